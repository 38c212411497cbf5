# SPDX-License-Identifier: Apache-2.0
"""Base class of engines on third-party libraries (vLLM, SGLang), which repack loaded weights."""

import base64
import io
import math
import os
import threading
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import contextmanager
from typing import Literal, TypeVar

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
"""Our finish reason, by the libraries' name. Other names are unknown."""
_LOG = "Its own message is in the log above."  # advice in errors about a library
Result = TypeVar("Result")
SEED_BITS = 63
"""Bits of a seed: the libraries take signed numbers of 64 bits."""
LogProbsOf = Literal["processed_logprobs", "raw_logprobs"]
"""The distribution of reported log-probabilities, by vLLM's names. `processed_logprobs`: after
temperature and filters, from which tokens are drawn. `raw_logprobs`: the model's, before both."""

# Guards the environment, which all threads share: engines may be restarted at the same time.
_ENVIRONMENT_LOCK = threading.RLock()


@contextmanager
def process_environment(num_processes: int, **variables: str) -> Iterator[None]:
    """Context manager: set the environment of processes that are started inside.

    On exit, the environment of this process is as before.

    Args:
        num_processes: number of processes that share this process's threads: each gets its part as
            `OMP_NUM_THREADS`. 0: the variable stays as it is.
        variables: other variables to set.
    """
    with _ENVIRONMENT_LOCK:
        if num_processes:
            # OpenMP also allows a number for each nested level, as in "4,2". torch has read it.
            setting = os.environ.get("OMP_NUM_THREADS", "")
            num_threads = int(setting) if setting.isdecimal() else torch.get_num_threads()
            variables["OMP_NUM_THREADS"] = str(max(1, num_threads // num_processes))
        # Processes inherit the environment when they start, so it is changed only inside.
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def image_data_urls(images: Images, engine: str) -> list[str]:
    """Images of a prompt as `data:` URLs of PNG files.

    Args:
        images: images of the prompt.
        engine: name of the engine, for errors.

    Raises:
        RolloutError: the prompt has videos.
    """
    if images.videos:
        raise RolloutError(
            f"{engine}.generate",
            got="a prompt with videos",
            expected="text and images",
            fix="Set actor_rollout_ref.rollout.name=native, hf or vllm,"
            " or leave out the rows with videos.",
        )
    urls = []
    for picture in images.pictures:
        file = io.BytesIO()
        picture.save(file, "PNG")
        encoded = base64.b64encode(file.getvalue()).decode()
        urls.append(f"data:image/png;base64,{encoded}")
    return urls


class ThirdPartyEngine(RolloutEngine):
    """An engine that starts without weights, so that its `weight_version` is -1 until a load.

    Subclasses implement `load_weights`, and load inside the context manager `_loading`.

    Args:
        manifest: the weights that make the model complete.
        max_model_len: tokens of the longest prompt and response together.

    Attributes:
        title: the library's name in messages.
    """

    title: str

    def __init__(self, manifest: Manifest, max_model_len: int) -> None:
        super().__init__()
        self.weight_version = -1
        self._manifest = manifest
        self._max_model_len = max_model_len

    @contextmanager
    def _loading(self, version: int) -> Iterator[list[dict[str, str]]]:
        """Context manager in which a subclass loads weights. After an error the version is -1.

        Args:
            version: version of the weights.

        Yields:
            An empty list. The block adds a dictionary for each process of the engine, with the
            fingerprints of the weights that the process received, by name.

        Raises:
            WeightSyncError: the library refused the weights, or its processes received different
                ones.
        """
        self._require_open("load_weights")
        self.weight_version = -1
        where = f"rollout.name={self.name}, weights of version {version}"
        received: list[dict[str, str]] = []
        try:
            yield received
        except Exception as error:  # failures of third-party engines have no class in common
            if isinstance(error, QuadrigaError) and not isinstance(error, RolloutError):
                raise
            # Our RolloutErrors about the library have its message in `got`.
            reason = error.got if isinstance(error, RolloutError) else first_line(error)
            raise WeightSyncError(
                where,
                got=f"{self.title} rejected the weights: {reason}",
                expected="weights that it loads",
                fix=f"{_LOG} Unfinished responses have to end before weights are published:"
                " wait for them, or call abort().",
            ) from error
        # All processes of an engine must have received the same weights.
        fingerprints = [Fingerprint(tensors) for tensors in received]
        for rank, fingerprint in enumerate(fingerprints[1:], start=1):
            names = fingerprints[0].differences(fingerprint)
            if names:
                got = f"{len(names)} weights that differ between process 0 and {rank}"
                got += f": {name_some(names)}"
                raise WeightSyncError(where, got, expected="the same in each process")
        self._arrived = fingerprints[0]
        self.weight_version = version

    def _require_ready(
        self, prompts: Prompts, sampling: Sampling, images: BatchImages = None
    ) -> None:
        """Check the engine and the arguments of a batch, including `max_model_len`.

        Args:
            prompts: token ids of each prompt.
            sampling: how each response is sampled.
            images: images of each prompt; None if no prompt has any.

        Raises:
            RolloutError: the engine is not ready, or cannot serve a request.
        """
        super()._require_ready(prompts, sampling, images)
        source = "actor_rollout_ref.rollout.max_model_len"
        self._require_length(prompts, sampling, self._max_model_len, source)


def require_device_memory(
    total_bytes: int, used_bytes: int, other_bytes: int, later_bytes: int, share: float
) -> None:
    """Refuse an engine on an accelerator if too little memory is left for it.

    Args:
        total_bytes: bytes of the device.
        used_bytes: bytes that this process's tensors hold before the engine starts.
        other_bytes: bytes that anything else holds: other programs, CUDA contexts and NCCL.
        later_bytes: bytes that training will take later, and then keep while the engine generates:
            AdamW's moments.
        share: share of `total_bytes` for the engine: `gpu_memory_utilization`.

    Raises:
        ConfigError: too little is left. The error says what holds the memory, and which share is
            possible.
    """
    gib = 1 << 30
    training_bytes = used_bytes + later_bytes
    taken_bytes = training_bytes + other_bytes
    if taken_bytes + share * total_bytes <= total_bytes:
        return
    training_text = f"training keeps {training_bytes / gib:.1f}"
    if later_bytes:
        training_text += f" ({later_bytes / gib:.1f} of it AdamW's moments from the first step on)"
    # Rounded down, so that the share in the error is possible.
    possible_share = int(max(0.0, 1 - taken_bytes / total_bytes) * 100) / 100
    raise ConfigError(
        "actor_rollout_ref.rollout.gpu_memory_utilization",
        got=f"{share:g}, which is {share * total_bytes / gib:.1f} GiB of {total_bytes / gib:.1f}, while"
        f" {training_text}, and other programs, CUDA and NCCL hold {other_bytes / gib:.1f}",
        expected=f"at most {possible_share:g}",
        fix="Lower it, end other programs on the GPU (`nvidia-smi` lists them), give the rollout a"
        " pool of its own (trainer.placement), or let more ranks share the weights (fsdp_size).",
    )


def start_error(name: str, title: str, problem: str) -> RolloutError:
    """Make the error of an engine that cannot be started.

    Args:
        name: name of the engine.
        title: name of its library.
        problem: the library's error.
    """
    return RolloutError(
        f"rollout.name={name}, at its start",
        got=problem,
        expected=f"a model and settings that {title} takes",
        fix=f"Check max_model_len, cache_gigabytes and engine_kwargs.{name} of"
        f" actor_rollout_ref.rollout; {title}'s own traceback is above.",
    )


def engine_lost_error(name: str, title: str, event: str) -> EngineLostError:
    """Make the error of requests that an engine cannot serve any more, because it has ended.

    Args:
        name: name of the engine.
        title: name of its library.
        event: what happened to the library, to follow "which".
    """
    return EngineLostError(
        f"{name}.generate",
        got=f"{title}, which {event}",
        expected="responses",
        fix=f"{_LOG} If it lacked memory, lower actor_rollout_ref.rollout.max_num_seqs,"
        " max_num_batched_tokens or gpu_memory_utilization.",
    )


def require_release(title: str, version: str, least: str, *, where: str, fix: str) -> None:
    """Refuse a library that is missing or too old.

    Args:
        title: name of the library.
        version: the installed version; "" if it is not installed.
        least: the oldest version that works.
        where: the setting that needs it, for errors.
        fix: advice in the error.

    Raises:
        RolloutError: the library is missing or too old.
    """
    if not version:
        got = f"no {title} in this environment"
        raise RolloutError(where, got, expected=f"{least} or newer", fix=fix)
    if release_numbers(version) < release_numbers(least):
        raise RolloutError(where, got=f"{title} {version}", expected=f"{least} or newer", fix=fix)


def results_of(futures: Sequence[Future[Result]]) -> list[Result]:
    """Wait for the results of all requests. The first error cancels the others, and is raised.

    Args:
        futures: the result of each request.

    Returns:
        The results, in order.
    """
    try:
        # The wait ends with the first error, of whichever request, or when all are done.
        for future in wait(futures, return_when=FIRST_EXCEPTION).done:
            future.result()
        return [future.result() for future in futures]
    finally:
        for future in futures:
            future.cancel()


def has_filters(sampling: SamplingParams) -> bool:
    """Whether top-k, top-p or min-p exclude tokens. Greedy sampling counts as without filters."""
    if sampling.is_greedy:
        return False
    return sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0


def split_log_probs(
    reported: list[float], sampling: SamplingParams, log_probs_of: LogProbsOf
) -> tuple[list[float], list[float]]:
    """Derive log-probabilities before and after filters from the one kind that an engine reports.

    Args:
        reported: the reported log-probability of each token.
        sampling: how the response was sampled.
        log_probs_of: distribution of the reported log-probabilities.

    Returns:
        `Completion.log_probs`, all NaN if they cannot be derived; and
        `Completion.sampling_log_probs`, empty if they cannot be derived.
    """
    is_filtered = has_filters(sampling)
    unknown = [math.nan] * len(reported)
    if log_probs_of == "processed_logprobs":
        # Temperature and filters have been applied. Without filters both kinds are the same.
        log_probs = unknown if is_filtered else reported
        return log_probs, list(reported)
    # Raw log-probabilities are at temperature 1, but training divides logits by the temperature.
    if not sampling.is_greedy and sampling.temperature != 1:
        return unknown, []
    sampling_log_probs = [] if is_filtered else list(reported)
    return reported, sampling_log_probs


def require_known_experts(name: str, model: PreTrainedModel, known: Collection[str] = ()) -> None:
    """Refuse a mixture of experts if the library may ignore new weights of the experts.

    Some libraries load such weights without an error, but go on to compute with the old ones.

    Args:
        name: name of the engine.
        model: the model; it may be on "meta".
        known: model types whose experts the library is known to update.

    Raises:
        RolloutError: the model has experts, and is of another type.
    """
    model_type = model.config.get_text_config().model_type
    if model_type in known or not any(mixtures(model)):
        return
    expected = "a model without experts"
    if known:
        expected += f", or one of {', '.join(known)}"
    raise RolloutError(
        f"rollout.name={name}",
        got=f"a mixture of experts ({type(model).__name__}, model_type {model_type!r})",
        expected=expected,
        fix="Generate with native or hf: this library is not known to compute with experts"
        " that are published to it.",
    )
