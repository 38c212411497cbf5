# SPDX-License-Identifier: Apache-2.0
"""Bring each known fault back in a copy of the sources, and show that its check fails.

    .venv/bin/python tests/rehearsal/faults/run.py [NAME ...]

The first line of NAME.patch is `check: ` and the test that must fail with the patch and pass
without it; `check in vllm: ` for one that runs where vLLM is installed (.venv-vllm, or the
interpreter of QUADRIGA_VLLM_PYTHON). Each check runs in a fork of this process, which has imported
torch and not the package, so a fault costs a few CPU seconds. With a fault a check ends at its first
failure.
"""

import importlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[2]
REHEARSAL = "tests/rehearsal/"
IN_VLLM = "check in vllm"
LIMIT_S = 600
"""Time limit of a check in seconds, so that a fault which makes it hang is reported, too."""
PRELOADED = ("torch", "torch.distributed.fsdp", "transformers", "numpy", "pyarrow.parquet")


def copy_sources(target: Path) -> None:
    """Copy the files that git knows."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target / name)


def check_of(patch: Path) -> tuple[str, str]:
    """Read where the check of a patch runs, and the test."""
    line = patch.read_text(encoding="utf-8").partition("\n")[0]
    where, _, test = line.partition(": ")
    return where, test.strip()


def apply(patch: Path, sources: Path, *options: str) -> bool:
    """Apply a patch.

    Args:
        patch: the patch.
        sources: folder to change.
        options: further options of the program `patch`.

    Returns:
        Whether the patch fits the sources.
    """
    command = ["patch", "-p1", "-s", "-f", "--no-backup-if-mismatch", "-i", str(patch), *options]
    return subprocess.run(command, cwd=sources, check=False).returncode == 0


def cpu_s() -> float:
    """CPU seconds of the processes that this one has waited for."""
    times = os.times()
    return times.children_user + times.children_system


def run_tests(
    where: str, tests: Sequence[str], sources: Path, *more_options: str
) -> tuple[int, str]:
    """Run tests of a copy of the sources.

    Args:
        where: see `check_of`.
        tests: the tests; those of the rehearsal must be alone.
        sources: folder with the sources.
        more_options: further options of pytest.

    Returns:
        The status of pytest, and the lines of its summary about tests that failed.
    """
    options = ["-q", "-p", "no:cacheprovider", "-rf", f"--timeout={LIMIT_S}", *more_options, *tests]
    if tests[0].startswith(REHEARSAL):
        options += ["-p", "tests.rehearsal.plugin"]
    paths = [str(sources / name) for name in (".", "packages", "recipes")]
    variables = {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        # Room for the reasons of failures.
        "COLUMNS": "250",
    }
    with tempfile.TemporaryFile("w+") as output:
        if where == IN_VLLM:
            default = str(ROOT / ".venv-vllm/bin/python")
            python = os.environ.get("QUADRIGA_VLLM_PYTHON", default)
            done = subprocess.run(
                [python, "-m", "pytest", *options],
                cwd=sources,
                env=os.environ | variables,
                stdout=output,
                stderr=subprocess.STDOUT,
                check=False,
            )
            status = done.returncode
        else:
            process = os.fork()
            if process == 0:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
                os.chdir(sources)
                os.environ.update(variables)
                sys.path[:0] = paths
                sys.dont_write_bytecode = True
                status = 3
                try:
                    status = int(pytest.main(options))
                finally:
                    sys.stdout.flush()
                    os._exit(status)
            status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        output.seek(0)
        text = output.read()
    failed = [line for line in text.splitlines() if line.startswith("FAILED")]
    if status not in (0, 1):
        # pytest itself did not work.
        print(text[-3000:], flush=True)
    return status, "\n".join(failed)


def main(names: list[str]) -> int:
    """Run the checks with and without each fault; returns the number of those that are wrong."""
    patches = [patch for patch in FOLDER.glob("*.patch") if not names or patch.stem in names]
    # Cheap checks first, so that much is known when the run is cut short.
    checks = {patch: check_of(patch) for patch in sorted(patches)}
    patches = sorted(checks, key=lambda patch: (checks[patch][0], REHEARSAL in checks[patch][1]))
    for module in PRELOADED:
        importlib.import_module(module)
    num_wrong = 0
    with tempfile.TemporaryDirectory(prefix="fault-") as folder:
        sources = Path(folder)
        copy_sources(sources)
        of_run: dict[tuple[str, bool], list[str]] = {}
        for where, test in checks.values():
            tests = of_run.setdefault((where, test.startswith(REHEARSAL)), [])
            if test not in tests:
                tests.append(test)
        for (where, _), tests in of_run.items():
            status, failed = run_tests(where, tests, sources)
            if status != 0:
                print(f"fails without a fault, {where}:\n{failed}", flush=True)
                num_wrong += 1
        print(f"{cpu_s():.0f} CPU seconds without a fault", flush=True)
        for patch in patches:
            where, test = checks[patch]
            before_s = cpu_s()
            result = "DOES NOT APPLY"
            failed = ""
            if apply(patch, sources, "--dry-run"):
                apply(patch, sources)
                status, failed = run_tests(where, [test], sources, "-x")
                if not apply(patch, sources, "-R"):
                    raise RuntimeError(f"{patch.stem} cannot be taken back")
                name = test.rpartition("::")[2].partition("[")[0]
                is_seen = status == 1 and name in failed
                result = "seen" if is_seen else "NOT SEEN"
            num_wrong += result != "seen"
            reason = failed.partition(" - ")[2] or test
            print(f"{result:8} {cpu_s() - before_s:4.0f} s  {patch.stem}: {reason}", flush=True)
    print(f"{len(patches)} faults, {num_wrong} wrong", flush=True)
    return num_wrong


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
