# SPDX-License-Identifier: Apache-2.0
"""`reward_model` and `custom_reward_function`: who grades the responses."""

from typing import Any

from pydantic import Field

from quadriga.config.base import Count, Name, PathText, PositiveFloat, Section, Share
from quadriga.config.optimizer import FSDPConfig, ParallelConfig


class RewardClassifierConfig(Section):
    """The reward model: a sequence classifier with one label, the score."""

    path: PathText | None = None
    """Folder or hub name of the classifier, with its tokenizer. It is needed where `reward_model.enable`."""
    input_tokenizer: PathText | None = "auto"
    """Folder or hub name of the policy's tokenizer: the chat is rendered again by the reward model's own template and
    tokenizer. null: the policy's tokens are used as they are. auto: as they are where both tokenizers have one
    vocabulary and one template, rendered again where not."""
    trust_remote_code: bool = False
    """Whether code that comes with the reward model may be run."""
    fsdp_config: FSDPConfig = Field(default_factory=FSDPConfig)


class RewardModelConfig(ParallelConfig):
    """Who grades: a reward model where one is enabled, and a reward manager with its graders."""

    enable: bool = False
    """Whether a reward model grades. A function of `custom_reward_function.path` is added to it; built-in graders are
    then not asked."""
    model: RewardClassifierConfig = Field(default_factory=RewardClassifierConfig)
    micro_batch_size_per_gpu: Count | None = None
    """Sequences in one pass of the reward model. null: as many as `forward_max_token_len_per_gpu` allows."""
    use_dynamic_bsz: bool = False
    """Whether its passes are cut by tokens even when a number of sequences is given."""
    forward_max_token_len_per_gpu: Count = 32768
    """Tokens in one pass of the reward model, where passes are cut by tokens."""
    max_length: Count | None = None
    """Longest input of the reward model, in tokens; longer ones lose the beginning of their prompt, and are counted.
    null: what the model and its tokenizer allow."""
    reward_manager: Name = "naive"
    """Name of a registered reward manager."""
    num_workers: Count = 2
    """Processes that grade."""
    launch_reward_fn_async: bool = False
    """Whether graders work while log-probabilities, reference and values are computed, and are waited for before the
    advantages. No number depends on it. It changes nothing where answers are graded earlier (`rollout.mode=async`,
    `algorithm.filter_groups`), where a reward model alone grades, and for a manager that cannot be started."""
    timeout_s: PositiveFloat = 10.0
    """Seconds that grading one response may take; then it is stopped and counted as an error."""
    max_error_rate: Share = 0.5
    """Share of a batch whose grading raised or ran out of time above which the run stops, in [0, 1]."""
    reward_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Open dictionary: options of the reward manager."""


class CustomRewardFunctionConfig(Section):
    """A reward function of your own, loaded from a file."""

    path: PathText | None = None
    """Python file that holds the function. null: the built-in grader of the row's data source."""
    name: Name = "compute_score"
    """Name of the function in that file: `f(data_source, solution_str, ground_truth, extra_info=None)`."""
    reward_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Open dictionary: further keyword arguments for the function."""
