# SPDX-License-Identifier: Apache-2.0
"""From a `DataProto` of prompts to one of prompts with responses; the same for every engine.

Legend: B sequences, P prompt positions (padded left), T response positions (padded right).
"""

import hashlib
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quadriga.config.rollout import RolloutConfig
from quadriga.errors import RolloutError
from quadriga.models.experts import ROUTES
from quadriga.observe.metrics import Metric
from quadriga.protocol import DataProto
from quadriga.protocol.memory import images_key
from quadriga.protocol.times import TIMES
from quadriga.rollout.interface import Completion, Images, RolloutEngine, SamplingParams
from quadriga.weight_sync.publish import require_version


def generate_sequences(
    engine: RolloutEngine,
    prompts: DataProto,
    *,
    config: RolloutConfig,
    response_length: int,
    pad_token_id: int,
    seed: int,
    count_ended: Callable[[int], None] | None = None,
) -> DataProto:
    """Generate a response for each row.

    The prompt of a row are the `input_ids` that its `attention_mask` selects, as in training.

    Args:
        engine: generates the responses.
        prompts: batch `input_ids`, `attention_mask` [B, P], `position_ids` [B, P] or [B, 3, P];
            non-tensors `uid`, and `sample_index` if the samples of a prompt are spread over several
            calls; `multi_modal_data`, `multi_modal_inputs` and `raw_prompt_ids` if prompts have
            images. meta_info: `global_steps`; `do_sample` (default: as the configuration says);
            `validate` (default: False, the settings of training); `weight_version`, which the
            engine must have (default: any).
        config: the section `actor_rollout_ref.rollout`.
        response_length: T; also the longest response, in tokens.
        pad_token_id: fills the responses.
        seed: `trainer.seed`. A sequence's own seed depends on it; see `sequence_seeds`.
        count_ended: called with the number of responses that have ended since the last call, by
            engines that report progress.

    Returns:
        batch `prompts` [B, P]; `responses`, `response_mask`, `rollout_log_probs`, `token_versions`
        [B, T]; `input_ids`, `attention_mask` [B, P + T], `position_ids` [B, P + T] or
        [B, 3, P + T]; `rollout_times` [B, 3], see `Completion.times`; and if the engine reports
        routes, `routed_experts` [B, P + T, L, k]. meta_info: `metrics`, `weight_version`.

    Raises:
        WeightSyncError: the engine's weights are not of the version in meta_info.
        RolloutError: a prompt leaves no room for a response in `rollout.max_model_len`, or has
            images and the engine takes none; or the engine's responses do not fit the requests.
    """
    expected_version = prompts.meta_info.get("weight_version")
    if expected_version is not None:
        require_version(engine, expected_version)
    started = time.perf_counter()
    token_ids, requests = requests_of(prompts, config, response_length, seed)
    engine.count_ended = count_ended
    try:
        completions = engine.generate_batch(token_ids, requests, images_of(prompts))
    finally:
        engine.count_ended = None
    return batch_of_completions(
        prompts, completions, engine.weight_version, response_length, pad_token_id, started
    )


def requests_of(
    prompts: DataProto, config: RolloutConfig, response_length: int, seed: int
) -> tuple[list[list[int]], list[SamplingParams]]:
    """Make the requests for a batch of prompts.

    Args:
        prompts: the batch of prompts; `generate_sequences` lists its columns.
        config: the section `actor_rollout_ref.rollout`.
        response_length: the longest response, in tokens.
        seed: `trainer.seed`.

    Returns:
        The token ids of each prompt without padding, and how each response is sampled.

    Raises:
        RolloutError: a prompt leaves no room for a response in `rollout.max_model_len`.
    """
    padded_rows = zip(prompts.batch["input_ids"], prompts.batch["attention_mask"], strict=True)
    token_ids = [ids[mask.bool()].tolist() for ids, mask in padded_rows]
    limit = config.max_model_len
    requests = []
    for row, row_seed in enumerate(sequence_seeds(prompts, seed)):
        ids = token_ids[row]
        # A long prompt leaves less room for its response.
        max_tokens = response_length
        if limit is not None:
            max_tokens = min(limit - len(ids), response_length)
        if max_tokens < 1:
            raise RolloutError(
                f"generate_sequences, prompt {row}",
                got=f"{len(ids)} tokens",
                expected=f"fewer than actor_rollout_ref.rollout.max_model_len={limit},"
                " to fit a response",
                fix="Lower data.max_prompt_length with data.filter_overlong_prompts=True,"
                " or raise max_model_len.",
            )
        settings = sampling_of(prompts.meta_info, config, max_tokens)
        requests.append(SamplingParams(**settings, seed=row_seed))
    return token_ids, requests


def batch_of_completions(
    prompts: DataProto,
    completions: Sequence[Completion],
    weight_version: int,
    response_length: int,
    pad_token_id: int,
    started: float,
) -> DataProto:
    """Make the batch that `generate_sequences` returns: prompts, responses and metrics.

    Args:
        prompts: the batch of prompts; `generate_sequences` lists its columns.
        completions: the response of each row.
        weight_version: version of the engine's weights.
        response_length: T.
        pad_token_id: fills the responses.
        started: when generation began, as `time.perf_counter()`, in seconds.

    Raises:
        RolloutError: there is not a response for each row, or a response has too many tokens, none,
            or tokens without a log-probability.
    """
    num_rows = len(completions)
    if num_rows != len(prompts):
        got = f"{num_rows} responses"
        raise RolloutError("engine", got, expected=f"{len(prompts)}, one for each prompt")
    responses = []
    num_tokens = 0
    total_log_prob = 0.0
    for row, completion in enumerate(completions):
        completion.require_fit(response_length, f"engine, response {row}")
        length = len(completion.token_ids)
        # The model wrote all tokens of a response, so its mask is 1 everywhere.
        responses.append((completion.token_ids, [1] * length, completion.log_probs))
        num_tokens += length
        total_log_prob += sum(completion.log_probs)
    batch = append_responses(
        prompts.batch,
        responses,
        response_length,
        pad_token_id,
        routes=[completion.routes for completion in completions],
        versions=[completion.token_versions for completion in completions],
    )

    times = [completion.times or (math.nan,) * 3 for completion in completions]
    # With `view`, an empty batch also has three columns.
    batch[TIMES] = torch.tensor(times, dtype=torch.float64).view(num_rows, 3)
    num_prompt_tokens = int(prompts.batch["attention_mask"].sum())
    reasons = Counter(completion.finish_reason for completion in completions)
    metrics = {
        "rollout/num_prompt_tokens": Metric(num_prompt_tokens, "sum"),
        "rollout/num_response_tokens": Metric(num_tokens, "sum"),
        "rollout/log_prob": Metric(total_log_prob / max(num_tokens, 1), "mean", num_tokens),
        "rollout/length_share": Metric(reasons["length"] / max(num_rows, 1), "mean", num_rows),
        "rollout/num_aborted": Metric(reasons["abort"], "sum"),
        "timing_s/generate_sequences": Metric(time.perf_counter() - started, "max"),
    }
    meta_info = {"metrics": metrics, "weight_version": weight_version}
    return DataProto.from_dict(tensors=batch, meta_info=meta_info)


def append_responses(
    prompts: Mapping[str, Tensor],
    responses: Sequence[tuple[Sequence[int], Sequence[int], Sequence[float]]],
    response_length: int,
    pad_token_id: int,
    routes: Sequence[np.ndarray | None] = (),
    versions: Sequence[Sequence[int]] = (),
) -> dict[str, Tensor]:
    """Append responses to prompts, padded on the right.

    Args:
        prompts: `input_ids`, `attention_mask` [B, P], `position_ids` [B, P] or [B, 3, P].
        responses: for each row the token ids, the mask (1 for tokens that the model wrote, 0 for
            others), and the log-probabilities.
        response_length: T.
        pad_token_id: fills the responses.
        routes: [tokens, L, k] of each row: experts of the prompt's and the response's tokens, which
            may be unknown for the last tokens. None: unknown for the row. Empty: unknown for all.
        versions: version of the weights that drew each token of each response. Empty: unknown, so
            that the result has no column `token_versions`.

    Returns:
        The columns that `generate_sequences` lists, except for `rollout_times`.
    """
    prompt_ids = prompts["input_ids"]
    prompt_mask = prompts["attention_mask"]
    device = prompt_ids.device

    def pad(rows: Iterable[Sequence[float]], fill: float) -> Tensor:
        """Pad rows on the right, [B, T]. The CPU fills them row by row; then all move at once."""
        padded = torch.full((len(responses), response_length), fill)
        for row, values in enumerate(rows):
            padded[row, : len(values)] = torch.tensor(values)
        return padded.to(device)

    response_ids = pad((ids for ids, _, _ in responses), pad_token_id).to(prompt_ids.dtype)
    is_token = pad(([1] * len(ids) for ids, _, _ in responses), 0).to(prompt_mask.dtype)
    attention_mask = torch.cat((prompt_mask, is_token), -1)

    columns = {}
    if any(versions):
        # -1 on the padding, which no weights wrote.
        columns["token_versions"] = pad(versions, -1)
    if any(row_routes is not None for row_routes in routes):
        columns[ROUTES] = _scatter_routes(routes, attention_mask)

    # Responses continue the prompt's positions on all axes: the last positions, [B, 1] or
    # [B, 3, 1], plus 1 to T.
    prompt_positions = prompts["position_ids"]
    steps = torch.arange(1, response_length + 1, device=device)
    positions = (prompt_positions[..., -1:] + steps).to(prompt_positions.dtype)
    return columns | {
        "prompts": prompt_ids,
        "responses": response_ids,
        "input_ids": torch.cat((prompt_ids, response_ids), -1),
        "attention_mask": attention_mask,
        "position_ids": torch.cat((prompt_positions, positions), -1),
        "response_mask": pad((mask for _, mask, _ in responses), 0),
        "rollout_log_probs": pad((log_probs for _, _, log_probs in responses), 0.0),
    }


def _scatter_routes(routes: Sequence[np.ndarray | None], attention_mask: Tensor) -> Tensor:
    """Scatter the routes of each row to the columns of its tokens.

    Args:
        routes: [tokens, L, k] of each row, for its first tokens. None: unknown for the row. At
            least one row has routes.
        attention_mask: [B, P + T], 1 on tokens.

    Returns:
        [B, P + T, L, k]; -1 where there are no routes.
    """
    is_token = attention_mask.bool().cpu()
    example = next(row_routes for row_routes in routes if row_routes is not None)
    dtype = torch.from_numpy(example).dtype
    padded = torch.full((*is_token.shape, *example.shape[1:]), -1, dtype=dtype)
    for row, row_routes in enumerate(routes):
        if row_routes is not None:
            columns = is_token[row].nonzero()[: len(row_routes), 0]
            padded[row, columns] = torch.from_numpy(row_routes)
    return padded.to(attention_mask.device)


def sampling_of(
    meta_info: dict[str, Any], config: RolloutConfig, max_tokens: int
) -> dict[str, Any]:
    """Arguments of `SamplingParams` for a batch, except for the seed.

    Args:
        meta_info: meta_info of the prompts. With `validate` the settings are those of validation,
            else those of training; `do_sample` replaces the setting of this name.
        config: the section `actor_rollout_ref.rollout`.
        max_tokens: length of the longest response, in tokens.
    """
    settings = config.val_kwargs if meta_info.get("validate", False) else config
    return {
        "max_tokens": max_tokens,
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "top_k": settings.top_k,
        "min_p": settings.min_p,
        "do_sample": bool(meta_info.get("do_sample", settings.do_sample)),
        "stop_token_ids": tuple(config.stop_token_ids),
        "stop": tuple(config.stop),
        "ignore_eos": config.ignore_eos,
    }


def sequence_seeds(prompts: DataProto, seed: int) -> list[int]:
    """Derive a seed for each row from the run's seed, the step, the uid and the sample's number.

    The samples of a prompt are the rows with the same uid. They are numbered in the order of the
    rows, unless the column `sample_index` has their numbers. Without a column `uid`, each row is a
    prompt of its own. Validation has other seeds than training.

    Args:
        prompts: the batch of prompts; `generate_sequences` lists its columns.
        seed: `trainer.seed`.
    """
    columns = prompts.non_tensor_batch
    meta_info = prompts.meta_info
    uids = columns.get("uid", [f"row {row}" for row in range(len(prompts))])
    sample_indices = columns.get("sample_index")
    step = int(meta_info.get("global_steps", 0))
    is_validation = bool(meta_info.get("validate", False))
    num_samples = Counter[str]()  # by uid, in the rows so far
    seeds = []
    for row, uid in enumerate(map(str, uids)):
        sample = num_samples[uid] if sample_indices is None else int(sample_indices[row])
        num_samples[uid] += 1
        seeds.append(derive_seed(int(seed), step, uid, sample, is_validation))
    return seeds


def derive_seed(*parts: Any, num_bytes: int = 8) -> int:
    """Hash parts to a seed, so that similar parts have unrelated seeds.

    Args:
        parts: values whose `repr` is the same in every process.
        num_bytes: size of the seed in bytes: it is below `256**num_bytes`.
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=num_bytes).digest()
    return int.from_bytes(digest, "big")


def images_of(prompts: DataProto) -> list[Images | None]:
    """Images of each row; None for a row without any.

    Rows whose columns share one object of inputs, as samples of a prompt do, share one `Images`.

    Args:
        prompts: batch `attention_mask` [B, P] and `position_ids` [B, 3, P]; non-tensors
            `multi_modal_data`, `multi_modal_inputs` and `raw_prompt_ids`, if prompts have images.
    """
    columns = prompts.non_tensor_batch
    if "multi_modal_inputs" not in columns:
        return [None] * len(prompts)
    images = []
    cache: dict[tuple[int, tuple[int, ...]], Images] = {}
    for row, inputs in enumerate(columns["multi_modal_inputs"]):
        if not inputs:
            images.append(None)
            continue
        short_prompt = tuple(columns["raw_prompt_ids"][row])
        # Objects of inputs are compared by identity, because hashing pixels takes time.
        key = (id(inputs), short_prompt)
        if key not in cache:
            mask = prompts.batch["attention_mask"][row].bool()
            data = columns["multi_modal_data"][row]
            videos = zip(data.get("video", ()), data.get("video_metadata", ()), strict=True)
            cache[key] = Images(
                pictures=tuple(data.get("image", ())),
                videos=tuple(videos),
                inputs=inputs,
                position_ids=prompts.batch["position_ids"][row][:, mask],
                short_prompt=short_prompt,
                key=images_key(inputs),
            )
        images.append(cache[key])
    return images
