# SPDX-License-Identifier: Apache-2.0
"""What this environment can do: which optional packages are there, whether they work, and if not, why.

"Installed" is not "usable": a package may be too old, or fail to load for want of another one. Those that load quickly
are imported, each in a process of its own, where a crash or a hang does no harm. Of the others, which take seconds, the
versions of what they require are compared, and the report says that they were not tried.
"""

import importlib.util
import re
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement

IMPORT_TIMEOUT_S = 60.0
# Imports at the same time; more would only make each other slow.
NUM_IMPORTS = 2
NOT_TRIED = "installed, not tried"


@dataclass(frozen=True, slots=True)
class Extra:
    """An optional package: distribution, module, least version, purpose, and whether it loads in less than a second."""

    package: str
    module: str
    least: str
    purpose: str
    install: str
    is_quick: bool = False


@dataclass(frozen=True, slots=True)
class Capability:
    """What the probe found about a package (no version: not installed); reason: "imports", `NOT_TRIED`, an error."""

    package: str
    version: str
    is_usable: bool
    reason: str
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
    """Look at each optional package, in the order given; `try_all` imports also those that take seconds to load."""
    with ThreadPoolExecutor(NUM_IMPORTS) as pool:
        return list(
            pool.map(lambda extra: _probe(extra, timeout_s, extra.is_quick or try_all), extras)
        )


def release_numbers(text: str) -> tuple[int, ...]:
    """The leading release numbers of a version: "2.13.0+cpu" -> (2, 13, 0)."""
    release = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(part) for part in release.group().split(".")) if release else ()


def _probe(extra: Extra, timeout_s: float, is_tried: bool) -> Capability:
    # mlflow also comes as a smaller distribution with the same module, which is all that tracking needs.
    distribution, found = installed(extra.package, f"{extra.package}-skinny")
    if not found:
        problem = f"not installed; pip install -e '{extra.install}'"
    elif release_numbers(found) < release_numbers(extra.least):
        problem = f"too old; {extra.least} or later is needed: pip install -U -e '{extra.install}'"
    elif not is_tried:
        problem = _unmet_problem(extra.module, distribution)
    else:
        command = [sys.executable, "-c", f"import {extra.module}"]
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                timeout=timeout_s,
            )
            last_line = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
            problem = f"does not import: {last_line}" if done.returncode else ""
        except subprocess.TimeoutExpired:
            problem = f"its import took more than {timeout_s:.0f} s"
    fine = "imports" if is_tried else NOT_TRIED
    return Capability(extra.package, found, not problem, problem or fine, extra.purpose)


def installed(*packages: str) -> tuple[str, str]:
    """Which of these distributions is installed, and its version; the first and "" if none is. Nothing is imported."""
    for name in packages:
        try:
            return name, version(name)
        except PackageNotFoundError:
            continue
    return packages[0], ""


def _unmet_problem(module: str, distribution: str) -> str:
    """What is known without an import: a missing module, or what the distribution requires here. Empty: no problem."""
    if importlib.util.find_spec(module) is None:
        return f"{NOT_TRIED}: there is no module {module}"
    for line in requires(distribution) or ():
        wanted = Requirement(line)
        if wanted.marker is not None and not wanted.marker.evaluate():
            continue
        _, found = installed(wanted.name, f"{wanted.name}-skinny")
        if not found:
            return f"{NOT_TRIED}: it requires {wanted.name}, which is not installed"
        if not wanted.specifier.contains(found, prereleases=True):
            return f"{NOT_TRIED}: it requires {wanted.name}{wanted.specifier}, and {found} is installed"
    return ""
