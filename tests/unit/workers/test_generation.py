# SPDX-License-Identifier: Apache-2.0
"""What is known of prompts before they are read: the tokenizer and the embedding, tools and agent loops."""

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from quadriga.config import Config
from quadriga.errors import DataError
from quadriga.workers.generation import embedding_limit, prompt_context
from tests.unit.workers.conftest import VOCABULARY

TOOLS = """
from quadriga.rollout.agent_loop import function_tool

@function_tool
def add(a: int, b: int) -> int:
    'Adds.'
    return a + b
"""
LOOPS = """
from quadriga.rollout.agent_loop import AgentLoop, register
from quadriga.rollout.agent_loop.loops import ToolAgent

@register("own_tools")
class OwnTools(ToolAgent):
    pass

@register("own_turns")
class OwnTurns(AgentLoop):
    async def run(self, chat):
        await chat.generate()
"""


@pytest.mark.parametrize(
    ("added", "limit", "told"),
    [
        ({}, None, ""),
        ({"pad_token": "[PAD]"}, VOCABULARY, ""),
        (
            {"pad_token": "[PAD]", "mask_token": "[MASK]"},
            VOCABULARY,
            "1 tokens have no row in the model's embedding",
        ),
    ],
)
def test_a_tokenizer_that_is_larger_than_the_model(
    config: Config,
    tokenizer: PreTrainedTokenizerFast,
    capsys: pytest.CaptureFixture,
    added: dict,
    limit,
    told: str,
) -> None:
    """Padding alone is not worth a word."""
    tokenizer.add_special_tokens(added)
    assert embedding_limit(config, tokenizer) == limit
    said = capsys.readouterr().out
    assert told in said and bool(told) == bool(said)


def test_a_stop_token_beyond_the_embedding(
    config: Config, tokenizer: PreTrainedTokenizerFast
) -> None:
    tokenizer.add_special_tokens({"eos_token": "[END]"})
    with pytest.raises(
        DataError, match=f"got the end-of-sequence token id {VOCABULARY}, expected an id below"
    ):
        embedding_limit(config, tokenizer)


def test_agent_loops_that_offer_tools(
    config: Config, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """That of the package, and a subclass of it; not a loop of the user's that never asks for tools."""
    (tmp_path / "tools.py").write_text(TOOLS)
    (tmp_path / "loops.py").write_text(LOOPS)
    rollout = config.actor_rollout_ref.rollout
    turns = rollout.multi_turn.model_copy(
        update={"enable": True, "function_tool_path": str(tmp_path / "tools.py")}
    )
    agent = rollout.agent.model_copy(update={"agent_loop_path": str(tmp_path / "loops.py")})
    changed = rollout.model_copy(update={"multi_turn": turns, "agent": agent})
    models = config.actor_rollout_ref.model_copy(update={"rollout": changed})
    context = prompt_context(config.model_copy(update={"actor_rollout_ref": models}), tokenizer)
    rows = [{"agent_name": name} for name in ("tool_agent", "own_tools", "own_turns", None)]
    names = [[tool["function"]["name"] for tool in context.tools_of(row)] for row in rows]
    assert names == [["add"], ["add"], [], []]
    assert prompt_context(config, tokenizer).tools == ()
