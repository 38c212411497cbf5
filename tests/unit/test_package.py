# SPDX-License-Identifier: Apache-2.0
"""The package's front door: what users import, from where, at what price."""

import re
import subprocess
import sys
import tomllib
from importlib import import_module, metadata
from pathlib import Path

import pytest

import quadriga
from quadriga.observe.probe import EXTRAS

REPOSITORY = Path(__file__).resolve().parents[2]

# Where users import from: the promise that survives a refactor.
PUBLIC = {
    "quadriga": "DataProto __version__",
    "quadriga.config": "Config load_config",
    "quadriga.protocol": "DataProto DataProtoItem DataProtoFuture pad_dataproto_to_divisor unpad_dataproto "
    "fold_batch_dim unfold_batch_dim union_tensor_dict union_numpy_dict all_gather_data_proto",
    "quadriga.single_controller": "Worker WorkerGroup ResourcePool ClassWithInitArgs Dispatch Execute register "
    "register_dispatch_mode update_dispatch_mode make_nd_compute_dataproto_dispatch_fn",
    "quadriga.data": "RLHFDataset collate_fn create_rl_dataset create_rl_sampler",
    "quadriga.algorithms.core_algos": "AdaptiveKLController AdvantageEstimator FixedKLController agg_loss "
    "compute_gae_advantage_return "
    "compute_gpg_outcome_advantage compute_grpo_outcome_advantage compute_grpo_passk_outcome_advantage "
    "compute_opo_outcome_advantage compute_policy_loss "
    "compute_reinforce_plus_plus_baseline_outcome_advantage compute_reinforce_plus_plus_outcome_advantage "
    "compute_remax_outcome_advantage compute_rloo_outcome_advantage compute_value_loss "
    "get_adv_estimator_fn get_kl_controller get_policy_loss_fn kl_penalty register_adv_est "
    "register_policy_loss",
    "quadriga.rewards": "register get_reward_manager_cls default_compute_score",
    "quadriga.workers": "ActorRolloutRefWorker",
    "quadriga.trainer": "RayPPOTrainer TaskRunner run_ppo Role",
}


@pytest.mark.parametrize(("module", "names"), PUBLIC.items())
def test_public_names(module: str, names: str) -> None:
    """Every promised name is there, and what a module lists in `__all__` exists."""
    loaded = import_module(module)
    missing = [
        name
        for name in {*names.split(), *getattr(loaded, "__all__", ())}
        if not hasattr(loaded, name)
    ]
    assert not missing, f"{module} lacks {sorted(missing)}"


def test_front_door_is_the_same_object() -> None:
    """`quadriga.DataProto` is the class of `quadriga.protocol`, not another one."""
    assert quadriga.DataProto is import_module("quadriga.protocol").DataProto


def test_unknown_name() -> None:
    """A name that does not exist fails as it does in any module."""
    with pytest.raises(AttributeError, match="'quadriga' has no attribute 'Dataproto'"):
        _ = quadriga.Dataproto


def test_version_is_one() -> None:
    """The version stands once, in the package, and the installed distribution has the same."""
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+|rc\d+)?", quadriga.__version__)
    assert metadata.version("quadriga") == quadriga.__version__


def test_import_is_free() -> None:
    """`import quadriga` loads nothing that takes time; using `DataProto` loads torch."""
    program = (
        "import sys, quadriga; assert 'torch' not in sys.modules and 'numpy' not in sys.modules;"
        "quadriga.DataProto; assert 'torch' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_constraints_name_every_dependency() -> None:
    """Each dependency of the core has an exact tested version, not below the floor in pyproject.toml."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(
        re.fullmatch(r"([\w.-]+)==(\S+)", line).groups()
        for line in lines
        if line and line[0] != "#"
    )
    pins = {name.lower().replace("_", "-"): version for name, version in pins.items()}
    for dependency in project["dependencies"]:
        name, floor = dependency.split(">=")
        assert name in pins, f"constraints.txt has no version for {name}"
        assert _numbers(pins[name]) >= _numbers(floor), (
            f"{name} is tested with {pins[name]}, below its floor {floor}"
        )
    assert (5, 16) <= _numbers(pins["transformers"]) < (5, 20), (
        "vLLM's CPU build asks for transformers below 5.20"
    )


def test_doctor_and_installer_agree() -> None:
    """The least version of an extra that `quadriga doctor` accepts is the one that pip is asked for."""
    text = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    extras = tomllib.loads(text)["project"]["optional-dependencies"]
    floors = dict(
        wanted.split(",")[0].split(">=")
        for wants in extras.values()
        for wanted in wants
        if ">=" in wanted
    )
    for extra in EXTRAS:
        assert floors.get(extra.package) == extra.least, (
            f"{extra.package}: {extra.least} in observe/probe.py"
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))
