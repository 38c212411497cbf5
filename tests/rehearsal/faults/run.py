# SPDX-License-Identifier: Apache-2.0
"""Bring each known fault back in a copy of the sources, and show that its check fails.

    .venv/bin/python tests/rehearsal/faults/run.py [NAME ...]

The first line of NAME.patch is `check: ` and the test that must fail with the patch and pass
without it; `check in vllm: ` for one that runs where vLLM is installed (.venv-vllm, or the
interpreter of QUADRIGA_VLLM_PYTHON).
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[2]


def copy_sources(target: Path) -> None:
    """Copy the files that git knows."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target / name)


def run_check(line: str, sources: Path) -> tuple[int, str]:
    """Run the check that the first line of a patch names.

    Args:
        line: the first line.
        sources: folder with the sources to test.

    Returns:
        The status of pytest, and the names of the tests that failed.
    """
    where, _, check = line.partition(":")
    python = str(ROOT / ".venv/bin/python")
    if where == "check in vllm":
        default = str(ROOT / ".venv-vllm/bin/python")
        python = os.environ.get("QUADRIGA_VLLM_PYTHON", default)
    options = ["-q", "-p", "no:cacheprovider", "-rf"]
    if "tests/rehearsal/" in check:
        options += ["-p", "tests.rehearsal.plugin"]
    paths = [sources, sources / "packages", sources / "recipes"]
    variables = {"PYTHONPATH": os.pathsep.join(map(str, paths)), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [python, "-m", "pytest", *options, check.strip()],
        cwd=sources,
        env=os.environ | variables | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    failed = [text for text in done.stdout.splitlines() if text.startswith("FAILED")]
    return done.returncode, "\n".join(failed)


def main(names: list[str]) -> int:
    """Run the checks with and without each fault; returns the number of those that are wrong."""
    num_wrong = 0
    for patch in sorted(FOLDER.glob("*.patch")):
        if names and patch.stem not in names:
            continue
        line = patch.read_text(encoding="utf-8").partition("\n")[0]
        test = line.rpartition("::")[2].partition("[")[0]
        with tempfile.TemporaryDirectory(prefix="fault-") as folder:
            sources = Path(folder)
            copy_sources(sources)
            status_before, _ = run_check(line, sources)
            subprocess.run(["patch", "-p1", "-s", "-i", str(patch)], cwd=sources, check=True)
            status, failed = run_check(line, sources)
        # 1: tests failed. Others mean that pytest itself did not work.
        is_seen = status_before == 0 and status == 1 and test in failed
        num_wrong += not is_seen
        print(f"{'seen' if is_seen else 'NOT SEEN':8}  {patch.stem}: {line}", flush=True)
    return num_wrong


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
