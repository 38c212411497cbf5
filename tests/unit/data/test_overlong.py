# SPDX-License-Identifier: Apache-2.0
"""Prompt lengths are measured once, in as many processes as asked for, and a damaged entry is measured again."""

import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from quadriga.config import DataConfig
from quadriga.data import files
from quadriga.data import prompt_lengths as lengths_module
from quadriga.data.files import read_table
from quadriga.data.prompt_lengths import PromptContext, PromptMeter, prompt_lengths
from quadriga.data.tokenizing import ChatEncoder
from quadriga.errors import DataError
from tests.unit.data.conftest import TEMPLATE
from tests.unit.data.encoders import CountingEncoder, FailingEncoder

WAIT_S = 120
LENGTHS = [3, 9, 1, 30, 2]
EXPECTED = [length + 2 for length in LENGTHS]


@pytest.fixture
def measure(tokenizer, tmp_path: Path):
    """Measure a file with a fresh encoder; returns the lengths and how many texts were tokenized."""

    def run(
        path: Path, num_workers: int = 1, **template_kwargs
    ) -> tuple[list[int], int, list[DataError]]:
        encoder = CountingEncoder(tokenizer, template_kwargs)
        found, errors = prompt_lengths(
            read_table(path),
            PromptMeter(encoder, None, DataConfig()),
            cache_dir=tmp_path / "cache",
            num_workers=num_workers,
        )
        return found["tokens"].tolist(), encoder.num_texts, errors

    return run


@pytest.fixture
def path(write, row) -> Path:
    return write("t.parquet", [row(length) for length in LENGTHS])


def only_entry(tmp_path: Path) -> Path:
    [entry] = (tmp_path / "cache" / "prompt_lengths").iterdir()
    return entry


def test_a_second_start_tokenizes_nothing(measure, path: Path):
    assert measure(path) == (EXPECTED, 5, [])
    assert measure(path) == (EXPECTED, 0, [])


def test_other_content_or_arguments_are_measured(measure, path: Path, write, row):
    measure(path)
    assert measure(path, shout=True) == ([length + 1 for length in EXPECTED], 5, [])
    write("t.parquet", [row(4)])
    assert measure(path) == ([6], 1, [])


def test_the_same_content_elsewhere_is_known(measure, path: Path):
    measure(path)
    assert measure(path.rename(path.with_name("moved.parquet"))) == (EXPECTED, 0, [])


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "other rows", "not an archive"])
def test_a_damaged_entry_is_said_and_rebuilt(
    measure, path: Path, tmp_path: Path, damage: str, capsys
):
    measure(path)
    entry = only_entry(tmp_path)
    content = bytearray(entry.read_bytes())
    if damage == "cut":
        entry.write_bytes(content[:-30])
    elif damage == "flip":
        # A byte of the array itself, well behind the headers of archive and array.
        at = content.index(np.int64(EXPECTED[0]).tobytes())
        content[at] ^= 1
        entry.write_bytes(content)
    elif damage == "other rows":
        with entry.open("wb") as file:
            np.savez(file, lengths=np.arange(3))
    else:
        entry.write_bytes(b"" if damage == "empty" else b"hello")
    assert measure(path) == (EXPECTED, 5, [])
    assert "is damaged" in capsys.readouterr().out
    assert measure(path) == (EXPECTED, 0, [])


TOOLS = tuple({"type": "function", "function": {"name": name}} for name in ("w7", "w8", "w9"))


@pytest.fixture
def tool_tokenizer(make_tokenizer):
    """A tokenizer whose template writes the names of tools."""
    return make_tokenizer(
        template="{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}" + TEMPLATE
    )


def test_processes_give_what_one_gives(
    tool_tokenizer, write, row, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Of prompts of all lengths, with the tools of their agent loop, and of a bad one."""
    monkeypatch.setattr(lengths_module, "BATCH_ROWS", 2)
    rows = [row(length) for length in LENGTHS]
    path = write("t.jsonl", [*rows, row(2, agent_name="plain"), row(prompt=[])])
    context = PromptContext(TOOLS, frozenset({"tool_agent"}), "tool_agent")
    encoder = CountingEncoder(tool_tokenizer, {})
    meter = PromptMeter(encoder, None, DataConfig(), context=context)
    expected = [*(length + 3 for length in EXPECTED), 4, lengths_module.BAD]
    for num_texts_here in (0, 1):  # the bad prompt is looked at again at the next start
        lengths, errors = prompt_lengths(
            read_table(path), meter, cache_dir=tmp_path / "cache", num_workers=2
        )
        assert lengths["tokens"].tolist() == expected
        assert [error.where for error in errors] == [f"{path} row 6, column 'prompt'"]
        assert encoder.num_texts == num_texts_here


def test_prompts_are_measured_with_the_tools_of_their_agent_loop(
    tool_tokenizer, write, row, tmp_path: Path
):
    table = read_table(
        write("t.jsonl", [row(2), row(2, agent_name="plain"), row(2, agent_name="tool_agent")])
    )
    for offered, expected in ((TOOLS, [7, 4, 7]), (TOOLS[:2], [6, 4, 6])):
        context = PromptContext(offered, frozenset({"tool_agent"}), "tool_agent")
        meter = PromptMeter(ChatEncoder(tool_tokenizer, {}), None, DataConfig(), context=context)
        lengths, errors = prompt_lengths(table, meter, cache_dir=tmp_path / "cache")
        assert (lengths["tokens"].tolist(), errors) == (expected, [])


def test_a_prompt_that_is_none_names_file_and_row(measure, write, row, monkeypatch):
    monkeypatch.setattr(lengths_module, "BATCH_ROWS", 2)
    path = write("bad.jsonl", [row(), row(), row(), row(prompt=[])])
    for num_texts in (4, 1):  # measured, and what was found at the next start
        lengths, num_measured, errors = measure(path)
        assert (lengths, num_measured) == ([4, 4, 4, lengths_module.BAD], num_texts)
        assert [error.where for error in errors] == [f"{path} row 3, column 'prompt'"]


def test_a_cache_that_cannot_be_written(tokenizer, path: Path, tmp_path: Path, capsys):
    (tmp_path / "occupied").write_text("")
    meter = PromptMeter(ChatEncoder(tokenizer, {}), None, DataConfig())
    lengths, _ = prompt_lengths(read_table(path), meter, cache_dir=tmp_path / "occupied")
    assert (
        lengths.tolist()
        == prompt_lengths(read_table(path), meter, cache_dir=tmp_path / "free")[0].tolist()
    )
    assert (
        "data.cache_dir: got" in (said := capsys.readouterr().out)
        and "measured at each start" in said
    )


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (
            "raise",
            r"t\.parquet rows 4 to 4: got RuntimeError: no tokens today, expected prompts whose tokens",
        ),
        (
            "kill",
            r"workers: got a process that ended with signal SIGKILL while it counted the tokens of rows 4 to 4",
        ),
    ],
)
def test_a_process_that_fails_is_an_error(
    tokenizer, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: str, said: str
):
    monkeypatch.setattr(lengths_module, "BATCH_ROWS", 1)
    encoder = FailingEncoder(tokenizer, {})
    encoder.act = act
    with pytest.raises(DataError, match=said):
        prompt_lengths(
            read_table(path),
            PromptMeter(encoder, None, DataConfig()),
            cache_dir=tmp_path / "cache",
            num_workers=2,
        )
    assert not (tmp_path / "cache").exists()


def test_a_process_that_dies_before_it_counts_is_an_error(
    tokenizer, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(lengths_module, "BATCH_ROWS", 1)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    meter = PromptMeter(ChatEncoder(tokenizer, {}), None, DataConfig())
    with pytest.raises(DataError, match="exit status 1 while it loaded the tokenizer"):
        prompt_lengths(read_table(path), meter, cache_dir=tmp_path / "cache", num_workers=2)


@pytest.mark.parametrize("what", ["pickle", "unpickle"])
def test_a_tokenizer_that_cannot_travel_is_counted_with_here_and_said_once(
    tokenizer, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys, what: str
):
    monkeypatch.setattr(lengths_module, "BATCH_ROWS", 2)
    monkeypatch.setattr(lengths_module, "_printed_reasons", set())
    if what == "pickle":
        tokenizer.of_the_user = lambda: None
    else:
        cls = type("OfTheScript", (type(tokenizer),), {"__module__": "__main__"})
        monkeypatch.setattr(sys.modules["__main__"], "OfTheScript", cls, raising=False)
        tokenizer.__class__ = cls
    for number in range(2 if what == "pickle" else 1):
        meter = PromptMeter(ChatEncoder(tokenizer, {}), None, DataConfig())
        lengths, _ = prompt_lengths(
            read_table(path), meter, cache_dir=tmp_path / str(number), num_workers=2
        )
        assert lengths["tokens"].tolist() == EXPECTED
    notice = "data.filter_overlong_prompts_workers: prompts are counted in this process alone"
    assert capsys.readouterr().out.count(notice) == 1


def test_processes_open_the_rows_again(write, row, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What travels of a large file is its entry in the cache, and of a small one its path."""
    rows = [row(2, index) for index in range(5000)]
    for name in ("t.parquet", "t.jsonl"):
        path = write(name, rows)
        small = read_table(path)
        with monkeypatch.context() as patch:
            patch.setattr(files, "MAPPED_BYTES", 0)
            mapped = read_table(path, tmp_path / "cache")
        for table in (small, mapped):
            sent = pickle.dumps(table)
            assert len(sent) < 1000
            copy = pickle.loads(sent)
            assert (copy.path, copy.columns, copy.digest, len(copy)) == (
                path,
                table.columns,
                table.digest,
                5000,
            )
            assert copy[4999] == table[4999]
    sent = pickle.dumps(small)
    write("t.jsonl", rows[:10])
    with pytest.raises(DataError, match="content that has changed"):
        pickle.loads(sent)


SCRIPT = """
import sys
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from quadriga.config import DataConfig
from quadriga.data import prompt_lengths
from quadriga.data.files import read_table
from quadriga.data.tokenizing import ChatEncoder

print("script runs", flush=True)
prompt_lengths.BATCH_ROWS = 1
folder, file = sys.argv[1:]
encoder = ChatEncoder(PreTrainedTokenizerFast.from_pretrained(folder), {})
meter = prompt_lengths.PromptMeter(encoder, None, DataConfig())
prompt_lengths.prompt_lengths(read_table(Path(file)), meter, cache_dir=f"{folder}/cache", num_workers=2)
print("all are counted", flush=True)
"""
ENDLESS = (
    "{% if messages[0].content == 'hang' %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}"
    "{% endfor %}{% endif %}<user> {{ messages[0].content }}"
)


def test_processes_end_with_a_driver_that_is_killed(make_tokenizer, write, row, tmp_path: Path):
    """In the midst of a row, whose template does not come to an end. The script has no main guard, and runs once."""
    make_tokenizer(template=ENDLESS).save_pretrained(tmp_path)
    path = write("t.jsonl", [row(prompt="hang"), row(prompt="hang")])
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path), str(path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as script:
        try:
            give_up = time.monotonic() + WAIT_S
            busy: list[psutil.Process] = []
            # Two supervisors, and below each of them the process that counts.
            while len(busy) < 4 and time.monotonic() < give_up:
                time.sleep(0.05)
                busy = psutil.Process(script.pid).children(recursive=True)
            assert len(busy) == 4
        finally:
            script.kill()
        said, _ = script.communicate()
    gone, alive = psutil.wait_procs(busy, timeout=WAIT_S)
    assert len(gone) == 4 and not alive
    assert said.splitlines() == ["script runs"]
