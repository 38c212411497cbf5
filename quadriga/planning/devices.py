# SPDX-License-Identifier: Apache-2.0
"""Devices of a plan: accelerators by name, from accelerators.tsv.

The table has figures of the makers' data sheets: dense bfloat16 products, bandwidth of the memory,
and bandwidth between neighbours in one direction. Its memory is what CUDA reports.
"""

import csv
import re
from dataclasses import dataclass
from pathlib import Path

from quadriga.errors import ConfigError, did_you_mean

CPU = "cpu"
_TABLE = Path(__file__).with_name("accelerators.tsv")
_SPECIFICATION = re.compile(r"(?:(?P<count>[1-9]\d*)x)?(?P<name>[^x].*)", re.IGNORECASE)


@dataclass(frozen=True)
class Devices:
    """Equal devices, one for each rank.

    Attributes:
        name: name in the table, or `cpu`.
        count: number of devices.
        memory_bytes: memory of one.
        flops: operations per second of large products in the dtype that computes.
        bytes_per_s: bandwidth of its memory.
        link_bytes_per_s: bandwidth between two of them, in one direction.
        source: where the figures come from.
        process_bytes: memory of Python and its libraries in a rank's process, if it is that of the
            device.
        packed_itemsize: see `quadriga.planning.phases.RolePlan`.
    """

    name: str
    count: int
    memory_bytes: float
    flops: float
    bytes_per_s: float
    link_bytes_per_s: float
    source: str
    process_bytes: float = 0.0
    packed_itemsize: int = 0

    @property
    def is_cpu(self) -> bool:
        """Whether the ranks share the cores of this machine."""
        return self.name == CPU

    @classmethod
    def parse(cls, text: str) -> "Devices":
        """Accelerators that a command line names, such as `8xH100-80GB`.

        Args:
            text: number and name.

        Raises:
            ConfigError: the table does not have the name.
        """
        count, name = count_and_name(text)
        with _TABLE.open(encoding="utf-8") as file:
            rows = {row["name"].lower(): row for row in csv.DictReader(file, delimiter="\t")}
        row = rows.get(name.lower())
        if row is None:
            names = [known["name"] for known in rows.values()]
            raise ConfigError(
                "--devices",
                got=f"{text!r}",
                expected=f"a number, x and one of {', '.join(names)}; or cpu",
                fix=did_you_mean(name, names) or f"Its row can be added to {_TABLE}.",
            )
        return cls(
            name=row["name"],
            count=count,
            memory_bytes=float(row["memory_gib"]) * (1 << 30),
            flops=float(row["bfloat16_tflops"]) * 1e12,
            bytes_per_s=float(row["memory_gb_s"]) * 1e9,
            link_bytes_per_s=float(row["link_gb_s"]) * 1e9,
            source="data sheet",
        )


def count_and_name(text: str) -> tuple[int, str]:
    """Number and name of devices such as `8xH100-80GB`; one without a number."""
    match = _SPECIFICATION.fullmatch(text.strip())
    if match is None:
        return 1, text
    return int(match["count"] or 1), match["name"]
