# SPDX-License-Identifier: Apache-2.0
"""Prompts with images, packed, against transformers' own forward of each row alone, without padding or sharing."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from quadriga.config import ActorConfig, OptimConfig
from quadriga.engines.batches import MicroBatching, Passes
from quadriga.engines.fsdp.engine import FSDPEngine, Training
from quadriga.engines.objectives import PolicyObjective
from quadriga.engines.step import infer, update
from quadriga.errors import EngineError
from quadriga.models.scorers import PolicyScorer
from quadriga.models.vision import vision_encoder
from quadriga.protocol import DataProto
from tests.numerics.recording import Recording
from tests.numerics.vision_batch import Row, vision_batch, vision_rows
from tests.tiny_vision import FAMILIES, IMAGE, MIXTURE, token_types, vision_model

CPU = torch.device("cpu")
CUTS = {
    "all": MicroBatching(99, 1),
    "one by one": MicroBatching(1, 1),
    "five, across groups": MicroBatching(5, 1),
    "all, prompts not shared": MicroBatching(99, 1, share_prompts=False),
    "by tokens": MicroBatching(None, 40),
}
TEMPERATURE = 0.7


def row_scores(model: PreTrainedModel, row: Row) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies [T] by transformers alone, which finds the positions by itself."""
    ids = torch.tensor([[*row.prompt, *row.answer]])
    logits = model(input_ids=ids, mm_token_type_ids=token_types(ids), **row.images).logits[0]
    logp = (logits[len(row.prompt) - 1 : -1] / TEMPERATURE).log_softmax(-1)
    return logp.gather(-1, torch.tensor(row.answer)[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def padded(values: list[Tensor], width: int) -> Tensor:
    return torch.stack([torch.nn.functional.pad(one, (0, width - len(one))) for one in values])


def gradients(model: PreTrainedModel, batch: DataProto, micro: MicroBatching) -> dict[str, Tensor]:
    engine = Recording(
        PolicyScorer(model),
        dtype=torch.float32,
        device=CPU,
        training=Training(OptimConfig(), 1.0, 3),
    )
    objective = PolicyObjective(ActorConfig(entropy_coeff=0.05))
    update(engine, batch, objective, Passes(len(batch), 1, micro), lr=1e-3, temperature=TEMPERATURE)
    return engine.recorded


def reference_gradients(
    model: PreTrainedModel, batch: DataProto, rows: list[Row]
) -> dict[str, Tensor]:
    """Of the clipped loss with an entropy bonus, averaged over tokens; row by row."""
    columns = batch.batch
    num_tokens = columns["response_mask"].sum()
    for number, row in enumerate(rows):
        log_probs, entropy = row_scores(model, row)
        advantages, old = (
            columns[key][number, : len(row.answer)] for key in ("advantages", "old_log_probs")
        )
        ratio = (log_probs - old).exp()
        losses = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
        losses = torch.where(advantages < 0, torch.minimum(losses, -3 * advantages), losses)
        ((losses - 0.05 * entropy).sum() / num_tokens).backward()
    return {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def largest_difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert set(ours) == set(theirs)
    return max(float((ours[name] - theirs[name]).norm() / theirs[name].norm()) for name in theirs)


@pytest.mark.parametrize("family", [*FAMILIES, MIXTURE])
def test_log_probs_and_entropies(family: str) -> None:
    """However the batch is cut: prompts with one image, with two, with none, with a video, and two that are equal in
    their tokens alone. Does not show it in bfloat16."""
    theirs, rows = vision_model("eager", family), vision_rows(family)
    batch = vision_batch(theirs, rows)
    width = batch.batch["response_mask"].shape[1]
    with torch.no_grad():
        scores = [row_scores(theirs, row) for row in rows]
    log_probs, entropy = (padded([score[part] for score in scores], width) for part in (0, 1))
    engine = FSDPEngine(PolicyScorer(vision_model(family=family)), dtype=torch.float32, device=CPU)
    for micro in CUTS.values():
        found = infer(engine, batch, micro, temperature=TEMPERATURE, with_entropy=True)
        torch.testing.assert_close(found["log_probs"], log_probs, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(found["entropy"], entropy, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("family", "cuts"),
    [*((family, tuple(CUTS)) for family in FAMILIES), (MIXTURE, ("all",))],
    ids=[*FAMILIES, MIXTURE],
)
def test_gradients(family: str, cuts: Sequence[str]) -> None:
    """Of the decoder and of the vision encoder, for every cut; of a mixture of experts for one. Does not show it for
    more than one process."""
    rows = vision_rows(family)
    theirs = vision_model("eager", family)
    batch = vision_batch(theirs, rows)
    expected = reference_gradients(theirs, batch, rows)
    assert any("visual" in name for name in expected)
    for cut in cuts:
        difference = largest_difference(
            gradients(vision_model(family=family), batch, CUTS[cut]), expected
        )
        assert difference < 1e-5, cut


def test_the_image_matters() -> None:
    """Rows 0 and 3 have the same prompt and answer but for the image: their log-probs differ. Else the comparisons
    above would show nothing of images."""
    rows = vision_rows()
    assert rows[0].prompt == rows[3].prompt and rows[0].answer == rows[3].answer
    engine = FSDPEngine(PolicyScorer(vision_model()), dtype=torch.float32, device=CPU)
    found = infer(engine, vision_batch(vision_model(), rows), CUTS["all"])["log_probs"]
    assert (found[0] - found[3]).abs().max() > 1e-3


def test_each_image_is_computed_once(record_images: Callable[[PreTrainedModel], list[int]]) -> None:
    """Three samples of a prompt share the image, whether they hold one object or equal ones; without sharing each has
    its own. Row 3 has another image than row 0."""
    model, rows = vision_model(), vision_rows()
    batch, seen = vision_batch(model, rows), record_images(model)
    engine = FSDPEngine(PolicyScorer(model), dtype=torch.float32, device=CPU)
    infer(engine, batch, CUTS["all"])
    copies = batch.non_tensor_batch["multi_modal_inputs"]
    copies[:] = np.array(
        [{name: tensor.clone() for name, tensor in one.items()} for one in copies], dtype=object
    )
    infer(engine, batch, CUTS["all"])
    infer(engine, batch, CUTS["all, prompts not shared"])
    num_images = sum(
        len(row.images.get(name, ()))
        for row in rows
        for name in ("image_grid_thw", "video_grid_thw")
    )
    assert seen == [num_images // 3, num_images // 3, num_images]


def test_an_answer_may_hold_the_token_of_images() -> None:
    """A model may write it, and it is a token like others there. Transformers' forward would look for an image, so its
    decoder is fed by hand."""
    model, (row, *_) = vision_model("eager"), vision_rows()
    row.answer[1] = IMAGE
    batch = vision_batch(model, [row])
    ids = torch.tensor([[*row.prompt, *row.answer]])
    with torch.no_grad():
        embeddings = model.get_input_embeddings()(ids)
        features = torch.cat(
            model.model.get_image_features(**row.images, return_dict=True).pooler_output
        )
        prompt = ids[0, : len(row.prompt)] == IMAGE
        embeddings[0, : len(row.prompt)][prompt] = features
        positions = batch.batch["position_ids"][0][:, batch.batch["attention_mask"][0].bool()]
        hidden = model.model.language_model(
            inputs_embeds=embeddings, position_ids=positions[:, None]
        ).last_hidden_state
        logp = model.lm_head(hidden[0, len(row.prompt) - 1 : -1]).log_softmax(-1)
    expected = logp.gather(-1, torch.tensor(row.answer)[:, None])[:, 0]
    engine = FSDPEngine(PolicyScorer(vision_model()), dtype=torch.float32, device=CPU)
    found = infer(engine, batch, CUTS["all"])["log_probs"][0]
    torch.testing.assert_close(found[: len(expected)], expected, atol=1e-5, rtol=1e-5)


def test_a_frozen_encoder_has_no_gradient() -> None:
    """The decoder's gradient is what it is with one that learns."""
    rows, model = vision_rows(), vision_model()
    batch = vision_batch(model, rows)
    vision_encoder(model).requires_grad_(False)
    found = gradients(model, batch, CUTS["all"])
    expected = gradients(vision_model(), batch, CUTS["all"])
    assert not any("visual" in name for name in found)
    assert largest_difference(found, {name: expected[name] for name in found}) < 1e-6


def test_places_without_an_image_are_refused() -> None:
    """A prompt that was cut, and images for a model that does not see."""
    rows = vision_rows()
    batch = vision_batch(vision_model(), rows)
    engine = FSDPEngine(PolicyScorer(vision_model()), dtype=torch.float32, device=CPU)
    batch.non_tensor_batch["multi_modal_inputs"][0] = {}
    with pytest.raises(
        EngineError,
        match=r"row 0 of a batch: got 4 tokens with id 5 for 0 embeddings of images, exp",
    ):
        infer(engine, batch, CUTS["all"])


@pytest.fixture
def record_images() -> Callable[[PreTrainedModel], list[int]]:
    """How many images each call of a model's vision encoder has."""

    def record(model: PreTrainedModel) -> list[int]:
        counts: list[int] = []
        model.model.visual.register_forward_pre_hook(
            lambda _, args, kwargs: counts.append(len(kwargs["grid_thw"])), with_kwargs=True
        )
        return counts

    return record
