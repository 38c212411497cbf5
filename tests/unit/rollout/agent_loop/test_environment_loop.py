# SPDX-License-Identifier: Apache-2.0
"""The agent loop of environments: what the model reads, and how its turns are scored."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from quadriga.config.environment import EnvironmentConfig
from quadriga.config.rollout import RolloutConfig
from quadriga.errors import RolloutError
from quadriga.protocol import DataProto
from quadriga.rollout.agent_loop import AgentLoopManager
from quadriga.rollout.environments.pool import EnvironmentPool

CLASSES = '''
class Account:
    def __init__(self):
        self.reward = 0.0

    def reset(self, **row):
        self.balance = row.get("start", 0)
        return f"You have {self.balance}."

    def pay_in(self, amount: int) -> str:
        """Pay in.

        Args:
            amount: how much.
        """
        if amount > 5:
            raise ValueError("at most 5")
        self.balance += amount
        self.reward = float(self.balance == 5)
        return f"You have {self.balance}."


class Guess:
    def reset(self, seed=None):
        self.turn = 0
        return "Guess."

    def step(self, action):
        self.turn += 1
        info = {"state": f"s{self.turn}", "speed": 2}
        return f"No, not {action}.", 0.25 * self.turn, self.turn == 2, False, info


class Turns:
    """Agents act in turn, and each is paid for what it says."""

    def reset(self, seed=None):
        self.turn = 0
        return "Begin."

    def step(self, action):
        agent = self.turn % 2
        self.turn += 1
        info = {"agent": self.turn % 2, "is_invalid": action == "no"}
        return f"{action}!", {agent: float(action)} if action != "no" else {}, False, info


class Unpaid(Account):
    def __init__(self):
        pass
'''
PAY = '<tool_call>{"name": "pay_in", "arguments": {"amount": %s}}</tool_call>'


@pytest.fixture
def play(tokenizer: Any, tmp_path: Path) -> Any:
    """`play(name, engine, prompts, **settings)`: a batch of conversations in the environment."""
    path = tmp_path / "classes.py"
    path.write_text(CLASSES)

    def run(
        name: str,
        engine: Any,
        prompts: DataProto,
        echo_roles: Any = (),
        max_turns: int | None = None,
        **settings: Any,
    ) -> DataProto:
        environment = EnvironmentConfig(name=f"{path}:{name}", num_processes=1, **settings)
        agent = {"default_agent_loop": "environment"}
        turns = {"enable": True, "max_assistant_turns": max_turns}
        config = RolloutConfig(mode="async", agent=agent, multi_turn=turns)
        with closing(
            AgentLoopManager(
                config,
                tokenizer,
                prompt_length=1000,
                response_length=400,
                environments=EnvironmentPool(environment),
                echo_roles=echo_roles,
            )
        ) as manager:
            return manager.generate(engine, prompts, seed=1)

    return run


def test_replies_are_actions(play: Any, recorder: Any, make_prompts: Any, tokenizer: Any) -> None:
    engine = recorder(["<think>\n7?</think> 4", "2"])
    prompts = make_prompts(["0"], extra_info=[{"env_seed": 6, "is_env_seed": True}])
    batch = play("Guess", engine, prompts, system_prompt="Be quick.")
    first, second = (tokenizer.decode(prompt) for prompt, _, _ in engine.seen)
    assert first == (
        "<|im_start|>system\nBe quick.<|im_end|>\n"
        "<|im_start|>user\nGuess.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert second.endswith("<|im_start|>user\nNo, not 4.<|im_end|>\n<|im_start|>assistant\n")
    columns = batch.non_tensor_batch
    assert columns["turn_scores"][0] == [0.25, 0.5]
    assert columns["turn_rewards"][0] == [0.25, 0.5]
    assert columns["turn_states"][0] == ["Guess.", "s1"]
    outcome = columns["reward_outcome"][0]
    assert outcome.score == 0.75
    assert outcome.extra == {"env_turns": 2, "env_invalid": 0, "env_speed": 2.0}


def test_observations_are_marked(
    play: Any, recorder: Any, make_prompts: Any, tokenizer: Any
) -> None:
    """Those after the first reply, and only if they are learned."""
    prompts = make_prompts(["0"], extra_info=[{"env_seed": 6, "is_env_seed": True}])
    batch = play("Guess", recorder(["4", "2"]), prompts, echo_roles=["user"]).batch
    marked = batch["responses"][0][batch["echo_mask"][0].bool()]
    assert tokenizer.decode(marked) == "No, not 4."
    assert not (batch["echo_mask"] * batch["response_mask"]).any()
    assert "echo_mask" not in play("Guess", recorder(["4", "2"]), prompts).batch.keys()


def test_calls_are_made_until_a_reply_has_none(
    play: Any, recorder: Any, make_prompts: Any, tokenizer: Any
) -> None:
    """The row of a data file reaches `reset`, and its prompt stands before the observation."""
    engine = recorder([PAY % 9, PAY % 4, "Done."])
    batch = play("Account", engine, make_prompts(["Pay in until you have 5."], start=[1]))
    first, second, third = (tokenizer.decode(prompt) for prompt, _, _ in engine.seen)
    assert '"name": "pay_in"' in first
    assert "user\nPay in until you have 5.\n\nYou have 1.<|im_end|>" in first
    assert "<|im_start|>tool\nError: at most 5<|im_end|>" in second
    assert "<|im_start|>tool\nYou have 5.<|im_end|>" in third
    outcome = batch.non_tensor_batch["reward_outcome"][0]
    assert outcome.score == 1.0
    assert outcome.extra == {"env_turns": 3, "env_invalid": 1}
    assert batch.non_tensor_batch["turn_scores"][0] == [0.0, 0.0, 1.0]


def test_an_action_without_effect_costs_the_penalty(
    play: Any, recorder: Any, make_prompts: Any
) -> None:
    engine = recorder([PAY % 9, PAY % 5, "Done."])
    prompts = make_prompts(["Pay in until you have 5."])
    columns = play("Account", engine, prompts, invalid_penalty=0.25).non_tensor_batch
    assert columns["reward_outcome"][0].score == 0.75
    assert columns["turn_scores"][0] == [-0.25, 0.0, 1.0]


def test_all_agents_of_an_episode_are_trained(
    play: Any, recorder: Any, make_prompts: Any, tokenizer: Any
) -> None:
    """Each has a row with its own turns, its role and what it was paid; the rows are one rollout."""
    engine = recorder(["1", "2", "no", "4"])
    facts = {"extra_info": [{"env_seed": 6, "is_env_seed": True}], "rollout_id": ["p/0"]}
    batch = play(
        "Turns",
        engine,
        make_prompts(["0"], **facts),
        agents=["policy", "policy"],
        train_together=True,
        roles=["first", "second"],
        invalid_penalty=0.5,
        max_turns=2,
    )
    columns = batch.non_tensor_batch
    assert list(columns["agent"]) == ["first", "second"]
    assert list(columns["rollout_id"]) == ["p/0", "p/0"]
    assert [outcome.score for outcome in columns["reward_outcome"]] == [0.5, 6.0]
    assert list(columns["turn_rewards"]) == [[1.0, -0.5], [2.0, 4.0]]
    responses = tokenizer.batch_decode(batch.batch["responses"], skip_special_tokens=True)
    assert responses == ["1\nuser\n2!\nassistant\nno", "2\nuser\nno!\nassistant\n4"]


def test_an_episode_that_nothing_grades_is_an_error(
    play: Any, recorder: Any, make_prompts: Any
) -> None:
    engine = recorder(["Done."])
    with pytest.raises(RolloutError, match="got an episode without rewards"):
        play("Unpaid", engine, make_prompts(["Pay in."]))
