# SPDX-License-Identifier: Apache-2.0
"""verl's functions of the program that drives a step, over a `DataProto`: masks, rewards, advantages, metrics.

Shapes: B sequences, T response positions.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from quadriga.algorithms import kl
from quadriga.protocol import DataProto
from quadriga.single_controller.dispatch import collect_rows, split_rows
from quadriga.trainer.metrics import data_metrics, performance_metrics
from quadriga.user_file import import_file, taken
from quadriga_verl.shim.algorithms import get_adv_estimator_fn

dispatch_dp_compute_data_proto, collect_dp_compute_data_proto = (
    partial(split_rows, ""),
    partial(collect_rows, ""),
)


def compute_response_mask(data: DataProto) -> Tensor:
    """[B, T]: the part of `attention_mask` that stands over `responses`."""
    return data.batch["attention_mask"][:, -data.batch["responses"].shape[1] :]


def get_response_mask(
    response_id: Tensor, eos_token: int | Sequence[int] = 2, dtype: torch.dtype = torch.int64
) -> Tensor:
    """[B, T]: 1 up to and with the first token that ends a response, 0 behind it."""
    is_end = torch.isin(response_id, torch.as_tensor(eos_token, device=response_id.device)).long()
    return ((is_end.cumsum(-1) - is_end) == 0).to(dtype)


def pad_sequence_to_length(
    tensors: Tensor, max_seq_len: int, pad_token_id: int, left_pad: bool = False
) -> Tensor:
    """[..., L] -> [..., max_seq_len], filled behind or in front; what is longer stays as it is."""
    missing = max(max_seq_len - tensors.shape[-1], 0)
    return pad(tensors, (missing, 0) if left_pad else (0, missing), value=pad_token_id)


def clip_by_value(x: Tensor, tensor_min: Tensor, tensor_max: Tensor) -> Tensor:
    """x between two tensors of its shape."""
    return torch.maximum(torch.minimum(x, tensor_max), tensor_min)


def compute_reward(data: DataProto, reward_fn: Callable[..., Any]) -> tuple[Tensor, dict[str, Any]]:
    """The rewards [B, T] of a reward manager of verl's, and what else it returns of each response."""
    found = reward_fn(data, **taken(reward_fn, {"return_dict": True}))
    if isinstance(found, Mapping):
        return found["reward_tensor"], dict(found.get("reward_extra_info") or {})
    return found, {}


def apply_kl_penalty(
    data: DataProto, kl_ctrl: Any, kl_penalty: str = "kl"
) -> tuple[DataProto, dict[str, float]]:
    """The batch with `token_level_rewards` [B, T], scores less the KL penalty of each token; and metrics of it."""
    read = {name: data.batch[name] for name in kl.PENALTY_FIELDS}
    data.batch["token_level_rewards"], metrics = kl.apply_kl_penalty(
        **read, kl_ctrl=kl_ctrl, kind=kl_penalty
    )
    return data, metrics


def compute_advantage(
    data: DataProto, adv_estimator: Any, config: Any = None, **options: Any
) -> DataProto:
    """The batch with `advantages` and `returns` [B, T], by the estimator of that name; `options` are verl's arguments
    (gamma, lam, norm_adv_by_std_in_grpo ...)."""
    if "response_mask" not in data.batch.keys():
        data.batch["response_mask"] = compute_response_mask(data)
    estimator = get_adv_estimator_fn(adv_estimator)
    offered = {
        **dict(data.batch.items()),
        "index": data.non_tensor_batch.get("uid"),
        **options,
        "config": config,
    }
    data.batch["advantages"], data.batch["returns"] = estimator(**taken(estimator, offered))
    return data


def compute_data_metrics(batch: DataProto, use_critic: bool = True) -> dict[str, float]:
    """Rewards, advantages, returns and lengths of a batch; with `use_critic` its values too, where it has them."""
    of_values = () if use_critic else ("critic/values", "critic/vf")
    return {
        name: value for name, value in data_metrics(batch).items() if not name.startswith(of_values)
    }


def calculate_debug_metrics(data: DataProto) -> dict[str, float]:
    """How far the probabilities of the rollout are from those of training: largest, mean and spread of the difference
    over response tokens, and their correlation."""
    columns = data.batch
    mask = (
        columns["response_mask"]
        if "response_mask" in columns.keys()
        else compute_response_mask(data)
    ).bool()
    trained, rolled = (
        columns[name][mask].double().exp() for name in ("old_log_probs", "rollout_log_probs")
    )
    apart, both = (trained - rolled).abs(), torch.stack([trained, rolled])
    found = {"max": apart.max(), "mean": apart.mean(), "std": apart.std()} if len(apart) > 1 else {}
    named = {f"training/rollout_probs_diff_{name}": float(value) for name, value in found.items()}
    correlation = (
        {"training/rollout_actor_probs_pearson_corr": float(torch.corrcoef(both)[0, 1])}
        if found
        else {}
    )
    return {"training/rollout_probs_diff_valid": int(bool(found)), **named, **correlation}


def compute_timing_metrics(batch: DataProto, timing_raw: Mapping[str, float]) -> dict[str, float]:
    """`timing_s/PHASE` in seconds, and `timing_per_token_ms/PHASE` of those that work on tokens."""
    found = performance_metrics(batch, {"step": 1.0, **timing_raw}, {})
    names = [
        name for name in found if name.startswith("timing") and name.split("/")[1] in timing_raw
    ]
    return {name: found[name] for name in names}


def compute_throughout_metrics(
    batch: DataProto, timing_raw: Mapping[str, float], n_gpus: int
) -> dict[str, float]:
    """Tokens of the batch, seconds of the step, and tokens a second of each of so many devices."""
    found = performance_metrics(batch, timing_raw, {})
    names = ("perf/total_num_tokens", "perf/time_per_step", "perf/throughput")
    return {name: found[name] / (n_gpus if name == names[2] else 1) for name in names}


def append_to_dict(data: dict[str, list[Any]], new_data: Mapping[str, Any]) -> None:
    """Adds each value to the list of its name."""
    for name, value in new_data.items():
        data.setdefault(name, []).append(value)


def reduce_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """One number of each list: the largest or smallest where the name says max or min, else the mean."""
    reduced = {}
    for name, values in metrics.items():
        numbers = torch.as_tensor(values, dtype=torch.float64)
        kind = next((kind for kind in ("max", "min") if kind in name), "mean")
        reduced[name] = float(getattr(numbers, kind)())
    return reduced


def load_extern_type(file_path: str | None, type_name: str) -> Any:
    """What a user's Python file calls `type_name`; None without a file."""
    return getattr(import_file(file_path, "load_extern_type"), type_name) if file_path else None
