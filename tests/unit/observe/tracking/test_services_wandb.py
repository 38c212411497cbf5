# SPDX-License-Identifier: Apache-2.0
"""The real wandb, offline: rows over the training step, a table of samples, one identity over a resume
and a restart, and no step twice.

That the service shows them well is not tried here.
"""

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from quadriga.errors import ConfigError
from quadriga.observe.tracking.services import WandbBackend, check_services

# Not imported where tests are collected, which every process does.
pytestmark = pytest.mark.skipif(
    find_spec("wandb") is None, reason="needs wandb: pip install -e '.[wandb]'"
)
BLOCK_BYTES = 32 * 1024


def test_without_a_key_it_is_said_how_to_go_on(tmp_path: Path) -> None:
    """In a process of its own, with an empty home: wandb finds keys in many places, and keeps what it has found."""
    program = (
        "from quadriga.errors import ConfigError\n"
        "from quadriga.observe.tracking.services import check_services\n"
        "try:\n    check_services(['console', 'wandb'])\n"
        "except ConfigError as error:\n    print(error)\n"
    )
    hidden = (
        "WANDB_MODE",
        "WANDB_API_KEY",
        "NETRC",
        "WANDB_IDENTITY_TOKEN_FILE",
        "WANDB_CONFIG_DIR",
    )
    found = {name: value for name, value in os.environ.items() if name not in hidden} | {
        "HOME": str(tmp_path)
    }
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command,
        env=found,
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "trainer.logger=wandb: got no key" in done.stdout
    assert "WANDB_MODE=offline" in done.stdout


def test_offline_needs_no_key_and_a_missing_package_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    check_services(["wandb", "jsonl"])
    monkeypatch.setitem(sys.modules, "swanlab", None)
    with pytest.raises(ConfigError, match=r"trainer\.logger=swanlab: got no usable package"):
        check_services(["wandb", "swanlab"])


def log_entries(content: bytes) -> Iterator[bytes]:
    """The entries of an offline file: LevelDB log chunks (checksum, length, kind) behind a header."""
    position, entry = 7, b""
    while position + 7 <= len(content):
        left_in_block = BLOCK_BYTES - position % BLOCK_BYTES
        if left_in_block < 7:
            position += left_in_block
            continue
        length, kind = struct.unpack_from("<HB", content, position + 4)
        entry += content[position + 7 : position + 7 + length]
        position += 7 + length
        # 1 is a whole entry, 2 the first chunk of one, 3 a middle chunk, 4 the last.
        if kind in (1, 4):
            yield entry
            entry = b""


def history(directory: Path) -> list[dict]:
    """The rows of all runs in the directory, out of wandb's own offline files."""
    from wandb.proto.wandb_internal_pb2 import Record

    rows = []
    for path in sorted(directory.glob("wandb/offline-run-*/run-*.wandb")):
        for entry in log_entries(path.read_bytes()):
            record = Record.FromString(entry)
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                rows.append(
                    {
                        item.key or "/".join(item.nested_key): json.loads(item.value_json)
                        for item in items
                    }
                )
    return rows


def test_an_offline_run_and_its_continuation(make_run, samples, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = make_run()
    first = WandbBackend(run)
    identity = first._run.id
    for step in (1, 2, 3):
        first.log({"critic/rewards/mean": step / 4}, step)
    first.log_samples(samples, 3)
    first.close(has_failed=True)
    second = WandbBackend(make_run(resume_step=2))
    assert second._run.id == identity
    second.log({"critic/rewards/mean": 0.75}, 3)
    second.log_samples(samples, 3)
    second.close()
    third = WandbBackend(make_run(is_restart=True))
    assert third._run.id == identity
    for step in (1, 2, 3, 4):
        third.log({"critic/rewards/mean": step / 4}, step)
    third.close()
    import_module("wandb").teardown()  # its service may write a finished run's file until it ends
    rows = history(run.directory)
    measured = [
        (row["step"], row["critic/rewards/mean"]) for row in rows if "critic/rewards/mean" in row
    ]
    assert sorted(measured) == [(1, 0.25), (2, 0.5), (3, 0.75), (4, 1.0)]
    (table,) = [row for row in rows if "samples/nrows" in row]
    assert (
        table["step"] == 3
        and table["samples/nrows"] == 2
        and table["samples/_type"] == "table-file"
    )
    stored = json.loads(
        next(run.directory.glob("wandb/*/files/media/table/samples*.json")).read_text()
    )
    assert stored["data"][0] == ["Which is | the\nlargest?", "82", 1.0, "[1, 2]"]


def test_a_command_leaves_its_service_the_time_to_write(tmp_path: Path) -> None:
    """wandb's service writes a finished run's file behind it, and is taken leave of as the process ends."""
    program = (
        "import wandb; from quadriga.descendants import Guardian; guardian = Guardian(); run = wandb.init()\n"
        "for step in range(1, 5):\n    run.log({'step': step})\n"
        "run.finish(); guardian.close()"
    )
    found = os.environ | {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, env=found, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert [row["step"] for row in history(tmp_path)] == [1, 2, 3, 4]
