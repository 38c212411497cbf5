# SPDX-License-Identifier: Apache-2.0
"""Several things that are wrong, said in one error."""

from collections.abc import Sequence
from typing import Any

from quadriga.config.yaml_text import to_yaml
from quadriga.errors import ConfigError


def as_text(value: Any) -> str:
    """A value as the user would write it, on one line."""
    if isinstance(value, str):
        return f"'{value}'"
    text = " ".join(to_yaml([value]).strip()[1:-1].split())
    return text if len(text) <= 120 else f"{text[:117]}..."


def combined(problems: Sequence[ConfigError]) -> ConfigError:
    """One error that holds all of them; a single one stays as it is."""
    if len(problems) == 1:
        return problems[0]
    lines = "\n".join(f"  {number}. {problem}" for number, problem in enumerate(problems, start=1))
    # The error ends its first part with a full stop, and the last line has one already.
    return ConfigError(f"{len(problems)} things in the configuration are wrong:\n{lines}".removesuffix("."))
