# SPDX-License-Identifier: Apache-2.0
"""Measures the CPU seconds that each test file takes, with all the processes that it starts.

    .venv/bin/python scripts/cpu_by_file.py cpu.tsv -- -n 2 --dist loadfile -m "not slow" tests/unit tests/e2e
    .venv/bin/python scripts/cpu_by_file.py --compare before.tsv after.tsv

What follows `--` goes to pytest. Ray's processes are no descendants of the test that uses them, so time is read from
control groups: each process of pytest moves into a group of its own, and all that it starts is counted there. This
needs a control group that can be written, usually as root: version 1 with `cpuacct`, or version 2. A group is read
where a file's tests begin and end. `(collection)` is what comes before the first test of a process.

To measure another commit, run this file from a checkout of that commit: nothing but pytest is imported.
"""

import os
import subprocess
import sys
from argparse import ArgumentParser
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

GROUP_VARIABLE = "QUADRIGA_CPU_GROUP"
READINGS_VARIABLE = "QUADRIGA_CPU_READINGS"
COLLECTION = "(collection)"


def find_root() -> Path:
    """The folder of this process's control group, below which new groups can be made.

    Raises:
        SystemExit: there is none.
    """
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if "cpuacct" in controllers.split(","):
            folders = [Path("/sys/fs/cgroup/cpuacct"), Path("/sys/fs/cgroup/cpu,cpuacct")]
        elif number == "0":
            folders = [Path("/sys/fs/cgroup")]
        else:
            continue
        for folder in folders:
            group = folder / path.lstrip("/")
            has_usage = (group / "cpuacct.usage").exists() or (group / "cpu.stat").exists()
            if has_usage and os.access(group, os.W_OK):
                return group
    raise SystemExit(
        "cpu_by_file: found no control group that can be written, expected cpuacct (version 1) or cpu.stat (version 2) "
        "under /sys/fs/cgroup. Run as root, or in a container with its own control groups."
    )


def read_seconds(group: Path) -> float:
    """CPU seconds of a control group and the groups below it since it was made."""
    counter = group / "cpuacct.usage"
    if counter.exists():
        return int(counter.read_text()) / 1e9
    fields = dict(line.split() for line in (group / "cpu.stat").read_text().splitlines())
    return int(fields["usage_usec"]) / 1e6


class CountByFile:
    """A plugin of pytest: moves this process into its own control group and adds up seconds by test file."""

    def __init__(self, group: Path, readings: Path, name: str) -> None:
        self._group = group / name
        self._group.mkdir()
        (self._group / "cgroup.procs").write_text(str(os.getpid()))
        self._readings = readings / f"{name}.tsv"
        self._file = COLLECTION
        self._last = read_seconds(self._group)
        self._seconds: dict[str, float] = defaultdict(float)

    def _count(self) -> None:
        now = read_seconds(self._group)
        self._seconds[self._file] += now - self._last
        self._last = now

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        file = item.nodeid.partition("::")[0]
        if file != self._file:
            self._count()
            self._file = file
        return (yield)

    def pytest_unconfigure(self) -> None:
        self._count()
        write_table(self._readings, self._seconds)


def pytest_configure(config: pytest.Config) -> None:
    """Count in the processes that run tests; the controller of pytest-xdist runs none."""
    is_controller = getattr(config.option, "numprocesses", None) and not hasattr(
        config, "workerinput"
    )
    if GROUP_VARIABLE in os.environ and not is_controller:
        name = getattr(config, "workerinput", {"workerid": "main"})["workerid"]
        plugin = CountByFile(
            Path(os.environ[GROUP_VARIABLE]), Path(os.environ[READINGS_VARIABLE]), name
        )
        config.pluginmanager.register(plugin)


def write_table(path: Path, seconds: dict[str, float]) -> None:
    """One line per file: seconds, tab, name; the largest first."""
    rows = sorted(seconds.items(), key=lambda row: -row[1])
    path.write_text("".join(f"{value:.2f}\t{name}\n" for name, value in rows))


def read_table(path: Path) -> dict[str, float]:
    """The inverse of `write_table`."""
    rows = [line.split("\t") for line in path.read_text().splitlines()]
    return {name: float(value) for value, name in rows}


def measure(output: Path, arguments: list[str]) -> int:
    """Run pytest, write its CPU seconds by file and print the total.

    Args:
        output: file to write the table to.
        arguments: pytest's.

    Returns:
        pytest's exit status.
    """
    group = find_root() / f"quadriga-cpu-{os.getpid()}"
    group.mkdir()
    readings = output.with_suffix(".readings")
    readings.mkdir(parents=True)
    environment = os.environ | {
        GROUP_VARIABLE: str(group),
        READINGS_VARIABLE: str(readings.resolve()),
        "PYTHONPATH": os.pathsep.join(
            filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")])
        ),
    }
    command = [sys.executable, "-m", "pytest", "-p", "cpu_by_file", *arguments]
    status = subprocess.run(command, env=environment).returncode

    seconds: dict[str, float] = defaultdict(float)
    for path in readings.iterdir():
        for name, value in read_table(path).items():
            seconds[name] += value
    write_table(output, seconds)
    print(f"{sum(seconds.values()):.0f} CPU seconds in {len(seconds)} files; the largest ten:")
    for line in output.read_text().splitlines()[:10]:
        print(f"  {line}")
    return status


def compare(before: Path, after: Path) -> None:
    """Print both totals, their ratio, and each file whose seconds differ by more than two."""
    old = read_table(before)
    new = read_table(after)
    for name in sorted(
        old.keys() | new.keys(), key=lambda name: new.get(name, 0.0) - old.get(name, 0.0)
    ):
        if abs(new.get(name, 0.0) - old.get(name, 0.0)) > 2:
            print(f"{old.get(name, 0.0):8.1f} {new.get(name, 0.0):8.1f}  {name}")
    total_before = sum(old.values())
    total_after = sum(new.values())
    print(f"{total_before:8.1f} {total_after:8.1f}  total: {total_after / total_before:.1%}")


def main() -> int:
    """The command line; see the top of this file."""
    words = sys.argv[1:]
    split = words.index("--") if "--" in words else len(words)
    parser = ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "output",
        nargs="?",
        type=Path,
        help="where to write the table; pytest's arguments follow `--`",
    )
    parser.add_argument(
        "--compare", nargs=2, type=Path, metavar=("BEFORE", "AFTER"), help="compare two tables"
    )
    options = parser.parse_args(words[:split])
    if options.compare:
        compare(*options.compare)
        return 0
    if options.output is None:
        parser.error("got neither a file to write to nor --compare")
    return measure(options.output, words[split + 1 :])


if __name__ == "__main__":
    sys.exit(main())
