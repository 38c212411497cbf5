# SPDX-License-Identifier: Apache-2.0
"""A model of a few thousand weights, a data set of a few rows and a reward that a few steps can raise."""

import json
import os
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

from quadriga.cli.main import main
from quadriga.protocol.times import TIME_COLUMNS
from quadriga.rewards.managers import naive
from quadriga.rewards.pool import GradingPool
from quadriga.rewards.process import GradingProcess
from tests.limits import COMMAND_S, PROCESS_ENDS_S

CLOCK_PREFIXES = ("timing_s/", "timing_per_token_ms/", "perf/", "recovery/")
"""Names of metrics that depend on the clock, the machine's load and on what went wrong."""
PR_SET_PDEATHSIG = 1
REPOSITORY = Path(__file__).resolve().parents[2]
ROLES = ["<user>", "<assistant>"]
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789 ,:?"
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
REWARD = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """The share of the letter that the prompt asks for."""
    return solution_str.count(ground_truth) / max(1, len(solution_str))
'''


@pytest.fixture(scope="module", autouse=True)
def _no_gpus() -> Iterator[None]:
    """Runs choose their device as they do by default; the GPUs of a machine that has some are hidden."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        # CUDA would keep what it finds for as long as this process lives, also for tests/gpu.
        patch.setattr(torch.cuda, "is_available", lambda: False)
        yield


def build_word_tokenizer(words: list[str], pattern: str, template: str) -> PreTrainedTokenizerFast:
    """One token per word, as the pattern tells words apart; behind <pad>, <eos> and <unk>."""
    vocabulary = {token: number for number, token in enumerate(["<pad>", "<eos>", "<unk>", *words])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    tokenizer.chat_template = template
    return tokenizer


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character."""
    tokenizer = build_word_tokenizer([*ROLES, *LETTERS], ".", TEMPLATE)
    tokenizer.add_special_tokens({"additional_special_tokens": ROLES})
    return tokenizer


def build_config(tokenizer: PreTrainedTokenizerFast, **changes: Any) -> LlamaConfig:
    """Of a tiny model for the tokenizer."""
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "max_position_embeddings": 256,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    tokens = {
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    return LlamaConfig(vocab_size=len(tokenizer), **sizes | heads | tokens | changes)


def make_row(number: int, **changes: Any) -> dict[str, Any]:
    """A prompt of its own length that asks for the letter `a`."""
    return {
        "data_source": "letters",
        "prompt": [{"role": "user", "content": f"say a {number}" + " please" * (number % 3)}],
        "ability": "spelling",
        "reward_model": {"style": "rule", "ground_truth": "a"},
        "extra_info": {"split": "train", "index": number},
    } | changes


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Rows as a parquet file."""
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


@pytest.fixture(scope="session")
def make_rows() -> Callable[..., list[dict[str, Any]]]:
    """`make_rows(count, **changes)`: rows of the task, each with the given columns changed."""
    return lambda count, **changes: [make_row(number, **changes) for number in range(count)]


@pytest.fixture(scope="session")
def write() -> Callable[[Path, list[dict[str, Any]]], Path]:
    """Write rows to a parquet file."""
    return write_rows


OTHER_TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }} {% endfor %}"


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[[], PreTrainedTokenizerFast]:
    """A fresh tokenizer of the tiny model."""
    return build_tokenizer


@pytest.fixture(scope="session")
def judges(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two reward models of the same weights: `same`, with the policy's template, and `other`."""
    folder = tmp_path_factory.mktemp("judges")
    torch.manual_seed(3)
    tokenizer = build_tokenizer()
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "max_position_embeddings": 96,
        "tie_word_embeddings": False,
    }
    model = LlamaForSequenceClassification(build_config(tokenizer, **sizes, num_labels=1))
    torch.nn.init.normal_(model.score.weight)
    for name, template in (("same", tokenizer.chat_template), ("other", OTHER_TEMPLATE)):
        model.save_pretrained(folder / name)
        tokenizer.chat_template = template
        tokenizer.save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, 10 training rows, 4 validation rows and a reward function."""
    folder = tmp_path_factory.mktemp("home")
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    LlamaForCausalLM(build_config(tokenizer)).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    write_rows(folder / "train.parquet", [make_row(number) for number in range(10)])
    write_rows(folder / "val.parquet", [make_row(number) for number in range(20, 24)])
    (folder / "reward.py").write_text(REWARD)
    return folder


@pytest.fixture(scope="session")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A smaller model than the policy, with other weights and the same tokenizer."""
    folder, tokenizer = tmp_path_factory.mktemp("teacher"), build_tokenizer()
    torch.manual_seed(5)
    model = LlamaForCausalLM(
        build_config(tokenizer, hidden_size=32, intermediate_size=48, tie_word_embeddings=False)
    )
    torch.nn.init.normal_(model.lm_head.weight, std=0.3)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


class SharedGradingPool(GradingPool):
    """Leaves its idle processes to later pools of the same function in the same environment.

    A grading process takes as long to start as two steps of the tiny model. The end of a pool's processes is tested in
    tests/unit/rewards; a run of a command of its own (`start`) has processes of its own.

    Attributes:
        waiting: processes that no pool has, by function and environment.
        shared_path: file whose functions are shared, for it does not change.
    """

    waiting: ClassVar[dict[str, list[GradingProcess]]] = defaultdict(list)
    shared_path: ClassVar[str]

    @property
    def _key(self) -> str:
        # This variable names the test.
        variables = {
            name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"
        }
        return repr((self._function, sorted(variables.items()), sys.path))

    def close(self) -> None:
        with self._lock:
            idle = self._idle[:]
            if self._function.path == self.shared_path:
                for process in idle:
                    if process.is_idle and not process.is_ended:
                        self._idle.remove(process)
                        self._processes.remove(process)
                        self.waiting[self._key].append(process)
        super().close()

    def _take_process(self) -> GradingProcess:
        waiting = self.waiting[self._key]
        while waiting and not self._idle:
            process = waiting.pop()
            if process.is_idle:
                self._processes.add(process)
                return process
            process.stop()
        return super()._take_process()


@pytest.fixture(scope="session", autouse=True)
def _grading_processes_stay(home: Path) -> Iterator[None]:
    """Runs in this process share grading processes."""
    SharedGradingPool.shared_path = str(home / "reward.py")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(naive, "GradingPool", SharedGradingPool)
        yield
    for processes in SharedGradingPool.waiting.values():
        for process in processes:
            process.stop()


def command_line(home: Path, folder: Path, *overrides: str, run: str = "run") -> list[str]:
    """The arguments of a quick exact run in `folder / run`; later ones win."""
    words = [
        f"data.train_files={home / 'train.parquet'}",
        f"data.val_files={home / 'val.parquet'}",
        f"data.cache_dir={folder / 'cache'}",
        "data.train_batch_size=4",
        "data.max_prompt_length=32",
        "data.max_response_length=8",
        f"actor_rollout_ref.model.path={home / 'model'}",
        "actor_rollout_ref.actor.fsdp_config.model_dtype=float32",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.rollout.n=2",
        "critic.fsdp_config.model_dtype=float32",
        "critic.optim.lr=1e-3",
        "reward_model.num_workers=1",
        f"custom_reward_function.path={home / 'reward.py'}",
        "trainer.total_training_steps=2",
        "trainer.val_before_train=False",
        "trainer.logger=[jsonl]",
        f"trainer.default_local_dir={folder / run}",
        "trainer.save_freq=-1",
        *overrides,
    ]
    return list({word.partition("=")[0]: word for word in words}.values())


@pytest.fixture
def arguments(home: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """`arguments(*overrides, run="run")`: the command line of a quick exact run in `tmp_path / run`; later ones win."""
    return partial(command_line, home, tmp_path)


@pytest.fixture
def train(arguments: Callable[..., list[str]], tmp_path: Path) -> Callable[..., Path]:
    """`train(*overrides, run="run")`: a run in this process that must succeed; returns its directory."""

    def run_here(*overrides: str, run: str = "run") -> Path:
        assert main(["train", *arguments(*overrides, run=run)]) == 0
        return tmp_path / run

    return run_here


@pytest.fixture(scope="session")
def alone(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`alone(*overrides)`: the directory of a run in one process, made once for all tests that compare with it."""
    done: dict[tuple[str, ...], Path] = {}

    def run_once(*overrides: str) -> Path:
        if overrides not in done:
            folder = tmp_path_factory.mktemp("alone")
            more = f"trainer.rollout_data_dir={folder / 'run' / 'rollouts'}"
            assert main(["train", *command_line(home, folder, *overrides, more)]) == 0
            done[overrides] = folder / "run"
        return done[overrides]

    return run_once


def with_the_tests(*command: str) -> list[str]:
    """A command that is killed when the process is that starts it: between a fork and the command nothing may run where
    that process has threads of Ray's.

    A shell's background jobs, this test run perhaps among them, ignore SIGINT, and so would what they start."""
    program = f"""if True:
        import ctypes, os, signal, sys
        ctypes.CDLL(None).prctl({PR_SET_PDEATHSIG}, signal.SIGKILL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.execv(sys.argv[1], sys.argv[1:])
    """
    return [sys.executable, "-IS", "-c", program, *command]


@pytest.fixture
def start(
    arguments: Callable[..., list[str]], tmp_path: Path
) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """`start(*overrides, run="run")`: a run in a process and a session of its own; what still lives is killed."""
    started: list[subprocess.Popen[str]] = []

    def run_apart(*overrides: str, run: str = "run") -> subprocess.Popen[str]:
        process = subprocess.Popen(
            with_the_tests(
                sys.executable, "-m", "quadriga.cli.main", "train", *arguments(*overrides, run=run)
            ),
            cwd=tmp_path,
            env=os.environ
            | {"PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": ""},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield run_apart
    for process in started:
        if process.poll() is None:
            process.kill()
        # What it has started may hold its output for as long as it lives.
        process.communicate(timeout=PROCESS_ENDS_S)


@pytest.fixture(scope="session")
def metric_lines() -> Callable[[Path], list[dict[str, Any]]]:
    """The lines of a run's metrics.jsonl without what depends on the clock, the machine's load and what went wrong."""

    def read(run: Path) -> list[dict[str, Any]]:
        lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [without_clock(json.loads(line)) for line in lines]

    return read


def without_clock(
    metrics: dict[str, Any], prefixes: tuple[str, ...] = CLOCK_PREFIXES
) -> dict[str, Any]:
    """Metrics of a step, except those with names that begin with some prefixes."""
    return {name: value for name, value in metrics.items() if not name.startswith(prefixes)}


def read_recorded_step(
    path: Path, prefixes: tuple[str, ...] = CLOCK_PREFIXES
) -> tuple[dict[str, Any], str]:
    """Read a Parquet file of `rollouts/` without what the clock decides.

    Args:
        path: the Parquet file.
        prefixes: beginnings of the names of metrics that are left out.

    Returns:
        The facts in the metadata, and the rows as text, in which NaN is equal to NaN.
    """
    table = pq.read_table(path)
    # The file of the vocabulary has no facts.
    facts = json.loads((table.schema.metadata or {}).get(b"quadriga", "{}"))
    facts.pop("calls", None)
    facts["metrics"] = without_clock(facts.get("metrics", {}), prefixes)
    rows = table.drop_columns([name for name in TIME_COLUMNS if name in table.column_names])
    return facts, repr(rows.to_pydict())


def members_of_session(session: int) -> list[int]:
    """Processes of a session that still live."""
    members = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(fields[3]) == session and fields[0] != "Z":
                members.append(int(entry.name))
    return members


@pytest.fixture(scope="session")
def interrupt() -> Callable[[subprocess.Popen[str]], str]:
    """Ctrl-C: one line says how to go on, and no process stays. Returns what was printed."""

    def press(process: subprocess.Popen[str]) -> str:
        # As a terminal does: to the whole foreground process group.
        os.killpg(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=COMMAND_S)
        assert process.returncode == 130, output
        assert "Traceback" not in output
        (line,) = [line for line in output.splitlines() if line.startswith("interrupted in step ")]
        assert "The same command goes on from the checkpoint of step " in line
        assert members_of_session(process.pid) == []
        return output

    return press


@pytest.fixture(scope="session")
def session_members() -> Callable[[int], list[int]]:
    """The processes of a session that still live."""
    return members_of_session
