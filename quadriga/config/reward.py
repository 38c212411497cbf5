# SPDX-License-Identifier: Apache-2.0
"""`reward_model` and `custom_reward_function`: how responses are graded."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import PositiveFloat

from quadriga.config.actor import FSDPConfig, ParallelConfig
from quadriga.config.base import Findings, ReadIf, Section, notice_unused
from quadriga.config.types import Count, Name, PathText, Share
from quadriga.errors import ConfigError, MachineError

_PASSES = (
    "micro_batch_size_per_gpu",
    "use_dynamic_bsz",
    "forward_max_token_len_per_gpu",
    "max_length",
)


BUFFER_DEFAULTS = {"enable": False, "len": 0, "penalty_factor": 1.0, "log": False}
"""Option `overlong_buffer_cfg` of the reward manager `dapo`."""


class RewardClassifierConfig(Section):
    """The reward model: a sequence classifier with one label, the score."""

    path: PathText | None = None
    """Folder or hub name of the classifier, with its tokenizer. It is needed where `reward_model.enable`."""
    input_tokenizer: PathText | None = "auto"
    """Folder or hub name of the policy's tokenizer: chats are rendered again, by the reward model's own template. null:
    the policy's tokens are used as they are. auto: rendered again where vocabulary or template differ."""
    trust_remote_code: bool = False
    """Whether code that comes with the reward model may be run."""
    fsdp_config: FSDPConfig = FSDPConfig()


class RewardModelConfig(ParallelConfig):
    """Rewards: a reward model where one is enabled, and a reward manager with its graders."""

    enable: bool = False
    """Whether a reward model grades. A `custom_reward_function` is added to it; built-in graders are then not used."""
    model: RewardClassifierConfig = RewardClassifierConfig()
    micro_batch_size_per_gpu: Annotated[Count | None, ReadIf("use_dynamic_bsz", (False,))] = None
    """Sequences in one pass of the reward model. null: as many as `forward_max_token_len_per_gpu` allows."""
    use_dynamic_bsz: bool = False
    """Whether its passes are cut by tokens even when a number of sequences is given."""
    forward_max_token_len_per_gpu: Count = 32768
    """Tokens in one pass of the reward model, where passes are cut by tokens."""
    max_length: Count | None = None
    """Longest input, in tokens; longer ones lose the beginning of their prompt. null: as model and tokenizer allow."""
    reward_manager: Name = "naive"
    """Name of a registered reward manager."""
    num_workers: Count = 2
    """Processes that grade."""
    timeout_s: PositiveFloat = 10.0
    """Seconds that grading one response may take; then it is stopped and counted as an error."""
    max_error_rate: Share = 0.05
    """Share of a batch whose grading raised or ran out of time above which the run stops, in [0, 1]."""
    reward_kwargs: dict[str, Any] = {}
    """Open dictionary: options of the reward manager."""

    @property
    def fsdp_config(self) -> FSDPConfig:
        """FSDP2 of the reward model. Other roles have this key in their own section."""
        return self.model.fsdp_config

    def findings(self, at: str) -> Findings:
        if not self.enable:
            # Keys that only a reward model reads. The others are about graders.
            names = {f"{at}.{name}" for name in (*_PASSES, *ParallelConfig.model_fields)}
            changed = self.model.changed_keys(f"{at}.model")
            changed += [key for key in self.changed_keys(at) if key in names]
            yield from notice_unused(changed, f"{at}.enable is false")
        elif self.model.path is None:
            yield ConfigError(
                f"{at}.model.path",
                f"null, with {at}.enable=True",
                "a reward model",
                "Set it to a folder or a hub name of a sequence classifier with one label.",
            )
        if self.reward_manager == "dapo":
            kwargs = self.reward_kwargs
            buffer = kwargs.get("overlong_buffer_cfg") or {}
            yield from check_overlong(f"{at}.reward_kwargs", kwargs.get("max_resp_len"), buffer)


class CustomRewardFunctionConfig(Section):
    """A reward function of your own, loaded from a file."""

    path: PathText | None = None
    """Python file that holds the function, or `pkg://package.module`. null: the built-in grader of the data source."""
    name: Name = "compute_score"
    """Name of the function in that file: `f(data_source, solution_str, ground_truth, extra_info=None)`."""
    reward_kwargs: dict[str, Any] = {}
    """Open dictionary: further keyword arguments for the function, or options of the built-in graders."""


def check_overlong(at: str, max_length: Any, buffer: Any) -> Findings:
    """Yield wrong options of the reward manager `dapo` about its penalty for over-long responses.

    Args:
        at: dotted key of the options.
        max_length: option `max_resp_len`, in tokens. It is only read if the penalty is enabled.
        buffer: option `overlong_buffer_cfg`, a dictionary with the keys of `BUFFER_DEFAULTS`.
    """
    key = f"{at}.overlong_buffer_cfg"
    if not isinstance(buffer, Mapping):
        yield ConfigError(key, repr(buffer), f"a dictionary with {', '.join(BUFFER_DEFAULTS)}")
        return
    unknown = [name for name in buffer if name not in BUFFER_DEFAULTS]
    if unknown:
        yield ConfigError(key, ", ".join(unknown), f"only {', '.join(BUFFER_DEFAULTS)}")
        return
    options = {**BUFFER_DEFAULTS, **buffer}
    if not options["enable"]:
        return
    buffer_length = options["len"]
    if not isinstance(max_length, int) or max_length < 1:
        yield ConfigError(
            f"{at}.max_resp_len",
            repr(max_length),
            "a number of tokens, usually data.max_response_length",
        )
    elif not isinstance(buffer_length, int) or not 0 < buffer_length <= max_length:
        yield ConfigError(
            f"{key}.len",
            repr(buffer_length),
            f"a number of tokens from 1 to max_resp_len={max_length}",
        )


def check_classifier(reward: RewardModelConfig, max_sequence_tokens: int) -> Findings:
    """Yield problems of a local reward model that its config.json shows.

    Args:
        reward: the section of the reward model.
        max_sequence_tokens: tokens of the policy's longest sequence.
    """
    path = reward.model.path or ""
    key = "reward_model.model.path"
    file = Path(path).expanduser() / "config.json"
    if not file.is_file():
        return
    try:
        model_config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        yield MachineError(key, f"'{file}' ({error})", "JSON", "Download the model again.")
        return

    fix = "Name a model that was trained to score."
    # A model with another head would load as well, but with a new, untrained head for the score.
    names = model_config.get("architectures") or []
    is_classifier = not names or any(name.endswith("ForSequenceClassification") for name in names)
    if not is_classifier and not reward.model.trust_remote_code:
        yield MachineError(
            key,
            f"'{path}', whose config.json names {', '.join(names)}: it has no classification head",
            "an architecture that ends in ForSequenceClassification, with one label",
            fix,
        )
        return
    # Without either key, a classifier has two labels: transformers' default.
    labels = model_config.get("id2label") or range(2)
    num_labels = model_config.get("num_labels", len(labels))
    if num_labels != 1:
        yield MachineError(
            key,
            f"'{path}', a classifier with {num_labels} labels by its config.json",
            "one label, the score",
            fix,
        )

    # Sequences of the policy should fit into the reward model's positions, and into max_length.
    num_positions = model_config.get("max_position_embeddings")
    limit = reward.max_length
    if not isinstance(num_positions, int):
        return
    if limit is not None and limit > num_positions:
        yield MachineError(
            "reward_model.max_length",
            str(limit),
            f"at most {num_positions}, the positions of the reward model",
            "Lower it, or leave it out.",
        )
        return
    num_tokens = limit or num_positions
    if num_tokens < max_sequence_tokens:
        yield (
            f"reward_model.max_length: {num_tokens} tokens, but a sequence of the policy may have "
            f"{max_sequence_tokens}: a longer one loses the beginning of its prompt, and is "
            "counted in reward/rm_cut."
        )
