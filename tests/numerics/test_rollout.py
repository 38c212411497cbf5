# SPDX-License-Identifier: Apache-2.0
"""The native engine against transformers: the same tokens, and the log-probabilities of a full forward pass."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from transformers import (
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from quadriga.errors import RolloutError, WeightSyncError
from quadriga.models.attention import ATTENTION_NAME, PackedAttention, Segment
from quadriga.models.heads import token_scores
from quadriga.rollout import Completion, NativeEngine, SamplingParams

EXPERTS = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "mlp_only_layers": [1],
}
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "mixtral": (partial(MixtralConfig, num_local_experts=4), MixtralForCausalLM),
    "qwen2_moe": (
        partial(Qwen2MoeConfig, **EXPERTS, shared_expert_intermediate_size=64),
        Qwen2MoeForCausalLM,
    ),
    "qwen3_moe": (partial(Qwen3MoeConfig, **EXPERTS), Qwen3MoeForCausalLM),
    "glm4_moe": (
        partial(Glm4MoeConfig, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=64),
        Glm4MoeForCausalLM,
    ),
}
VOCABULARY = 199
EOS = 1


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    """A random model of each family with grouped heads, confident enough that answers differ by prompt."""
    torch.manual_seed(0)
    config_class, model_class = FAMILIES[request.param]
    config = config_class(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=VOCABULARY,
        initializer_range=0.1,
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=EOS,
        pad_token_id=0,
    )
    config._attn_implementation = ATTENTION_NAME
    return model_class(config).eval()


@pytest.fixture
def plain(model: PreTrainedModel):
    """Runs a function of the model with an attention of transformers."""

    def call(function: Callable[[PreTrainedModel], torch.Tensor]) -> torch.Tensor:
        model.set_attn_implementation("eager")
        try:
            with torch.no_grad():
                return function(model)
        finally:
            model.set_attn_implementation(ATTENTION_NAME)

    return call


def _prompts(count: int = 5, longest: int = 12) -> list[list[int]]:
    generator = torch.Generator().manual_seed(4)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    return [
        torch.randint(2, VOCABULARY, (length,), generator=generator).tolist() for length in lengths
    ]


def _tokens(completions: list[Completion]) -> list[list[int]]:
    return [completion.token_ids for completion in completions]


def test_greedy_tokens_are_those_of_transformers(model: PreTrainedModel, plain) -> None:
    """In float32, token by token, past the first growth of the cache. Says nothing of ties in bfloat16."""
    prompts = _prompts()
    completions = NativeEngine(model).generate_batch(
        prompts, [SamplingParams(max_tokens=80, do_sample=False)] * 5
    )
    for prompt, completion in zip(prompts, completions, strict=True):
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        expected = plain(
            lambda m, ids=ids, mask=mask: m.generate(
                ids, attention_mask=mask, max_new_tokens=80, do_sample=False
            )
        )
        assert completion.token_ids == expected[0, len(prompt) :].tolist()
        assert completion.finish_reason == ("stop" if completion.token_ids[-1] == EOS else "length")


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_are_those_of_a_full_forward_pass(
    model: PreTrainedModel, plain, temperature: float
) -> None:
    """In float32 within 1e-5, with prompts shared unevenly, refilled places and answers of many lengths."""
    prompts = [_prompts()[number] for number in (0, 1, 0, 2, 3, 0, 4, 2, 0)]
    params = [
        SamplingParams(max_tokens=5 + 9 * row, temperature=temperature, seed=row)
        for row in range(9)
    ]
    engine = NativeEngine(model, max_num_seqs=4, max_num_batched_tokens=16)
    for prompt, completion in zip(prompts, engine.generate_batch(prompts, params), strict=True):
        ids = torch.tensor([prompt + completion.token_ids])
        logits = plain(lambda m, ids=ids: m(ids, use_cache=False).logits)[0, len(prompt) - 1 : -1]
        answer = torch.tensor(completion.token_ids)
        expected = (logits / temperature).log_softmax(-1).gather(1, answer[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(completion.log_probs), expected, atol=1e-5, rtol=0)


def test_what_is_sampled_does_not_depend_on_the_batch(model: PreTrainedModel) -> None:
    """Alone, together, in another order, with fewer places: the same tokens. In float32; in bfloat16 products round
    differently in batches of different size."""
    prompts = [_prompts()[number] for number in (0, 1, 0, 2, 3, 0, 4)]
    kinds = [
        {},
        {"top_p": 0.8},
        {"top_k": 20},
        {"temperature": 1.5},
        {"min_p": 0.02},
        {"do_sample": False},
        {},
    ]
    params = [
        SamplingParams(max_tokens=30, seed=row + 10, **kind) for row, kind in enumerate(kinds)
    ]
    together = _tokens(NativeEngine(model).generate_batch(prompts, params))
    assert len({tuple(tokens) for tokens in together}) == 7
    for max_num_seqs in (1, 3):
        engine = NativeEngine(model, max_num_seqs=max_num_seqs)
        assert _tokens(engine.generate_batch(prompts, params)) == together
    order = [6, 2, 0, 4, 1, 5, 3]
    shuffled = NativeEngine(model).generate_batch(
        [prompts[i] for i in order], [params[i] for i in order]
    )
    assert _tokens(shuffled) == [together[i] for i in order]


def test_stop_tokens_end_answers(model: PreTrainedModel) -> None:
    """Any of several end-of-text tokens, and those asked for, end an answer and belong to it; `ignore_eos` lifts the
    former only."""
    prompts, engine = _prompts(3), NativeEngine(model, eos_token_ids=(EOS, 2))

    def generate(**options) -> list[Completion]:
        return engine.generate_batch(
            prompts, [SamplingParams(max_tokens=40, seed=s, **options) for s in range(3)]
        )

    free = _tokens(generate(ignore_eos=True))
    assert [len(tokens) for tokens in free] == [40, 40, 40]
    stops = (free[0][3], free[1][7])
    for tokens, completion in zip(
        free, generate(ignore_eos=True, stop_token_ids=stops), strict=True
    ):
        end = next((place for place, token in enumerate(tokens) if token in stops), len(tokens) - 1)
        assert completion.token_ids == tokens[: end + 1]
        assert completion.finish_reason == ("stop" if tokens[end] in stops else "length")
    engine.eos_token_ids = stops
    assert _tokens(generate()) == _tokens(generate(ignore_eos=True, stop_token_ids=stops))


def test_bfloat16_log_probs_are_close_to_training(model: PreTrainedModel) -> None:
    """Mean absolute difference to the packed forward pass of training below 0.02, on a random model; how large it is on
    a trained one, the metrics of a run say."""
    prompts = [_prompts()[number] for number in (0, 0, 1, 2, 0, 3, 4, 4)]
    narrow = type(model)(model.config).to(torch.bfloat16).eval()
    narrow.load_state_dict(model.state_dict())
    completions = NativeEngine(narrow).generate_batch(
        prompts, [SamplingParams(max_tokens=20, seed=seed) for seed in range(8)]
    )
    sequences = [prompt + one.token_ids for prompt, one in zip(prompts, completions, strict=True)]
    starts = [sum(map(len, sequences[:row])) for row in range(len(sequences))]
    plan = PackedAttention(
        [Segment(s, len(q)) for s, q in zip(starts, sequences, strict=True)], torch.device("cpu")
    )
    tokens = torch.tensor([token for sequence in sequences for token in sequence])
    positions = torch.cat([torch.arange(len(sequence)) for sequence in sequences])
    places = [
        start + len(prompt) - 1 + step
        for start, prompt, one in zip(starts, prompts, completions, strict=True)
        for step in range(len(one.token_ids))
    ]
    with torch.no_grad():
        hidden = narrow.model(
            input_ids=tokens[None],
            position_ids=positions[None],
            use_cache=False,
            attention_plan=plan,
        ).last_hidden_state[0]
        expected = token_scores(
            hidden[places], narrow.lm_head.weight, None, tokens[torch.tensor(places) + 1]
        ).log_probs
    found = torch.tensor([number for one in completions for number in one.log_probs])
    assert (found - expected).abs().mean() < 0.02


def test_the_module_stays_as_it_was(model: PreTrainedModel) -> None:
    """Training mode comes back, parameters can still be trained, and own parameters are not copied."""
    model.train()
    engine = NativeEngine(model)
    engine.generate_batch([[5, 6]], [SamplingParams(max_tokens=2)])
    assert model.training
    model.eval()
    before = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    engine.load_weights(model.state_dict().items(), version=7)
    assert engine.weight_version == 7
    assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == before
    assert {name: tensor.data_ptr() for name, tensor in engine.named_weights()} == before
    assert not any(parameter.is_inference() for parameter in model.parameters())


def test_incomplete_weights(model: PreTrainedModel) -> None:
    """A weight that is missing or has another shape is named, and the engine does not generate with what it has."""
    engine = NativeEngine(model)
    weights = dict(model.state_dict())
    name = "model.layers.1.self_attn.o_proj.weight"
    with pytest.raises(WeightSyncError, match=f"without 1 of .* weights: {name}"):
        engine.load_weights(
            ((key, tensor) for key, tensor in weights.items() if key != name), version=2
        )
    with pytest.raises(RolloutError, match="not loaded completely"):
        engine.generate_batch([[1]], [SamplingParams(max_tokens=1)])
    with pytest.raises(WeightSyncError, match=rf"weight {name}: got shape \(3,\), expected shape"):
        engine.load_weights({**weights, name: torch.zeros(3)}.items(), version=2)
    engine.load_weights(weights.items(), version=3)
    assert len(engine.generate_batch([[1]], [SamplingParams(max_tokens=1)])) == 1


def test_what_the_engine_refuses(model: PreTrainedModel, plain) -> None:
    """Another attention, more tokens than there are positions, logits that are not numbers."""
    engine = NativeEngine(model)
    with pytest.raises(
        RolloutError,
        match="prompt 0: got 3 prompt tokens and up to 300 new ones, expected at most 256",
    ):
        engine.generate_batch([[1, 2, 3]], [SamplingParams(max_tokens=300)])
    with pytest.raises(RolloutError, match="a model with eager attention"):
        plain(NativeEngine)
    weight = model.get_output_embeddings().weight
    kept = weight.detach().clone()
    try:
        weight.data.fill_(float("nan"))
        with pytest.raises(RolloutError, match="log-probability of nan"):
            engine.generate_batch([[1, 2]], [SamplingParams(max_tokens=3)])
    finally:
        weight.data.copy_(kept)
