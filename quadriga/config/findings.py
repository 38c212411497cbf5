# SPDX-License-Identifier: Apache-2.0
"""What checks find: things that are wrong, and things to know."""

from dataclasses import dataclass, field

from quadriga.errors import ConfigError


@dataclass
class Findings:
    """Collects, so that a user hears everything at once."""

    problems: list[ConfigError] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)

    def refuse(self, key: str, *, got: str, expected: str, fix: str) -> None:
        """The run cannot start."""
        self.problems.append(ConfigError(key, got=got, expected=expected, fix=fix))

    def notice(self, text: str) -> None:
        """The run can start; its user may have meant something else."""
        self.notices.append(text)
