# SPDX-License-Identifier: Apache-2.0
"""verl's functions for a training step on a `DataProto`: masks, rewards, advantages, metrics.

Shapes: B sequences, T response positions.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import Parameter, signature
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from quadriga.algorithms import kl
from quadriga.errors import ProtocolError, did_you_mean
from quadriga.observe.metrics import Metric
from quadriga.observe.metrics import reduce_metrics as combine_metrics
from quadriga.protocol import DataProto
from quadriga.rewards import RewardManager
from quadriga.single_controller.dispatch import collect_rows, split_rows
from quadriga.trainer.metrics import data_metrics, performance_metrics
from quadriga.user_file import accepted_arguments, import_file
from quadriga_verl.shim.algorithms import VARIADIC, get_adv_estimator_fn
from quadriga_verl.shim.loop_view import RESPONSE_COLUMNS

# "" is the name of a worker group's default mesh.
dispatch_dp_compute_data_proto = partial(split_rows, "")
collect_dp_compute_data_proto = partial(collect_rows, "")
Metrics: TypeAlias = dict[str, float]


# ---- masks --------------------------------------------------------------------------------------


def compute_response_mask(data: DataProto) -> Tensor:
    """The columns of `attention_mask` that belong to `responses`: [B, T]."""
    num_positions = data.batch["responses"].shape[1]
    return data.batch["attention_mask"][:, -num_positions:]


def get_response_mask(
    response_id: Tensor, eos_token: int | Sequence[int] = 2, dtype: torch.dtype = torch.int64
) -> Tensor:
    """Mask of the tokens up to the first end token, which is included.

    Args:
        response_id: token ids of responses, [B, T].
        eos_token: id or ids that end a response.
        dtype: dtype of the mask.

    Returns:
        The mask, [B, T].
    """
    is_end = torch.isin(response_id, torch.as_tensor(eos_token, device=response_id.device)).long()
    num_ends_before = is_end.cumsum(-1) - is_end
    return (num_ends_before == 0).to(dtype)


def pad_sequence_to_length(
    tensors: Tensor, max_seq_len: int, pad_token_id: int, left_pad: bool = False
) -> Tensor:
    """Pad the last dimension to a length. Longer tensors are returned unchanged.

    Args:
        tensors: [..., L].
        max_seq_len: the length.
        pad_token_id: the value to pad with.
        left_pad: whether to pad at the start instead of the end.

    Returns:
        The padded tensor, [..., max(L, max_seq_len)].
    """
    num_missing = max(max_seq_len - tensors.shape[-1], 0)
    padding = (num_missing, 0) if left_pad else (0, num_missing)
    return pad(tensors, padding, value=pad_token_id)


def pad_2d_list_to_length(
    response: Sequence[Sequence[int]], pad_token_id: int, max_length: int | None = None
) -> Tensor:
    """Make a tensor from lists of token ids, padded at the end.

    Args:
        response: B lists.
        pad_token_id: the value to pad with.
        max_length: length to which rows are padded at least. None: that of the longest list.

    Returns:
        The tensor, [B, max(max_length, longest list)].
    """
    length = max([max_length or 0, *map(len, response)])
    return torch.tensor([[*ids, *[pad_token_id] * (length - len(ids))] for ids in response])


def clip_by_value(x: Tensor, tensor_min: Tensor, tensor_max: Tensor) -> Tensor:
    """Clip values between two tensors of the same shape."""
    return torch.maximum(torch.minimum(x, tensor_max), tensor_min)


# ---- rewards and advantages ---------------------------------------------------------------------


def compute_reward(data: DataProto, reward_fn: Callable[..., Any]) -> tuple[Tensor, dict[str, Any]]:
    """Grade a batch by a reward manager with verl's or Quadriga's interface.

    If the batch has greedy responses (`RESPONSE_COLUMNS` in its `meta_info`), their object columns are
    removed afterwards: ReMax joins the batch with sampled responses, which have columns of these names.

    Args:
        data: the batch.
        reward_fn: the reward manager.

    Returns:
        Rewards [B, T], and further columns by name.
    """
    extra = {}
    if isinstance(reward_fn, RewardManager):
        # Responses of agent loops may have been graded already, each as soon as it was complete.
        outcomes = data.non_tensor_batch.pop("reward_outcome", None)
        output = reward_fn.begin(data, outcomes).result()
        rewards = output.scores
        extra = output.extra
    else:
        rewards = reward_fn(data, **accepted_arguments(reward_fn, {"return_dict": True}))
        if isinstance(rewards, Mapping):
            extra = rewards.get("reward_extra_info") or {}
            rewards = rewards["reward_tensor"]
    for name in data.meta_info.pop(RESPONSE_COLUMNS, ()):
        data.non_tensor_batch.pop(name, None)
    return rewards, dict(extra)


def apply_kl_penalty(
    data: DataProto, kl_ctrl: Any, kl_penalty: str = "kl"
) -> tuple[DataProto, Metrics]:
    """Add `token_level_rewards` [B, T] to a batch: scores minus the KL penalty of each token.

    Args:
        data: the batch, with the columns of `kl.PENALTY_FIELDS`.
        kl_ctrl: controller of the coefficient.
        kl_penalty: kind of estimate, as for `kl.kl_penalty`.

    Returns:
        The batch, and metrics.
    """
    fields = {name: data.batch[name] for name in kl.PENALTY_FIELDS}
    rewards, metrics = kl.apply_kl_penalty(**fields, kl_ctrl=kl_ctrl, kind=kl_penalty)
    data.batch["token_level_rewards"] = rewards
    return data, metrics


def compute_advantage(
    data: DataProto, adv_estimator: Any, config: Any = None, **options: Any
) -> DataProto:
    """Add `advantages` and `returns` [B, T] to a batch.

    Args:
        data: the batch.
        adv_estimator: name of the estimator.
        config: the section `algorithm`, for options that are not in `options`.
        options: arguments of verl's estimators, such as `gamma` and `lam`.

    Returns:
        The batch.

    Raises:
        ProtocolError: the batch lacks a column that the estimator reads.
    """
    if "response_mask" not in data.batch.keys():
        data.batch["response_mask"] = compute_response_mask(data)
    estimator = get_adv_estimator_fn(adv_estimator)
    offered = dict(data.batch.items())
    offered["index"] = data.non_tensor_batch.get("uid")
    offered |= options
    offered["config"] = config
    for name, parameter in signature(estimator).parameters.items():
        is_optional = parameter.default is not Parameter.empty or parameter.kind in VARIADIC
        if not is_optional and offered.get(name) is None:
            raise ProtocolError(
                "compute_advantage",
                got=f"a batch without {'uid' if name == 'index' else name!r}",
                expected="the columns that the estimator reads",
                fix=did_you_mean(name, list(offered)),
            )
    advantages, returns = estimator(**accepted_arguments(estimator, offered))
    data.batch["advantages"] = advantages
    data.batch["returns"] = returns
    return data


# ---- metrics ------------------------------------------------------------------------------------


def compute_data_metrics(batch: DataProto, use_critic: bool = True) -> Metrics:
    """Metrics of rewards, advantages, returns and lengths, and of values if `use_critic`."""
    metrics = data_metrics(batch)
    if use_critic:
        return metrics
    value_names = ("critic/values", "critic/vf")
    return {name: value for name, value in metrics.items() if not name.startswith(value_names)}


def calculate_debug_metrics(data: DataProto) -> Metrics:
    """Compare the probabilities of response tokens in rollout and training.

    Returns:
        Maximum, mean and standard deviation of the absolute difference, and the correlation. With
        fewer than two tokens only `training/rollout_probs_diff_valid`, which is then 0.
    """
    columns = data.batch
    mask = columns.get("response_mask")
    if mask is None:
        mask = compute_response_mask(data)
    mask = mask.bool()
    trained = columns["old_log_probs"][mask].double().exp()
    sampled = columns["rollout_log_probs"][mask].double().exp()
    if len(trained) < 2:
        return {"training/rollout_probs_diff_valid": 0}
    difference = (trained - sampled).abs()
    correlation = torch.corrcoef(torch.stack([trained, sampled]))[0, 1]
    return {
        "training/rollout_probs_diff_valid": 1,
        "training/rollout_probs_diff_max": float(difference.max()),
        "training/rollout_probs_diff_mean": float(difference.mean()),
        "training/rollout_probs_diff_std": float(difference.std()),
        "training/rollout_actor_probs_pearson_corr": float(correlation),
    }


def compute_timing_metrics(batch: DataProto, timing_raw: Mapping[str, float]) -> Metrics:
    """Seconds of each phase, and milliseconds per token of the phases that work on tokens."""
    # `performance_metrics` needs the time of a step. If the caller has not given one, 1 stands in for
    # it, and is left out of the result below.
    metrics = performance_metrics(batch, {"step": 1.0, **timing_raw}, {})
    # Names are such as `timing_s/PHASE` and `timing_per_token_ms/PHASE`.
    names = [name for name in metrics if name.startswith("timing")]
    return {name: metrics[name] for name in names if name.split("/")[1] in timing_raw}


def compute_throughout_metrics(
    batch: DataProto, timing_raw: Mapping[str, float], n_gpus: int
) -> Metrics:
    """Tokens of a batch, seconds of its step, and tokens per second and device.

    Args:
        batch: the batch.
        timing_raw: seconds by phase; `step` is the whole step.
        n_gpus: number of devices.
    """
    metrics = performance_metrics(batch, timing_raw, {})
    return {
        "perf/total_num_tokens": metrics["perf/total_num_tokens"],
        "perf/time_per_step": metrics["perf/time_per_step"],
        "perf/throughput": metrics["perf/throughput"] / n_gpus,
    }


def append_to_dict(data: dict[str, list[Any]], new_data: Mapping[str, Any]) -> None:
    """Append each value of `new_data` to the list of the same name in `data`."""
    for name, value in new_data.items():
        data.setdefault(name, []).append(value)


def reduce_metrics(metrics: Mapping[str, Any]) -> Metrics:
    """Reduce lists of values to numbers.

    Values of the class `Metric` say themselves how they are combined. Numbers are reduced to their
    maximum or minimum if the name contains "max" or "min", else to their mean.
    """
    reduced = {}
    for name, values in metrics.items():
        first = values[0] if isinstance(values, list) and values else values
        if isinstance(first, Metric):
            reduced |= combine_metrics({name: values})
            continue
        numbers = torch.as_tensor(values, dtype=torch.float64)
        if "max" in name:
            number = numbers.max()
        elif "min" in name:
            number = numbers.min()
        else:
            number = numbers.mean()
        reduced[name] = float(number)
    return reduced


def load_extern_type(file_path: str | None, type_name: str) -> Any:
    """Load a class or function from a user's Python file. Return None if there is no file."""
    if not file_path:
        return None
    return getattr(import_file(file_path, "load_extern_type"), type_name)
