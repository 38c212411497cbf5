# SPDX-License-Identifier: Apache-2.0
"""The command line: which command, which exit status, what is said."""

import subprocess
import sys
import types
from collections.abc import Callable, Sequence

import pytest

from quadriga import __version__
from quadriga.cli import main as command_line
from quadriga.cli.main import COMMANDS, main
from quadriga.errors import ConfigError, RewardError
from tests.limits import PROGRAM_S


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Sequence[str]], int]], None]:
    """Puts a function in the place of the command `train`."""

    def install(function: Callable[[Sequence[str]], int]) -> None:
        module = types.ModuleType("stand_in")
        module.main = function
        monkeypatch.setitem(sys.modules, "stand_in", module)
        monkeypatch.setitem(COMMANDS, "train", ("stand_in", "stand in"))

    return install


def raising(error: BaseException) -> Callable[[Sequence[str]], int]:
    def run(argv: Sequence[str]) -> int:
        raise error

    return run


def test_a_command_gets_its_arguments_and_gives_its_status(command) -> None:
    seen = []
    command(lambda argv: seen.append(list(argv)) or 0)
    assert main(["train", "--config", "a.yaml", "data.seed=1", "--traceback", "--help"]) == 0
    assert seen == [["--config", "a.yaml", "data.seed=1", "--help"]]


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (
            ConfigError("data.seed", got="x", expected="y", fix="Fix it."),
            2,
            "data.seed: got x, expected y. Fix it.",
        ),
        (RewardError("grader", got="an exception"), 1, "--traceback"),
        (KeyboardInterrupt(), 130, "quadriga train: interrupted\n"),
        (ModuleNotFoundError("No module named 'zebra'", name="zebra"), 1, "zebra is not installed"),
    ],
)
def test_an_error_is_said_without_a_traceback(
    command, capsys, error: BaseException, status: int, said: str
) -> None:
    command(raising(error))
    assert main(["train"]) == status
    printed = capsys.readouterr()
    assert said in printed.err
    assert "Traceback" not in printed.err
    assert printed.out == ""


def test_the_traceback_is_there_when_asked_for(command, monkeypatch: pytest.MonkeyPatch) -> None:
    command(raising(RewardError("grader")))
    with pytest.raises(RewardError):
        main(["train", "--traceback"])
    monkeypatch.setenv("QUADRIGA_TRACEBACK", "1")
    with pytest.raises(RewardError):
        main(["train"])


def test_our_own_bugs_are_not_hidden(command) -> None:
    command(raising(AssertionError("ours")))
    with pytest.raises(AssertionError):
        main(["train"])
    command(raising(ModuleNotFoundError("x", name="quadriga.gone")))
    with pytest.raises(ModuleNotFoundError):
        main(["train"])


@pytest.mark.parametrize(
    ("typed", "said"), [("trian", "Did you mean 'train'?"), ("zzz", "There are train, generate")]
)
def test_an_unknown_command_suggests_the_nearest(capsys, typed: str, said: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main([typed])
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


def test_without_a_command_the_help_is_an_error(capsys) -> None:
    assert main([]) == 2
    assert "commands:" in capsys.readouterr().err


def test_version(capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"quadriga {__version__}\n"


def test_help_names_every_command_and_loads_none() -> None:
    code = (
        "import sys; from quadriga.cli.main import main\n"
        "try:\n    main(['--help'])\nfinally:\n"
        "    heavy = {'torch', 'pydantic', 'yaml', 'numpy', 'quadriga.config'}\n"
        "    print('heavy:', heavy & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "heavy: set()" in done.stdout
    for name in COMMANDS:
        assert f"  {name} " in done.stdout


def test_a_reader_that_leaves_early_is_no_error() -> None:
    show = f"'{sys.executable}' -m {command_line.__name__} config show"
    done = subprocess.run(
        ["bash", "-c", f"{show} | head -1; echo ${{PIPESTATUS[0]}}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    # The whole tree may fit into the pipe before the reader has left.
    assert done.stdout.splitlines() in (["task: rl", "0"], ["task: rl", "141"])


def test_output_that_is_lost_is_a_failure() -> None:
    words = [sys.executable, "-m", command_line.__name__, "--help"]
    with open("/dev/full", "wb") as disk:
        done = subprocess.run(
            words, stdout=disk, stderr=subprocess.PIPE, text=True, timeout=PROGRAM_S
        )
    assert done.returncode == 141
    assert done.stderr == "quadriga: standard output cannot be written (No space left on device)\n"


def test_an_argument_that_the_locale_cannot_decode_is_refused(capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["train", "--config", "caf\udce9.yaml"])
    assert caught.value.code == 2
    assert r"'caf\udce9.yaml'" in capsys.readouterr().err
