# SPDX-License-Identifier: Apache-2.0
"""Leads the conversations of a batch, all at the same time.

    batch ──> a task for each row ──> loop: engine.generate / tools / user simulator ──> grade ──> batch, same rows
                     │                                                              │
                     └── a tool failed: this row ends, with the reason              └── while others are generated
                     └── the engine or the grader failed: all end, the error is raised

a task  consumes a row; waits for the engine, for tools and the grader; unblocked by each of them, or cancelled.

Legend: B conversations, P prompt positions (padded left), T response positions (padded right).
"""

import asyncio
import json
import logging
import os
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

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
    Limits,
    Sample,
    Turn,
    TurnEncoder,
)
from quadriga.rollout.agent_loop.guards import guarded, printed
from quadriga.rollout.agent_loop.interactions import load_interactions
from quadriga.rollout.agent_loop.loops import (
    REGISTRY,
    AgentLoop,
    Services,
    SingleTurnAgent,
    ToolAgent,
    load_loops,
)
from quadriga.rollout.agent_loop.mcp_servers import Server, server_tools
from quadriga.rollout.agent_loop.tool_calls import ToolFailedError, ToolThread
from quadriga.rollout.agent_loop.tools import ToolSpec, class_tools, function_tools
from quadriga.rollout.interface import Images, RolloutEngine, SamplingParams
from quadriga.rollout.sequences import images_of, sampling_of, sequence_seeds, with_responses
from quadriga.weight_sync.publish import require_version

logger = logging.getLogger(__name__)

Grade: TypeAlias = Callable[[dict[str, Any]], Awaitable[Outcome]]
MAX_FAILURES_IN_A_ROW = 64


class AgentLoopManager:
    """Loads tools, user simulators and loops once, and leads batch after batch.

    Args:
        prompt_length: P, `data.max_prompt_length`.
        response_length: T, `data.max_response_length`: everything after the prompt, tools included.
        template_kwargs: `data.apply_chat_template_kwargs`.
        log_dir: where MCP servers' standard error is written; None: a temporary folder.
        processor: of a vision-language model, whose later turns may show images, and whose rows then have
            `multi_modal_inputs`.
        vocabulary_size: rows of the model's embedding. None: enough for each token.

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
        processor: Any = None,
        vocabulary_size: int | None = None,
    ) -> None:
        self.config, self.tokenizer, self.processor = config, tokenizer, processor
        self.encoder = TurnEncoder(tokenizer, template_kwargs or {}, vocabulary_size)
        total, turns = config.max_model_len or prompt_length + response_length, config.multi_turn
        self.limits = Limits(
            prompt_length, response_length, total, turns.max_assistant_turns, turns.max_user_turns
        )
        self._thread, self._servers = ToolThread(), list[Server]()
        self._runner = asyncio.Runner()
        self._loops: dict[str, AgentLoop] = {}
        self._num_failed_in_a_row = 0
        try:
            if config.agent.agent_loop_path is not None:
                load_loops(config.agent.agent_loop_path)
            tools = load_tools(turns, self._thread, self._servers, log_dir)
            path = turns.interaction_config_path if turns.enable else None
            interactions = load_interactions(path) if path else {}
        except BaseException:
            self.close()
            raise
        self.services = Services(config, tools, interactions, self._thread)

    @property
    def description(self) -> str:
        """Which MCP servers there are and where their standard error is written; "" where there is none.

        It is the same in every process, each of which starts servers of its own.
        """
        folders = {
            server.log.parent for server in self._servers if server.entry.command is not None
        }
        logs = "".join(f"; standard error in {folder}/mcp-*.log" for folder in folders)
        return (
            f"MCP servers {', '.join(server.name for server in self._servers)}{logs}"
            if self._servers
            else ""
        )

    def generate(
        self, engine: RolloutEngine, prompts: DataProto, *, seed: int, grade: Grade | None = None
    ) -> DataProto:
        """A conversation for each row. Not from within an event loop: there, `lead`.
        Returns what `to_batch` does. meta_info: `metrics`, `weight_version`. A tool that fails ends its own row, whose
        `finish_reason` says why.

        Args:
            prompts: as `generate_sequences` takes them; non-tensors besides: `raw_prompt` where tools are offered;
                `agent_name`, `tools_kwargs`, `interaction_kwargs`, `data_source`, `reward_model`, `extra_info` where
                they exist.
            seed: `trainer.seed`; each sequence's own is derived from it.
            grade: grades a conversation that has ended, while others go on.

        Raises:
            RolloutError: the engine failed, or nothing but failed conversations.
            WeightSyncError: the engine's weights are not of the version that meta_info names.
        """
        return run_coroutine(self.lead(engine, prompts, seed=seed, grade=grade), self._runner.run)

    async def lead(
        self, engine: RolloutEngine, prompts: DataProto, *, seed: int, grade: Grade | None = None
    ) -> DataProto:
        """The same as `generate`, for callers with an event loop of their own."""
        if (expected := prompts.meta_info.get("weight_version")) is not None:
            require_version(engine, expected)
        started = time.perf_counter()
        params = sampling_of(prompts.meta_info, self.config, self.limits.response_tokens)
        samples = samples_of(prompts, self.config.agent.default_agent_loop)
        drawn = [SamplingParams(**params, seed=own) for own in sequence_seeds(prompts, seed)]
        chats = [
            Conversation(engine, self.encoder, *one, self.limits, processor=self.processor)
            for one in zip(samples, drawn, strict=True)
        ]
        outcomes: list[Outcome | None] = [None] * len(chats)
        wait = waiting(f"{len(chats)} conversations", lambda: _state(chats))
        try:
            with wait, guarded(self.config.agent.timeout_s):
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
        grades = None if grade is None and not any(outcomes) else outcomes
        batch = to_batch(chats, grades, self.limits, self.tokenizer.pad_token_id)
        batch.to(prompts.batch["input_ids"].device)
        metrics = metrics_of(chats, time.perf_counter() - started)
        batch.meta_info = {"metrics": metrics, "weight_version": engine.weight_version}
        return batch

    def close(self) -> None:
        """Ends the MCP servers, and the thread in which tools run."""
        close_tools(self._thread, self._servers)
        off_the_loop(self._runner.close)

    async def _lead_one(
        self, chat: Conversation, outcomes: list[Outcome | None], grade: Grade | None
    ) -> None:
        sample = chat.sample
        try:
            printed.set([0])
            if sample.agent not in self._loops:
                self._loops[sample.agent] = REGISTRY[sample.agent](self.services)
            loop = self._loops[sample.agent]
            # What these two call has limits of its own.
            is_ours = type(loop).run in (SingleTurnAgent.run, ToolAgent.run)
            async with nullcontext() if is_ours else chat.limited(self.config.agent.timeout_s):
                await _run(loop, chat)
            chat.finish(chat.finish_reason or "stop")
        except ConversationOver as over:
            chat.finish(over.reason)
        except ToolFailedError as failure:
            chat.finish(f"tool_error: {failure}"[:2000], failure=failure.details or str(failure))
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task and task.cancelling():
                raise
            if isinstance(error, QuadrigaError):
                error.add_note(
                    f"in the conversation of row {sample.row}, uid {sample.uid}, turn {len(chat.turns)}"
                )
                raise
            # A loop of a user's failed, or called sys.exit: it ends its own conversation, as a tool does.
            details = traceback_text(error)
            chat.finish(f"loop_error: {type(error).__name__}: {error}"[:2000], failure=details)
        outcomes[sample.row] = chat.outcome
        if grade is not None and chat.outcome is None:
            chat.activity = "being graded"
            outcomes[sample.row] = await grade(graded_row(chat))
        chat.activity = ""

    def _count_failures(self, chats: list[Conversation]) -> None:
        """Says how many failed and why; where all do, the run stops."""
        failed = [chat for chat in chats if chat.failure]
        for chat in chats:
            self._num_failed_in_a_row = self._num_failed_in_a_row + 1 if chat.failure else 0
        if not failed:
            return
        first = f"The first, row {failed[0].sample.row}: {failed[0].finish_reason}"
        if self._num_failed_in_a_row >= MAX_FAILURES_IN_A_ROW:
            got = f"{self._num_failed_in_a_row} conversations in a row that failed"
            raise RolloutError(
                "agent loop",
                got=got,
                expected="some that do not",
                fix=f"{first}\n{failed[0].failure}",
            )
        logger.warning("%d of %d conversations failed. %s", len(failed), len(chats), first)


def load_tools(
    turns: MultiTurnConfig, thread: ToolThread, servers: list[Server], log_dir: Path | None
) -> dict[str, ToolSpec]:
    """Load the tools of a configuration, by name; none where `multi_turn.enable` is false.

    Args:
        turns: `actor_rollout_ref.rollout.multi_turn`.
        thread: reaches MCP servers.
        servers: gets the servers that were started or reached; `close_tools` ends them.
        log_dir: as for `AgentLoopManager`.

    Raises:
        ConfigError: a file is not as it must be, or two tools have one name.
        RolloutError: a function cannot be a tool, or a server cannot be reached.
    """
    specs: list[ToolSpec] = []
    if turns.enable and turns.function_tool_path:
        specs += function_tools(turns.function_tool_path)
    if turns.enable and turns.tool_config_path:
        specs += class_tools(turns.tool_config_path)
        specs += server_tools(turns.tool_config_path, thread, servers, log_dir)
    tools: dict[str, ToolSpec] = {}
    for spec in specs:
        if spec.name in tools:
            where = "actor_rollout_ref.rollout.multi_turn, tools"
            raise ConfigError(
                where, got=f"two with the name {spec.name!r}", expected="a name for each"
            )
        tools[spec.name] = spec
    return tools


def close_tools(thread: ToolThread, servers: list[Server]) -> None:
    """End MCP servers, and the thread in which tools run."""
    while servers:
        thread.submit(servers.pop().close()).result()
    thread.close()


def offered_tools(config: RolloutConfig) -> tuple[tuple[dict[str, Any], ...], frozenset[str]]:
    """Schemas of the configured tools, and the names of the agent loops that offer them.

    MCP servers are started or reached to list their tools, and left again. Errors are those of
    `load_tools`.
    """
    if not config.multi_turn.enable:
        return (), frozenset()
    thread = ToolThread()
    servers: list[Server] = []
    with TemporaryDirectory(prefix="quadriga-") as log_dir:
        try:
            tools = load_tools(config.multi_turn, thread, servers, Path(log_dir))
        finally:
            close_tools(thread, servers)
    if tools and config.agent.agent_loop_path is not None:
        load_loops(config.agent.agent_loop_path)
    agents = frozenset(name for name, loop in REGISTRY.items() if loop.offers_tools)
    return tuple(spec.schema for spec in tools.values()), agents


async def _run(loop: AgentLoop, chat: Conversation) -> None:
    """Runs a user's loop. A process that it forked, and that comes back here, ends: there is one trainer."""
    pid = os.getpid()
    try:
        await loop.run(chat)
    finally:
        if os.getpid() != pid:
            os._exit(1)


def _state(chats: Sequence[Conversation]) -> str:
    """How many have ended, and what the others are at."""
    activities = Counter(chat.activity for chat in chats if chat.activity)
    left = ", ".join(f"{count} {activity}" for activity, count in activities.most_common(6))
    return f"{len(chats) - activities.total()} ended, {left}"


def samples_of(prompts: DataProto, default_agent: str) -> list[Sample]:
    """The rows of a batch with `input_ids`, `attention_mask`, `position_ids` [B, P] or [B, 3, P]."""
    batch, images = prompts.batch, images_of(prompts)
    num_axes = 1 if batch["position_ids"].dim() == 2 else batch["position_ids"].shape[1]
    samples = []
    for row, (ids, mask) in enumerate(
        zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ):
        own = {name: column[row] for name, column in prompts.non_tensor_batch.items()}
        uid, agent = str(own.get("uid", f"row {row}")), own.get("agent_name") or default_agent
        messages = (
            None
            if own.get("raw_prompt") is None
            else [dict(message) for message in own["raw_prompt"]]
        )
        samples.append(
            Sample(row, uid, ids[mask.bool()].tolist(), messages, own, agent, images[row], num_axes)
        )
    return samples


def graded_row(chat: Conversation) -> dict[str, Any]:
    """What a score function reads of a conversation that has ended; `extra_info` also says how it went."""
    columns = chat.sample.columns
    row = {
        "data_source": columns.get("data_source"),
        "solution_str": chat.encoder.text(chat.token_ids, with_special=False),
        "solution_with_special_tokens": chat.encoder.text(chat.token_ids, with_special=True),
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
    chats: Sequence[Conversation],
    outcomes: Sequence[Outcome | None] | None,
    limits: Limits,
    pad_token_id: int,
) -> DataProto:
    """The columns of `generate_sequences`, and what became of each conversation.
    Returns batch `prompts` [B, P], `responses`, `response_mask`, `rollout_log_probs`, `token_versions` [B, T],
    `input_ids`, `attention_mask` [B, P + T], `position_ids` [B, P + T] or [B, 3, P + T]; non-tensors `num_turns`,
    `finish_reason`, `tool_rewards`, `turn_scores` and, if graded, `reward_outcome`; with a processor
    `multi_modal_inputs`. `response_mask` and log-probabilities are 0 on tokens of tools and users.

    Args:
        chats: B conversations that have ended.
        outcomes: their grades; None, or None of one: graded later.
        limits: P and T.
        pad_token_id: fills both sides.
    """
    shown = [chat.images for chat in chats]
    prompts, position_ids = _prompts_of(chats, shown, limits, pad_token_id)
    responses = [(chat.token_ids, chat.mask, chat.log_probs) for chat in chats]
    routes = [chat.routes for chat in chats]
    versions = [chat.versions for chat in chats]
    tensors = with_responses(
        prompts, responses, limits.response_tokens, pad_token_id, routes, versions
    )
    tensors["position_ids"] = position_ids
    non_tensors = {
        "num_turns": object_array(len(chat.turns) for chat in chats),
        "finish_reason": object_array(chat.finish_reason for chat in chats),
        "tool_rewards": object_array(chat.tool_rewards for chat in chats),
        "turn_scores": object_array(chat.turn_scores for chat in chats),
        "solution_messages": object_array(chat.solution_messages for chat in chats),
    }
    if chats and chats[0].processor is not None:
        non_tensors["multi_modal_inputs"] = object_array(
            {} if one is None else one.inputs for one in shown
        )
    if outcomes is not None:
        non_tensors["reward_outcome"] = object_array(outcomes)
    return DataProto.from_dict(tensors=tensors, non_tensors=non_tensors)


def _prompts_of(
    chats: Sequence[Conversation], shown: Sequence[Images | None], limits: Limits, pad_token_id: int
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The columns of prompts, as `with_responses` takes them, and the positions of prompts and responses."""
    size, num_axes, prompt_length = (
        len(chats),
        chats[0].sample.num_axes if chats else 1,
        limits.prompt_tokens,
    )
    input_ids = torch.full((size, prompt_length), pad_token_id, dtype=torch.int64)
    attention_mask = torch.zeros_like(input_ids)
    positions = torch.zeros(
        size, num_axes, prompt_length + limits.response_tokens, dtype=torch.int64
    )
    for row, (chat, images) in enumerate(zip(chats, shown, strict=True)):
        start = prompt_length - len(chat.prompt_ids)
        if start < 0:
            got = f"{len(chat.prompt_ids)} tokens"
            raise RolloutError(f"prompt of row {row}", got=got, expected=f"at most {prompt_length}")
        input_ids[row, start:] = torch.tensor(chat.prompt_ids)
        attention_mask[row, start:] = 1
        own = torch.arange(positions.shape[2] - start)
        if images is not None:
            own = images.followed_by(
                [pad_token_id] * (len(own) - images.position_ids.shape[1])
            ).position_ids.cpu()
        positions[row, :, start:] = own
    position_ids = positions[:, 0] if num_axes == 1 else positions
    of_prompts = position_ids[..., :prompt_length]
    return {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "position_ids": of_prompts,
    }, position_ids


def metrics_of(chats: Sequence[Conversation], seconds: float) -> dict[str, Metric]:
    """Metrics of a batch; the first ones have the names that `generate_sequences` gives them."""
    num_model = sum(sum(chat.mask) for chat in chats)
    num_other = sum(len(chat.mask) for chat in chats) - num_model
    num_rows, rows = len(chats), max(len(chats), 1)
    turns = [turn for chat in chats for turn in (*chat.turns, *chat.unread)]
    responses = [response for turn in turns for response in turn.tool_responses]
    tools_s = [
        sum(turn.seconds for turn in chat.turns if turn.role != "assistant") for chat in chats
    ]
    return {
        "rollout/num_prompt_tokens": Metric(sum(len(chat.prompt_ids) for chat in chats), "sum"),
        "rollout/num_response_tokens": Metric(num_model, "sum"),
        "rollout/num_tool_tokens": Metric(num_other, "sum"),
        "rollout/log_prob": Metric(
            sum(sum(chat.log_probs) for chat in chats) / max(num_model, 1), "mean", num_model
        ),
        "rollout/length_share": Metric(
            sum(chat.finish_reason == "length" for chat in chats) / rows, "mean", num_rows
        ),
        "rollout/num_turns": Metric(
            sum(len(chat.turns) for chat in chats) / rows, "mean", num_rows
        ),
        "rollout/num_tool_calls": Metric(len(responses), "sum"),
        "rollout/num_refused_calls": Metric(
            sum(response.is_refused for response in responses), "sum"
        ),
        "rollout/num_failures": Metric(sum(bool(chat.failure) for chat in chats), "sum"),
        "timing_s/tools": Metric(max(tools_s, default=0.0), "max"),
        "timing_s/generate_sequences": Metric(seconds, "max"),
    }


def write_trace(
    directory: str,
    chats: Sequence[Conversation],
    outcomes: Sequence[Outcome | None],
    meta_info: dict[str, Any],
) -> None:
    """Appends a JSON record, one a line, for each conversation that has ended, with its grade where there is one.

    Each process writes files of its own, one for each step: `000012.HOST-PID.jsonl`, in validation
    `000012.validate.HOST-PID.jsonl`.
    """
    step, is_validation = (
        int(meta_info.get("global_steps", 0)),
        bool(meta_info.get("validate", False)),
    )
    lines = []
    for chat, outcome in zip(chats, outcomes, strict=True):
        if not chat.finish_reason:
            continue
        sample = chat.sample.columns.get("sample_index")
        record = {
            "uid": chat.sample.uid,
            "sample": None if sample is None else int(sample),
            "agent": chat.sample.agent,
            "finish_reason": chat.finish_reason,
            "failure": chat.failure,
            "num_turns": len(chat.turns),
            "num_prompt_tokens": len(chat.prompt_ids),
            "num_response_tokens": len(chat.token_ids),
            "num_model_tokens": sum(chat.mask),
            "seconds": round(sum(turn.seconds for turn in (*chat.turns, *chat.unread)), 6),
            "prompt": chat.encoder.text(chat.prompt_ids, with_special=True),
            "prompt_token_ids": chat.prompt_ids,
            "turns": [_turn(turn) for turn in chat.turns],
            "unread": [_turn(turn) for turn in chat.unread],
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
    folder, kind = Path(directory).expanduser(), ".validate" if is_validation else ""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{step:06d}{kind}.{socket.gethostname()}-{os.getpid()}.jsonl").open(
        "a", encoding="utf-8"
    ) as file:
        file.writelines(lines)


def _turn(turn: Turn) -> dict[str, Any]:
    record: dict[str, Any] = asdict(turn) | {"seconds": round(turn.seconds, 6)}
    calls = record.pop("tool_responses")
    for call in calls:
        call |= {"answer": call.pop("text"), "seconds": round(call["seconds"], 6)}
    return {**record, "calls": calls} if calls else record
