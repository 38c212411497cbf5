# SPDX-License-Identifier: Apache-2.0
"""Generation by a rollout engine, in the actor's process or in separate processes."""

from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from quadriga.config import Config
from quadriga.data import load_processor
from quadriga.data.prompt_lengths import PromptContext
from quadriga.errors import DataError, EngineError
from quadriga.models.load import explain_load_errors, load_config
from quadriga.observe.machine import release_free_memory
from quadriga.observe.metrics import Metric
from quadriga.observe.timing import Tally
from quadriga.protocol import DataProto
from quadriga.rewards import early_grader
from quadriga.rollout import generate_sequences
from quadriga.rollout.agent_loop.manager import AgentLoopManager, offered_tools
from quadriga.rollout.call_queue import CallQueue, QueueReply, ServedCall
from quadriga.rollout.environments.pool import EnvironmentPool
from quadriga.rollout.group import RolloutGroup
from quadriga.workers.rollout_engines import make_rollout_engine


class ResponseGenerator:
    """Generates responses: for a batch at once, or with `rollout.mode=async` as conversations.

    Args:
        config: the configuration.
        tokenizer: tokenizer of the policy.
        device: device of the engine.
        dtype: dtype of the engine's weights.
        is_beside_training: whether models are trained on the same device. With
            `rollout.free_cache_engine`, the engine then sleeps except while it generates.
        num_processes: number of processes that generate. They share the graders.
        actor: the actor's module, in which some engines compute; None if this process lacks some of
            the actor's weights.
        group: the ranks that generate together. Its leader has agent loops and graders, and returns
            the responses. None: this process generates alone.

    Attributes:
        sleeps: whether the engine gives its memory to training between calls of `generate`.
        loops: runs conversations; None without `rollout.mode=async`.
        grader: grades responses as soon as they end; None if that is not configured.
        calls: queue of a server's calls; None without `rollout.serve.enable`. Ranks that do not
            lead their group have none of the three.
        choices: automatic choices, with reasons, to be printed.
    """

    def __init__(
        self,
        config: Config,
        tokenizer: PreTrainedTokenizerBase,
        device: torch.device,
        dtype: torch.dtype,
        *,
        is_beside_training: bool,
        num_processes: int = 1,
        actor: PreTrainedModel | None = None,
        group: RolloutGroup | None = None,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.group = group
        self.engine = make_rollout_engine(
            config, tokenizer, device=device, dtype=dtype, actor=actor, group=group
        )
        rollout = config.actor_rollout_ref.rollout
        self.sleeps = is_beside_training and rollout.free_cache_engine
        self.vocabulary_size = vocabulary_size(config)
        self.loops: AgentLoopManager | None = None
        self.grader = None
        self.calls: CallQueue | None = None
        self.choices = {"rollout": self.engine.description}
        # Only leaders have graders, agent loops and environments, which they share evenly.
        is_leader = group is None or group.is_leader
        num_leaders = num_processes // (1 if group is None else group.size)
        if is_leader:
            self.grader = early_grader(config, tokenizer, num_leaders)

        if rollout.serve.enable and is_leader:
            self.calls = CallQueue(self.engine)
        if rollout.mode == "async" and is_leader:
            # Only loops with several turns add images to a conversation. A user's loop may do so.
            adds_turns = rollout.multi_turn.enable or rollout.agent.agent_loop_path is not None
            learner = config.actor_rollout_ref.actor
            self.loops = AgentLoopManager(
                rollout,
                tokenizer,
                prompt_length=config.data.max_prompt_length,
                response_length=config.data.max_response_length,
                template_kwargs=config.data.apply_chat_template_kwargs,
                log_dir=config.trainer.directory / "logs",
                processor=build_processor(config) if adds_turns else None,
                vocabulary_size=self.vocabulary_size,
                environments=_environments(config, num_leaders),
                echo_roles=learner.echo_roles if learner.echo_coeff else (),
            )
            if config.env.name is not None:
                self.choices["environment"] = config.env.name
            if self.loops.description:
                self.choices["tools"] = self.loops.description

        # Leave the device to training until the first call.
        if self.sleeps:
            self.engine.sleep()

    def generate(self, prompts: DataProto, weight_version: int) -> DataProto:
        """Generate responses by `rollout.generate_sequences` or `AgentLoopManager.generate`.

        If `sleeps`, the engine is woken before and put to sleep afterwards.

        Args:
            prompts: rows with `PROMPT_TENSORS`.
            weight_version: the version that the engine's weights must have.

        Returns:
            The responses, with the engine's counts of events as metrics unless the rows are for
            validation. Members of a rollout group other than its leader return no rows.

        Raises:
            EngineError: a prompt has a token id outside of the model's vocabulary.
        """
        # Padding tokens are not checked, because they are never computed with.
        token_ids = prompts.batch["input_ids"][prompts.batch["attention_mask"].bool()]
        if token_ids.numel() and int(token_ids.max()) >= self.vocabulary_size:
            raise EngineError(
                "prompts",
                got=f"token id {int(token_ids.max())}",
                expected=f"ids below {self.vocabulary_size}, the size of the model's vocabulary",
                fix="Use the model's own tokenizer: see data.tokenizer.",
            )
        prompts.meta_info["weight_version"] = weight_version
        if self.sleeps:
            self.engine.wake()
        try:
            if self.group is not None and not self.group.is_leader:
                # Compute the same steps as the leader, until it releases the group.
                self.engine.follow()
                return DataProto()
            # Within `opened`, the engine also answers the calls of a server.
            with nullcontext() if self.calls is None else self.calls.opened():
                responses = self._respond(prompts)
        finally:
            if self.group is not None and self.group.is_leader:
                self.engine.release()
            if self.sleeps:
                self.engine.sleep()
        # Only training reports the engine's counts. Those of validation are in the next report.
        if not prompts.meta_info.get("validate", False):
            counts = self.engine.counts
            self.engine.counts = Counter()
            for name, count in counts.items():
                if count:
                    responses.meta_info["metrics"][name] = Metric(count, "sum")
        release_free_memory()
        return responses

    def _respond(self, prompts: DataProto) -> DataProto:
        """Generate responses: as conversations if there are agent loops, else as a batch."""
        seed = self.config.trainer.seed
        if self.loops is not None:
            grade = None if self.grader is None else self.grader.grade_one
            return self.loops.generate(
                self.engine, prompts, seed=seed, grade=grade, count_ended=Tally.add
            )
        # Engines that compute in the calling thread take turns with the calls of a server.
        with self.engine.batch_lock:
            return generate_sequences(
                self.engine,
                prompts,
                config=self.config.actor_rollout_ref.rollout,
                response_length=self.config.data.max_response_length,
                pad_token_id=self.tokenizer.pad_token_id,
                seed=seed,
                count_ended=Tally.add,
            )

    def exchange_calls(self, calls: Sequence[ServedCall], cancelled: Collection[int]) -> QueueReply:
        """Exchange the calls of a server; see `CallQueue.exchange`."""
        assert self.calls is not None, "only ranks with a queue are asked"
        return self.calls.exchange(calls, cancelled)

    def close(self) -> None:
        """Close the engine, the agent loops and the graders."""
        if self.calls is not None:
            self.calls.close()
        if self.loops is not None:
            self.loops.close()
        if self.grader is not None:
            self.grader.close()
        self.engine.close()


def _environments(config: Config, num_leaders: int) -> EnvironmentPool | None:
    """Start this process's share of the environment processes; None without `env.name`.

    Args:
        config: the configuration.
        num_leaders: number of processes among which environment processes are divided.
    """
    if config.env.name is None:
        return None
    # A reward function or a reward model may grade the episodes besides the environment.
    has_function = config.custom_reward_function.path is not None
    is_graded_elsewhere = has_function or config.reward_model.enable
    return EnvironmentPool(config.env, num_leaders, is_graded_elsewhere=is_graded_elsewhere)


def build_processor(config: Config) -> Any:
    """Load the image processor of a vision-language model; None for a language model."""
    model = config.actor_rollout_ref.model
    trusts = config.data.trust_remote_code or model.trust_remote_code
    return load_processor(
        model.path,
        trust_remote_code=trusts,
        options=config.data.mm_processor_kwargs.model_dump(exclude_none=True),
    )


def prompt_context(config: Config, tokenizer: Any) -> PromptContext:
    """Collect tools, agents and the limit of token ids, which decide how long prompts become.

    Args:
        config: the configuration.
        tokenizer: tokenizer of the policy.

    Raises:
        ConfigError, RolloutError: see `offered_tools`.
        DataError: see `embedding_limit`.
    """
    rollout = config.actor_rollout_ref.rollout
    limit = embedding_limit(config, tokenizer)
    tools, agents = offered_tools(rollout)
    return PromptContext(tools, agents, rollout.agent.default_agent_loop, limit)


def embedding_limit(config: Config, tokenizer: Any) -> int | None:
    """Find the number of embedding rows, if the tokenizer has token ids beyond them.

    Prints a notice about tokens with such ids, unless the padding token is the only one.

    Args:
        config: the configuration.
        tokenizer: tokenizer of the policy.

    Returns:
        The number of rows: a prompt with this id or a higher one cannot be used. None if all ids of
        the tokenizer have rows, or no model is configured.

    Raises:
        DataError: a token that ends responses has no row.
    """
    model = config.actor_rollout_ref.model
    if not model.path:
        return None
    size = vocabulary_size(config)
    name = f"tokenizer {tokenizer.name_or_path}"
    stops = [(name, tokenizer.eos_token_id)]
    for token_id in declared_stop_token_ids(model.path):
        stops.append((f"{model.path}, generation_config.json", token_id))
    # A response could never end with a token without a row, and would always be cut off.
    for where, token_id in stops:
        if token_id is not None and token_id >= size:
            raise DataError(
                where,
                got=f"the end-of-sequence token id {token_id}",
                expected=f"an id below {size}, the rows of the model's embedding",
                fix="The model can never write it: correct the file, or use the model's tokenizer.",
            )

    beyond = sorted(token for token, token_id in tokenizer.get_vocab().items() if token_id >= size)
    if not beyond:
        return None
    # Padding is never computed with.
    unusable = [token for token in beyond if token != tokenizer.pad_token]
    if unusable:
        examples = ", ".join(map(repr, unusable[:5]))
        notice = f"{len(unusable)} tokens have no row in the model's embedding of {size}"
        print(f"{name}: {notice} ({examples}); a row that holds one is refused.", flush=True)
    return size


def _text_config(config: Config) -> Any:
    """Configuration of the policy's decoder."""
    model = config.actor_rollout_ref.model
    shape = load_config(
        model.path, trust_remote_code=model.trust_remote_code, override_config=model.override_config
    )
    return shape.get_text_config()


def vocabulary_size(config: Config) -> int:
    """Rows of the embedding of the configured model."""
    return _text_config(config).vocab_size


def num_positions(config: Config) -> int | None:
    """Tokens that a prompt and its response may have together; None if there is no limit."""
    positions = getattr(_text_config(config), "max_position_embeddings", None)
    limits = (positions, config.actor_rollout_ref.rollout.max_model_len)
    # Either may be None: no limit.
    return min((limit for limit in limits if limit is not None), default=None)


def declared_stop_token_ids(path: str | Path) -> tuple[int, ...]:
    """Token ids that end a response, from a model's generation_config.json; () without the file."""
    with explain_load_errors(path):
        try:
            declared = GenerationConfig.from_pretrained(path).eos_token_id
        except OSError:
            return ()
    ids = declared if isinstance(declared, list) else [declared]
    return tuple(token for token in ids if token is not None)
