# SPDX-License-Identifier: Apache-2.0
"""`ray_kwargs`: the cluster that `trainer.backend=ray` runs on."""

from difflib import get_close_matches
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from quadriga.config.base import PathText, Section, refuse

# Arguments of ray.init that say where a cluster is or what it has. Those about printing are the command line's own.
RAY_INIT_KEYS = frozenset(
    {
        "address",
        "num_cpus",
        "num_gpus",
        "resources",
        "labels",
        "object_store_memory",
        "object_spilling_directory",
        "include_dashboard",
        "dashboard_host",
        "dashboard_port",
        "namespace",
        "runtime_env",
        "_memory",
        "_metrics_export_port",
        "_node_ip_address",
        "_node_name",
        "_plasma_directory",
        "_redis_password",
        "_redis_username",
        "_system_config",
        "_temp_dir",
    }
)


def _known_arguments(value: dict[str, Any]) -> dict[str, Any]:
    unknown = [name for name in value if name not in RAY_INIT_KEYS]
    if unknown:
        close = get_close_matches(unknown[0], RAY_INIT_KEYS, n=1, cutoff=0.6)
        fix = f"Did you mean {close[0]}?" if close else ""
        raise refuse(f"keys out of {', '.join(sorted(RAY_INIT_KEYS))}", fix)
    return value


class RayConfig(Section):
    """Read with `trainer.backend=ray`."""

    ray_init: Annotated[dict[str, Any], AfterValidator(_known_arguments)] = Field(default_factory=dict)
    """Arguments of `ray.init`, such as `address` (a cluster that is up) or `num_cpus` (of one that is started for the
    run). Without an address: that of the variable RAY_ADDRESS, else a cluster on this machine for the run alone."""
    timeline_json_file: PathText | None = None
    """File for a timeline of Ray's tasks, to be opened in a trace viewer. null: none."""

    @property
    def arguments(self) -> dict[str, Any]:
        """What `ray_init` sets; a key that is null is as good as left out."""
        return {name: value for name, value in self.ray_init.items() if value is not None}
