# SPDX-License-Identifier: Apache-2.0
"""Lead the conversations of a batch, all at the same time.

    batch ──> a task for each row ──> loop: engine.generate / tools / user simulator ──> grade ──> batch, same rows
                     │                                                              │
                     └── a tool fails: its row ends, with the reason                └── while others are generated
                     └── the engine or the grader fails: all rows end, the error is raised

A task waits for the engine, for tools and for the grader. It is cancelled if another task raises.

Legend: B conversations, P prompt positions (padded left), T response positions (padded right).
"""

import asyncio
import json
import logging
import math
import os
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from quadriga.background import off_the_loop, run_coroutine
from quadriga.config.multi_turn import MultiTurnConfig
from quadriga.config.rollout import RolloutConfig
from quadriga.errors import ConfigError, QuadrigaError, RolloutError, traceback_text
from quadriga.observe.metrics import Metric
from quadriga.observe.tracking.jsonl import jsonable
from quadriga.observe.watchdog import waiting
from quadriga.protocol import DataProto
from quadriga.protocol.columns import object_array
from quadriga.rewards.outcome import Outcome
from quadriga.rewards.samples import policy_text
from quadriga.rewards.scoring import POLICY_TEXT
from quadriga.rollout.agent_loop.conversation import (
    Conversation,
    ConversationOver,
    LengthLimits,
    Sample,
    Turn,
    TurnEncoder,
)
from quadriga.rollout.agent_loop.guards import guard_users_code, num_printed
from quadriga.rollout.agent_loop.interactions import load_interactions
from quadriga.rollout.agent_loop.loops import (
    REGISTRY,
    AgentLoop,
    Services,
    SingleTurnAgent,
    ToolAgent,
    load_loops,
)
from quadriga.rollout.agent_loop.mcp_servers import server_tools
from quadriga.rollout.agent_loop.tool_calls import ToolFailedError, ToolThread
from quadriga.rollout.agent_loop.tools import ToolSpec, class_tools, function_tools
from quadriga.rollout.environments.loop import EnvironmentAgent
from quadriga.rollout.environments.pool import EnvironmentPool
from quadriga.rollout.interface import Images, RolloutEngine, SamplingParams
from quadriga.rollout.sequences import append_responses, images_of, sampling_of, sequence_seeds
from quadriga.weight_sync.publish import require_version

logger = logging.getLogger(__name__)

# Grades a conversation by the row that `graded_row` makes of it.
Grade: TypeAlias = Callable[[dict[str, Any]], Awaitable[Outcome]]
# Number of failed conversations in a row that stops the run. Failures are counted when a batch has
# ended, in the order of its rows, and on from batch to batch. In the order in which conversations
# end, failures would often be in a row in runs that go well, because a conversation that fails ends
# sooner than others.
MAX_FAILURES_IN_A_ROW = 64

# Finish reasons are a column of the batch, so a longer message of an error is cut.
_MAX_REASON_CHARACTERS = 2000
# Attributes of `Conversation` that are columns of the batch under the same names.
_CONVERSATION_COLUMNS = (
    "finish_reason",
    "tool_rewards",
    "turn_scores",
    "solution_messages",
    "turn_spans",
    "turn_states",
    "turn_rewards",
    "agent",
)


class AgentLoopManager:
    """Loads tools, user simulators and agent loops once, and leads batch after batch.

    Args:
        config: `actor_rollout_ref.rollout`.
        tokenizer: the model's tokenizer, with its chat template.
        prompt_length: P, `data.max_prompt_length`.
        response_length: T, `data.max_response_length`: all tokens after the prompt, including
            those of tools and users.
        template_kwargs: `data.apply_chat_template_kwargs`.
        log_dir: folder for the standard error of MCP servers. None: a temporary folder.
        processor: processor of a vision-language model. Later turns may then show images, and the
            rows have `multi_modal_inputs`.
        vocabulary_size: rows of the model's embedding. None: every token has a row.
        environments: pool of the environment `env.name`, which `close` ends too. None: there is
            no environment.
        echo_roles: roles whose tokens have a loss of their own; batches get `echo_mask`.

    Raises:
        ConfigError: a file of tools, interactions or loops is invalid.
        RolloutError: a function cannot be a tool, or an MCP server cannot be reached.
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
        processor: Any = None,
        vocabulary_size: int | None = None,
        environments: EnvironmentPool | None = None,
        echo_roles: Sequence[str] = (),
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.processor = processor
        self.encoder = TurnEncoder(tokenizer, template_kwargs or {}, vocabulary_size, echo_roles)
        turns = config.multi_turn
        self.limits = LengthLimits(
            prompt_tokens=prompt_length,
            response_tokens=response_length,
            total_tokens=config.max_model_len or prompt_length + response_length,
            assistant_turns=turns.max_assistant_turns or math.inf,
            user_turns=turns.max_user_turns or math.inf,
        )
        self._thread = ToolThread()
        self._environments = environments
        self._runner = asyncio.Runner()
        self._loops: dict[str, AgentLoop] = {}
        self._num_failed_in_a_row = 0
        # After an error the caller has no object to close, but the servers and the thread run.
        try:
            if config.agent.agent_loop_path is not None:
                load_loops(config.agent.agent_loop_path)
            tools = load_tools(turns, self._thread, log_dir)
            interactions = {}
            if turns.enable and turns.interaction_config_path:
                interactions = load_interactions(turns.interaction_config_path)
        except BaseException:
            self.close()
            raise
        self.services = Services(config, tools, interactions, self._thread, environments)

    @property
    def description(self) -> str:
        """Names of the MCP servers and the folder of their standard error; "" without servers.

        Each process starts its own servers, but all processes return the same text.
        """
        servers = self._thread.servers
        if not servers:
            return ""
        text = f"MCP servers {', '.join(server.name for server in servers)}"
        # Only a server that is started here, by a command, has a standard error.
        for folder in {server.log.parent for server in servers if server.entry.command is not None}:
            text += f"; standard error in {folder}/mcp-*.log"
        return text

    def generate(
        self,
        engine: RolloutEngine,
        prompts: DataProto,
        *,
        seed: int,
        grade: Grade | None = None,
        count_ended: Callable[[int], None] | None = None,
    ) -> DataProto:
        """Lead a conversation for each row of a batch, and wait until all of them have ended.

        In a coroutine, await `lead` instead. A tool that fails ends only the row that called it,
        whose `finish_reason` says why.

        Args:
            engine: the engine that generates the model's turns.
            prompts: the batch that `generate_sequences` takes, with further non-tensors:
                `raw_prompt` where tools are offered; optionally `agent_name`, `tools_kwargs`,
                `interaction_kwargs`, `data_source`, `reward_model`, `extra_info`.
            seed: `trainer.seed`, from which the seed of each sequence is derived.
            grade: grades each conversation as soon as it has ended, while others go on.
            count_ended: called with 1 whenever the rollout of a row has ended.

        Returns:
            The batch of `to_batch`, with `metrics` and `weight_version` in meta_info.

        Raises:
            RolloutError: the engine failed, or too many conversations in a row failed.
            WeightSyncError: the engine's weights do not have the version that meta_info names.
        """
        work = self.lead(engine, prompts, seed=seed, grade=grade, count_ended=count_ended)
        return run_coroutine(work, self._runner.run)

    async def lead(
        self,
        engine: RolloutEngine,
        prompts: DataProto,
        *,
        seed: int,
        grade: Grade | None = None,
        count_ended: Callable[[int], None] | None = None,
    ) -> DataProto:
        """Lead a conversation for each row of a batch, in the caller's event loop.

        Args:
            engine: the engine that generates the model's turns.
            prompts: the batch of prompts; `generate` lists its columns.
            seed: `trainer.seed`, from which the seed of each sequence is derived.
            grade: grades each conversation as soon as it has ended, while others go on.
            count_ended: called with 1 whenever the rollout of a row has ended.

        Returns:
            The batch of `to_batch`, with `metrics` and `weight_version` in meta_info.

        Raises:
            RolloutError: the engine failed, or too many conversations in a row failed.
            WeightSyncError: the engine's weights do not have the version that meta_info names.
        """
        expected_version = prompts.meta_info.get("weight_version")
        if expected_version is not None:
            require_version(engine, expected_version)
        started = time.perf_counter()
        params = sampling_of(prompts.meta_info, self.config, self.limits.response_tokens)
        samples = samples_of(prompts, self.config.agent.default_agent_loop)
        chats = []
        for sample, row_seed in zip(samples, sequence_seeds(prompts, seed), strict=True):
            sampling = SamplingParams(**params, seed=row_seed)
            chat = Conversation(
                engine, self.encoder, sample, sampling, self.limits, processor=self.processor
            )
            chats.append(chat)

        reported_wait = waiting(f"{len(chats)} conversations", lambda: _progress_text(chats))
        try:
            with reported_wait, guard_users_code(self.config.agent.timeout_s):
                async with asyncio.TaskGroup() as group:
                    for chat in chats:
                        task = group.create_task(self._lead_one(chat, grade))
                        if count_ended is not None:
                            task.add_done_callback(lambda _: count_ended(1))
        except BaseExceptionGroup as errors:
            # The first error has cancelled the other conversations, so it is the only cause.
            first_error = errors.exceptions[0]
            # Raised with its own cause. Otherwise Python would show the group as the cause.
            raise first_error from first_error.__cause__
        finally:
            # A loop may have begun further conversations, each of which is a row.
            rows = [row for chat in chats for row in chat.rows]
            # Also after an error, whose cause the trace may show.
            if self.config.trace_dir is not None:
                write_trace(self.config.trace_dir, rows, prompts.meta_info)
        self._count_failures(chats)

        # Without any grade `reward_outcome` is left out, and the trainer grades the batch.
        has_grades = grade is not None or any(row.outcome for row in rows)
        batch = to_batch(rows, self.limits, self.tokenizer.pad_token_id, has_grades=has_grades)
        batch.to(prompts.batch["input_ids"].device)
        metrics = metrics_of(rows, time.perf_counter() - started)
        if self._environments is not None:
            metrics |= self._environments.take_metrics()
        batch.meta_info = {"metrics": metrics, "weight_version": engine.weight_version}
        return batch

    def close(self) -> None:
        """Stop the MCP servers, the thread in which tools run, and the environments."""
        self._thread.close()
        off_the_loop(self._runner.close)
        # Last, because conversations that `_runner.close` cancels still end their episodes.
        if self._environments is not None:
            self._environments.close()

    async def _lead_one(self, chat: Conversation, grade: Grade | None) -> None:
        """Lead the conversations of one rollout to their end, and grade them.

        Args:
            chat: first conversation of the rollout, which the loop receives.
            grade: grades the rollout unless its loop has done so. None: the trainer grades it.
        """
        await self._run_loop(chat)
        for row in chat.rollout[1:]:
            row.finish(row.finish_reason or chat.finish_reason)
        ungraded_rows = [row for row in chat.rows if row.outcome is None]
        # Conversations to which the loop has given no grade share that of the first conversation,
        # or else one new grade.
        if ungraded_rows and grade is not None and chat.outcome is None:
            chat.activity = "being graded"
            chat.outcome = await grade(graded_row(ungraded_rows[0]))
        for row in ungraded_rows:
            row.outcome = chat.outcome
        chat.activity = ""

    async def _run_loop(self, chat: Conversation) -> None:
        """Run the loop of a rollout, and finish its first conversation, also if the loop fails.

        Only errors of our own are raised. Those of tools, environments and users' loops end this
        conversation, with the error in `finish_reason` and `failure`.
        """
        sample = chat.sample
        try:
            # What this task prints is counted from here on. Other tasks do not see this value.
            num_printed.set([0])
            if sample.agent not in self._loops:
                self._loops[sample.agent] = REGISTRY[sample.agent](self.services)
            loop = self._loops[sample.agent]
            # Loops with a `run` of ours need no time limit: the tools, user simulators and
            # environments that they call have their own.
            built_in_runs = (SingleTurnAgent.run, ToolAgent.run, EnvironmentAgent.run)
            is_built_in = type(loop).run in built_in_runs
            timeout_s = self.config.agent.timeout_s
            async with nullcontext() if is_built_in else chat.time_limit(timeout_s):
                await _run_and_end_forks(loop, chat)
            chat.finish(chat.finish_reason or "stop")
        except ConversationOver as over:
            chat.finish(over.reason)
        except ToolFailedError as error:
            reason = f"{error.reason}: {error}"[:_MAX_REASON_CHARACTERS]
            chat.finish(reason, failure=error.details or str(error))
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:
            # Without `cancelling`, nobody has cancelled the task: users' code has raised a
            # CancelledError, which is a failure like others.
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task and task.cancelling():
                raise
            if isinstance(error, QuadrigaError):
                place = f"row {sample.row}, uid {sample.uid}, turn {len(chat.turns)}"
                error.add_note(f"in the conversation of {place}")
                raise
            # A user's loop raised, or called sys.exit. It ends its own conversation, like a tool.
            reason = f"loop_error: {type(error).__name__}: {error}"[:_MAX_REASON_CHARACTERS]
            chat.finish(reason, failure=traceback_text(error))

    def _count_failures(self, chats: list[Conversation]) -> None:
        """Log how many conversations failed and why; stop the run after too many in a row.

        Raises:
            RolloutError: `MAX_FAILURES_IN_A_ROW` conversations in a row have failed.
        """
        failed = []
        for chat in chats:
            if chat.failure:
                failed.append(chat)
                # A success between two failures begins the count anew.
                self._num_failed_in_a_row += 1
            else:
                self._num_failed_in_a_row = 0
        if not failed:
            return
        first = f"The first, row {failed[0].sample.row}: {failed[0].finish_reason}"
        if self._num_failed_in_a_row >= MAX_FAILURES_IN_A_ROW:
            raise RolloutError(
                "agent loop",
                got=f"{self._num_failed_in_a_row} conversations in a row that failed",
                expected="some that succeed",
                fix=f"Correct the tool or the loop. {first}\n{failed[0].failure}",
            )
        logger.warning("%d of %d conversations failed. %s", len(failed), len(chats), first)


def load_tools(
    turns: MultiTurnConfig, thread: ToolThread, log_dir: Path | None
) -> dict[str, ToolSpec]:
    """Load the tools of a configuration, which has none if `multi_turn.enable` is false.

    Args:
        turns: `actor_rollout_ref.rollout.multi_turn`.
        thread: thread in which MCP servers are reached, and which stops them when it is closed.
        log_dir: folder for the standard error of MCP servers. None: a temporary folder.

    Returns:
        The tools by name: functions first, then classes, then tools of MCP servers.

    Raises:
        ConfigError: a file is invalid, or two tools have the same name.
        RolloutError: a function cannot be a tool, or a server cannot be reached.
    """
    # The prompt describes the tools in this order.
    specs = []
    if turns.enable and turns.function_tool_path:
        specs += function_tools(turns.function_tool_path)
    if turns.enable and turns.tool_config_path:
        specs += class_tools(turns.tool_config_path)
        specs += server_tools(turns.tool_config_path, thread, log_dir)
    tools = {}
    for spec in specs:
        if spec.name in tools:
            where = "actor_rollout_ref.rollout.multi_turn, tools"
            got = f"two with the name {spec.name!r}"
            raise ConfigError(where, got, expected="a different name for each tool")
        tools[spec.name] = spec
    return tools


def offered_tools(config: RolloutConfig) -> tuple[tuple[dict[str, Any], ...], frozenset[str]]:
    """Find out which tools prompts will offer, before agent loops are made.

    MCP servers are started or reached to list their tools, and then closed.

    Returns:
        Schemas of the configured tools, and the names of the agent loops that offer them.

    Raises:
        ConfigError, RolloutError: the tools or the file of agent loops cannot be loaded; see
            `load_tools` and `load_loops`.
    """
    if not config.multi_turn.enable:
        return (), frozenset()
    with TemporaryDirectory(prefix="quadriga-") as log_dir, closing(ToolThread()) as thread:
        tools = load_tools(config.multi_turn, thread, Path(log_dir))
    if tools and config.agent.agent_loop_path is not None:
        # A user's loop may offer tools, too.
        load_loops(config.agent.agent_loop_path)
    agents = frozenset(name for name, loop in REGISTRY.items() if loop.offers_tools)
    return tuple(spec.schema for spec in tools.values()), agents


async def _run_and_end_forks(loop: AgentLoop, chat: Conversation) -> None:
    """Run a loop. A child process that users' code has forked ends here."""
    pid = os.getpid()
    try:
        await loop.run(chat)
    finally:
        if os.getpid() != pid:
            # In the child, which would go on as a second trainer.
            os._exit(1)


def _progress_text(chats: Sequence[Conversation]) -> str:
    """Say how many conversations have ended, and what the others are doing."""
    # A conversation that has ended has no activity.
    activities = Counter(chat.activity for chat in chats if chat.activity)
    pending = ", ".join(f"{count} {activity}" for activity, count in activities.most_common(6))
    return f"{len(chats) - activities.total()} ended, {pending}"


def samples_of(prompts: DataProto, default_agent: str) -> list[Sample]:
    """Convert the rows of a batch of prompts to samples, which agent loops read.

    Args:
        prompts: batch `input_ids`, `attention_mask` [B, P], `position_ids` [B, P] or [B, 3, P].
        default_agent: name of the loop for rows without `agent_name`.

    Returns:
        B samples, in the order of the rows.
    """
    batch = prompts.batch
    images = images_of(prompts)
    num_axes = 1 if batch["position_ids"].dim() == 2 else batch["position_ids"].shape[1]
    samples = []
    for row, token_ids in enumerate(batch["input_ids"]):
        columns = {name: column[row] for name, column in prompts.non_tensor_batch.items()}
        messages = columns.get("raw_prompt")
        # Copies, because the rows of a prompt share its messages, and a loop may change its own.
        if messages is not None:
            messages = [dict(message) for message in messages]
        is_prompt = batch["attention_mask"][row].bool()
        sample = Sample(
            row=row,
            uid=str(columns.get("uid", f"row {row}")),
            prompt_ids=token_ids[is_prompt].tolist(),
            messages=messages,
            columns=columns,
            agent=columns.get("agent_name") or default_agent,
            images=images[row],
            num_axes=num_axes,
        )
        samples.append(sample)
    return samples


def graded_row(chat: Conversation) -> dict[str, Any]:
    """Make the arguments of a score function for a conversation that has ended.

    Args:
        chat: the conversation.

    Returns:
        Arguments of a score function. `extra_info` has the entries of the data's `extra_info`, the
        loop's `extra_fields`, and facts such as `num_turns` and `finish_reason`. If tools or users
        have written tokens of the response, `POLICY_TEXT` has the text of the model alone.
    """
    columns = chat.sample.columns
    row = {
        "data_source": columns.get("data_source"),
        "solution_str": chat.encoder.decode(chat.token_ids, with_special=False),
        "solution_with_special_tokens": chat.encoder.decode(chat.token_ids, with_special=True),
        "solution_messages": chat.solution_messages,
        "ground_truth": (columns.get("reward_model") or {}).get("ground_truth"),
        "extra_info": {
            **(columns.get("extra_info") or {}),
            **chat.extra_fields,
            "num_turns": len(chat.turns),
            "finish_reason": chat.finish_reason,
            "tool_rewards": chat.tool_rewards,
            "turn_scores": chat.turn_scores,
        },
    }
    if not all(chat.mask):
        row[POLICY_TEXT] = policy_text(chat.encoder.tokenizer, chat.token_ids, chat.mask)
    return row


def to_batch(
    chats: Sequence[Conversation], limits: LengthLimits, pad_token_id: int, *, has_grades: bool
) -> DataProto:
    """Make a batch of conversations that have ended, with the columns of `generate_sequences`.

    `response_mask` and the log-probabilities are 0 on the tokens of tools and users.

    Args:
        chats: B conversations that have ended.
        limits: P and T, in tokens.
        pad_token_id: the token that fills prompts on the left and responses on the right.
        has_grades: whether to add a column `reward_outcome` with the grades of the conversations. A
            conversation whose grade is None is graded by the trainer.

    Returns:
        batch `prompts` [B, P], `responses`, `response_mask`, `rollout_log_probs`,
        `token_versions` [B, T], `input_ids`, `attention_mask` [B, P + T], `position_ids`
        [B, P + T] or [B, 3, P + T]; non-tensors `num_turns`, `finish_reason`, `tool_rewards`,
        `turn_scores`, `solution_messages`, `turn_spans`, `turn_states`, `turn_rewards`, `agent`;
        `rollout_id` if the prompts have it, `reward_outcome` with `has_grades`,
        `multi_modal_inputs` with a processor. If tokens of tools or users have a loss of their own
        (`echo_roles`), batch `echo_mask` [B, T].
    """
    # `Conversation.images` computes positions at each call, so it is read once.
    images = [chat.images for chat in chats]
    prompts = _prompt_columns(chats, images, limits, pad_token_id)
    position_ids = prompts["position_ids"]
    # `append_responses` continues the positions of the prompt as for text, which is wrong behind
    # images of later turns. So they are replaced below.
    tensors = append_responses(
        prompts | {"position_ids": position_ids[..., : limits.prompt_tokens]},
        [(chat.token_ids, chat.mask, chat.log_probs) for chat in chats],
        limits.response_tokens,
        pad_token_id,
        routes=[chat.routes for chat in chats],
        versions=[chat.versions for chat in chats],
    )
    tensors["position_ids"] = position_ids
    if chats and chats[0].encoder.echo_roles:
        echo_mask = torch.zeros_like(tensors["response_mask"])
        for row, chat in enumerate(chats):
            echo_mask[row, : len(chat.echo_mask)] = torch.tensor(chat.echo_mask)
        tensors["echo_mask"] = echo_mask

    non_tensors = _conversation_columns(chats)
    if chats and chats[0].processor is not None:
        inputs = [{} if row_images is None else row_images.inputs for row_images in images]
        non_tensors["multi_modal_inputs"] = object_array(inputs)
    if has_grades:
        non_tensors["reward_outcome"] = object_array(chat.outcome for chat in chats)
    return DataProto.from_dict(tensors=tensors, non_tensors=non_tensors)


def _conversation_columns(chats: Sequence[Conversation]) -> dict[str, np.ndarray]:
    """Columns of objects [B]: attributes of conversations, and `rollout_id` if prompts have it."""
    columns = {"num_turns": object_array(len(chat.turns) for chat in chats)}
    for name in _CONVERSATION_COLUMNS:
        columns[name] = object_array(getattr(chat, name) for chat in chats)
    if all("rollout_id" in chat.sample.columns for chat in chats):
        columns["rollout_id"] = object_array(chat.sample.columns["rollout_id"] for chat in chats)
    return columns


def _prompt_columns(
    chats: Sequence[Conversation],
    images: Sequence[Images | None],
    limits: LengthLimits,
    pad_token_id: int,
) -> dict[str, torch.Tensor]:
    """Make the columns of the prompts, padded on the left, and the positions of all tokens.

    Args:
        chats: B conversations.
        images: images of each conversation, with the positions of its tokens; None: text.
        limits: P and T.
        pad_token_id: fills the prompts on the left and the responses on the right.

    Returns:
        `input_ids` and `attention_mask` [B, P]; `position_ids` [B, P + T], or [B, 3, P + T] of a
        vision-language model, 0 on the padding of prompts.
    """
    num_axes = chats[0].sample.num_axes if chats else 1
    length = limits.prompt_tokens + limits.response_tokens
    input_ids = torch.full((len(chats), limits.prompt_tokens), pad_token_id)
    attention_mask = torch.zeros_like(input_ids)
    positions = torch.zeros(len(chats), num_axes, length, dtype=torch.int64)
    for row, (chat, row_images) in enumerate(zip(chats, images, strict=True)):
        start = limits.prompt_tokens - len(chat.prompt_ids)
        if start < 0:
            raise RolloutError(
                f"prompt of row {row}",
                got=f"{len(chat.prompt_ids)} tokens",
                expected=f"at most {limits.prompt_tokens}",
            )
        input_ids[row, start:] = torch.tensor(chat.prompt_ids)
        attention_mask[row, start:] = 1
        if row_images is None:
            positions[row, :, start:] = torch.arange(length - start)
        else:
            # The images have the positions of prompt and response. Those of the padding follow.
            padding = [pad_token_id] * (length - start - row_images.position_ids.shape[1])
            positions[row, :, start:] = row_images.followed_by(padding).position_ids.cpu()
    return {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "position_ids": positions[:, 0] if num_axes == 1 else positions,
    }


def metrics_of(chats: Sequence[Conversation], seconds: float) -> dict[str, Metric]:
    """Metrics of a batch of conversations, under the names that `generate_sequences` uses.

    Args:
        chats: B conversations that have ended.
        seconds: time that the whole batch took.

    Returns:
        Metrics by name.
    """
    num_prompt_tokens = sum(len(chat.prompt_ids) for chat in chats)
    num_model_tokens = sum(sum(chat.mask) for chat in chats)
    num_other_tokens = sum(len(chat.mask) for chat in chats) - num_model_tokens
    num_turns = sum(len(chat.turns) for chat in chats)
    num_cut = sum(chat.finish_reason == "length" for chat in chats)
    num_failures = sum(bool(chat.failure) for chat in chats)
    total_log_prob = sum(sum(chat.log_probs) for chat in chats)
    log_prob = total_log_prob / max(num_model_tokens, 1)

    tool_responses = []
    tools_s = []  # time of each conversation in tools and user simulators, in seconds
    for chat in chats:
        # Calls of unread turns were made, too.
        for turn in (*chat.turns, *chat.unread):
            tool_responses += turn.tool_responses
        tools_s.append(sum(turn.seconds for turn in chat.turns if turn.role != "assistant"))
    num_refused = sum(response.is_refused for response in tool_responses)
    num_rows = len(chats)
    divisor = max(num_rows, 1)
    return {
        "rollout/num_prompt_tokens": Metric(num_prompt_tokens, "sum"),
        "rollout/num_response_tokens": Metric(num_model_tokens, "sum"),
        "rollout/num_tool_tokens": Metric(num_other_tokens, "sum"),
        "rollout/log_prob": Metric(log_prob, "mean", num_model_tokens),
        "rollout/length_share": Metric(num_cut / divisor, "mean", num_rows),
        "rollout/num_turns": Metric(num_turns / divisor, "mean", num_rows),
        "rollout/num_tool_calls": Metric(len(tool_responses), "sum"),
        "rollout/num_refused_calls": Metric(num_refused, "sum"),
        "rollout/num_failures": Metric(num_failures, "sum"),
        "timing_s/tools": Metric(max(tools_s, default=0.0), "max"),
        "timing_s/generate_sequences": Metric(seconds, "max"),
    }


def write_trace(directory: str, chats: Sequence[Conversation], meta_info: dict[str, Any]) -> None:
    """Append a line of JSON for each conversation that has ended to a trace file.

    Each process writes its own file for each step: `000012.HOST-PID.jsonl`, in validation
    `000012.validate.HOST-PID.jsonl`.

    Args:
        directory: `rollout.trace_dir`; made if it does not exist.
        chats: B conversations; those that have not ended are left out.
        meta_info: meta_info of the batch, with `global_steps` and `validate`.
    """
    step = int(meta_info.get("global_steps", 0))
    is_validation = bool(meta_info.get("validate", False))
    lines = []
    for chat in chats:
        # Without a reason it has not ended: an error of another conversation has cancelled it.
        if not chat.finish_reason:
            continue
        outcome = chat.outcome
        sample_index = chat.sample.columns.get("sample_index")
        record = {
            "uid": chat.sample.uid,
            "sample": None if sample_index is None else int(sample_index),
            "agent": chat.sample.agent,
            "finish_reason": chat.finish_reason,
            "failure": chat.failure,
            "num_turns": len(chat.turns),
            "num_prompt_tokens": len(chat.prompt_ids),
            "num_response_tokens": len(chat.token_ids),
            "num_model_tokens": sum(chat.mask),
            "seconds": round(sum(turn.seconds for turn in (*chat.turns, *chat.unread)), 6),
            "prompt": chat.encoder.decode(chat.prompt_ids, with_special=True),
            "prompt_token_ids": chat.prompt_ids,
            "turns": [_turn_record(turn) for turn in chat.turns],
            "unread": [_turn_record(turn) for turn in chat.unread],
            "tool_rewards": chat.tool_rewards,
            "turn_scores": chat.turn_scores,
            "score": outcome.score if outcome else None,
            "reward_error": outcome.error if outcome else None,
            "step": step,
            "is_validation": is_validation,
        }
        lines.append(json.dumps(jsonable(record), ensure_ascii=False, allow_nan=False) + "\n")
    if not lines:
        return
    folder = Path(directory).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    kind = ".validate" if is_validation else ""
    path = folder / f"{step:06d}{kind}.{socket.gethostname()}-{os.getpid()}.jsonl"
    with path.open("a", encoding="utf-8") as file:
        file.writelines(lines)


def _turn_record(turn: Turn) -> dict[str, Any]:
    """Make the trace's record of a turn, with the tool calls to which the turn responds."""
    record: dict[str, Any] = asdict(turn)
    record["seconds"] = round(turn.seconds, 6)
    calls = record.pop("tool_responses")
    for call in calls:
        # "answer" and "calls" are part of the trace's format, which readers of traces know.
        call["answer"] = call.pop("text")
        call["seconds"] = round(call["seconds"], 6)
    if calls:
        record["calls"] = calls
    return record
