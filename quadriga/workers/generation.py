# SPDX-License-Identifier: Apache-2.0
"""A rollout engine at work, colocated with the actor or on processes of its own."""

from collections import Counter
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from quadriga.config import Config
from quadriga.data import load_processor
from quadriga.errors import EngineError
from quadriga.models.load import explained, load_config
from quadriga.observe.machine import release_free_memory
from quadriga.observe.metrics import Metric
from quadriga.protocol import DataProto
from quadriga.rewards import early_grader
from quadriga.rollout import generate_sequences
from quadriga.rollout.agent_loop import AgentLoopManager
from quadriga.rollout.group import RolloutGroup
from quadriga.workers.rollout_engines import make_rollout_engine


class Generation:
    """Responses to prompts: a batch at once, or with `rollout.mode=async` a conversation for each.

    Args:
        is_beside_training: whether models train on the same device: the engine sleeps meanwhile
            (`rollout.free_cache_engine`).
        num_processes: how many generate; they share the graders.
        actor: the actor's own module, where this process has all of its weights.
        group: the ranks that generate together; its leader has agent loops and graders, and returns the responses.
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
        self.config, self.tokenizer, self.group = config, tokenizer, group
        self.engine = make_rollout_engine(
            config, tokenizer, device=device, dtype=dtype, actor=actor, group=group
        )
        leads, num_processes = (
            group is None or group.is_leader,
            num_processes // (1 if group is None else group.size),
        )
        rollout, model = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
        self.sleeps = is_beside_training and rollout.free_cache_engine
        shape = load_config(
            model.path,
            trust_remote_code=model.trust_remote_code,
            override_config=model.override_config,
        )
        self.vocabulary_size = shape.get_text_config().vocab_size
        self.loops: AgentLoopManager | None = None
        self.grader = early_grader(config, tokenizer, num_processes) if leads else None
        self.choices = {"rollout": self.engine.description}
        if rollout.mode == "async" and leads:
            own_turns = rollout.multi_turn.enable or rollout.agent.agent_loop_path is not None
            self.loops = AgentLoopManager(
                rollout,
                tokenizer,
                prompt_length=config.data.max_prompt_length,
                response_length=config.data.max_response_length,
                template_kwargs=config.data.apply_chat_template_kwargs,
                log_dir=config.trainer.directory / "logs",
                processor=build_processor(config) if own_turns else None,
            )
            self.choices |= {"tools": self.loops.description} if self.loops.description else {}
        if self.sleeps:
            self.engine.sleep()

    def generate(self, prompts: DataProto, weight_version: int) -> DataProto:
        """Responses by `rollout.generate_sequences` or `rollout.agent_loop.AgentLoopManager.generate`, from an engine
        whose weights must have this version; a member of a rollout group generates with its leader, and returns no
        rows.
        Raises EngineError: a prompt has a token that the model does not know."""
        input_ids, seed = prompts.batch["input_ids"], self.config.trainer.seed
        if input_ids.numel() and int(input_ids.max()) >= self.vocabulary_size:
            expected = f"ids below {self.vocabulary_size}, the size of the model's vocabulary"
            fix = "Use the model's own tokenizer: see data.tokenizer."
            raise EngineError(
                "prompts", got=f"token id {int(input_ids.max())}", expected=expected, fix=fix
            )
        prompts.meta_info["weight_version"] = weight_version
        if self.sleeps:
            self.engine.wake()
        try:
            if self.group is not None and not self.group.is_leader:
                self.engine.follow()
                return DataProto()
            if self.loops is not None:
                grade = None if self.grader is None else self.grader.grade_one
                responses = self.loops.generate(self.engine, prompts, seed=seed, grade=grade)
            else:
                responses = generate_sequences(
                    self.engine,
                    prompts,
                    config=self.config.actor_rollout_ref.rollout,
                    response_length=self.config.data.max_response_length,
                    pad_token_id=self.tokenizer.pad_token_id,
                    seed=seed,
                )
        finally:
            if self.group is not None and self.group.is_leader:
                self.engine.release()
            if self.sleeps:
                self.engine.sleep()
        if not prompts.meta_info.get(
            "validate", False
        ):  # of validation no metrics of the engine are kept
            counts, self.engine.counts = self.engine.counts, Counter()
            responses.meta_info["metrics"] |= {
                name: Metric(count, "sum") for name, count in counts.items() if count
            }
        release_free_memory()
        return responses

    def close(self) -> None:
        """End the engine, the agent loops and the graders."""
        if self.loops is not None:
            self.loops.close()
        if self.grader is not None:
            self.grader.close()
        self.engine.close()


def build_processor(config: Config) -> Any:
    """The image processor of a vision-language model; None for a language model."""
    model = config.actor_rollout_ref.model
    trusts = config.data.trust_remote_code or model.trust_remote_code
    sizes = config.data.mm_processor_kwargs.model_dump(exclude_none=True)
    return load_processor(model.path, trust_remote_code=trusts, options=sizes)


def declared_stop_token_ids(path: str | Path) -> tuple[int, ...]:
    """Token ids that end a response by the generation_config.json of a model, which may have none."""
    with explained(path):
        try:
            declared = GenerationConfig.from_pretrained(path).eos_token_id
        except OSError:
            return ()
    ids = declared if isinstance(declared, list) else [declared]
    return tuple(token for token in ids if token is not None)
