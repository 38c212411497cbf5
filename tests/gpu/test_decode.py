# SPDX-License-Identifier: Apache-2.0
"""Decode steps on a CUDA device: Triton's kernels against torch's operators, graphs against none."""

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from quadriga.models import heads
from quadriga.models.attention import ATTENTION_NAME
from quadriga.rollout import Completion, NativeEngine, SamplingParams
from quadriga.rollout.native.attention import CompiledPlan, DecodePlan
from quadriga.rollout.native.generation import Generation
from quadriga.rollout.sampler import NUM_DRAWS, SamplingRules, sample

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not heads.HAS_TRITON, reason="the package triton is not installed"),
]

VOCABULARY = 5000
PROMPTS = [list(range(3, 150))] * 3 + [[7, 8, 9]] + [list(range(100, 170))] * 2 + [[11]]


def make_model(kind: str, dtype: torch.dtype) -> torch.nn.Module:
    """Confident enough that a rounding seldom changes the likeliest token."""
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 256,
        "intermediate_size": 320,
        "num_hidden_layers": 3,
        "vocab_size": VOCABULARY,
    }
    sizes |= {"num_attention_heads": 12, "num_key_value_heads": 2, "initializer_range": 0.1}
    config = (
        Qwen2Config(**sizes | {"hidden_size": 768})
        if kind == "qwen2"
        else Qwen3Config(**sizes, head_dim=80)
    )
    config._attn_implementation = ATTENTION_NAME
    with torch.device("cuda"):
        made = Qwen2ForCausalLM if kind == "qwen2" else Qwen3ForCausalLM
        return made(config).to(dtype).eval()


def generate(
    model: torch.nn.Module, plans: set[type], temperature: float, **options: bool
) -> list[Completion]:
    """Responses of several lengths; which plans computed them goes into `plans`."""
    sampling = [
        SamplingParams(max_tokens=80 - 9 * row, temperature=temperature, seed=row)
        for row in range(7)
    ]
    with pytest.MonkeyPatch.context() as patch:
        step = Generation._decode_step

        def noted(self: Generation) -> None:
            step(self)
            if self.plan is not None:
                plans.add(type(self.plan))

        patch.setattr(Generation, "_decode_step", noted)
        return NativeEngine(model, eos_token_ids=(), **options).generate_batch(PROMPTS, sampling)


def compare(found: list[Completion], expected: list[Completion], bound: float) -> float:
    """Requires that log-probs agree as far as tokens do. Returns the share of tokens before the first difference."""
    num_equal, num_tokens = 0, 0
    for one, other in zip(found, expected, strict=True):
        pairs = zip(one.token_ids, other.token_ids, one.log_probs, other.log_probs, strict=True)
        for ours, theirs, mine, its in pairs:
            if ours != theirs:
                break
            assert abs(mine - its) < bound
            num_equal += 1
        num_tokens += len(one.token_ids)
    return num_equal / num_tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_triton_decodes_as_torch_does(kind: str, dtype: torch.dtype, temperature: float) -> None:
    """Log-probs to the rounding of the dtype, as far as the tokens are the same: a random model has many that are about
    as likely, so one rounding leads elsewhere soon. With graphs products have more rows, so they round otherwise."""
    model, plans = make_model(kind, dtype), set[type]()
    graphed = generate(model, plans, temperature)
    stepwise = generate(model, plans, temperature, uses_graphs=False)
    assert plans == {CompiledPlan}
    plans.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heads, "has_compiler", lambda: False)
        plain = generate(model, plans, temperature)
    assert plans == {DecodePlan}
    bound, share = (0.5, 0.1) if dtype == torch.bfloat16 else (0.1, 0.3)
    assert compare(graphed, stepwise, bound) > 0.5
    assert compare(graphed, plain, bound) > share


@pytest.mark.parametrize("temperatures", [[1.0] * 64, [0.7, 0.0, 1.0, 1.3] * 16, [0.0] * 5])
@pytest.mark.parametrize("num_tokens", [1, 300, 151_936])
def test_tokens_are_those_of_the_sampler(num_tokens: int, temperatures: list[float]) -> None:
    """The same numbers lead to the same tokens; sums of float32 in another order may move one in a million."""
    from quadriga.rollout.native.kernels_triton import draw

    generator = torch.Generator("cuda").manual_seed(0)
    logits = 4 * torch.randn(len(temperatures), num_tokens, device="cuda", generator=generator)
    uniforms = torch.rand(
        len(temperatures), NUM_DRAWS, dtype=torch.float64, device="cuda", generator=generator
    )
    rules = SamplingRules.from_params(
        [SamplingParams(max_tokens=1, temperature=one) for one in temperatures], "cuda"
    )
    found = draw(logits, rules.temperature, rules.is_greedy, uniforms)
    tokens, *log_probs = sample(logits.clone(), rules, uniforms)
    assert found[:, 0].long().equal(tokens)
    for ours, theirs in zip(found.T[1:], log_probs, strict=True):
        torch.testing.assert_close(ours.float(), theirs, rtol=1e-5, atol=1e-5)
