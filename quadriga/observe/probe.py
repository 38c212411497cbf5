# SPDX-License-Identifier: Apache-2.0
"""What this environment can do: which optional packages are there, whether they work, and if not, why.

"Installed" is not "usable": a package may be too old, or fail to load for want of a system library. So each one is
imported, in a process of its own, where a crash or a hang of it hurts nobody.
"""

import re
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

IMPORT_TIMEOUT_S = 60.0
# Imports at the same time; more would only make each other slow.
NUM_IMPORTS = 2


@dataclass(frozen=True, slots=True)
class Extra:
    """An optional package: its distribution, the module it is imported as, the least version, what it is for."""

    package: str
    module: str
    least: str
    purpose: str
    install: str


@dataclass(frozen=True, slots=True)
class Capability:
    """What the probe found out about one package. `version` is empty when it is not installed."""

    package: str
    version: str
    is_usable: bool
    reason: str
    purpose: str


EXTRAS = (
    Extra("gguf", "gguf", "0.10", "reads a model from a GGUF file", "quadriga[gguf]"),
    Extra("accelerate", "accelerate", "1.0", "reads a model from a GGUF file", "quadriga[gguf]"),
    Extra("matplotlib", "matplotlib", "3.8", "draws the learning curve", "quadriga[plot]"),
    Extra("math-verify", "math_verify", "0.8", "grades mathematics", "quadriga[math]"),
    Extra("reasoning-gym", "reasoning_gym", "0.1.20", "verifiable tasks and their graders", "quadriga[reasoning-gym]"),
    Extra("tensorboard", "tensorboard", "2.16", "tracks runs in event files", "quadriga[tensorboard]"),
    Extra("wandb", "wandb", "0.18", "tracks runs at Weights & Biases", "quadriga[wandb]"),
    Extra("mlflow", "mlflow", "2.16", "tracks runs with MLflow", "quadriga[mlflow]"),
    Extra("swanlab", "swanlab", "0.6", "tracks runs with SwanLab", "quadriga[swanlab]"),
)


def probe_capabilities(extras: Sequence[Extra] = EXTRAS, timeout_s: float = IMPORT_TIMEOUT_S) -> list[Capability]:
    """Look at each optional package, in the order given."""
    with ThreadPoolExecutor(NUM_IMPORTS) as pool:
        return list(pool.map(lambda extra: _probe(extra, timeout_s), extras))


def _probe(extra: Extra, timeout_s: float) -> Capability:
    found = _installed_version(extra.package)
    if not found:
        reason = f"not installed; pip install '{extra.install}'"
    elif _numbers(found) < _numbers(extra.least):
        reason = f"too old; {extra.least} or later is needed: pip install -U '{extra.install}'"
    else:
        reason = _import_problem(extra.module, timeout_s)
    return Capability(extra.package, found, not reason, reason or "imports", extra.purpose)


def _installed_version(package: str) -> str:
    # mlflow also comes as a smaller distribution with the same module, which is all that tracking needs.
    for name in (package, f"{package}-skinny"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return ""


def _import_problem(module: str, timeout_s: float) -> str:
    """Why the module does not import, in one line; empty if it does."""
    command = [sys.executable, "-c", f"import {module}"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return f"its import took more than {timeout_s:.0f} s"
    if done.returncode == 0:
        return ""
    last_line = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    return f"does not import: {last_line}"


def _numbers(text: str) -> tuple[int, ...]:
    """The leading release numbers of a version: "2.13.0+cpu" -> (2, 13, 0)."""
    release = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(part) for part in release.group().split(".")) if release else ()
