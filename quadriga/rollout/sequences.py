# SPDX-License-Identifier: Apache-2.0
"""From a `DataProto` of prompts to one of prompts with responses; written once, for every engine.

Legend: B sequences, P prompt positions (padded left), T response positions (padded right).
"""

import hashlib
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from quadriga.config.rollout import RolloutConfig
from quadriga.errors import RolloutError
from quadriga.models.experts import ROUTES
from quadriga.observe.metrics import Metric
from quadriga.protocol import DataProto
from quadriga.protocol.memory import images_key
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
) -> DataProto:
    """One response for each row.

    The prompt of a row is what stands in `input_ids` under its `attention_mask`, for that is what training sees.

    Args:
        prompts: batch `input_ids`, `attention_mask`, `position_ids` [B, P] or [B, 3, P]; non-tensors `uid`, and
            `sample_index` where the samples of one prompt are spread over several calls; `multi_modal_data`,
            `multi_modal_inputs` and `raw_prompt_ids` where prompts have images. meta_info: `global_steps`; `do_sample`
            (as the configuration says); `validate` (False: the settings of training); `weight_version` (that of the
            engine).
        response_length: T; also the longest response, in tokens.
        pad_token_id: fills the responses.
        seed: `trainer.seed`. A sequence's own seed comes from it, the step, the uid and the number of the sample.

    Returns:
        batch `prompts` [B, P], `responses`, `response_mask`, `rollout_log_probs` [B, T], `input_ids`,
        `attention_mask`, `position_ids` [B, P + T], `token_versions` [B, T], and where the engine reports routes
        `routed_experts` [B, P + T, L, k]. meta_info: `metrics`, `weight_version`.

    Raises:
        WeightSyncError: the engine's weights are not of the version that meta_info names.
        RolloutError: a prompt leaves no room for a response in `rollout.max_model_len`, or has images, which the
            engine does not take; or the engine's responses do not fit.
    """
    if (expected := prompts.meta_info.get("weight_version")) is not None:
        require_version(engine, expected)
    started = time.perf_counter()
    token_ids, requests = requests_of(prompts, config, response_length, seed)
    completions = engine.generate_batch(token_ids, requests, images_of(prompts))
    return completed(
        prompts, completions, engine.weight_version, response_length, pad_token_id, started
    )


def requests_of(
    prompts: DataProto, config: RolloutConfig, response_length: int, seed: int
) -> tuple[list[list[int]], list[SamplingParams]]:
    """The token ids of each prompt, and how its response is sampled; see `generate_sequences`."""
    padded = zip(prompts.batch["input_ids"], prompts.batch["attention_mask"], strict=True)
    token_ids = [ids[mask.bool()].tolist() for ids, mask in padded]
    limit, requests = config.max_model_len, []
    for row, (ids, own_seed) in enumerate(
        zip(token_ids, sequence_seeds(prompts, seed), strict=True)
    ):
        room = response_length if limit is None else min(limit - len(ids), response_length)
        if room < 1:
            where = f"generate_sequences, prompt {row}"
            expected = (
                f"fewer than actor_rollout_ref.rollout.max_model_len={limit}, to fit a response"
            )
            fix = "Lower data.max_prompt_length with data.filter_overlong_prompts=True, or raise max_model_len."
            raise RolloutError(where, got=f"{len(ids)} tokens", expected=expected, fix=fix)
        requests.append(
            SamplingParams(**sampling_of(prompts.meta_info, config, room), seed=own_seed)
        )
    return token_ids, requests


def completed(
    prompts: DataProto,
    completions: Sequence[Completion],
    weight_version: int,
    response_length: int,
    pad_token_id: int,
    started: float,
) -> DataProto:
    """What `generate_sequences` returns, of generation that began at `started`, a time of `time.perf_counter`."""
    before = prompts.batch
    if len(completions) != len(prompts):
        got = f"{len(completions)} responses"
        raise RolloutError("engine", got=got, expected=f"{len(prompts)}, one for each prompt")
    for row, completion in enumerate(completions):
        completion.require_fit(response_length, f"engine, response {row}")
    responses = [(one.token_ids, [1] * len(one.token_ids), one.log_probs) for one in completions]
    versions = [one.versions or [one.weight_version] * len(one.token_ids) for one in completions]
    routes = [one.routes for one in completions]
    batch = with_responses(before, responses, response_length, pad_token_id, routes, versions)
    num_tokens = sum(len(one.token_ids) for one in completions)
    total_log_prob = sum(sum(one.log_probs) for one in completions)
    reasons, num_rows = Counter(one.finish_reason for one in completions), len(completions)
    metrics = {
        "rollout/num_prompt_tokens": Metric(int(before["attention_mask"].sum()), "sum"),
        "rollout/num_response_tokens": Metric(num_tokens, "sum"),
        "rollout/log_prob": Metric(total_log_prob / max(num_tokens, 1), "mean", num_tokens),
        "rollout/length_share": Metric(reasons["length"] / max(num_rows, 1), "mean", num_rows),
        "rollout/num_aborted": Metric(reasons["abort"], "sum"),
        "timing_s/generate_sequences": Metric(time.perf_counter() - started, "max"),
    }
    meta_info = {"metrics": metrics, "weight_version": weight_version}
    return DataProto.from_dict(tensors=batch, meta_info=meta_info)


def with_responses(
    prompts: Mapping[str, torch.Tensor],
    responses: Sequence[tuple[Sequence[int], Sequence[int], Sequence[float]]],
    response_length: int,
    pad_token_id: int,
    routes: Sequence[np.ndarray | None] = (),
    versions: Sequence[Sequence[int]] = (),
) -> dict[str, torch.Tensor]:
    """The columns of `generate_sequences`, responses padded on the right.

    Args:
        prompts: `input_ids`, `attention_mask` [B, P], `position_ids` [B, P] or [B, 3, P].
        responses: of each row the token ids, which of them the model wrote, and their log-probabilities.
        response_length: T.
        pad_token_id: fills the responses.
        routes: [tokens, L, k] of each row's prompt and response, or of the first of these tokens.
        versions: of the weights that wrote each token of each response, or nothing.
    """
    ids, attention_mask, position_ids = (
        prompts[name] for name in ("input_ids", "attention_mask", "position_ids")
    )
    shape = (len(responses), response_length)
    tokens = torch.full(shape, pad_token_id, dtype=ids.dtype)
    attended = torch.zeros(shape, dtype=attention_mask.dtype)
    mask, log_probs = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape)
    for row, (own_tokens, own_mask, own_log_probs) in enumerate(responses):
        length = len(own_tokens)
        tokens[row, :length] = torch.tensor(own_tokens)
        attended[row, :length] = 1
        mask[row, :length] = torch.tensor(own_mask)
        log_probs[row, :length] = torch.tensor(own_log_probs)
    device = ids.device
    tokens, attended = tokens.to(device), attended.to(device)
    columns: dict[str, torch.Tensor] = {}
    if any(versions):
        columns["token_versions"] = torch.full(shape, -1)
        for row, own in enumerate(versions):
            columns["token_versions"][row, : len(own)] = torch.tensor(own)
        columns["token_versions"] = columns["token_versions"].to(device)
    attention = torch.cat((attention_mask, attended), -1)
    if (like := next((one for one in routes if one is not None), None)) is not None:
        valid = attention.bool().cpu()
        column = torch.full((*valid.shape, *like.shape[1:]), -1, dtype=torch.from_numpy(like).dtype)
        for row, own in enumerate(routes):
            if own is not None:
                column[row, valid[row].nonzero()[: len(own), 0]] = torch.from_numpy(own)
        columns[ROUTES] = column.to(device)
    following = position_ids[..., -1:] + torch.arange(1, response_length + 1, device=device)
    return columns | {
        "prompts": ids,
        "responses": tokens,
        "input_ids": torch.cat((ids, tokens), -1),
        "attention_mask": attention,
        "position_ids": torch.cat((position_ids, following.to(position_ids.dtype)), -1),
        "response_mask": mask.to(device),
        "rollout_log_probs": log_probs.to(device),
    }


def sampling_of(
    meta_info: dict[str, Any], config: RolloutConfig, max_tokens: int
) -> dict[str, Any]:
    """The sampling parameters of a call, without the seed: those of training, or of validation where it says so."""
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
    """A seed for each row, from the run's seed, the step, the uid, the number of the sample and what it is for.

    Samples are numbered as they come among rows of equal uid, unless `sample_index` numbers them. Rows without uid are
    told apart by their place.
    """
    non_tensors, meta_info = prompts.non_tensor_batch, prompts.meta_info
    uids = list(map(str, non_tensors.get("uid", [f"row {row}" for row in range(len(prompts))])))
    numbers = non_tensors.get("sample_index")
    seen: Counter[str] = Counter()
    seeds = []
    for row, uid in enumerate(uids):
        number = seen[uid] if numbers is None else int(numbers[row])
        seen[uid] += 1
        source = (
            int(seed),
            int(meta_info.get("global_steps", 0)),
            uid,
            number,
            bool(meta_info.get("validate", False)),
        )
        seeds.append(
            int.from_bytes(hashlib.blake2b(repr(source).encode(), digest_size=8).digest(), "big")
        )
    return seeds


def images_of(prompts: DataProto) -> list[Images | None]:
    """The images of each row; None for a row without any. Rows that share their columns share the object.
    `prompts`: batch `attention_mask` [B, P] and `position_ids` [B, 3, P]; non-tensors `multi_modal_data`,
        `multi_modal_inputs` and `raw_prompt_ids`, where a prompt has images."""
    columns = prompts.non_tensor_batch
    if "multi_modal_inputs" not in columns:
        return [None] * len(prompts)
    made: dict[tuple[int, tuple[int, ...]], Images] = {}
    found: list[Images | None] = []
    for row, inputs in enumerate(columns["multi_modal_inputs"]):
        if not inputs:
            found.append(None)
            continue
        short_prompt = tuple(columns["raw_prompt_ids"][row])
        if (id(inputs), short_prompt) not in made:
            mask = prompts.batch["attention_mask"][row].bool()
            data = columns["multi_modal_data"][row]
            videos = zip(data.get("video", ()), data.get("video_metadata", ()), strict=True)
            made[id(inputs), short_prompt] = Images(
                pictures=tuple(data.get("image", ())),
                videos=tuple(videos),
                inputs=inputs,
                position_ids=prompts.batch["position_ids"][row][:, mask],
                short_prompt=short_prompt,
                key=images_key(inputs),
            )
        found.append(made[id(inputs), short_prompt])
    return found
