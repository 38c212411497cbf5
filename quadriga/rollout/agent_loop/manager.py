# SPDX-License-Identifier: Apache-2.0
"""Leads the conversations of a batch, all at the same time.

    batch ──> a task for each row ──> loop: engine.generate / tools / user simulator ──> grade ──> batch, same rows
                     │                                                              │
                     └── a tool failed: this row ends, with the reason              └── while others are generated
                     └── the engine or the grader failed: all end, the error is raised

a task  consumes a row; waits for the engine, for tools and the grader; unblocked by each of them, or cancelled.
"""

import asyncio
import logging
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from transformers import PreTrainedTokenizerBase

from quadriga.config.rollout import RolloutConfig
from quadriga.errors import ConfigError, QuadrigaError, RolloutError
from quadriga.protocol import DataProto
from quadriga.rewards.outcome import Outcome
from quadriga.rollout.agent_loop.batch import graded_row, metrics_of, samples_of, to_batch, write_trace
from quadriga.rollout.agent_loop.conversation import Conversation, ConversationOver, Limits, TurnEncoder
from quadriga.rollout.agent_loop.interactions import load_interactions
from quadriga.rollout.agent_loop.loops import REGISTRY, AgentLoop, Services
from quadriga.rollout.agent_loop.mcp_servers import Server, server_tools
from quadriga.rollout.agent_loop.tool_calls import ToolFailedError, ToolThread
from quadriga.rollout.agent_loop.tools import ToolSpec, class_tools, function_tools
from quadriga.rollout.interface import RolloutEngine, SamplingParams
from quadriga.rollout.sequences import sampling_of, sequence_seeds
from quadriga.user_file import import_file
from quadriga.weight_sync.publish import require_version

logger = logging.getLogger(__name__)

Grade: TypeAlias = Callable[[dict[str, Any]], Awaitable[Outcome]]
MAX_FAILURES_IN_A_ROW = 64


class AgentLoopManager:
    """Loads tools, user simulators and loops once, and leads batch after batch.

    Args:
        config: of the rollout.
        tokenizer: of the model.
        prompt_length: P, `data.max_prompt_length`.
        response_length: T, `data.max_response_length`: everything after the prompt, tools included.
        template_kwargs: of `data.apply_chat_template_kwargs`.
        log_dir: where MCP servers' standard error is written; None: a temporary folder.

    Raises:
        ConfigError: a file with tools, interactions or loops is not as it must be.
        RolloutError: a tool cannot be one, or an MCP server cannot be reached.
    """

    def __init__(
        self,
        config: RolloutConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        prompt_length: int,
        response_length: int,
        template_kwargs: Mapping[str, Any] | None = None,
        log_dir: Path | None = None,
    ) -> None:
        self.config, self.tokenizer = config, tokenizer
        self.encoder = TurnEncoder(tokenizer, template_kwargs or {})
        total, turns = config.max_model_len or prompt_length + response_length, config.multi_turn
        self.limits = Limits(prompt_length, response_length, total, turns.max_assistant_turns, turns.max_user_turns)
        self._thread, self._servers = ToolThread(), list[Server]()
        self._runner = asyncio.Runner()
        self._loops: dict[str, AgentLoop] = {}
        self._num_failed_in_a_row = 0
        if config.agent.agent_loop_path is not None:
            import_file(config.agent.agent_loop_path, "actor_rollout_ref.rollout.agent.agent_loop_path")
        try:
            tools = self._load_tools(log_dir)
            has_interactions = turns.enable and turns.interaction_config_path is not None
            interactions = load_interactions(turns.interaction_config_path) if has_interactions else {}
        except BaseException:
            self.close()
            raise
        self.services = Services(config, tools, interactions, self._thread)

    @property
    def description(self) -> str:
        """Which MCP servers there are and where their standard error is written; "" where there is none.

        It is the same in every process, each of which starts servers of its own.
        """
        folders = {server.log.parent for server in self._servers if server.entry.command is not None}
        logs = "".join(f"; standard error in {folder}/mcp-*.log" for folder in folders)
        return f"MCP servers {', '.join(server.name for server in self._servers)}{logs}" if self._servers else ""

    def generate(
        self, engine: RolloutEngine, prompts: DataProto, *, seed: int, grade: Grade | None = None
    ) -> DataProto:
        """A conversation for each row; see `generate_conversations`. Not from within an event loop: there, `lead`."""
        return self._runner.run(self.lead(engine, prompts, seed=seed, grade=grade))

    async def lead(
        self, engine: RolloutEngine, prompts: DataProto, *, seed: int, grade: Grade | None = None
    ) -> DataProto:
        """The same as `generate`, for callers with an event loop of their own."""
        if (expected := prompts.meta_info.get("weight_version")) is not None:
            require_version(engine, expected)
        started = time.perf_counter()
        params = sampling_of(prompts.meta_info, self.config, self.limits.response_tokens)
        samples = samples_of(prompts, self.config.agent.default_agent_loop)
        chats = [
            Conversation(engine, self.encoder, sample, SamplingParams(**params, seed=own), self.limits)
            for sample, own in zip(samples, sequence_seeds(prompts, seed), strict=True)
        ]
        outcomes: list[Outcome | None] = [None] * len(chats)
        try:
            async with asyncio.TaskGroup() as group:
                for chat in chats:
                    group.create_task(self._lead_one(chat, outcomes, grade))
        except BaseExceptionGroup as failed:
            # The first one ended the others; they say nothing of their own.
            raise failed.exceptions[0] from failed.exceptions[0].__cause__
        finally:
            if self.config.trace_dir is not None:
                write_trace(self.config.trace_dir, chats, outcomes, prompts.meta_info)
        self._count_failures(chats)
        batch = to_batch(
            chats,
            None if grade is None else [outcome for outcome in outcomes if outcome is not None],
            prompt_length=self.limits.prompt_tokens,
            response_length=self.limits.response_tokens,
            pad_token_id=self.tokenizer.pad_token_id,
        ).to(prompts.batch["input_ids"].device)
        metrics = metrics_of(chats, time.perf_counter() - started)
        batch.meta_info = {"metrics": metrics, "weight_version": engine.weight_version}
        return batch

    def close(self) -> None:
        """Ends the MCP servers, and the thread in which tools run."""
        while self._servers:
            self._thread.wait(self._servers.pop().close())
        self._thread.close()
        self._runner.close()

    async def _lead_one(self, chat: Conversation, outcomes: list[Outcome | None], grade: Grade | None) -> None:
        sample = chat.sample
        try:
            if sample.agent not in self._loops:
                self._loops[sample.agent] = REGISTRY.get(sample.agent)(self.services)
            await self._loops[sample.agent].run(chat)
            chat.finish(chat.finish_reason or "stop")
        except ConversationOver as over:
            chat.finish(over.reason)
        except ToolFailedError as failure:
            chat.finish(f"tool_error: {failure}", failure=failure.details or str(failure))
        except Exception as error:
            if isinstance(error, QuadrigaError):
                error.add_note(f"in the conversation of row {sample.row}, uid {sample.uid}, turn {len(chat.turns)}")
                raise
            # A loop of a user's failed: an environment, say. It ends its own conversation, as a tool does.
            details = "".join(traceback.format_exception(error)).rstrip()
            chat.finish(f"loop_error: {type(error).__name__}: {error}"[:2000], failure=details)
        if grade is not None:
            outcomes[sample.row] = await grade(graded_row(chat))

    def _load_tools(self, log_dir: Path | None) -> dict[str, ToolSpec]:
        config = self.config.multi_turn
        specs: list[ToolSpec] = []
        if config.enable and config.function_tool_path is not None:
            specs += function_tools(config.function_tool_path)
        if config.enable and config.tool_config_path is not None:
            specs += class_tools(config.tool_config_path)
            specs += server_tools(config.tool_config_path, self._thread, self._servers, log_dir)
        named: dict[str, ToolSpec] = {}
        for spec in specs:
            if spec.name in named:
                where = "actor_rollout_ref.rollout.multi_turn, tools"
                raise ConfigError(where, got=f"two with the name {spec.name!r}", expected="a name for each")
            named[spec.name] = spec
        return named

    def _count_failures(self, chats: list[Conversation]) -> None:
        """Says how many failed and why; where all do, the run stops."""
        failed = [chat for chat in chats if chat.failure]
        for chat in chats:
            self._num_failed_in_a_row = self._num_failed_in_a_row + 1 if chat.failure else 0
        if not failed:
            return
        first = f"The first, row {failed[0].sample.row}: {failed[0].finish_reason}"
        if self._num_failed_in_a_row >= MAX_FAILURES_IN_A_ROW:
            raise RolloutError(
                "agent loop",
                got=f"{self._num_failed_in_a_row} conversations in a row that failed",
                expected="some that do not",
                fix=f"{first}\n{failed[0].failure}",
            )
        logger.warning("%d of %d conversations failed. %s", len(failed), len(chats), first)


def generate_conversations(
    engine: RolloutEngine,
    prompts: DataProto,
    *,
    config: RolloutConfig,
    tokenizer: PreTrainedTokenizerBase,
    prompt_length: int,
    response_length: int,
    seed: int,
    grade: Grade | None = None,
) -> DataProto:
    """A conversation for each row: the agent loop in one call. `AgentLoopManager` keeps tools over many.

    Args:
        engine: generates.
        prompts: as `generate_sequences` takes them; non-tensors besides: `raw_prompt` where tools are offered;
            `agent_name`, `tools_kwargs`, `interaction_kwargs`, `data_source`, `reward_model`, `extra_info` where they
            exist.
        config: of the rollout.
        tokenizer: of the model.
        prompt_length: P.
        response_length: T; also the longest conversation behind the prompt, in tokens.
        seed: `trainer.seed`; each sequence's own is derived from it.
        grade: grades a conversation that has ended, while others go on.

    Returns:
        See `to_batch`. meta_info: `metrics`, `weight_version`. A tool that fails ends its own row, and its
        `finish_reason` says why.

    Raises:
        RolloutError: the engine failed, or nothing but failed conversations.
        WeightSyncError: the engine's weights are not of the version that meta_info names.
    """
    manager = AgentLoopManager(config, tokenizer, prompt_length=prompt_length, response_length=response_length)
    try:
        return manager.generate(engine, prompts, seed=seed, grade=grade)
    finally:
        manager.close()
