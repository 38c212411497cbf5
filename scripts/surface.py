# SPDX-License-Identifier: Apache-2.0
"""Writes what users of a checkout rely on as JSON, and compares it with an earlier snapshot.

    .venv/bin/python scripts/surface.py --output before.json ../other-checkout
    .venv/bin/python scripts/surface.py --compare before.json
    .venv/bin/python scripts/surface.py --compare before.json --allow 'removed: names: quadriga.x.*'

Without a folder it looks at this checkout. `--compare` ends with status 1 if something was removed
or changed; additions are listed. A snapshot is a dictionary of sections, each of flat entries
`path: description`:

    modules          modules of the wheel's packages and of verl's names; "needs NAME" where a
                     package is missing
    names            public names of each module: functions with parameters and defaults, classes
                     with base classes, constructor and members, the types of values
    keys             configuration keys of each task with default, JSON schema and flags
    commands         options and arguments of each command, from its parser
    metrics          names in metrics.jsonl of a few two-step runs of a tiny model
    metric_literals  complete metric names in the source, such as "recovery/restarts"
    files            files that these runs write
    wheel            files of the wheel
    annotations      annotations of parameters and results (changes are notes)
    help             text of each `--help` (changes are notes)

A module offers the names that it defines, those of `__all__`, and names of the packages that it
imports without using them; an `__init__.py` offers all names of the packages that it imports. The
source of a module that cannot be imported is read instead. `--compare` also imports the modules of
the earlier snapshot by their old paths, so an alias keeps a path alive. A file of the wheel that
moved is a note if its module can still be imported, or if it is data under the same name elsewhere.

No part of the product lists the names of metrics. Those of the runs are complete for what the runs
do, and `benchmarks/same_numbers.py` compares the names and values of many more. A literal that is
gone is a note if a run still writes it. Names that are put together, `f"{role}/lr"`, are no
literals.
"""

import ast
import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from argparse import ArgumentParser, Namespace
from pathlib import Path

from surface_reader import Section, Snapshot, find_modules, find_packages, import_path

REPOSITORY = Path(__file__).resolve().parents[1]
READER = Path(__file__).with_name("surface_reader.py")

NOT_COMPARED = ("annotations", "help")
METRIC = re.compile(
    # The first part tells a metric from a path.
    r"(actor|async|balance|critic|data|filter_groups|num_turns|perf|prompt_length|recovery|response"
    r"|response_length|reward|rollout|rollout_corr|timing_per_token_ms|timing_s|train|training|val"
    r"|val-aux|val-core)(/[\w@-]+)+"
)
PARAMETER = re.compile(r"(?P<owner>.*)\(\w+\)")


def read_metric_literals(packages: dict[str, Path]) -> Section:
    """Strings of the source that are complete metric names."""
    literals: Section = {}
    for _, path in find_modules(packages):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
                continue
            if METRIC.fullmatch(node.value):
                literals[node.value] = ""
    return literals


def read_wheel(checkout: Path, folder: Path) -> Section:
    """The files of the wheel, without its version."""
    # A build writes into its source.
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(checkout / name, source / name)
    for package in find_packages(checkout).values():
        ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(package, source / package.relative_to(checkout), ignore=ignore)
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "wheel"]
    command += ["--no-deps", "--no-build-isolation", "--no-index"]
    command += ["--wheel-dir", str(folder), str(source)]
    subprocess.run(command, check=True, stdout=sys.stderr)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    return {re.sub(r"^(\w+)-[^/]*\.dist-info/", r"\1.dist-info/", name): "" for name in names}


def take_snapshot(checkout: Path, earlier: Snapshot) -> Snapshot:
    """Take the snapshot of a checkout.

    Args:
        checkout: its folder.
        earlier: a snapshot whose modules are imported too; may be empty.
    """
    snapshot: Snapshot = {}
    with tempfile.TemporaryDirectory(prefix="surface-") as name:
        folder = Path(name)
        (folder / "earlier.json").write_text(json.dumps(earlier), encoding="utf-8")
        for part in ("names", "runs"):
            run_part(part, checkout, folder)
            snapshot |= json.loads((folder / f"{part}.json").read_text(encoding="utf-8"))
        snapshot["wheel"] = read_wheel(checkout, folder)
    snapshot["metric_literals"] = read_metric_literals(find_packages(checkout))
    return snapshot


def run_part(part: str, checkout: Path, folder: Path) -> None:
    """Take a part of the snapshot in a process that imports the checkout."""
    variables = {name: value for name, value in os.environ.items() if "QUADRIGA" not in name}
    variables |= {"PYTHONPATH": import_path(checkout), "PYTHONHASHSEED": "0", "COLUMNS": "100"}
    variables |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"}
    # -P: the folder of the reader must not come before the checkout.
    command = [sys.executable, "-P", str(READER), part, str(checkout), str(folder)]
    process = subprocess.run(command, cwd=folder, env=variables, stdout=sys.stderr)
    if process.returncode:
        status = process.returncode
        raise SystemExit(f"surface: reading the {part} of {checkout} ended with status {status}")


def compare(old: Snapshot, new: Snapshot) -> dict[str, list[str]]:
    """Compare two snapshots.

    Args:
        old: the earlier one, all of whose entries must stay.
        new: the later one.

    Returns:
        Lines under `removed` and `changed`, which break users' code, and `added` and `noted`, which
        do not.
    """
    lines: dict[str, list[str]] = {"removed": [], "changed": [], "added": [], "noted": []}
    for section, old_entries in old.items():
        new_entries = new.get(section, {})
        is_compared = section not in NOT_COMPARED
        for path, text in old_entries.items():
            if path not in new_entries:
                is_note = not is_compared or was_moved(section, path, old, new)
                lines["noted" if is_note else "removed"].append(f"{section}: {path}")
            elif new_entries[path] != text:
                change = f"{section}: {path}: {text!r} -> {new_entries[path]!r}"
                lines["changed" if is_compared else "noted"].append(change)
        for path, text in new_entries.items():
            if is_compared and path not in old_entries:
                kind = "changed" if is_new_demand(path, text, old_entries) else "added"
                lines[kind].append(f"{section}: {path}: {text!r}")
    return lines


def is_new_demand(path: str, text: str, old_entries: Section) -> bool:
    """Whether a new entry is a parameter without default of something that callers already use."""
    parameter = PARAMETER.fullmatch(path)
    if parameter is None or not text.endswith(", required"):
        return False
    return parameter["owner"] in old_entries


def was_moved(section: str, path: str, old: Snapshot, new: Snapshot) -> bool:
    """Whether what is no longer in a section can still be reached."""
    if section == "metric_literals":
        return any(entry.endswith(f": {path}") for entry in new["metrics"])
    if section != "wheel":
        return False
    if path.endswith(".py"):
        module_path = path.removesuffix(".py").removesuffix("/__init__")
        return module_path.replace("/", ".") in new["modules"]
    added_paths = new["wheel"].keys() - old["wheel"].keys()
    return Path(path).name in {Path(added_path).name for added_path in added_paths}


def report(lines: dict[str, list[str]], allowed_patterns: list[str]) -> int:
    """Print the result of a comparison; returns the exit status."""
    num_refused = 0
    for kind, entries in lines.items():
        for entry in sorted(entries):
            line = f"{kind}: {entry}"
            if kind in ("removed", "changed"):
                if any(fnmatch.fnmatchcase(line, pattern) for pattern in allowed_patterns):
                    line += " (allowed)"
                else:
                    num_refused += 1
            print(line)
    counts = ", ".join(f"{len(entries)} {kind}" for kind, entries in lines.items())
    print(f"surface: {counts}; {num_refused} not allowed")
    return int(num_refused > 0)


def parse_arguments() -> Namespace:
    """The command line; see the top of this file."""
    parser = ArgumentParser(description=(__doc__ or "").splitlines()[0])
    checkout_help = "folder to take the snapshot of (default: this checkout)"
    parser.add_argument("checkout", nargs="?", type=Path, default=REPOSITORY, help=checkout_help)
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the snapshot to a file")
    compare_help = "compare the snapshot with an earlier one"
    parser.add_argument("--compare", type=Path, metavar="FILE", help=compare_help)
    allow_help = "accept reported lines that match a pattern, such as 'changed: keys: rl trainer.*'"
    parser.add_argument("--allow", action="append", default=[], metavar="PATTERN", help=allow_help)
    options = parser.parse_args()
    if options.output is None and options.compare is None:
        parser.error("expected --output or --compare")
    return options


def main() -> int:
    """Take a snapshot; write it, compare it, or both."""
    options = parse_arguments()
    checkout = options.checkout.resolve()
    earlier: Snapshot = {}
    if options.compare:
        earlier = json.loads(options.compare.read_text(encoding="utf-8"))
    snapshot = take_snapshot(checkout, earlier)
    if options.output:
        text = json.dumps(snapshot, indent=1, sort_keys=True, ensure_ascii=False)
        options.output.write_text(f"{text}\n", encoding="utf-8")
        num_entries = sum(len(entries) for entries in snapshot.values())
        print(f"surface: {num_entries} entries in {options.output}")
    if options.compare:
        return report(compare(earlier, snapshot), options.allow)
    return 0


if __name__ == "__main__":
    sys.exit(main())
