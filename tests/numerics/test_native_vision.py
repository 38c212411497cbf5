# SPDX-License-Identifier: Apache-2.0
"""The native engine on prompts with images, against transformers' generate of each prompt alone and the trainer's pass.

What none of this proves: the same in bfloat16, or on an accelerator.
"""

import asyncio
from collections.abc import Sequence

import pytest
import torch
from transformers import PreTrainedModel

from quadriga.data.videos import TIME_TEXT_TYPES
from quadriga.engines.batches import MicroBatching
from quadriga.engines.fsdp.engine import FSDPEngine
from quadriga.engines.step import infer
from quadriga.errors import RolloutError
from quadriga.models.scorers import PolicyScorer
from quadriga.protocol.memory import images_key
from quadriga.rollout import Completion, NativeEngine, SamplingParams
from quadriga.rollout.interface import Images
from quadriga.rollout.native.network import Network, PlainNetwork
from tests.numerics.vision_batch import RESPONSE_WIDTH, Row, vision_batch, vision_rows
from tests.tiny_vision import EOS, FAMILIES, IMAGE, MIXTURE, positions_of, token_types, vision_model

NUM_TOKENS = RESPONSE_WIDTH


def prompts_of(
    model: PreTrainedModel, rows: Sequence[Row]
) -> tuple[list[list[int]], list[Images | None]]:
    """Prompts and their images as an engine gets them."""
    images = [
        Images(
            (), row.images, positions_of(model, row.prompt, row.images), (), images_key(row.images)
        )
        if row.images
        else None
        for row in rows
    ]
    return [row.prompt for row in rows], images


def params_of(rows: Sequence[Row], max_tokens: int = NUM_TOKENS, **options) -> list[SamplingParams]:
    return [
        SamplingParams(max_tokens=max_tokens, seed=number, **options) for number in range(len(rows))
    ]


def tokens_of(completions: Sequence[Completion]) -> list[list[int]]:
    return [completion.token_ids for completion in completions]


@pytest.fixture
def rows(request: pytest.FixtureRequest) -> list[Row]:
    """Five prompts, each three times: an image, the same tokens with another image, text, two images, a video."""
    family = (
        request.node.callspec.params["family"]
        if hasattr(request.node, "callspec")
        else "qwen2_5_vl"
    )
    return vision_rows(family)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_answers_are_those_of_transformers(rows: list[Row], family: str) -> None:
    """Each prompt alone, with positions that transformers finds by itself."""
    theirs, model = vision_model("sdpa", family), vision_model(family=family)
    prompts, images = prompts_of(theirs, rows)
    found = NativeEngine(model).generate_batch(prompts, params_of(rows, 20, temperature=0), images)
    for row, completion in list(zip(rows, found, strict=True))[::3]:
        ids = torch.tensor([row.prompt])
        kinds = {"mm_token_type_ids": token_types(ids)}
        expected = theirs.generate(ids, **row.images, **kinds, max_new_tokens=20, do_sample=False)[
            0, ids.shape[1] :
        ]
        assert completion.token_ids == expected.tolist()
        theirs.model.rope_deltas = None
    assert found[0] == found[1] and abs(found[0].log_probs[0] - found[3].log_probs[0]) > 1e-3


@pytest.mark.parametrize("family", [*FAMILIES, MIXTURE])
def test_log_probs_are_the_trainers(rows: list[Row], family: str) -> None:
    """Of sampled tokens; by the module, and layer by layer where the engine knows the layers."""
    model = vision_model(family=family)
    prompts, images = prompts_of(model, rows)
    engine = NativeEngine(model)
    completions = engine.generate_batch(prompts, params_of(rows, ignore_eos=True), images)
    assert type(engine._network) is (Network if family in TIME_TEXT_TYPES else PlainNetwork)
    for row, completion in zip(rows, completions, strict=True):
        row.answer[:] = completion.token_ids
    trainer = FSDPEngine(
        PolicyScorer(vision_model(family=family)), dtype=torch.float32, device=torch.device("cpu")
    )
    expected = infer(trainer, vision_batch(model, rows), MicroBatching(99, 1))["log_probs"]
    found = torch.tensor([completion.log_probs for completion in completions])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_answers_do_not_depend_on_what_else_is_generated(rows: list[Row]) -> None:
    """Together, one by one, awaited, and where a cache that is too small lets them begin anew."""
    model = vision_model()
    prompts, images = prompts_of(model, rows)
    params = params_of(rows, 30, ignore_eos=True)
    together = tokens_of(NativeEngine(model).generate_batch(prompts, params, images))
    assert len({tuple(answer) for answer in together}) == len(rows)
    for prompt, own, image, expected in zip(prompts, params, images, together, strict=True):
        assert NativeEngine(model).generate_batch([prompt], [own], [image])[0].token_ids == expected
    engine = NativeEngine(model)

    async def ask() -> list[Completion]:
        return await asyncio.gather(*map(engine.generate, prompts, params, images))

    assert tokens_of(asyncio.run(ask())) == together
    engine.close()
    small = NativeEngine(
        model, cache_gigabytes=120 * NativeEngine(model).cache_memory.token_bytes / 2**30
    )
    assert tokens_of(small.generate_batch(prompts, params, images)) == together


def test_an_image_is_computed_once_for_all_of_its_answers(rows: list[Row]) -> None:
    """Equal images of other objects are the same; the encoder does not read responses that hold image tokens."""
    model, calls = vision_model(), []
    model.model.visual.register_forward_pre_hook(
        lambda _, args, kwargs: calls.append(len(kwargs["grid_thw"])), with_kwargs=True
    )
    prompts, images = prompts_of(model, rows)
    NativeEngine(model).generate_batch(prompts, params_of(rows), images)
    assert calls == [6]  # one, another one, two, and an image with a video


def test_what_does_not_fit_is_refused(rows: list[Row]) -> None:
    model = vision_model()
    prompts, images = prompts_of(model, rows[:1])
    with pytest.raises(
        RolloutError,
        match="prompt 0: got 3 tokens with id 5 for 4 embeddings of images, expected at",
    ):
        NativeEngine(model).generate_batch(
            [[*prompts[0][:4], *prompts[0][5:]]], params_of(rows[:1]), images
        )


def test_what_was_written_behind_images_is_text(rows: list[Row]) -> None:
    """A later turn goes on from an answer that holds the token of images: its tokens are those of one longer answer."""
    model, row = vision_model(), rows[-1]
    prompts, images = prompts_of(model, [row])
    (whole,) = NativeEngine(model).generate_batch(
        prompts, [SamplingParams(12, temperature=0, ignore_eos=True)], images
    )
    said = [whole.token_ids[0], IMAGE, *whole.token_ids[2:4]]
    longer, after = [*row.prompt, *said], images[0].followed_by(said)
    (found,) = NativeEngine(model).generate_batch(
        [longer], [SamplingParams(RESPONSE_WIDTH - 4, ignore_eos=True)], [after]
    )
    row.answer[:] = [*said, *found.token_ids]
    trainer = FSDPEngine(
        PolicyScorer(vision_model()), dtype=torch.float32, device=torch.device("cpu")
    )
    expected = infer(trainer, vision_batch(model, [row]), MicroBatching(99, 1))["log_probs"][0, 4:]
    torch.testing.assert_close(torch.tensor(found.log_probs), expected, atol=1e-5, rtol=1e-5)


def test_the_end_of_a_text_ends_an_answer(rows: list[Row]) -> None:
    """Of a model whose configuration of the text names it."""
    assert NativeEngine(vision_model()).eos_token_ids == (EOS,)
