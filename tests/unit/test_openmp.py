# SPDX-License-Identifier: Apache-2.0
"""How the threads of torch wait, by what other programs do."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """\
import os, sys
from pathlib import Path
from quadriga import openmp
openmp._LOAD = Path(sys.argv[1])
import quadriga
quadriga.DataProto
assert "torch" in sys.modules
print([os.environ.get(name) for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")], openmp.notice())
"""


def load_torch(tmp_path: Path, runnable: int, **chosen: str) -> tuple[str, str]:
    """What a program prints that loads torch beside other programs; and what OpenMP prints.

    It loads one name of the package. Others load more modules in the same way: quadriga/lazy.py.
    """
    file = tmp_path / "loadavg"
    # The program itself is runnable too.
    file.write_text(f"0.20 0.18 0.12 {runnable + 1}/80 11206\n")
    variables = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    environment = {name: value for name, value in os.environ.items() if name not in variables}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(file)],
        env=environment | chosen | {"OMP_DISPLAY_ENV": "verbose"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr


def assert_spins(output: str, expected: str) -> None:
    # Only GNU's OpenMP, which torch has on Linux, prints it.
    if "GOMP_SPINCOUNT" in output:
        assert f"GOMP_SPINCOUNT = '{expected}'" in output


def test_threads_sleep_if_other_programs_compute(tmp_path: Path) -> None:
    cores = os.cpu_count() or 1
    printed, of_openmp = load_torch(tmp_path, runnable=cores)
    why = f"since {cores} other threads compute on {cores} cores"
    assert printed == f"[None, None] waiting threads sleep, {why}"
    assert_spins(of_openmp, "0")


def test_threads_spin_if_no_other_program_computes(tmp_path: Path) -> None:
    printed, of_openmp = load_torch(tmp_path, runnable=0)
    assert printed == "[None, None]"
    assert "GOMP_SPINCOUNT = '0'" not in of_openmp


@pytest.mark.parametrize(
    ("name", "value", "spins"),
    [("OMP_WAIT_POLICY", "ACTIVE", "30000000000"), ("GOMP_SPINCOUNT", "7", "7")],
)
def test_the_environment_has_the_last_word(
    name: str, value: str, spins: str, tmp_path: Path
) -> None:
    printed, of_openmp = load_torch(tmp_path, os.cpu_count() or 1, **{name: value})
    assert printed == str(
        [os.environ.get(n) if n != name else value for n in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")]
    )
    assert_spins(of_openmp, spins)
