# SPDX-License-Identifier: Apache-2.0
"""Campaigns of damage: kills, stops, full disks, flipped bytes, hostile programs; each case from its number alone.

    .venv/bin/python benchmarks/chaos.py list                        # campaigns, cases so far and wanted
    .venv/bin/python benchmarks/chaos.py run kills                   # a full sitting, added to the record
    .venv/bin/python benchmarks/chaos.py run kills --cases 100       # the next hundred cases
    .venv/bin/python benchmarks/chaos.py run kills --minutes 20      # as many as begin within that time
    .venv/bin/python benchmarks/chaos.py again kills 17 23           # those cases, nothing recorded, folders kept
    .venv/bin/python benchmarks/chaos.py table                       # writes docs/reliability.md

Each campaign is a module of benchmarks/campaigns: async_runs, damage, disk_full, engine_kills, hostile, kills,
ray_kills, right, stops, stream_kills, user_code. Keys that a case is not about have their defaults, `trainer.device`
too; GPUs are hidden by CUDA_VISIBLE_DEVICES. `scripts/test --all` runs a few cases (tests/e2e/test_campaigns.py).

The record, `docs/reliability.jsonl`, has one line a sitting: the commit, the machine, the numbers of its cases, events
by group, figures and every failure. A sitting goes on after the last number of the one before, so that sittings add up;
one that is interrupted records what it has done. The status is 1 if a case failed.
"""

import importlib
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "benchmarks")]
# Runs choose their device as they do by default; what they compute is the same on every machine.
os.environ["CUDA_VISIBLE_DEVICES"] = ""

from campaigns.campaign import Campaign, Outcome  # noqa: E402

RECORD = REPOSITORY / "docs" / "reliability.jsonl"
PAGE = REPOSITORY / "docs" / "reliability.md"
NAMES = sorted(
    path.stem
    for path in (REPOSITORY / "benchmarks" / "campaigns").glob("*.py")
    if path.stem != "campaign"
)
HEAD = """# Reliability

What was done to runs of Quadriga, and what came of it. Written by `benchmarks/chaos.py table` from
`docs/reliability.jsonl`, which has a line for each sitting: commit, machine, numbers of the cases, failures.
A case is made from its number alone: `benchmarks/chaos.py again CAMPAIGN NUMBER` repeats it.
"""


def campaign(name: str) -> Campaign:
    """The campaign of a module in benchmarks/campaigns."""
    return importlib.import_module(f"campaigns.{name}").CAMPAIGN


def one_case(name: str, number: int, folder: Path, files: Path) -> Outcome:
    """Run a case in a folder of its own, which goes unless the case failed."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    outcome = campaign(name).run(number, folder, files)
    if not outcome.failure:
        shutil.rmtree(folder, ignore_errors=True)
    return outcome


def outcomes(
    name: str, numbers: Iterable[int], args: Namespace, until: float
) -> Iterator[tuple[int, Outcome]]:
    """The outcomes of cases as they end; none begins after `until` (by the monotonic clock)."""
    chosen, base = campaign(name), args.output / name
    base.mkdir(parents=True, exist_ok=True)
    files, left = base / "files", iter(numbers)
    files.mkdir(exist_ok=True)
    if chosen.prepare:
        chosen.prepare(files)
    num_processes = min(chosen.processes, args.processes)
    # Not forked from this process: a case may fork a warm interpreter of its own, without threads of a pool.
    with ProcessPoolExecutor(num_processes, multiprocessing.get_context("spawn")) as pool:
        running: dict[Future[Outcome], int] = {}
        while True:
            while (
                len(running) < num_processes
                and time.monotonic() < until
                and (number := next(left, None)) is not None
            ):
                running[pool.submit(one_case, name, number, base / f"case_{number}", files)] = (
                    number
                )
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                yield running.pop(future), future.result()


def sittings() -> list[dict[str, Any]]:
    """The lines of the record."""
    return (
        [json.loads(line) for line in RECORD.read_text(encoding="utf-8").splitlines()]
        if RECORD.is_file()
        else []
    )


def sit(args: Namespace) -> int:
    """Run the next cases of a campaign, print each, and add a line to the record."""
    first = 1 + max(
        (line["last"] for line in sittings() if line["campaign"] == args.campaign), default=0
    )
    num_cases = args.cases or (sys.maxsize if args.minutes else campaign(args.campaign).cases)
    last_wanted = first + num_cases
    until = time.monotonic() + (args.minutes * 60 if args.minutes else float("inf"))
    groups, done = Counter[str](), dict[int, Outcome]()
    start = time.monotonic()
    try:
        for number, outcome in outcomes(args.campaign, range(first, last_wanted), args, until):
            done[number] = outcome
            groups += outcome.events
            told = outcome.failure or ", ".join(
                f"{key} {value:.3g}" for key, value in outcome.figures.items()
            )
            mark = "FAILED" if outcome.failure else "ok"
            print(f"{args.campaign} {number} {dict(outcome.events)}: {mark} {told}", flush=True)
    finally:
        # Cases end in any order: those behind one that did not end run again in the next sitting.
        end = first
        while end in done:
            end += 1
        if end > first:
            _add(
                args.campaign,
                {number: done[number] for number in range(first, end)},
                time.monotonic() - start,
            )
    num_failed = sum(bool(outcome.failure) for outcome in done.values())
    print(f"{args.campaign}: {len(done)} cases, {num_failed} failed, {dict(groups)}")
    return int(num_failed > 0)


def _add(name: str, done: dict[int, Outcome], seconds: float) -> None:
    groups, figures = Counter[str](), defaultdict[str, list[float]](list)
    for outcome in done.values():
        groups += outcome.events
        for key, value in outcome.figures.items():
            figures[key].append(value)
    git = ["git", "-C", str(REPOSITORY)]
    commit = subprocess.run(
        [*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    # The record itself may have changed since: a sitting before wrote it.
    status = subprocess.run(
        [*git, "status", "--porcelain", "quadriga", "benchmarks"], capture_output=True, text=True
    )
    line = {
        "campaign": name,
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "commit": commit + ("+" if status.stdout.strip() else ""),
        "machine": machine(),
        "first": min(done),
        "last": max(done),
        "seconds": round(seconds),
        "groups": dict(sorted(groups.items())),
        "figures": {
            key: [min(each), statistics.median(each), max(each)]
            for key, each in sorted(figures.items())
        },
        "failures": {
            number: outcome.failure.replace(f"{REPOSITORY}/", "")
            for number, outcome in done.items()
            if outcome.failure
        },
    }
    with RECORD.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def machine() -> str:
    """Processor, cores and kernel."""
    models = [
        line
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    name = models[0].partition(":")[2].strip() if models else os.uname().machine
    return f"{name}, {len(os.sched_getaffinity(0))} cores, Linux {os.uname().release.partition('-')[0]}"


def again(args: Namespace) -> int:
    """Run cases by their numbers, one after the other, and keep the folders of those that fail."""
    args.processes, failed = 1, False
    for number, outcome in outcomes(args.campaign, args.numbers, args, float("inf")):
        failed |= bool(outcome.failure)
        print(
            f"{args.campaign} {number} {outcome.group}: {outcome.failure or 'ok'} {dict(outcome.figures)}",
            flush=True,
        )
    return int(failed)


def table(args: Namespace) -> int:
    """Write the page: per campaign what was wanted, what was run, and what failed."""
    lines = sittings()
    rows = [
        "| done to a run | promised in every case | events | wanted | failed |",
        "|---|---|---|---|---|",
    ]
    details = []
    for name in NAMES:
        chosen, own = campaign(name), [line for line in lines if line["campaign"] == name]
        groups = sum((Counter(line["groups"]) for line in own), Counter[str]())
        wanted = ", ".join(
            f"{key} {count:,}" if key else f"{count:,}" for key, count in chosen.wanted.items()
        )
        num_failed = sum(len(line["failures"]) for line in own)
        rows.append(
            f"| {chosen.what} | {chosen.promise} | {groups.total():,} | {wanted} | {num_failed} |"
        )
        if own:
            details += [
                "",
                f"## {name}",
                "",
                f"By group: {', '.join(f'{k} {v:,}' for k, v in sorted(groups.items()))}.",
            ]
            details += [f"- {_sitting(line)}" for line in own]
    PAGE.write_text("\n".join([HEAD, *rows, *details]) + "\n", encoding="utf-8")
    return 0


def _sitting(line: dict[str, Any]) -> str:
    figures = "; ".join(
        f"{key} {low:.3g} / {mid:.3g} / {high:.3g}"
        for key, (low, mid, high) in line["figures"].items()
    )
    failures = "; ".join(f"case {number}: {text}" for number, text in line["failures"].items())
    told = f"{line['date']}, commit {line['commit']}, {line['machine']}: cases {line['first']} to {line['last']}"
    lowest = f"; least / median / most: {figures}" if figures else ""
    return f"{told} in {line['seconds']} s{lowest}{f'. Failed: {failures}' if failures else ''}"


def show(args: Namespace) -> int:
    """Print what was run and what is wanted."""
    for name in NAMES:
        own = [line for line in sittings() if line["campaign"] == name]
        groups = sum((Counter(line["groups"]) for line in own), Counter[str]())
        num_failed = sum(len(line["failures"]) for line in own)
        wanted = dict(campaign(name).wanted)
        print(
            f"{name}: {groups.total()} events {dict(groups)}, wanted {wanted}, {num_failed} failed"
        )
    return 0


def main() -> int:
    """The command line."""
    parser = ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(required=True)
    for name, function in {"list": show, "table": table, "run": sit, "again": again}.items():
        command = commands.add_parser(name, help=(function.__doc__ or "").splitlines()[0])
        command.set_defaults(function=function)
        if name not in ("run", "again"):
            continue
        command.add_argument("campaign", choices=NAMES)
        command.add_argument(
            "--output", type=Path, default=Path("outputs/chaos"), help="folder of the cases"
        )
        command.add_argument(
            "--processes",
            type=int,
            default=2,
            help="cases side by side, where the campaign allows it",
        )
        if name == "run":
            command.add_argument("--cases", type=int, help="how many; by default a full sitting")
            command.add_argument("--minutes", type=float, help="as many as begin within that time")
        else:
            command.add_argument("numbers", nargs="+", type=int)
    args = parser.parse_args()
    if hasattr(args, "output"):
        args.output = args.output.absolute()
    return args.function(args)


if __name__ == "__main__":
    sys.exit(main())
