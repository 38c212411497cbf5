# SPDX-License-Identifier: Apache-2.0
"""The tables of this package, which are files of tab-separated values."""

from pathlib import Path


def read_rows(name: str) -> list[list[str]]:
    """Read a table.

    Args:
        name: name of its file. Lines that begin with # are comments.

    Returns:
        The cells of each row.
    """
    text = Path(__file__).with_name(name).read_text(encoding="utf-8")
    return [line.split("\t") for line in text.splitlines() if not line.startswith("#")]
