# SPDX-License-Identifier: Apache-2.0
"""A position in a data set means something in the same rows only."""

from collections.abc import Mapping
from typing import Any

from quadriga.errors import DataError


def require_same_rows(own: Mapping[str, Any], state: Mapping[str, Any], where: str) -> None:
    """Refuses to go on from a position in other rows than these.

    Args:
        own: which rows there are: `num_rows`, and `rows`, their hash.
        state: the same of the checkpoint.
        where: the key of the files.

    Raises:
        DataError: they are others.
    """
    if state != own:
        raise DataError(
            where,
            got=f"{own['num_rows']} rows that are not the {state['num_rows']} rows of the checkpoint",
            expected="the data that the run began with, read by the same settings",
            fix="Restore the files and data settings, or begin a new run from the checkpoint's weights.",
        )
