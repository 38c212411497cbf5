# SPDX-License-Identifier: Apache-2.0
"""Base class of engines that are third-party libraries (vLLM, SGLang), which repack weights as they load them."""

import base64
import io
import math
import os
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

import torch
from transformers import PreTrainedModel

from quadriga.errors import (
    ConfigError,
    EngineLostError,
    QuadrigaError,
    RolloutError,
    WeightSyncError,
    first_line,
)
from quadriga.models.experts import mixtures
from quadriga.observe.probe import release_numbers
from quadriga.rollout.interface import (
    BatchImages,
    FinishReason,
    Images,
    Prompts,
    RolloutEngine,
    Sampling,
    SamplingParams,
)
from quadriga.rollout.manifest import Manifest
from quadriga.weight_sync.fingerprint import Fingerprint
from quadriga.weight_sync.publish import name_some

FINISH_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
"""Those of the servers' and libraries' responses that are known."""
_LOG = "Its own message stands in the log above."
SEED_BITS = 63
"""A seed of theirs is a signed number of 64 bits."""
LogProbsOf = Literal["processed_logprobs", "raw_logprobs"]
"""`processed_logprobs` are those of the distribution that tokens are drawn from, after temperature and filters;
`raw_logprobs` those of the model, before both. The words are vLLM's."""


_CHANGES = (
    threading.RLock()
)  # of the environment, which all threads share: engines are made again at the same time


@contextmanager
def process_environment(num_processes: int, **variables: str) -> Iterator[None]:
    """The environment for processes that this one starts meanwhile: so many share its threads, and have these
    variables."""
    with _CHANGES:
        own = os.environ.get("OMP_NUM_THREADS", "")
        threads = int(own) if own.isdecimal() else torch.get_num_threads()
        variables |= (
            {"OMP_NUM_THREADS": str(max(1, threads // num_processes))} if num_processes else {}
        )
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name, None)
                os.environ.update({} if value is None else {name: value})


def data_urls(images: Images, engine: str) -> list[str]:
    """The images of a prompt as `data:` URLs of PNG files; a RolloutError where it has videos."""
    if images.videos:
        fix = "Set actor_rollout_ref.rollout.name=native, hf or vllm, or leave out the rows with videos."
        raise RolloutError(
            f"{engine}.generate", got="a prompt with videos", expected="text and images", fix=fix
        )
    urls = []
    for picture in images.pictures:
        picture.save(file := io.BytesIO(), "PNG")
        urls.append(f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}")
    return urls


class ThirdPartyEngine(RolloutEngine):
    """An engine that starts without weights; a subclass implements `load_weights` within `_loading`.

    `manifest` lists the weights that make the model complete; prompt and response have at most `max_model_len` tokens
    together; `title` is the library's name in messages.
    """

    title: str
    reserves_memory = True

    def __init__(self, manifest: Manifest, max_model_len: int) -> None:
        super().__init__()
        self.weight_version = -1
        self._manifest, self._max_model_len = manifest, max_model_len

    @contextmanager
    def _loading(self, version: int) -> Iterator[list[Mapping[str, str]]]:
        """A load: afterwards the engine has the version, or -1 and an error that says what its library said. It yields
        an empty list, for the fingerprints of what each process of the engine received."""
        self._require_open("load_weights")
        self.weight_version = -1
        where = f"rollout.name={self.name}, weights of version {version}"
        received: list[Mapping[str, str]] = []
        try:
            yield received
        except Exception as error:  # failures of third-party engines have no class in common
            if isinstance(error, QuadrigaError) and not isinstance(error, RolloutError):
                raise
            reason = error.got if isinstance(error, RolloutError) else first_line(error)
            got, end = (
                f"{self.title} rejected the weights: {reason}",
                "wait for them, or call abort()",
            )
            fix = f"{_LOG} Responses that are under way have to end before weights are published: {end}."
            raise WeightSyncError(where, got=got, expected="a load", fix=fix) from error
        first, *others = map(Fingerprint, received)
        for rank, other in enumerate(others, start=1):
            if differing := first.differences(other):
                got = f"{len(differing)} weights that differ between process 0 and {rank}: {name_some(differing)}"
                raise WeightSyncError(where, got=got, expected="the same in each process")
        self._arrived, self.weight_version = first, version

    def _require_ready(
        self, prompts: Prompts, sampling: Sampling, images: BatchImages = None
    ) -> None:
        super()._require_ready(prompts, sampling, images)
        self._require_length(
            prompts, sampling, self._max_model_len, "actor_rollout_ref.rollout.max_model_len"
        )


def require_room(total: int, held: int, to_come: int, share: float) -> None:
    """Refuse an engine on an accelerator that training leaves no memory for.

    Args:
        total, held: bytes of the device, and those in use before the engine starts.
        to_come: bytes that training will take besides, and not give back while the engine generates.
        share: of `total`, for the engine: `gpu_memory_utilization`.
    """
    if held + to_come + share * total > total:
        gib, rest = 1 << 30, max(0.0, 1 - (held + to_come) / total)
        training = f"training keeps {(held + to_come) / gib:.1f}"
        training += (
            f" ({to_come / gib:.1f} of it AdamW's moments from the first step on)"
            if to_come
            else ""
        )
        got = f"{share:g}, which is {share * total / gib:.1f} GiB of {total / gib:.1f}, while {training}"
        fix = "Lower it, give the rollout a pool of its own (trainer.placement), or let more ranks share the weights"
        where = "actor_rollout_ref.rollout.gpu_memory_utilization"
        raise ConfigError(
            where, got=got, expected=f"at most {int(rest * 100) / 100:g}", fix=f"{fix} (fsdp_size)."
        )


def refused(name: str, title: str, what: str) -> RolloutError:
    """The error of an engine that cannot be made."""
    where, expected = (
        f"rollout.name={name}, at its start",
        f"a model and settings that {title} takes",
    )
    fix = (
        f"See max_model_len, cache_gigabytes and engine_kwargs.{name} of actor_rollout_ref.rollout"
    )
    return RolloutError(
        where, got=what, expected=expected, fix=f"{fix}; {title}'s own traceback stands above."
    )


def died(name: str, title: str, what: str) -> EngineLostError:
    """The error of requests that an engine will not serve any more."""
    keys = (
        "actor_rollout_ref.rollout.max_num_seqs, max_num_batched_tokens or gpu_memory_utilization"
    )
    got, fix = f"{title}, which {what}", f"{_LOG} Less memory: lower {keys}."
    return EngineLostError(f"{name}.generate", got=got, expected="responses", fix=fix)


def require_release(title: str, found: str, least: str, *, where: str, fix: str) -> None:
    """Raise a RolloutError unless the installed version of a library, "" where there is none, is new enough."""
    if not found:
        raise RolloutError(
            where, got=f"no {title} in this environment", expected=f"{least} or newer", fix=fix
        )
    if release_numbers(found) < release_numbers(least):
        raise RolloutError(where, got=f"{title} {found}", expected=f"{least} or newer", fix=fix)


def has_filters(sampling: SamplingParams) -> bool:
    """Whether some tokens cannot be drawn; the likeliest one always can."""
    return not sampling.is_greedy and (
        sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0
    )


def split_log_probs(
    reported: list[float], sampling: SamplingParams, log_probs_of: LogProbsOf
) -> tuple[list[float], list[float]]:
    """`Completion.log_probs` and `Completion.sampling_log_probs`, of an engine that reports one number for each token.

    Where it does not report the first one, that is NaN: unknown, rather than nearly right. The second is then empty.
    """
    is_scaled = not sampling.is_greedy and sampling.temperature != 1
    if log_probs_of == "processed_logprobs":
        return ([math.nan] * len(reported) if has_filters(sampling) else reported), list(reported)
    if is_scaled:
        return [math.nan] * len(reported), []
    return reported, [] if has_filters(sampling) else list(reported)


def require_known_experts(name: str, model: PreTrainedModel, known: Collection[str] = ()) -> None:
    """Refuse a mixture of experts whose new weights the library is not known to compute with: it takes them without an
    error. Raises RolloutError: says which ones, by `model_type`, are known."""
    kind = model.config.get_text_config().model_type
    if kind not in known and any(mixtures(model)):
        got, expected = (
            f"a mixture of experts ({type(model).__name__}, model_type {kind!r})",
            "a model without experts",
        )
        expected += f", or one of {', '.join(known)}" if known else ""
        fix = "Generate with native or hf: this library is not known to compute with experts that are published to it."
        raise RolloutError(f"rollout.name={name}", got=got, expected=expected, fix=fix)
