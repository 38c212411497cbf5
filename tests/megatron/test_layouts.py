# SPDX-License-Identifier: Apache-2.0
"""A model in Megatron's modules, in every layout, learns what it learns in FSDP2's engine in one process, over gloo.

What none of this proves: anything on CUDA, where other kernels compute and NCCL adds up.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM

from quadriga.protocol import DataProto
from tests.megatron.cases import (
    CHAINS,
    GOES_ON,
    NARROW,
    PLAIN_MIXTURES,
    PUBLISHED,
    RUNS,
    TOLD_MIXTURES,
)
from tests.numerics.launching import run_ranks
from tests.numerics.test_layouts import distance, require_close, require_same_metrics

PROGRAM = Path(__file__).with_name("layouts.py")
SPREAD = [(layout, kind) for layout, kinds in RUNS.items() for kind in kinds]
LEARNED_MIXTURES = [(layout, "mixture") for layout in PLAIN_MIXTURES]


@pytest.fixture(scope="module")
def results(
    tmp_path_factory: pytest.TempPathFactory, make_batch: Callable[[], DataProto]
) -> dict[str, Any]:
    """What every layout gave."""
    folder = tmp_path_factory.mktemp("megatron")
    write_models(folder)
    with_values(make_batch()).save_to_disk(folder / "batch")
    run_ranks(PROGRAM, 5, folder, num_ports=2)
    found: dict[str, Any] = {"folder": folder}
    for size in (1, 2, 4):
        found |= torch.load(folder / f"{size}.pt")
    return found


def write_models(folder: Path) -> None:
    """A random model of each family."""
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 44,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    }
    sizes |= {"num_key_value_heads": 2, "vocab_size": 97}  # which two ranks do not divide
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
    # Some rows have the padding token: its embedding must not learn.
    of_family = {
        "qwen2": Qwen2ForCausalLM(Qwen2Config(**sizes, tie_word_embeddings=True, pad_token_id=3)),
        "llama": LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=False)),
        "qwen3_moe": Qwen3MoeForCausalLM(
            Qwen3MoeConfig(
                **sizes, **experts, head_dim=16, norm_topk_prob=True, tie_word_embeddings=False
            )
        ),
        "qwen3": Qwen3ForCausalLM(Qwen3Config(**sizes, head_dim=16, tie_word_embeddings=False)),
    }
    for name, model in of_family.items():
        torch.manual_seed(0)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        model.save_pretrained(folder / name)


def with_values(batch: DataProto) -> DataProto:
    """Also what a critic learns from."""
    batch.batch["values"] = batch.batch["advantages"] * 0.3
    batch.batch["returns"] = batch.batch["advantages"] + 1.0
    return batch


@pytest.mark.parametrize(
    ("layout", "kind"), [*SPREAD, *LEARNED_MIXTURES, *((name, "told") for name in TOLD_MIXTURES)]
)
def test_log_probs_and_values(results: dict[str, Any], layout: str, kind: str) -> None:
    """Outputs of the model before it has learned."""
    require_close(results[f"{layout}, {kind}"]["asked"], results[f"fsdp, {kind}"]["asked"])


@pytest.mark.parametrize(("layout", "kind"), SPREAD + LEARNED_MIXTURES)
def test_two_optimizer_steps(results: dict[str, Any], layout: str, kind: str) -> None:
    """Losses, gradient norms (clipped ones), and the whole model afterwards, gathered."""
    got, expected = results[f"{layout}, {kind}"], results[f"fsdp, {kind}"]
    require_same_metrics(got["metrics"], expected["metrics"])
    assert all(
        norm > 0.05
        for each in got["metrics"]
        for name, norm in each.items()
        if name.endswith("grad_norm")
    )
    require_close(got["weights"], expected["weights"])


def test_transformer_engines_linear_modules_are_taken_on_cuda(results: dict[str, Any]) -> None:
    """By stand-ins: two of each in each of four layers, which learn what the other engine does; and it is said."""
    got = results["linear modules"]
    assert got["counts"] == [8, 8] and "linear modules of Transformer Engine 2.99" in got["said"]
    require_close(got["weights"], results["fsdp, llama"]["weights"])


@pytest.mark.parametrize("layout", TOLD_MIXTURES)
def test_routers_go_where_they_are_told(results: dict[str, Any], layout: str) -> None:
    """Their own choices, which pipelines do not return; steps in which they are told some, with a load-balancing loss
    and a z-loss; and what is said of them."""
    got, expected = results[f"{layout}, told"], results["fsdp, told"]
    require_close(got["weights"], expected["weights"])
    assert got["said"] == pytest.approx(expected["said"], rel=1e-5)
    assert (
        got["said"]["actor/router_replay_differs"] > 0.1
        and got["said"]["actor/router_aux_loss"] > 0.5
    )
    if "pp" not in layout:
        (rows, chosen), (_, whole) = got["routes"], expected["routes"]
        assert torch.equal(chosen, whole[rows])
        assert (chosen >= 0).any()


@pytest.mark.parametrize("layout", [*GOES_ON, "fsdp 2"])
def test_a_checkpoint_goes_on_in_another_layout_and_engine(
    results: dict[str, Any], layout: str
) -> None:
    """Written by Megatron on four ranks, read by Megatron on one and two, whose tensors rest in a file between phases,
    and by FSDP2: the next two steps."""
    got, expected = results[f"{layout}, goes on"], results["undisturbed"]
    assert all(
        torch.equal(got["loaded"][name], weight) for name, weight in expected["saved"].items()
    )
    require_same_metrics(got["metrics"], expected["metrics"])
    require_close(got["weights"], expected["weights"])


@pytest.mark.parametrize("kind", CHAINS)
def test_checkpoints_go_from_engine_to_engine(results: dict[str, Any], kind: str) -> None:
    """From tensor parallelism (and experts on two ranks) to FSDP2 to two stages: weights, moments and numbers of steps
    are exact, and so is the folder that is exported; the next two steps are those of a run that was not stopped."""
    found = results[f"chain, {kind}"]
    first, *others = found["states"]
    assert any(
        name.startswith("optimizer.exp_avg_sq.") and one.any() for name, one in first.items()
    )
    for state in others:
        assert state.keys() == first.keys()
        assert all(torch.equal(state[name], one) for name, one in first.items())
    require_same_metrics(found["goes on"]["metrics"], found["undisturbed"]["metrics"])
    require_close(found["goes on"]["weights"], found["undisturbed"]["weights"])
    if kind != "critic":
        place = results["folder"] / f"{kind} exported" / "huggingface"
        exported = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
        for name, parameter in exported.named_parameters():
            assert torch.equal(parameter, first[f"model.{name}"])


@pytest.mark.parametrize(("layout", "kind"), PUBLISHED.items())
def test_weights_reach_native_in_another_process(
    results: dict[str, Any], layout: str, kind: str
) -> None:
    """Gathered over tensor, pipeline and expert parallelism, with equal fingerprints, or the receiver raises."""
    folder = results["folder"]
    family = {"llama": "llama", "mixture": "qwen3_moe"}[kind]
    sent = AutoModelForCausalLM.from_pretrained(folder / family, dtype=torch.float32)
    received = torch.load(folder / f"{layout}.received.pt")
    assert received.keys() >= {name for name, _ in sent.named_parameters()}
    assert all(
        torch.equal(received[name], parameter) for name, parameter in sent.named_parameters()
    )


@pytest.mark.parametrize(
    ("layout", "dtype"), [(name, str(dtype)) for name in NARROW for dtype in NARROW[name]]
)
def test_narrow_is_as_near_to_float32_as_the_other_engine(
    results: dict[str, Any], layout: str, dtype: str
) -> None:
    """Log-probabilities, and what two steps have added to the weights."""
    exact, alone, got = (
        results["fsdp, policy"],
        results[f"fsdp, {dtype}"],
        results[f"{layout}, {dtype}"],
    )
    for part in ("asked", "weights"):
        assert distance(got[part], exact[part]) <= 2 * distance(alone[part], exact[part])
    assert distance(alone["asked"], exact["asked"]) > 1e-5, "it was not narrow"


@pytest.mark.parametrize("layout", ["fsdp", "fsdp 2", "fsdp, pp 2"])
def test_float16_is_nearer_to_float32_than_bfloat16(results: dict[str, Any], layout: str) -> None:
    """It has three bits more: an eighth of the distance, to within a factor of two. Its losses are scaled, its gradient
    norms are not, and no step overflows."""
    exact, wide, got = (
        results["fsdp, policy"],
        results["fsdp, torch.bfloat16"],
        results[f"{layout}, torch.float16"],
    )
    for part in ("asked", "weights"):
        assert distance(got[part], exact[part]) <= distance(wide[part], exact[part]) / 4
    for each, expected in zip(got["metrics"], exact["metrics"], strict=True):
        if each:
            assert each["actor/grad_norm"] == pytest.approx(expected["actor/grad_norm"], rel=2e-2)
            assert (each["actor/loss_scale"], each["actor/nonfinite_steps"]) == (65536.0, 0.0)


@pytest.mark.parametrize("layout", ["fsdp 2", "dp 2, distributed optimizer"])
def test_all_ranks_skip_what_overflows_on_one(results: dict[str, Any], layout: str) -> None:
    """In float16, and halve the loss scale each time."""
    assert results[f"{layout}, overflow"] == [(True, [8192.0, 0.0])] * 2


def test_torch_is_as_it_was_outside_of_megatron(results: dict[str, Any]) -> None:
    """What answers Megatron in CUDA's place is there while a call into it lasts, also after one that failed."""
    assert results["outside"] == []
