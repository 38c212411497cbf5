# SPDX-License-Identifier: Apache-2.0
"""A built wheel is complete: it installs elsewhere and its command answers there, without the checkout.

What it does not prove: that the wheel's dependencies suffice (they are those of the environment that runs the tests).
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import quadriga
from tests.limits import PROGRAM_S

REPOSITORY = Path(__file__).resolve().parents[2]
INGREDIENTS = ("pyproject.toml", "README.md", "LICENSE", "quadriga", "recipes", "packages")


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Run a command that must succeed, and return what it printed."""
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=clean | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=PROGRAM_S,
    )
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds nothing but the installed wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in INGREDIENTS:
        path = REPOSITORY / name
        copy = shutil.copytree if path.is_dir() else shutil.copy
        copy(path, source / name)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
    run(
        *pip,
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "-w",
        folder,
        source,
        cwd=folder,
    )
    (wheel,) = folder.glob("quadriga-*.whl")
    site = folder / "site"
    run(*pip, "install", "--no-deps", "--no-index", "--target", site, wheel, cwd=folder)
    return site


def python(site: Path, tmp_path: Path, *words: str) -> str:
    """Run Python in an empty folder with the installed wheel before anything else."""
    # -P keeps the current folder out of the path, and an editable install's finder comes after PYTHONPATH.
    return run(sys.executable, "-P", *words, cwd=tmp_path, PYTHONPATH=str(site))


def test_wheel_is_what_runs(installed: Path, tmp_path: Path) -> None:
    """The imported package is the wheel's, in the version of the checkout."""
    program = "import quadriga; print(quadriga.__version__, quadriga.__file__)"
    version, file = python(installed, tmp_path, "-c", program).split()
    assert version == quadriga.__version__
    assert Path(file).is_relative_to(installed)


def test_every_module_is_in_the_wheel(installed: Path) -> None:
    """No file of the three packages is left behind, data files included, and nothing else lies at the top."""
    for name in ("quadriga", "recipes/quadriga_recipes", "packages/quadriga_verl"):
        package = REPOSITORY / name
        expected, found = (
            {
                path.relative_to(folder)
                for path in folder.rglob("*")
                if path.is_file() and path.suffix != ".pyc"
            }
            for folder in (package, installed / package.name)
        )
        assert expected - found == set()
    names = {path.name for path in installed.iterdir() if path.suffix != ".dist-info"}
    assert names == {"quadriga", "quadriga_recipes", "quadriga_verl", "bin"}


def test_recipes_are_found(installed: Path, tmp_path: Path) -> None:
    """`quadriga prepare data` finds the second package in the wheel; without it, one sentence says what is missing."""
    main = "import sys; from quadriga.cli.main import main; sys.exit(main())"
    words = (
        "-c",
        main,
        "prepare",
        "data",
        "largest",
        "--num-train",
        "2",
        "--num-val",
        "1",
        "--output",
        "rows",
    )
    assert "rows/train.parquet" in python(installed, tmp_path, *words)
    shutil.copytree(installed / "quadriga", tmp_path / "alone" / "quadriga")
    # -S leaves out what an editable install of the checkout would add; the folders of the other packages are named.
    packages = [path for path in sys.path if path.endswith("-packages")]
    done = subprocess.run(
        [
            sys.executable,
            "-P",
            "-S",
            "-c",
            f"import sys; sys.path += {packages}; {main}",
            *words[2:],
        ],
        cwd=tmp_path,
        # Other tests may have turned the names of verl on, whose package is not there.
        env=dict(os.environ) | {"PYTHONPATH": str(tmp_path / "alone"), "QUADRIGA_VERL": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1 and "got no package quadriga_recipes" in done.stderr, done.stderr


def test_command_answers(installed: Path, tmp_path: Path) -> None:
    """The command's version and its list of configuration keys come out of the wheel, through its entry point."""
    entry = (installed / "bin" / "quadriga").read_text(encoding="utf-8")
    assert "from quadriga.cli.main import main" in entry
    main = "import sys; from quadriga.cli.main import main; sys.exit(main())"
    assert quadriga.__version__ in python(installed, tmp_path, "-c", main, "--version")
    assert "actor_rollout_ref.actor.optim.lr" in python(
        installed, tmp_path, "-c", main, "config", "keys"
    )
