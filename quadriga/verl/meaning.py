# SPDX-License-Identifier: Apache-2.0
"""What values of verl's keys mean here, where a row of rules.tsv names a function."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quadriga.verl.translate import Line


def frequency(line: "Line", key: str, value: Any) -> None:
    """Steps between checkpoints or validations: verl takes whatever is not above zero for never."""
    line.set(key, value if isinstance(value, int) and value > 0 else -1)


def warmup_steps(line: "Line", key: str, value: Any) -> None:
    """Without a number of steps the share of the run decides."""
    line.set(key, -1 if value is None or value < 0 else value)


FUNCTIONS: dict[str, Callable[["Line", str, Any], None]] = {
    one.__name__: one for one in (frequency, warmup_steps)
}  # fmt: skip
"""Name in rules.tsv -> function."""


def processes(line: "Line") -> None:
    """Several processes run on Ray; the device is whatever this machine has."""
    line.written = "trainer.n_gpus_per_node"
    count = line.get("trainer.n_gpus_per_node", 1) * line.get("trainer.nnodes", 1)
    if count != 1:
        line.set("trainer.backend", "ray")


FINISH: dict[str, tuple[Callable[["Line"], None], ...]] = {"ppo": (processes,)}
"""Rows of rules.tsv -> functions of the whole line, called when every leaf was translated."""
