# SPDX-License-Identifier: Apache-2.0
"""A model spread over processes in every way learns what it learns in one, over gloo.

What none of this proves: the same on NCCL, where the order of additions is another.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from quadriga.protocol import DataProto
from tests.numerics.launching import run_ranks
from tests.numerics.layouts import GOES_ON, IN_BFLOAT16, KINDS, LAYOUTS, SAVED

PROGRAM = Path(__file__).with_name("layouts.py")
TOLERANCE = 1e-5
OF_TWO = [*((name, "policy") for name in LAYOUTS[2]), ("replicas 2", "policy, untied")]
# Of four processes, one kind of model for each layout, so that each kind meets each way to spread a model, here or in
# OF_TWO. "fsdp 4" learns after it has read a checkpoint. The rest is slow.
OF_FOUR = {
    "hsdp 2 x 2": "critic",
    "fsdp 2 x tp 2": "policy",
    "fsdp 2 x sp 2": "policy, untied",
    "tp 2 x pp 2": "critic",
    "fsdp 2 x pp 2": "policy, untied",
    "sp 2 x tp 2": "policy, untied",
    "sp 2 x pp 2": "policy",
    "sp 4, more than key-value heads": "critic",
    "pp 4": "policy",
}
SPREAD = [
    *OF_TWO,
    *(
        pytest.param(name, kind, marks=() if OF_FOUR.get(name) == kind else pytest.mark.slow)
        for name in LAYOUTS[4]
        for kind in KINDS
    ),
]
# How a batch was cut shows in these and in nothing else.
OF_THE_CUT = ("packed_tokens", "perf/")


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    make_batch: Callable[[], DataProto],
) -> dict[str, Any]:
    """What every layout gave that a test of this session is about."""
    folder = tmp_path_factory.mktemp("layouts")
    about = [item.callspec.params for item in request.session.items if item.path == request.path]
    wanted = [f"{each['layout']}, {each['kind']}" for each in about if "kind" in each]
    (folder / "wanted").write_text("\n".join(wanted))
    for name in ("tied", "untied"):
        torch.manual_seed(0)
        config = Qwen2Config(
            hidden_size=32,
            intermediate_size=44,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=97,
            tie_word_embeddings=name == "tied",
            pad_token_id=3,  # some rows have it as a token: its embedding must not learn
        )
        model = Qwen2ForCausalLM(config)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        model.save_pretrained(folder / name)
    batch = make_batch()
    batch.batch["values"] = batch.batch["advantages"] * 0.3
    batch.batch["returns"] = batch.batch["advantages"] + 1.0
    generator, shape = torch.Generator().manual_seed(5), batch.batch["response_mask"].shape
    top = (torch.randn(*shape, 97, generator=generator) * 2).log_softmax(-1).topk(3, -1)
    batch.batch["teacher_log_prob"] = top.values[..., 0]
    batch.batch["teacher_top_log_probs"], batch.batch["teacher_top_ids"] = (
        top.values,
        top.indices.int(),
    )
    batch.save_to_disk(folder / "batch")
    run_ranks(PROGRAM, 4, folder, num_ports=2)
    found: dict[str, Any] = {}
    for size in LAYOUTS:
        found |= torch.load(folder / f"{size}.pt")
    return found


def require_close(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Each tensor differs by at most TOLERANCE of its largest number."""
    assert list(got) == list(expected)
    for name, tensor in expected.items():
        assert (got[name] - tensor).abs().max() <= TOLERANCE * tensor.abs().max(), name


def require_same_metrics(got: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    for one, other in zip(got, expected, strict=True):
        named = {name for name in other if not any(part in name for part in OF_THE_CUT)}
        assert named <= one.keys()
        for name in named:
            # Losses and divergences are means of terms of order 1 that nearly cancel.
            assert one[name] == pytest.approx(other[name], rel=TOLERANCE, abs=0.1 * TOLERANCE), name


@pytest.mark.parametrize(("layout", "kind"), SPREAD)
def test_log_probs_and_values(results: dict[str, Any], layout: str, kind: str) -> None:
    """What the model says before it has learned."""
    require_close(results[f"{layout}, {kind}"]["asked"], results[f"one process, {kind}"]["asked"])


@pytest.mark.parametrize(("layout", "kind"), SPREAD)
def test_loss_and_gradient_norm(results: dict[str, Any], layout: str, kind: str) -> None:
    """Two mini-batches of ragged rows, then one of all of them: losses, gradient norms (clipped ones), and what a
    learning rate of one half makes of them."""
    metrics = results[f"{layout}, {kind}"]["metrics"]
    require_same_metrics(metrics, results[f"one process, {kind}"]["metrics"])
    assert all(
        norm > 0.05 for each in metrics for name, norm in each.items() if name.endswith("grad_norm")
    )


@pytest.mark.parametrize(("layout", "kind"), SPREAD)
def test_parameters_after_three_steps(results: dict[str, Any], layout: str, kind: str) -> None:
    """Of the whole model, gathered."""
    got, expected = (
        results[f"{layout}, {kind}"]["weights"],
        results[f"one process, {kind}"]["weights"],
    )
    require_close(got, expected)


@pytest.mark.parametrize("layout", GOES_ON)
def test_a_checkpoint_goes_on_in_another_layout(results: dict[str, Any], layout: str) -> None:
    """Written by four processes, read by four, two and one, whose tensors rest in a file between phases: bit for bit on
    the same layout, to rounding on others."""
    got, expected = results[f"{layout}, goes on"], results["undisturbed"]
    if layout == SAVED:
        assert got["metrics"] == expected["metrics"]
        assert all(
            torch.equal(got["weights"][name], weight)
            for name, weight in expected["weights"].items()
        )
    require_same_metrics(got["metrics"], expected["metrics"])
    require_close(got["weights"], expected["weights"])
    # FSDP pads parts of tensors that its ranks do not divide, in memory of its own.
    assert got["share in the file"] > 0.8


@pytest.mark.parametrize("layout", IN_BFLOAT16)
def test_bfloat16_is_as_near_to_float32_as_in_one_process(
    results: dict[str, Any], layout: str
) -> None:
    """Log-probabilities, and what three steps have added to the weights; parts of a sum that are rounded before they
    are added up may cost as much again."""
    exact, alone = results["one process, policy"], results["one process, bfloat16"]
    got = results[f"{layout}, bfloat16"]
    for part in ("asked", "weights"):
        assert distance(got[part], exact[part]) <= 2 * distance(alone[part], exact[part])
    assert distance(alone["asked"], exact["asked"]) > 1e-5, "it was no bfloat16"
    for one, other in zip(got["metrics"], exact["metrics"], strict=True):
        assert one["actor/grad_norm"] == pytest.approx(other["actor/grad_norm"], rel=0.03)


def distance(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Of all numbers together, relative to their size."""
    differences = torch.cat(
        [(got[name].float() - tensor.float()).flatten() for name, tensor in expected.items()]
    )
    return float(
        differences.norm()
        / torch.cat([tensor.float().flatten() for tensor in expected.values()]).norm()
    )
