# SPDX-License-Identifier: Apache-2.0
"""The agent loop of environments: the policy plays an episode.

    reset ──> observation ──> model ──> step ──> observation ──> model ──> step ──> is_done     actions are texts
    reset ──> observation ──> model ──> calls ──> results ──> model, without a call             actions are tools

The score is the sum of the rewards of all steps. For each turn of the model, the conversation has the reward
(`turn_scores`) and the state before the turn (`turn_states`: `info["state"]`, or else the observation).

If several agents are trained, an episode trains one of them, its seat. All responses to a row have the same seat;
rows take the seats in turn. With `env.train_together` an episode trains all of them, each in a row of its own.
"""

import time
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from quadriga.config.environment import EnvironmentConfig
from quadriga.errors import RolloutError
from quadriga.rewards.outcome import Outcome, failure
from quadriga.rollout.agent_loop.conversation import Conversation, ConversationOver, Sample, Turn
from quadriga.rollout.agent_loop.loops import (
    AgentLoop,
    Services,
    parser_of,
    register,
    tool_messages,
)
from quadriga.rollout.agent_loop.parsers import ToolCall
from quadriga.rollout.agent_loop.tool_calls import ToolResult
from quadriga.rollout.environments.interface import Step
from quadriga.rollout.environments.players import (
    Player,
    PolicyPlayer,
    ScriptedPlayer,
    ServerPlayer,
    player_seed,
)
from quadriga.rollout.environments.pool import EnvironmentFailedError, EnvironmentPool, Episode
from quadriga.rollout.sequences import derive_seed

# Columns that the data loader adds to those of the data file. Environments do not get them.
_BATCH_COLUMNS = frozenset(
    {
        "uid",
        "item",
        "source_row",
        "sample_index",
        "raw_prompt_ids",
        "multi_modal_data",
        "multi_modal_inputs",
        "raw_prompt",
        "full_prompts",
        "tools_kwargs",
        "interaction_kwargs",
    }
)


@register("environment")
class EnvironmentAgent(AgentLoop):
    """Agent loop that plays an episode of `env.name` in each conversation."""

    def __init__(self, services: Services) -> None:
        super().__init__(services)
        if services.environments is None:
            fix = "Set env=NAME: `quadriga env list` has names."
            raise RolloutError("agent loop environment", got="env.name=null", fix=fix)
        self._pool: EnvironmentPool = services.environments
        self._schemas = self._pool.description.schemas
        # An environment without tools takes texts, which need no parser.
        if self._schemas:
            self._parser = parser_of(services.config.multi_turn.format)
            num_agents = self._pool.config.num_agents
            if num_agents > 1:
                got = f"{num_agents} agents, of an environment whose actions are tools"
                raise RolloutError("env.agents", got, expected="one agent")

    async def run(self, chat: Conversation) -> None:
        """Play the episode of a conversation's row, and score it."""
        seed = episode_seed_of(chat.sample)
        # A seat is an agent that can be trained.
        config = self._pool.config
        seats = config.seats
        if not config.train_together:
            # All responses to a row play the same seat, so that they can be compared. The last bit
            # of the seed tells training from validation, so `// 2` keeps it out of the choice.
            seats = [seats[seed // 2 % len(seats)]]
        plays: Plays = {}
        for seat in seats:
            # The first agent has the conversation of the row, each other one a further one.
            plays[seat] = Play(chat.another() if plays else chat, seat, config)
        async with self._pool.open(seed, row_of(chat.sample)) as episode:
            try:
                try:
                    step = await episode.reset()
                    _record(plays, step)
                    if self._schemas:
                        chat.begin(self._first_messages(chat, step.text), self._schemas)
                        await self._call_tools(plays[seats[0]], episode)
                    else:
                        await self._take_turns(chat, plays, episode, step)
                except ConversationOver as over:
                    # A limit ends the episode for all agents. The part before the limit is scored.
                    # The agent that reached the limit has its own reason already.
                    for play in plays.values():
                        play.chat.finish_reason = play.chat.finish_reason or over.reason
                _record(plays, await episode.finish())
            except EnvironmentFailedError as error:
                # The failure is the grade, so that nothing else grades the conversation.
                chat.outcome = failure(error.kind, error.details or str(error))
                raise
        for play in plays.values():
            play.grade(is_graded_elsewhere=self._pool.is_graded_elsewhere)

    def _first_messages(self, chat: Conversation, observation: str) -> list[dict[str, Any]]:
        """Messages before the first turn: system prompt, messages of the row, first observation.

        If the row ends with a message of the user, the observation is appended to this message.

        Args:
            chat: the conversation.
            observation: the first observation.

        Raises:
            RolloutError: there is no text at all.
        """
        messages = []
        if self._pool.config.system_prompt is not None:
            messages.append({"role": "system", "content": self._pool.config.system_prompt})
        if not is_seed(chat.sample):
            messages += chat.sample.messages or []
        text = chat.encoder.escape_text(observation)
        last = messages[-1] if messages else {}
        # Many templates take no two messages of the user in a row.
        if last.get("role") == "user" and isinstance(last["content"], str):
            messages[-1] = {**last, "content": f"{last['content']}\n\n{text}".strip()}
        elif text:
            messages.append({"role": "user", "content": text})
        if not messages:
            raise RolloutError(
                f"environment {self._pool.config.name}",
                got="no text from reset",
                expected="an observation that the model can answer",
                fix="Set env.system_prompt, or data.train_files to a file with prompts.",
            )
        return messages

    async def _take_turns(
        self, chat: Conversation, plays: "Plays", episode: Episode, step: Step
    ) -> None:
        """Ask the agents for actions in turn until the episode is over.

        Args:
            chat: conversation of the row.
            plays: the trained agents.
            episode: the episode.
            step: the first step of the episode, from `reset`.
        """
        players = self._make_players(chat, plays, episode)
        while not step.is_done:
            chat.activity = "in the environment"
            agent = step.agent
            step = await episode.step(await players[agent].act(step.text))
            _record(plays, step, agent)

    def _make_players(self, chat: Conversation, plays: "Plays", episode: Episode) -> list[Player]:
        """Make the player of each agent, as `env.agents` names them.

        Args:
            chat: conversation of the row.
            plays: the trained agents.
            episode: the episode.
        """
        prompt = self._first_messages
        players: list[Player] = []
        # A text of `env.agents` is "policy", the address of a server, or a script.
        for number, kind in enumerate(self._pool.config.agents or ["policy"]):
            name = f"agent {number}"
            seed = player_seed(chat.sampling.seed, number)
            if number in plays:
                play = plays[number]
                players.append(PolicyPlayer(play.chat, prompt, play.generate, name))
            elif kind == "policy":
                # Not `chat.another`: this agent is not trained, so its conversation is no row.
                sampling = replace(chat.sampling, seed=seed)
                other = Conversation(chat.engine, chat.encoder, chat.sample, sampling, chat.limits)
                players.append(PolicyPlayer(other, prompt, other.generate, name))
            elif kind.startswith(("http://", "https://")):
                players.append(ServerPlayer(kind, chat, self._pool.config.system_prompt, name))
            else:
                players.append(ScriptedPlayer(episode, kind, seed))
        return players

    async def _call_tools(self, play: "Play", episode: Episode) -> None:
        """Generate turns and make their calls of tools.

        It ends with a turn without a call, or when the episode is over.

        Args:
            play: the trained agent.
            episode: the episode.
        """
        chat = play.chat
        config = self.services.config.multi_turn
        functions = [schema["function"] for schema in self._schemas]
        parameters = {function["name"]: function["parameters"] for function in functions}
        while not play.is_done:
            turn = await play.generate()
            calls = self._parser(turn.text, parameters)
            if not calls:
                return
            chat.activity = "in the environment"
            started = time.perf_counter()
            # One after the other, because the calls act on the same environment. Calls over the
            # limit are not made, and get no response.
            responses = []
            for call in calls[: config.max_parallel_calls]:
                if not play.is_done:
                    responses.append(await self._call(play, episode, call))
            if not play.is_done:
                chat.append(
                    tool_messages(chat, responses),
                    tool_responses=responses,
                    seconds=time.perf_counter() - started,
                )

    async def _call(self, play: "Play", episode: Episode, call: ToolCall) -> ToolResult:
        """Make one call of a tool, and record its step.

        A call that cannot be read is refused here, and does not reach the environment.

        Args:
            play: the trained agent.
            episode: the episode.
            call: the call.
        """
        started = time.perf_counter()
        step = Step(f"Error: {call.problem}", info={"is_invalid": True})
        if not call.problem:
            step = await episode.step({"name": call.name, "arguments": call.arguments})
        # With tools there is one agent, whose number is 0.
        play.record(step, 0)
        return ToolResult(
            name=call.name,
            arguments=call.arguments_text,
            text=step.text,
            num_chars=len(step.text),
            seconds=time.perf_counter() - started,
            is_refused=bool(step.info.get("is_invalid")),
        )


@dataclass
class Play:
    """Records the rewards and states of one trained agent in an episode."""

    chat: Conversation  # conversation of the agent
    agent: int  # number of the agent
    config: EnvironmentConfig  # the section `env`
    is_done: bool = False  # whether the episode is over
    score: float = 0.0  # sum of all rewards of the agent
    rewards: list[float] = field(default_factory=list)  # reward of each turn of the agent
    has_rewards: bool = False  # whether the environment has scored a step
    has_unscored_step: bool = False  # whether the agent's reward of a step was None
    num_invalid: int = 0  # actions of the agent without effect
    info: dict[str, Any] = field(default_factory=dict)  # latest value of each entry of `Step.info`
    state: str = ""  # state in which the agent acts next

    async def generate(self) -> Turn:
        """Generate the agent's next turn, whose reward is 0 until `record` adds to it."""
        self.chat.states[len(self.rewards)] = self.state
        try:
            return await self.chat.generate()
        finally:
            # Also if `generate` raises, because a turn that the engine cut is in the conversation.
            num_missing = self.chat.num_assistant_turns - len(self.rewards)
            self.rewards += [0.0] * num_missing

    def record(self, step: Step, actor: int | None = None) -> None:
        """Record a step, and add the agent's reward for the step to the agent's last turn.

        Args:
            step: response of the environment.
            actor: number of the agent that acted. None: `reset` or `finish`.
        """
        # Three agents may differ: `self.agent`, which this play records; `actor`, which has acted;
        # and `step.agent`, which acts next.
        if step.rewards:
            # An agent without an entry has the reward 0. None means that the step was not scored.
            reward = step.rewards.get(self.agent, 0.0)
            if reward is None:
                self.has_unscored_step = True
            else:
                self.has_rewards = True
                self._add_reward(reward)
        self.is_done = self.is_done or step.is_done
        self.info |= step.info
        if actor == self.agent and step.info.get("is_invalid"):
            self.num_invalid += 1
            self._add_reward(-self.config.invalid_penalty)
        if step.agent == self.agent:
            self.state = str(step.info.get("state", step.text))

    def _add_reward(self, reward: float) -> None:
        """Add a reward to the score and to the agent's last turn, if it has one."""
        self.score += reward
        # An agent may be rewarded before its first turn, when another one loses.
        if self.rewards:
            self.rewards[-1] += reward

    def grade(self, *, is_graded_elsewhere: bool) -> None:
        """Write the grade of the episode, the sum of the agent's rewards, to the conversation.

        Without rewards there is no grade if a score function or a reward model gives one, and else
        the grade is 0.

        Args:
            is_graded_elsewhere: whether a score function or a reward model is configured, which
                then grades an episode without rewards.

        Raises:
            RolloutError: the environment has not scored the episode, and nothing else will.
        """
        chat = self.chat
        chat.turn_scores = list(self.rewards)
        chat.turn_rewards = list(self.rewards)
        chat.extra_fields |= {"num_invalid": self.num_invalid, "agent": self.agent}
        chat.agent = self.config.role_of(self.agent)
        if not self.has_rewards and is_graded_elsewhere:
            return
        # An environment may score only the last step. If a limit has cut the episode off before
        # that, the grade is 0.
        was_cut_off = chat.finish_reason and not self.is_done
        if not self.has_rewards and self.has_unscored_step and not was_cut_off:
            raise RolloutError(
                "environment",
                got="an episode without rewards",
                expected="get_reward(), an attribute `reward`, or rewards of step",
                fix="Let the environment reward the episode, or set custom_reward_function.path to"
                " a file with a score function.",
            )
        extra: dict[str, Any] = {"env_turns": len(self.rewards), "env_invalid": self.num_invalid}
        wins = self.info.get("wins")
        if isinstance(wins, list):
            extra["env_won"] = float(self.agent in wins)
        for name, value in self.info.items():
            if isinstance(value, bool | int | float) and name not in ("is_invalid", "agent"):
                extra[f"env_{name}"] = float(value)
        chat.outcome = Outcome(self.score, extra, "", "graded")


# The trained agents of an episode, by number of the agent. Each has its own conversation.
Plays: TypeAlias = dict[int, Play]


def _record(plays: Plays, step: Step, actor: int | None = None) -> None:
    """Record a step for all trained agents.

    Args:
        plays: the trained agents.
        step: the environment's response.
        actor: number of the agent that acted; see `Play.record`.
    """
    for play in plays.values():
        play.record(step, actor)


def is_seed(sample: Sample) -> bool:
    """Whether a row is only a seed for the environment, with a placeholder instead of a prompt."""
    return bool((sample.columns.get("extra_info") or {}).get("is_env_seed"))


def episode_seed_of(sample: Sample) -> int:
    """Seed of a row's episode, which all responses to the row share.

    It is `extra_info.env_seed` of the row, or else a hash of the row's prompt and `index`.
    """
    extra_info = sample.columns.get("extra_info") or {}
    if "env_seed" in extra_info:
        return int(extra_info["env_seed"])
    return derive_seed(sample.prompt_ids, sample.columns.get("index")) % 2**31


def row_of(sample: Sample) -> dict[str, Any]:
    """Columns of a row for `reset`. There are none if the row is only a seed."""
    if is_seed(sample):
        return {}
    row = {name: value for name, value in sample.columns.items() if name not in _BATCH_COLUMNS}
    return {**row, "prompt": sample.messages or []}
