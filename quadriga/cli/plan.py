# SPDX-License-Identifier: Apache-2.0
"""`quadriga plan`: predict whether a run fits on some devices, and the time of a step."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from quadriga.cli.config import add_config_arguments, load_from
from quadriga.cli.loading import LazyModule
from quadriga.config import Config, show
from quadriga.config.placement import ACTOR, CRITIC
from quadriga.errors import ConfigError
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
from quadriga.planning.sizes import ModelSizes

if TYPE_CHECKING:
    from quadriga.models import load
    from quadriga.observe import machine
    from quadriga.planning import cpu
    from quadriga.rollout.native import products
    from quadriga.workers import layer_times
else:
    # They load torch, which a plan for accelerators does not need.
    load = LazyModule("quadriga.models.load", import_module)
    machine = LazyModule("quadriga.observe.machine", import_module)
    cpu = LazyModule("quadriga.planning.cpu", import_module)
    products = LazyModule("quadriga.rollout.native.products", import_module)
    layer_times = LazyModule("quadriga.workers.layer_times", import_module)

_RUN = "quadriga.trainer.task_runner"
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
    is_cpu = name == CPU
    devices = measure_this_machine(count, dtype) if is_cpu else Devices.parse(options.devices)
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
    sizes = {ACTOR: read_sizes(_config_file(model.path), model.override_config)}
    if config.algorithm.adv_estimator == "gae":
        path = config.critic.model.path
        decoder = read_sizes(_config_file(path), {}) if path else sizes[ACTOR]
        sizes[CRITIC] = decoder.with_value_head()
    if is_cpu:
        # Refuses models without formulas before their layers are measured.
        plan_roles(config, devices, lengths, sizes, itemsize)
        devices = with_layer_times(config, devices, lengths, sizes, dtype)
    plan = make_plan(config, devices, lengths, sizes, itemsize)
    plan = choose_recomputation(plan, lengths, sizes, itemsize)
    for line in describe_plan(plan, lengths, sizes, itemsize):
        print(line)
    if options.write:
        options.write.write_text(show(plan.config), encoding="utf-8")
        print(f"\nwritten: {options.write}")
    return 0 if plan.fits else 1


def measure_this_machine(count: int, dtype: str) -> Devices:
    """Measure this machine's CPU, as the device that ranks share.

    Args:
        count: number of ranks that share the cores.
        dtype: dtype that computes.

    Returns:
        The devices.
    """
    # Imports what a run imports, for the memory that is measured below.
    import_module(_RUN)
    packs_narrow = dtype == "bfloat16" and products.has_fast_bfloat16()
    return cpu.measured_cpu(count, dtype, machine.available_bytes(), packs_narrow=packs_narrow)


def with_layer_times(
    config: Config, devices: Devices, lengths: Lengths, sizes: dict[str, ModelSizes], dtype: str
) -> Devices:
    """Measure layers of the models on this machine, and the memory of a process without a model.

    Args:
        config: the configuration, with a rank for each device.
        devices: the measured machine.
        lengths: assumed mean lengths.
        sizes: models of the trained roles, by the keys of their sections.
        dtype: dtype that computes.

    Returns:
        The devices with the times, and with the memory of Python and its libraries.
    """
    times = {}
    for role, model_sizes in sizes.items():
        times[role] = layer_times.layer_times(
            config,
            role,
            model_sizes,
            lengths,
            dtype=dtype,
            flops=devices.flops,
            num_ranks=devices.count,
        )
    # Measured last, because kernels that have been compiled stay in memory in a run, too.
    process_bytes, _ = machine.resident_bytes()
    return replace(devices, process_bytes=process_bytes, layer_times=times)


def _mean_length(kind: str, mean: float | None, longest: int) -> float:
    """Check a mean length in tokens; half of the longest if none is given.

    Args:
        kind: "prompt" or "response".
        mean: value of the option.
        longest: largest length that the configuration allows.
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
