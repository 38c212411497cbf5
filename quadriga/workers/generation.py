# SPDX-License-Identifier: Apache-2.0
"""What every worker with a rollout engine does alike, colocated with the actor or on its own processes."""

import torch
from transformers import PreTrainedTokenizerBase

from quadriga.config import Config
from quadriga.errors import EngineError
from quadriga.models.load import load_config
from quadriga.observe.machine import release_free_memory
from quadriga.protocol import DataProto
from quadriga.rewards import early_grader
from quadriga.rollout import RolloutEngine, generate_sequences
from quadriga.rollout.agent_loop import AgentLoopManager


class Generation:
    """Responses to prompts: a batch at once, or with `rollout.mode=async` a conversation for each.

    Args:
        config: configuration.
        tokenizer: of the model.
        engine: generates; it is closed with this.
        is_beside_training: whether models train on the same device: the engine sleeps meanwhile
            (`rollout.free_cache_engine`).
        num_processes: that generate; they share the graders.
    """

    def __init__(
        self,
        config: Config,
        tokenizer: PreTrainedTokenizerBase,
        engine: RolloutEngine,
        *,
        is_beside_training: bool,
        num_processes: int = 1,
    ) -> None:
        self.config, self.tokenizer, self.engine = config, tokenizer, engine
        self.rollout_config = config.actor_rollout_ref.rollout
        self.sleeps = is_beside_training and self.rollout_config.free_cache_engine
        model = config.actor_rollout_ref.model
        shape = load_config(
            model.path, trust_remote_code=model.trust_remote_code, override_config=model.override_config
        )
        self.vocabulary_size = shape.get_text_config().vocab_size
        self.loops: AgentLoopManager | None = None
        self.grader = early_grader(config, tokenizer, num_processes)
        if self.rollout_config.mode == "async":
            self.loops = AgentLoopManager(
                self.rollout_config,
                tokenizer,
                prompt_length=config.data.max_prompt_length,
                response_length=config.data.max_response_length,
                template_kwargs=config.data.apply_chat_template_kwargs,
                log_dir=config.trainer.directory / "logs",
            )
        if self.sleeps:
            self.engine.sleep()

    @property
    def choices(self) -> dict[str, str]:
        """What else was chosen, for people to read: MCP servers, where there are some."""
        tools = "" if self.loops is None else self.loops.description
        return {"tools": tools} if tools else {}

    def generate(self, prompts: DataProto, weight_version: int) -> DataProto:
        """Responses by `rollout.generate_sequences` or `rollout.agent_loop.AgentLoopManager.generate`.

        Args:
            prompts: see there.
            weight_version: that the engine's weights must have.
        """
        self._require_known_tokens(prompts.batch["input_ids"])
        prompts.meta_info["weight_version"] = weight_version
        if self.sleeps:
            self.engine.wake()
        try:
            responses = self._generate(prompts)
        finally:
            if self.sleeps:
                self.engine.sleep()
        release_free_memory()
        return responses

    def close(self) -> None:
        """End the engine, the agent loops and the graders."""
        if self.loops is not None:
            self.loops.close()
        if self.grader is not None:
            self.grader.close()
        self.engine.close()

    def _generate(self, prompts: DataProto) -> DataProto:
        seed = self.config.trainer.seed
        if self.loops is not None:
            grade = None if self.grader is None else self.grader.grade_one
            return self.loops.generate(self.engine, prompts, seed=seed, grade=grade)
        return generate_sequences(
            self.engine,
            prompts,
            config=self.rollout_config,
            response_length=self.config.data.max_response_length,
            pad_token_id=self.tokenizer.pad_token_id,
            seed=seed,
        )

    def _require_known_tokens(self, input_ids: torch.Tensor) -> None:
        if input_ids.numel() and int(input_ids.max()) >= self.vocabulary_size:
            raise EngineError(
                "prompts",
                got=f"token id {int(input_ids.max())}",
                expected=f"ids below {self.vocabulary_size}, the size of the model's vocabulary",
                fix="Use the model's own tokenizer: see data.tokenizer.",
            )
