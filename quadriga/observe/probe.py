# SPDX-License-Identifier: Apache-2.0
"""Probe of the optional packages: whether each is installed and works, and if not, why.

An installed package may be too old, or fail to load because it needs another one. Packages that
load quickly are imported, each in a separate process, where a crash or a hang does no harm. For
packages that take seconds to load, only the versions of their requirements are compared, and the
report says that they were not tried.

A problem is a text, or "" if there is none.
"""

import importlib.util
import re
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement

IMPORT_TIMEOUT_S = 60.0
# Imports at the same time; more would only slow each other down.
NUM_IMPORTS = 2
NOT_TRIED = "installed, not tried"


@dataclass(frozen=True, slots=True)
class Extra:
    """An optional package, and what it is needed for."""

    package: str  # name of the distribution
    module: str  # name that is imported
    least: str  # oldest version that works
    purpose: str
    install: str  # argument of `pip install -e`
    is_quick: bool = False  # whether it loads in less than a second


@dataclass(frozen=True, slots=True)
class Capability:
    """Result of the probe of a package."""

    package: str
    version: str  # "" if it is not installed
    is_usable: bool
    reason: str  # "imports", `NOT_TRIED`, or an error
    purpose: str


EXTRAS = (
    Extra("gguf", "gguf", "0.10", "reads a model from a GGUF file", ".[gguf]", is_quick=True),
    Extra("pillow", "PIL", "10.1", "reads the images of prompts", ".[vision]", is_quick=True),
    Extra("av", "av", "14.0", "reads video files", ".[video]", is_quick=True),
    Extra("accelerate", "accelerate", "1.0", "reads a model from a GGUF file", ".[gguf]"),
    Extra("matplotlib", "matplotlib", "3.8", "draws the learning curve", ".[plot]", is_quick=True),
    Extra("math-verify", "math_verify", "0.8", "grades mathematics", ".[math]", is_quick=True),
    Extra(
        "reasoning-gym",
        "reasoning_gym",
        "0.1.20",
        "verifiable tasks and their graders",
        ".[reasoning-gym]",
    ),
    Extra(
        "ray", "ray", "2.60", "worker processes, on one machine or many", ".[ray]", is_quick=True
    ),
    Extra(
        "megatron-core", "megatron.core", "0.16.1", "the training engine megatron", ".[megatron]"
    ),
    Extra("peft", "peft", "0.17", "trains adapters in place of weights", ".[peft]"),
    Extra(
        "tensorboard",
        "tensorboard",
        "2.16",
        "tracks runs in event files",
        ".[tensorboard]",
        is_quick=True,
    ),
    Extra("wandb", "wandb", "0.18", "tracks runs at Weights & Biases", ".[wandb]"),
    Extra("mlflow", "mlflow", "2.16", "tracks runs with MLflow", ".[mlflow]"),
    Extra("swanlab", "swanlab", "0.6", "tracks runs with SwanLab", ".[swanlab]"),
)


def probe_capabilities(
    extras: Sequence[Extra] = EXTRAS, timeout_s: float = IMPORT_TIMEOUT_S, *, try_all: bool = False
) -> list[Capability]:
    """Probe optional packages.

    Args:
        extras: the packages.
        timeout_s: time limit of each import, in seconds.
        try_all: import packages that take seconds to load, too.

    Returns:
        The results, in the order of the packages.
    """
    with ThreadPoolExecutor(NUM_IMPORTS) as pool:
        probe = partial(_probe, timeout_s=timeout_s, try_all=try_all)
        return list(pool.map(probe, extras))


def release_numbers(text: str) -> tuple[int, ...]:
    """Leading release numbers of a version: "2.13.0+cpu" -> (2, 13, 0). Empty if there are none."""
    release = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(map(int, release[0].split("."))) if release else ()


def _probe(extra: Extra, *, timeout_s: float, try_all: bool) -> Capability:
    """Probe one package: import it, or only compare its requirements.

    Args:
        extra: the package.
        timeout_s: time limit of the import, in seconds.
        try_all: import the package even if it takes seconds to load.
    """
    is_tried = extra.is_quick or try_all
    # mlflow also comes as a smaller distribution with the same module, which serves as well.
    distribution, found_version = installed(extra.package, f"{extra.package}-skinny")
    if not found_version:
        problem = f"not installed; pip install -e '{extra.install}'"
    elif release_numbers(found_version) < release_numbers(extra.least):
        problem = f"too old; {extra.least} or later is needed: pip install -U -e '{extra.install}'"
    elif is_tried:
        problem = _import_problem(extra.module, timeout_s)
    else:
        problem = _requirement_problem(extra.module, distribution)
    return Capability(
        package=extra.package,
        version=found_version,
        is_usable=not problem,
        reason=problem or ("imports" if is_tried else NOT_TRIED),
        purpose=extra.purpose,
    )


def _import_problem(module: str, timeout_s: float) -> str:
    """Import a module in a separate process. Return the problem, or "" if there is none.

    Args:
        module: name of the module.
        timeout_s: time limit of the import, in seconds. A longer import is a problem.
    """
    try:
        result = subprocess.run(
            [sys.executable, "-c", f"import {module}"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        return f"its import took more than {timeout_s:.0f} s"
    if result.returncode == 0:
        return ""
    # The last line of a traceback names the error.
    lines = result.stderr.strip().splitlines() or [f"exit status {result.returncode}"]
    return f"does not import: {lines[-1]}"


def installed(*packages: str) -> tuple[str, str]:
    """Find the first of some distributions that is installed, without importing it.

    Args:
        *packages: names of distributions that serve the same purpose.

    Returns:
        Name and version of the distribution. If none is installed, the first name and "".
    """
    for name in packages:
        try:
            return name, version(name)
        except PackageNotFoundError:
            continue
    return packages[0], ""


def _requirement_problem(module: str, distribution: str) -> str:
    """Look for a problem without an import: no module, or a requirement that is not met.

    Args:
        module: name that would be imported.
        distribution: name of the installed distribution.

    Returns:
        The problem, or "" if there is none.
    """
    if importlib.util.find_spec(module) is None:
        return f"{NOT_TRIED}: there is no module {module}"
    for line in requires(distribution) or ():
        requirement = Requirement(line)
        # Skip requirements of other systems, and of extras of the package.
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        name = requirement.name
        _, found_version = installed(name, f"{name}-skinny")
        if not found_version:
            return f"{NOT_TRIED}: it requires {name}, which is not installed"
        specifier = requirement.specifier
        if not specifier.contains(found_version, prereleases=True):
            return f"{NOT_TRIED}: it requires {name}{specifier}, and {found_version} is installed"
    return ""
