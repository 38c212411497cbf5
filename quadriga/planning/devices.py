# SPDX-License-Identifier: Apache-2.0
"""Devices of a plan: accelerators by name, from accelerators.tsv.

The table has figures from the makers' data sheets: dense bfloat16 products, bandwidth of the
memory, and bandwidth between neighbours in one direction. The size of the memory is the one that
CUDA reports, which is less than in the data sheet.
"""

import csv
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from quadriga.errors import ConfigError, did_you_mean

CPU = "cpu"
_TABLE = Path(__file__).with_name("accelerators.tsv")
# Such as `8xH100-80GB`; the number and the x may be left out.
_SPECIFICATION = re.compile(r"(?:(?P<count>[1-9]\d*)x)?(?P<name>[^x].*)", re.IGNORECASE)


@dataclass(frozen=True)
class PassTimes:
    """Measured seconds of a part of a model, on one rank.

    A pass over N tokens takes the seconds of a call, and N times those of a token.

    Attributes:
        forward_call_s: pass without gradients over a micro-batch: the part that does not depend on
            the number of tokens.
        forward_token_s: the same pass: the part for each token.
        update_call_s: forward and backward pass over a micro-batch: the part that does not depend
            on the number of tokens.
        update_token_s: the same passes: the part for each token.
        optimizer_s: optimizer step.
        publish_s: weight sync.
        generation_start_s: a generation's copies of the weights, prefill of the prompts, and first
            token of each sequence.
        decode_step_s: decode step of all sequences.
    """

    forward_call_s: float = 0.0
    forward_token_s: float = 0.0
    update_call_s: float = 0.0
    update_token_s: float = 0.0
    optimizer_s: float = 0.0
    publish_s: float = 0.0
    generation_start_s: float = 0.0
    decode_step_s: float = 0.0


@dataclass(frozen=True)
class LayerTimes:
    """Measured seconds of a model, and the memory that an update takes beyond its tensors.

    Attributes:
        layer: seconds of each layer.
        ends: seconds of everything else: embedding, head, sampling, and the calls for each pass.
        num_context_tokens: tokens of each sequence in the measured decode steps.
        num_passes: cost of the measured forward and backward pass, in forward passes
            (`update_passes`).
        kept_share: freed tensors that the C library keeps in an update, relative to the tensors that
            exist at once.
        kept_layers: number of layers of the model with which `kept_share` was measured.
    """

    layer: PassTimes
    ends: PassTimes
    num_context_tokens: float = 0.0
    num_passes: int = 3
    kept_share: float = 0.0
    kept_layers: int = 1

    def seconds(self, name: str, num_layers: int) -> float:
        """Seconds of a model with this number of layers.

        Args:
            name: the attribute of `PassTimes` to add up.
            num_layers: number of layers.
        """
        return float(num_layers * getattr(self.layer, name) + getattr(self.ends, name))

    def resident_factor(self, num_layers: int) -> float:
        """Growth of the process's memory in an update, relative to the tensors that exist at once.

        A layer's tensors reuse part of the memory that earlier layers have freed, so the memory that
        the C library keeps grows more slowly than the number of layers. In runs of 4 to 12 layers it
        grew with the power 0.3 to 1 of that number, on average 2/3.
        """
        kept_growth = (num_layers / self.kept_layers) ** (2 / 3)
        # The result is relative to the tensors that exist at once, which grow with the number itself.
        return 1.0 + self.kept_share * kept_growth * self.kept_layers / num_layers


@dataclass(frozen=True)
class Devices:
    """Equal devices, one for each rank. All figures are those of a single device.

    Attributes:
        name: name in the table, or `cpu`.
        count: number of devices.
        memory_bytes: size of the memory.
        flops: operations per second of large products in the dtype that computes.
        bytes_per_s: bandwidth of the memory.
        link_bytes_per_s: bandwidth between two devices, in one direction; not used on a CPU.
        source: where the figures come from, for messages.
        new_bytes_per_s: bandwidth to memory that the system has to map and zero first.
        process_bytes: part of the device's memory that Python and its libraries take in a rank's
            process; 0 for an accelerator.
        packed_itemsize: see `quadriga.planning.phases.RolePlan`; 0 for an accelerator.
        layer_times: measured times of the trained roles' models, by the keys of their sections.
    """

    name: str
    count: int
    memory_bytes: float
    flops: float
    bytes_per_s: float
    link_bytes_per_s: float
    source: str
    new_bytes_per_s: float = math.inf
    process_bytes: float = 0.0
    packed_itemsize: int = 0
    layer_times: Mapping[str, LayerTimes] = field(default_factory=dict)

    @property
    def is_cpu(self) -> bool:
        """Whether the devices are shares of this machine's CPU."""
        return self.name == CPU

    @classmethod
    def parse(cls, text: str) -> "Devices":
        """Look up the accelerators that a command line names.

        Args:
            text: number and name, such as `8xH100-80GB`.

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
                fix=did_you_mean(name, names) or f"Or add a row with its figures to {_TABLE}.",
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
    """Split `8xH100-80GB` into number and name.

    The number is 1 if the text has none. A text in another form is returned whole as the name, with
    the number 1.
    """
    match = _SPECIFICATION.fullmatch(text.strip())
    if match is None:
        return 1, text
    return int(match["count"] or 1), match["name"]
