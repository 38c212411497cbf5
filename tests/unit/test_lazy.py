# SPDX-License-Identifier: Apache-2.0
"""What is imported when, and what the garbage collector does meanwhile."""

import gc
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest

from quadriga.cli.main import COMMANDS, main
from quadriga.lazy import collector_paused

NOT_FOR_A_RUN = (
    "av", "datasets", "matplotlib", "omegaconf", "pandas", "ray", "scipy", "sglang", "sklearn", "tensorboard",
    "torch.distributed.pipelining", "torch.utils.tensorboard", "torchvision", "transformers.trainer", "vllm", "wandb",
)  # fmt: skip
"""Modules that take a tenth of a second and more, and that a text run in one process does without."""


def test_the_collector_is_off_until_the_last_of_several_pauses_has_ended() -> None:
    is_inside, may_end = threading.Event(), threading.Event()

    def pause() -> None:
        with collector_paused():
            is_inside.set()
            may_end.wait(60)

    thread = threading.Thread(target=pause)
    with collector_paused():
        thread.start()
        assert is_inside.wait(60)
    assert not gc.isenabled()
    may_end.set()
    thread.join()
    assert gc.isenabled()


def test_a_collector_that_is_off_stays_off() -> None:
    gc.disable()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_what_was_made_in_a_pause_is_collected_once_it_is_garbage() -> None:
    class Part:
        pass

    deleted = []
    with collector_paused():
        part = Part()
        part.itself = part
        weakref.finalize(part, deleted.append, "part")
    del part
    gc.collect()
    assert deleted == ["part"]


def test_the_collector_is_off_for_a_commands_modules_and_on_for_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "observed_command.py").write_text(
        "import gc\nwhile_imported = gc.isenabled()\n"
        "def main(argv):\n    global while_running\n    while_running = gc.isenabled()\n    return 0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(COMMANDS, "doctor", ("observed_command", "stands in"))
    assert main(["doctor"]) == 0
    module = sys.modules.pop("observed_command")
    assert (module.while_imported, module.while_running) == (False, True)


def test_a_run_imports_what_it_needs_and_ends_with_all_handlers_called() -> None:
    program = (
        "import atexit, gc, sys\n"
        "atexit.register(print, 'registered before')\n"
        "from quadriga.trainer.launch import RUNNER, _load\n"
        "_load(RUNNER)\n"
        "atexit.register(print, 'registered after')\n"
        "print('collector', gc.isenabled())\n"
        f"print('loaded', [name for name in {NOT_FOR_A_RUN} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "collector True",
        # pyarrow imports it to convert the rows of the rollout record, after the first step.
        "loaded ['pandas']",
        "registered after",
        "registered before",
    ]


def test_a_run_prints_its_first_line_before_it_loads_torch(tmp_path: Path) -> None:
    """The line names the run's folder; torch takes seconds to load."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1 + 1", "reward_model": {"ground_truth": "2"}}\n')
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    words = [
        "train",
        f"data.train_files={rows}",
        f"actor_rollout_ref.model.path={tmp_path}",
        "actor_rollout_ref.rollout.n=8",
        f"trainer.default_local_dir={tmp_path / 'run'}",
        "trainer.val_before_train=False",
    ]
    program = (
        "import sys\n"
        "from quadriga.cli.main import main\n"
        "class FirstLine:\n"
        "    def write(self, text):\n"
        "        print(text, 'torch' in sys.modules, file=sys.__stdout__)\n"
        "        raise SystemExit(0)\n"
        "    def flush(self):\n"
        "        pass\n"
        "sys.stdout = FirstLine()\n"
        "main(sys.argv[1:])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert str(tmp_path / "run") in done.stdout
    assert done.stdout.endswith(" False\n")
