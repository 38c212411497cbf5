# SPDX-License-Identifier: Apache-2.0
"""Files: tables that are read whole or refused, files that appear only when they are whole."""

import hashlib
import json
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import parse_qs

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from quadriga.data import files
from quadriga.data.files import read_blocks, read_table, resolve_files, written_aside
from quadriga.errors import DataError
from tests.http_server import Handler, serving


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("b.jsonl", "a.jsonl", "c.json"):
        (tmp_path / name).write_text("{}")
    return tmp_path


@pytest.fixture
def memory():
    """fsspec's store in memory: the real remote path, without a network."""
    filesystem = fsspec.filesystem("memory")
    filesystem.store.clear()
    yield filesystem
    filesystem.store.clear()


def names(paths: list[Path]) -> list[str]:
    return [path.name for path in paths]


def test_path_list_and_glob(folder: Path):
    assert names(resolve_files(folder / "a.jsonl", folder, where="k")) == ["a.jsonl"]
    assert names(resolve_files(str(folder / "*.jsonl"), folder, where="k")) == [
        "a.jsonl",
        "b.jsonl",
    ]
    listed = [str(folder / "c.json"), f"file://{folder}/b.jsonl", str(folder / "?.json")]
    assert names(resolve_files(listed, folder, where="k")) == ["c.json", "b.jsonl", "c.json"]


def test_a_name_with_a_bracket_that_exists_is_not_a_pattern(folder: Path):
    (folder / "x[1].json").write_text("{}")
    assert names(resolve_files(str(folder / "x[1].json"), folder, where="k")) == ["x[1].json"]


def test_home_is_understood(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(folder))
    assert resolve_files("~/a.jsonl", folder, where="k") == [folder / "a.jsonl"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "no file"),
        ([], "no file"),
        ("missing.parquet", "missing.parquet, which does not exist"),
        ("nothing-*.parquet", "matches no file"),
        ("nosuchscheme://x/y.parquet", "expected a file that fsspec can open"),
    ],
)
def test_errors_name_the_key_and_the_file(tmp_path: Path, name: str | list, message: str):
    with pytest.raises(DataError, match=message) as caught:
        resolve_files(name, tmp_path, where="data.val_files")
    assert caught.value.where == "data.val_files"


def test_a_folder_is_refused_with_the_pattern_to_use(tmp_path: Path):
    with pytest.raises(DataError, match=r"a folder.*\*\.parquet"):
        resolve_files(tmp_path, tmp_path, where="k")
    (tmp_path / "dataset_info.json").touch()
    with pytest.raises(DataError, match=r"written by save_to_disk.*Convert it.*to_parquet"):
        resolve_files(tmp_path, tmp_path, where="k")


def test_remote_files_are_copied_once_and_again_when_they_change(
    memory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    memory.pipe("/bucket/train.jsonl", b"one")
    fetched = []
    original = type(memory).get_file

    def count(self, path, *args, **kwargs):
        fetched.append(path)
        return original(self, path, *args, **kwargs)

    monkeypatch.setattr(type(memory), "get_file", count)
    first = resolve_files("memory://bucket/*.jsonl", tmp_path, where="k")
    again = resolve_files("memory://bucket/train.jsonl", tmp_path, where="k")
    assert first == again
    assert first[0].read_bytes() == b"one"
    assert first[0].suffix == ".jsonl"
    assert len(fetched) == 1
    memory.pipe("/bucket/train.jsonl", b"two")
    changed = resolve_files("memory://bucket/train.jsonl", tmp_path, where="k")
    assert changed[0].read_bytes() == b"two"
    assert changed != first


def test_a_copy_that_fails_leaves_nothing_behind(
    memory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    memory.pipe("/bucket/train.jsonl", b"one")

    def fail(self, path, target, **kwargs):
        Path(target).write_bytes(b"half")
        raise ConnectionError("the line is down")

    monkeypatch.setattr(type(memory), "get_file", fail)
    with pytest.raises(
        DataError, match=r"^k: got 'memory://bucket/train.jsonl': ServerLostError: the line is down"
    ):
        resolve_files("memory://bucket/train.jsonl", tmp_path, where="k")
    assert list((tmp_path / "files").iterdir()) == []


class Documents(Handler, BaseHTTPRequestHandler):
    """Serves `files` by path after a delay, a path that leads to another, and one that does not answer."""

    def do_GET(self) -> None:
        name = self.path.partition("?")[0]
        if name == "/moved.jsonl":
            self.reply(302, b"", {"Location": "/t.jsonl"})
        elif name == "/slow.jsonl":
            time.sleep(0.5)
        elif name not in self.server.files:
            self.reply(404, b"no")
        else:
            content = self.server.files[name]
            time.sleep(self.server.delay_s)
            self.reply(200, content, {"ETag": str(hash(content))})


@pytest.fixture
def web():
    files = {
        "/t.jsonl": b'{"a": 1}\n' * 20_000,
        "/page.jsonl": b"\n<!DOCTYPE html><html>Log in</html>",
    }
    with serving(Documents, files=files, delay_s=0.0) as server:
        yield server


def test_a_file_on_the_web(web, tmp_path: Path):
    first = resolve_files(f"{web.url}/t.jsonl?download=true", tmp_path, where="k")
    assert first[0].suffix == ".jsonl" and len(read_table(first[0])) == 20_000
    written = first[0].stat().st_mtime_ns
    assert resolve_files(f"{web.url}/t.jsonl?download=true", tmp_path, where="k") == first
    assert first[0].stat().st_mtime_ns == written
    assert (
        len(read_table(resolve_files(f"{web.url}/moved.jsonl", tmp_path, where="k")[0])) == 20_000
    )
    web.files["/t.jsonl"] = b'{"a": 2}'
    [changed] = resolve_files(f"{web.url}/t.jsonl?download=true", tmp_path, where="k")
    assert changed.read_bytes() == b'{"a": 2}'


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("page.jsonl", "a page of HTML, expected a data file"),
        ("none.jsonl", "none.jsonl': status 404"),
        ("slow.jsonl", "slow.jsonl': .*Timeout"),
    ],
)
def test_what_is_no_file_on_the_web(
    web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str
):
    monkeypatch.setattr(files, "SILENCE_S", 0.2)
    with pytest.raises(DataError, match=message) as caught:
        resolve_files(f"{web.url}/{name}", tmp_path, where="data.train_files")
    assert caught.value.where == "data.train_files"
    assert not [*tmp_path.rglob("*.jsonl*")]


def _etag(content: bytes) -> str:
    return f'"{hashlib.md5(content).hexdigest()}"'


class Bucket(Handler, BaseHTTPRequestHandler):
    """As much of an S3 server as it takes to list and to read the objects of one bucket, `files` by path."""

    def do_HEAD(self) -> None:
        content = self.server.files.get(self.path)
        self.send_response(404 if content is None else 200)
        self.send_header("Content-Length", str(len(content or b"")))
        self.send_header("Last-Modified", self.server.changed)
        self.send_header("ETag", _etag(content or b""))
        self.end_headers()

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        assert "Credential=key/" in self.headers["Authorization"]
        time.sleep(self.server.delay_s)
        if (content := self.server.files.get(path)) is not None:
            first, last = (
                self.headers.get("Range", f"bytes=0-{len(content) - 1}")
                .removeprefix("bytes=")
                .split("-")
            )
            facts = {"Last-Modified": self.server.changed, "ETag": _etag(content)}
            facts["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
            part = content[int(first) : int(last) + 1]
            self.reply(206 if "Range" in self.headers else 200, part, facts)
        elif "list-type=2" in query:
            listed = (
                f"<Contents><Key>{name.split('/', 2)[2]}</Key><Size>{len(content)}</Size><LastModified>"
                f"2026-01-02T03:04:05.000Z</LastModified><ETag>{_etag(content)}</ETag></Contents>"
                for name, content in self.server.files.items()
                if name.startswith(f"{path.rstrip('/')}/{parse_qs(query).get('prefix', [''])[0]}")
            )
            self.reply(200, f"<ListBucketResult>{''.join(listed)}</ListBucketResult>".encode())
        else:
            self.reply(404, b"")


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch):
    names = {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    objects = {f"/bucket/{name}.jsonl": b'{"a": 1}\n' * 20_000 for name in ("a", "b")}
    changed = "Fri, 02 Jan 2026 03:04:05 GMT"
    with serving(Bucket, files=objects, delay_s=0.05, changed=changed) as server:
        for name, value in {**names, "AWS_ENDPOINT_URL": server.url}.items():
            monkeypatch.setenv(name, value)
        yield server


def test_files_of_an_s3_server(bucket, tmp_path: Path):
    assert read_in_two_processes("s3://bucket/a.jsonl", tmp_path) == [20_000] * 4
    assert len([*tmp_path.glob("files/*")]) == len([*tmp_path.glob("rows/*/rows.arrow")]) == 1
    bucket.delay_s = 0
    both = resolve_files("s3://bucket/*.jsonl", tmp_path, where="k")
    assert [len(read_table(file)) for file in both] == [20_000, 20_000]
    assert (
        both[:1]
        == resolve_files("s3://bucket/a.jsonl", tmp_path, where="k")
        == [*tmp_path.glob("files/*a.jsonl")]
    )
    bucket.files["/bucket/b.jsonl"] = b'{"a": 2}'
    [changed] = resolve_files("s3://bucket/b.jsonl", tmp_path, where="k")
    assert changed != both[1] and changed.read_bytes() == b'{"a": 2}'
    with pytest.raises(DataError, match=r"k: got 's3://bucket/none.jsonl': FileNotFoundError"):
        resolve_files("s3://bucket/none.jsonl", tmp_path, where="k")


READ_TWICE = """
import sys
from quadriga.data import files

url, folder = sys.argv[1:]
files.MAPPED_BYTES = 0
print("ready", flush=True)
sys.stdin.readline()
for _ in range(2):
    [path] = files.resolve_files(url, folder, where="k")
    print(len(files.read_table(path, folder)))
"""


def read_in_two_processes(url: str, folder: Path) -> list[int]:
    """Read a file twice in each of two processes, which begin at once. Returns how many rows there were each time."""
    command = [sys.executable, "-c", READ_TWICE, url, str(folder)]
    pipe = subprocess.PIPE
    with (
        subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as one,
        subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as other,
    ):
        for process in (one, other):
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
        for process in (one, other):
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        return [int(line) for process in (one, other) for line in process.communicate()[0].split()]


def test_two_processes_fill_the_cache_at_once(web, tmp_path: Path):
    web.delay_s = 0.1
    assert read_in_two_processes(f"{web.url}/t.jsonl", tmp_path) == [20_000] * 4
    assert not [*tmp_path.rglob("*.partial")]
    assert len([*tmp_path.glob("files/*")]) == len([*tmp_path.glob("rows/*/rows.arrow")]) == 1


ROWS = [
    {"a": 1, "nested": {"x": "é"}},
    {"a": 2, "nested": {"x": "\u2028"}},
    {"a": 3, "nested": None},
]


@pytest.mark.parametrize("is_mapped", [False, True])
@pytest.mark.parametrize("name", ["t.parquet", "t.json", "t.jsonl", "lines.json"])
def test_the_formats_agree(
    write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, is_mapped: bool
):
    path = (
        write("t.jsonl", ROWS).rename(write("x.jsonl", ROWS).with_name(name))
        if name == "lines.json"
        else write(name, ROWS)
    )
    if is_mapped:
        monkeypatch.setattr(files, "MAPPED_BYTES", 0)
        monkeypatch.setattr(files, "_MAX_BATCH_ROWS", 2)
        read_table(path, tmp_path / "cache")
    table = read_table(path, tmp_path / "cache")
    assert (tmp_path / "cache" / "rows").is_dir() == is_mapped
    assert len(table) == 3
    assert table.columns == ("a", "nested")
    assert [table[i] for i in range(3)] == ROWS
    assert list(table.batches(["a"], 2)) == [[{"a": 1}, {"a": 2}], [{"a": 3}]]


def test_damaged_rows_in_the_cache_are_said_and_written_again(
    write, tmp_path: Path, monkeypatch, capsys
):
    monkeypatch.setattr(files, "MAPPED_BYTES", 0)
    path = write("t.jsonl", ROWS)
    read_table(path, tmp_path / "cache")
    [rows] = (tmp_path / "cache" / "rows").glob("*/rows.arrow")
    rows.write_bytes(rows.read_bytes()[:200])
    assert read_table(path, tmp_path / "cache")[1] == ROWS[1]
    assert "is damaged" in capsys.readouterr().out


def test_bad_lines_are_left_out_and_named(write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "t.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": \n\n[3]\n{"b": "\xff"}\n{"c": "4"}')
    monkeypatch.setattr(files, "MAPPED_BYTES", 0)
    for cache in (None, tmp_path / "cache", tmp_path / "cache"):
        bad: list[DataError] = []
        table = read_table(path, cache, bad)
        assert [table[row] for row in range(len(table))] == [
            {"a": 1, "c": None},
            {"a": None, "c": "4"},
        ]
        assert [error.where for error in bad] == [f"{path} line {number}" for number in (2, 4, 5)]


def test_json_rows_may_lack_keys(write):
    table = read_table(write("t.jsonl", [{"a": 1}, {"b": "x"}]))
    assert table[0] == {"a": 1, "b": None}
    assert list(table.batches(["b"], 9)) == [[{"b": None}, {"b": "x"}]]


def test_a_folder_name_adds_no_column(write):
    assert read_table(write("split=train/t.parquet", ROWS)).columns == ("a", "nested")


def test_the_digest_follows_the_content(write):
    first = read_table(write("a.jsonl", ROWS)).digest
    assert read_table(write("b.jsonl", ROWS)).digest == first
    assert read_table(write("a.jsonl", ROWS[:2])).digest != first


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.parquet", b"", "an empty file, expected a parquet file"),
        ("t.parquet", b"PAR1 this is no parquet file", "28 bytes that are no whole parquet file"),
        ("t.jsonl", b"", "no rows, expected at least one"),
        ("t.json", b"[]", "no rows, expected at least one"),
        ("t.jsonl", b'{"a": 1}\n\n{"a": ', "line 3: got text that is no JSON"),
        ("t.jsonl", b'{"a": 1}\n[1]', "line 2: got a JSON list"),
        ("t.jsonl", b'{"a": ' + b"[" * 10_000, "line 1: got text that is no JSON"),
        ("t.json", b"[" * 10_000, "got text that is no JSON"),
        ("t.json", b'[{"a": 1}, 5]', "row 1: got a JSON int"),
        ("t.jsonl", b"\xff\xfe", "not UTF-8"),
        ("t.csv", b"a,b", r"a \.csv suffix, expected \.parquet, \.json or \.jsonl"),
    ],
)
def test_broken_files(tmp_path: Path, name: str, content: bytes, message: str):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        read_table(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)


def test_a_file_of_broken_lines_alone(tmp_path: Path):
    (tmp_path / "t.jsonl").write_text("{\n{\n")
    with pytest.raises(
        DataError, match=r"got 2 bad lines only, the first: .*line 1: got text that is no JSON"
    ):
        read_table(tmp_path / "t.jsonl", bad_lines=[])


@pytest.mark.parametrize(
    ("name", "text"), [("t.jsonl", '{"a": 1}\n'), ("t.json", ' [{"a": 1}]'), ("u.json", '{"a": 1}')]
)
def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path, name: str, text: str):
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    assert read_table(tmp_path / name)[0] == {"a": 1}
    assert next(read_blocks(tmp_path / name, 1))[0] == {"a": 1}


def test_a_parquet_file_cut_in_the_middle(write):
    path = write("t.parquet", ROWS)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match="no whole parquet file"):
        read_table(path)


def test_a_parquet_file_with_columns_but_no_rows(tmp_path: Path):
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "t.parquet")
    with pytest.raises(DataError, match="no rows"):
        read_table(tmp_path / "t.parquet")


def test_a_file_appears_only_when_it_is_whole(tmp_path: Path):
    target = tmp_path / "deep" / "x.txt"
    with written_aside(target, where="k") as draft:
        draft.write_text("new")
        assert not target.exists()
    assert target.read_text() == "new"
    assert [path.name for path in target.parent.iterdir()] == ["x.txt"]


def test_a_failure_keeps_the_old_file(tmp_path: Path):
    target = tmp_path / "x.txt"
    target.write_text("old")
    with pytest.raises(KeyError), written_aside(target, where="k") as draft:
        draft.write_text("half")
        raise KeyError("stop")
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["x.txt"]


def test_a_folder_replaces_a_folder(tmp_path: Path):
    target = tmp_path / "model"
    target.mkdir()
    (target / "old").write_text("")
    with written_aside(target, where="k") as draft:
        draft.mkdir()
        (draft / "new").write_text("")
    assert [path.name for path in target.iterdir()] == ["new"]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_place_that_cannot_be_written_is_one_clear_error(tmp_path: Path):
    (tmp_path / "file").write_text("")
    target = tmp_path / "file" / "x.json"
    with (
        pytest.raises(DataError, match=r"data.cache_dir: got .*File exists"),
        written_aside(target, where="data.cache_dir"),
    ):
        pass


def test_a_full_disk_is_one_clear_error(tmp_path: Path):
    with (
        pytest.raises(DataError, match="No space left"),
        written_aside(tmp_path / "x", where="k") as draft,
    ):
        draft.write_text("half")
        raise OSError(28, "No space left on device")
    assert list(tmp_path.iterdir()) == []


def calls(index: int, **arguments) -> list[dict]:
    """A chat with one tool call."""
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    return [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": f"{index}", "tool_calls": [call]},
    ]


@pytest.mark.parametrize("column", ["prompt", "extra_info.messages"])
def test_chats_of_parquet_lose_the_nulls_that_arrow_adds_and_other_columns_keep_theirs(
    tmp_path: Path, column: str
):
    rows = [
        {
            "prompt": calls(index, **arguments),
            "extra_info": {"messages": calls(index, **arguments), "note": None},
            "reward_model": {"ground_truth": [1, None], "style": None},
        }
        for index, arguments in enumerate([{"x": 1}, {"y": [None, {"z": 2}]}])
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "t.parquet")
    for index, row in enumerate(rows):
        read = read_table(tmp_path / "t.parquet", chat_columns=[column])[index]
        other = "extra_info" if column == "prompt" else "prompt"
        chats = {"prompt": read["prompt"], "extra_info": read["extra_info"]["messages"]}
        assert chats[column.partition(".")[0]] == row["prompt"]
        assert chats[other] != row["prompt"]
        assert read["extra_info"]["note"] is None
        assert read["reward_model"] == row["reward_model"]


def test_chats_of_json_keep_their_nulls(tmp_path: Path):
    chat = calls(0, x=None)
    (tmp_path / "t.jsonl").write_text(json.dumps({"prompt": chat}))
    assert read_table(tmp_path / "t.jsonl", chat_columns=["prompt"])[0]["prompt"] == chat
