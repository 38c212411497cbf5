# SPDX-License-Identifier: Apache-2.0
"""What every engine of this process shares: requests awaited together form one batch, and sleep is sleep."""

import asyncio

import pytest

from quadriga.errors import RolloutError
from quadriga.rollout import Completion, SamplingParams, ScriptedEngine


class Counting(ScriptedEngine):
    """Remembers the sizes of its batches."""

    def generate_batch(
        self, prompts, sampling: list[SamplingParams], images=None
    ) -> list[Completion]:
        self.sizes = [*getattr(self, "sizes", []), len(prompts)]
        return super().generate_batch(prompts, sampling, images)


async def _ask(engine: ScriptedEngine, prompts: list[list[int]]) -> list[list[int]]:
    params = SamplingParams(max_tokens=4)
    completions = await asyncio.gather(*(engine.generate(prompt, params) for prompt in prompts))
    return [completion.token_ids for completion in completions]


def test_requests_awaited_together_are_generated_together() -> None:
    """Three at once are one batch of three; those of a later turn are another."""
    engine = Counting(lambda prompt: prompt + prompt)

    async def turns() -> None:
        assert await _ask(engine, [[1], [2], [3]]) == [[1, 1], [2, 2], [3, 3]]
        assert await _ask(engine, [[4]]) == [[4, 4]]

    asyncio.run(turns())
    assert engine.sizes == [3, 1]


def test_an_error_reaches_everyone_who_waits() -> None:
    """It is raised where each of them awaits."""
    engine = ScriptedEngine(lambda prompt: [])

    async def ask_all() -> list[object]:
        params = SamplingParams(max_tokens=4)
        return await asyncio.gather(
            *(engine.generate([1], params) for _ in range(2)), return_exceptions=True
        )

    errors = asyncio.run(ask_all())
    assert [type(error) for error in errors] == [RolloutError, RolloutError]


def test_sleep_and_close() -> None:
    """An engine that is asleep or closed does not generate, and says why."""
    engine, params = ScriptedEngine([[1]]), [SamplingParams(max_tokens=1)]
    engine.sleep()
    with pytest.raises(RolloutError, match=r"asleep.*wake"):
        engine.generate_batch([[1]], params)
    engine.wake()
    assert engine.generate_batch([[1]], params)[0].token_ids == [1]
    engine.close()
    with pytest.raises(RolloutError, match="closed"):
        engine.wake()


def test_requests_that_make_no_sense() -> None:
    """An empty prompt is named by its place; prompts and parameters must be as many."""
    engine, params = ScriptedEngine([[1]]), SamplingParams(max_tokens=1)
    with pytest.raises(RolloutError, match="prompt 1 without a token"):
        engine.generate_batch([[1], []], [params, params])
    with pytest.raises(RolloutError, match="2 prompts and 1 sampling"):
        engine.generate_batch([[1], [2]], [params])


def test_stop_tokens() -> None:
    """`ignore_eos` lifts the model's own stop tokens, not those that were asked for."""
    assert SamplingParams(max_tokens=1, stop_token_ids=(5,)).stops([2, 3]) == {2, 3, 5}
    assert SamplingParams(max_tokens=1, stop_token_ids=(5,), ignore_eos=True).stops([2, 3]) == {5}
