# SPDX-License-Identifier: Apache-2.0
"""The table of verl's names: each is there, what is missing is told, and nothing of it is there while it is off."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from quadriga.errors import ConfigError
from quadriga.user_file import import_file
from quadriga_verl import shim as verl
from tests.limits import PROGRAM_S


@pytest.mark.usefixtures("verl_names")
def test_each_name_of_the_table() -> None:
    """Each can be imported from each of its modules; a star takes all of them."""
    assert len(verl.MODULES) > 40
    for module, names in verl.MODULES.items():
        found = import_module(module)
        assert found.__all__ == list(names)
        for name in names:
            assert callable(getattr(found, name)) or name.isupper() or name == "RawRewardFn", (
                f"{module}.{name}"
            )


def test_no_module_is_covered_and_missing() -> None:
    for name in verl.MISSING:
        assert not verl.MODULES.get(name), name  # a package without names of its own
        module, _, member = name.rpartition(".")
        assert member not in verl.MODULES.get(module, {}), name


@pytest.mark.usefixtures("verl_names")
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "from verl.workers.reward_manager import PrimeRewardManager",
            "reward_model.reward_manager=prime",
        ),
        ("from verl.workers.sharding_manager.fsdp_vllm import Manager", "update_actor"),
        ("from verl.utils.fs import agg_loss", r"is in verl\.trainer\.ppo\.core_algos"),
        ("from verl.utils.dataset.rl_dataset import RMDataset", r"is in verl\.utils\.dataset"),
        ("import verl.single_controller.base.megatron", "quadriga.single_controller"),
        ("import verl.utils.megatron_utils", "strategy=megatron"),
        ("from verl.trainer.ppo.core_algos import agg_los", r"Did you mean 'agg_loss'"),
        ("from verl.utils.reward_score.math import strip_string", "is_equiv"),
        ("import verl.quux", "docs/verl_names.md"),
    ],
)
def test_a_missing_name_says_what_to_use(text: str, expected: str) -> None:
    name = r"\.".join(text.split()[1].split(".")[:3])
    with pytest.raises(
        ImportError, match=rf"^(verl\.single_controller|{name}).*without this name.*{expected}"
    ):
        exec(text)


@pytest.mark.usefixtures("verl_names")
def test_a_users_file_that_imports_a_missing_name(tmp_path: Path) -> None:
    """The file, its line, the name and what to use; nothing about turning on what is on."""
    (tmp_path / "mine.py").write_text("from verl.utils.megatron_utils import x\n")
    words = r"mine\.py., line 1(?s:.*)verl\.utils\.megatron_utils.*strategy=megatron"
    with pytest.raises(ConfigError, match=words) as raised:
        import_file(tmp_path / "mine.py", "key")
    assert "QUADRIGA_VERL=1" not in str(raised.value)


@pytest.mark.parametrize("text", ["import verl\n", "from verl.utils.reward_score import gsm8k\n"])
def test_off_it_says_how_to_turn_it_on(tmp_path: Path, text: str) -> None:
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(ConfigError, match=r"No module named 'verl'(?s:.*)Set QUADRIGA_VERL=1"):
        import_file(tmp_path / "mine.py", "key")


def test_the_environment_turns_it_on_and_scores_need_no_torch(tmp_path: Path) -> None:
    """In any process that imports the package; one of the file itself is enough too."""
    program = (
        "import sys; {}; from verl.utils.reward_score.gsm8k import compute_score; "
        "print(compute_score('#### 5', '5'), 'torch' in sys.modules)"
    )
    repository = str(Path(verl.__file__).parents[3])
    cases = (("import quadriga", {"QUADRIGA_VERL": "1"}), ("import quadriga.compat.verl", {}))
    for start, variables in cases:
        done = subprocess.run(
            [sys.executable, "-c", program.format(start)],
            env={"PYTHONPATH": repository, "PATH": "/usr/bin:/bin", **variables},
            capture_output=True,
            text=True,
            timeout=PROGRAM_S,
        )
        assert done.stdout.split() == ["1.0", "False"], done.stderr


def test_an_installed_verl_is_told(tmp_path: Path) -> None:
    """Which of the two is used, once, also where processes start others; off, the installed one is imported."""
    (tmp_path / "verl").mkdir()
    (tmp_path / "verl" / "__init__.py").write_text("kind = 'theirs'\n")
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import quadriga']); "
    program = f"import quadriga, verl; {child}print('theirs' if hasattr(verl, 'kind') else 'ours')"
    program = program.replace("hasattr(verl, 'kind')", "'kind' in vars(verl)")
    path = f"{Path(verl.__file__).parents[3]}:{tmp_path}"
    for variables, expected in (({"QUADRIGA_VERL": "1"}, "ours"), ({}, "theirs")):
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONPATH": path, "PATH": "/usr/bin:/bin", **variables},
            capture_output=True,
            text=True,
            timeout=PROGRAM_S,
        )
        assert done.stdout.splitlines()[-1] == expected, done.stderr
        assert done.stdout.count("verl is installed; with QUADRIGA_VERL=1") == (expected == "ours")
