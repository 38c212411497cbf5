# SPDX-License-Identifier: Apache-2.0
"""What a finished batch says about the run: rewards, lengths, advantages, and how fast it went.

Shapes: B sequences, P prompt positions, T response positions.
"""

from collections.abc import Mapping

import torch

from quadriga.observe.machine import peak_resident_bytes, resident_bytes
from quadriga.protocol import DataProto


def data_metrics(batch: DataProto) -> dict[str, float]:
    """Rewards, advantages, returns, values and lengths of a batch that an update has seen."""
    mask = batch.batch["response_mask"].bool()
    width = mask.shape[1]
    attention = batch.batch["attention_mask"].bool()
    lengths, prompt_lengths = attention[:, -width:].sum(-1).float(), attention[:, :-width].sum(-1).float()
    metrics = spread("critic/score", batch.batch["token_level_scores"].sum(-1))
    metrics |= spread("critic/rewards", batch.batch["token_level_rewards"].sum(-1))
    for name in ("advantages", "returns", "values"):
        if name in batch.batch.keys() and bool(mask.any()):
            metrics |= spread(f"critic/{name}", batch.batch[name][mask])
    if "values" in batch.batch.keys():
        metrics["critic/vf_explained_var"] = explained_variance(batch, mask)
    if "num_turns" in batch.non_tensor_batch:
        metrics |= spread("num_turns", torch.tensor(batch.non_tensor_batch["num_turns"].tolist()))
    metrics |= spread("response_length", lengths)
    metrics["response_length/clip_ratio"] = float((lengths == width).float().mean())
    return metrics | spread("prompt_length", prompt_lengths)


def spread(name: str, values: torch.Tensor) -> dict[str, float]:
    """Mean, max and min of some numbers."""
    values = values.float()
    return {
        f"{name}/mean": float(values.mean()),
        f"{name}/max": float(values.max()),
        f"{name}/min": float(values.min()),
    }


def explained_variance(batch: DataProto, mask: torch.Tensor) -> float:
    """Share of the returns' variance that the values account for: 1 is all of it, 0 no better than a constant."""
    returns, values = batch.batch["returns"][mask], batch.batch["values"][mask]
    variance = returns.var(correction=0)
    return float(1 - (returns - values).var(correction=0) / variance) if variance > 0 else 0.0


def performance_metrics(
    batch: DataProto, seconds: Mapping[str, float], measured: Mapping[str, float]
) -> dict[str, float]:
    """Seconds of each phase, tokens a second, and memory.

    Args:
        batch: the batch of the step.
        seconds: of each phase; `step` is the whole of it.
        measured: what the step has measured: tokens that were generated, those of groups that were left out among
            them; not told where answers were not generated, but kept.
    """
    num_tokens = int(batch.batch["attention_mask"].sum())
    num_generated = measured.get("rollout/num_response_tokens", 0.0)
    metrics = {f"timing_s/{phase}": duration for phase, duration in seconds.items()}
    metrics["perf/total_num_tokens"] = float(num_tokens)
    metrics["perf/time_per_step"] = seconds["step"]
    metrics["perf/throughput"] = num_tokens / seconds["step"]
    if seconds.get("gen") and num_generated and not measured.get("rollout/replayed"):
        metrics["perf/generated_tokens_per_s"] = num_generated / seconds["gen"]
    metrics["perf/memory_resident_gib"] = resident_bytes() / 2**30
    metrics["perf/memory_peak_gib"] = peak_resident_bytes() / 2**30
    return metrics
