# SPDX-License-Identifier: Apache-2.0
"""`quadriga plan`: predict whether a run fits on some devices, and the time of a step."""

import argparse
import math
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from quadriga.cli.config import add_config_arguments, load_from
from quadriga.cli.loading import LazyModule
from quadriga.config import show
from quadriga.config.placement import ACTOR, CRITIC
from quadriga.errors import ConfigError
from quadriga.observe.watchdog import waiting
from quadriga.planning.devices import CPU, Devices, count_and_name
from quadriga.planning.phases import Lengths
from quadriga.planning.plan import (
    choose_recomputation,
    describe_plan,
    make_plan,
    on_devices,
    plan_roles,
    read_sizes,
)

if TYPE_CHECKING:
    from quadriga.models import load
    from quadriga.observe import machine
    from quadriga.rollout.native import products
    from quadriga.workers import layer_times
else:
    # They load torch, which a plan for accelerators does not need.
    load = LazyModule("quadriga.models.load", import_module)
    machine = LazyModule("quadriga.observe.machine", import_module)
    products = LazyModule("quadriga.rollout.native.products", import_module)
    layer_times = LazyModule("quadriga.workers.layer_times", import_module)

_RUN = "quadriga.trainer.task_runner"
"""Module that a run imports, whose memory `measure_cpu` counts."""
_ABOUT = """Predict the memory of each phase on each rank and the time of a step, the largest token
budget that fits, what limits, and the layouts that fit by speed. Of the models only config.json is
read. The status is 1 if the plan does not fit."""


def main(argv: Sequence[str]) -> int:
    """Run `quadriga plan`; return its exit status."""
    parser = argparse.ArgumentParser(prog="quadriga plan", description=_ABOUT)
    add_config_arguments(parser)
    parser.add_argument(
        "--devices", required=True, metavar="NxNAME", help="such as 8xH100-80GB, or cpu"
    )
    parser.add_argument(
        "--mean-response", type=float, metavar="N", help="tokens; default: half of the longest"
    )
    parser.add_argument(
        "--mean-prompt", type=float, metavar="N", help="tokens; default: half of the longest"
    )
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="write the configuration with the plan's ranks"
    )
    options = parser.parse_intermixed_args(list(argv))
    config = load_from(options)
    model = config.actor_rollout_ref.model
    if not model.path:
        raise ConfigError(
            "actor_rollout_ref.model.path",
            got="no model",
            expected="a folder or hub name",
            fix="Name the model whose memory and time are predicted.",
        )
    dtype = config.actor_rollout_ref.actor.fsdp_config.model_dtype
    if dtype == "auto":
        dtype = "float32" if options.devices.endswith(CPU) else "bfloat16"
    count, name = count_and_name(options.devices)
    devices = unmeasured_cpu(count, dtype) if name == CPU else Devices.parse(options.devices)
    itemsize = 4 if dtype == "float32" else 2
    data = config.data
    lengths = Lengths(
        prompt=_mean_length("prompt", options.mean_prompt, data.max_prompt_length),
        response=_mean_length("response", options.mean_response, data.max_response_length),
    )
    num_ranks = config.trainer.nnodes * config.trainer.n_gpus_per_node
    if num_ranks not in (1, devices.count):
        print(f"The configuration has {num_ranks} ranks; the plan has one for each device.")
    config = on_devices(config, devices)
    # Sizes of the models by trained role. A reference has those of the actor.
    sizes = {ACTOR: read_sizes(_config_file(model.path), model.override_config)}
    if config.algorithm.adv_estimator == "gae":
        path = config.critic.model.path
        decoder = read_sizes(_config_file(path), {}) if path else sizes[ACTOR]
        sizes[CRITIC] = decoder.with_value_head()
    if devices.is_cpu:
        # `plan_roles` raises an error for models without formulas. Call it before layers are measured,
        # which takes long.
        roles = plan_roles(config, devices, lengths, sizes, itemsize)
        print("Measuring this CPU: half a minute, or minutes for long batches ...", flush=True)
        with waiting("the measurement of this CPU"):
            devices = layer_times.measure_cpu(
                config, devices, roles, lengths, dtype=dtype, imported=_RUN
            )
    plan = make_plan(config, devices, lengths, sizes, itemsize)
    plan = choose_recomputation(plan)
    for line in describe_plan(plan, lengths):
        print(line)
    if options.write:
        options.write.write_text(show(plan.config), encoding="utf-8")
        print(f"\nwritten: {options.write}")
    return 0 if plan.fits else 1


def unmeasured_cpu(count: int, dtype: str) -> Devices:
    """This machine's CPU, as devices whose speed has not been measured.

    Speeds are 0, which `layer_times.measure_cpu` replaces. The link is not used on a CPU.

    Args:
        count: number of ranks that share the cores and the memory.
        dtype: dtype of computations.
    """
    # The rollout packs the layers' weights in bfloat16 if the CPU computes fast in it, else in float32.
    packs_bfloat16 = dtype == "bfloat16" and products.has_fast_bfloat16()
    memory_bytes = machine.available_bytes() / count
    return Devices(
        name=CPU,
        count=count,
        memory_bytes=memory_bytes,
        flops=0.0,
        bytes_per_s=0.0,
        link_bytes_per_s=math.inf,
        source="not measured",
        packed_itemsize=2 if packs_bfloat16 else 4,
    )


def _mean_length(kind: str, mean: float | None, longest: int) -> float:
    """Return a mean length in tokens: that of the option, or else half of the longest.

    Args:
        kind: "prompt" or "response".
        mean: value of the option `--mean-KIND`. None: it is not given.
        longest: largest length that the configuration allows.

    Raises:
        ConfigError: the mean is not above 0, or above the largest length.
    """
    if mean is None:
        return longest / 2
    if not 0 < mean <= longest:
        raise ConfigError(
            f"--mean-{kind}",
            got=f"{mean:g}",
            expected=f"above 0, and at most data.max_{kind}_length={longest}",
        )
    return mean


def _config_file(path: str) -> Path:
    """Find the config.json of a model, in its folder or on the hub."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder / "config.json"
    return load.config_file(path)
