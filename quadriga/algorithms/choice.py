# SPDX-License-Identifier: Apache-2.0
"""An algorithm that a configuration chose: its function with the options bound, and what it reads.

Everything that can be wrong with the choice is found here, before anything is computed.

Shapes: B sequences, T response positions.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from quadriga.algorithms.registry import (
    ADVANTAGES,
    BATCH_COLUMNS,
    NEEDS_ADVANTAGE,
    POLICY_LOSSES,
    Registry,
    bind_options,
    options,
    required_fields,
)
from quadriga.algorithms.signature import check_options


@dataclass(frozen=True)
class Algorithm:
    """A function, and the fields of the batch that it and its columns name."""

    name: str
    function: Callable[..., Any]
    """Its options are bound; its fields are passed by name."""
    columns: Mapping[str, Callable[..., Tensor]]
    """Fields that are computed from the whole batch, by name; their options are bound too."""
    needs_advantage: bool
    """Whether a sequence without an advantage changes nothing."""

    @property
    def fields(self) -> tuple[str, ...]:
        """Fields that the function reads."""
        return required_fields(self.function)

    @property
    def column_fields(self) -> frozenset[str]:
        """Fields that its columns are computed from."""
        return frozenset(name for column in self.columns.values() for name in required_fields(column))

    def compute_columns(self, fields: Mapping[str, Any]) -> dict[str, Tensor]:
        """The columns of a whole batch, from fields [B, T] by name."""
        return {
            name: column(**{field: fields[field] for field in required_fields(column)})
            for name, column in self.columns.items()
        }


def choose_estimator(name: str, given: Mapping[str, Any], shared: Mapping[str, Any]) -> Algorithm:
    """The advantage estimator of a configuration.

    Args:
        name: of a registered one, or `path/to/file.py:function`.
        given: `algorithm.adv_options`, each of which it must have.
        shared: settings offered to every estimator (the section `algorithm`).

    Raises:
        ConfigError: an unknown name, an option that it does not have (with the nearest names), or one without a value.
    """
    return _choose(ADVANTAGES, name, given, shared, "algorithm.adv_options")


def choose_policy_loss(name: str, given: Mapping[str, Any], shared: Mapping[str, Any]) -> Algorithm:
    """The policy loss of a configuration; as `choose_estimator`, with `actor_rollout_ref.actor.policy_loss`."""
    return _choose(POLICY_LOSSES, name, given, shared, "actor_rollout_ref.actor.policy_loss")


def _choose(
    registry: Registry, name: str, given: Mapping[str, Any], shared: Mapping[str, Any], where: str
) -> Algorithm:
    function = registry.get(name)
    columns = {field: BATCH_COLUMNS.get(field) for field in required_fields(function) if field in BATCH_COLUMNS}
    parts = (function, *columns.values())
    known = tuple(dict.fromkeys(option for part in parts for option in options(part)))
    check_options(given, known, f"{where} ({name})")

    def bound(part: Callable[..., Any]) -> Callable[..., Any]:
        own = {option: value for option, value in given.items() if option in options(part)}
        return bind_options(part, own, shared=shared, where=f"{where} ({name})")

    return Algorithm(
        name,
        bound(function),
        {field: bound(column) for field, column in columns.items()},
        registry.has(name, NEEDS_ADVANTAGE),
    )
