# SPDX-License-Identifier: Apache-2.0
"""Architectures against transformers' own forward, eager and one row at a time: docs/models.md is made of the results.

What none of this proves: the same in bfloat16, on a GPU, or for a trained model of the architecture.
"""

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from quadriga.algorithms.aggregate import agg_loss
from quadriga.algorithms.losses import vanilla
from quadriga.config import ActorConfig, OptimConfig
from quadriga.engines.batches import MicroBatching, Passes
from quadriga.engines.fsdp.engine import Training
from quadriga.engines.objectives import PolicyObjective
from quadriga.engines.step import infer, update
from quadriga.errors import EngineError
from quadriga.models.architecture import is_packed, length_limit, way_of
from quadriga.models.attention import ATTENTION_NAME
from quadriga.models.load import load_causal_lm
from quadriga.models.probe import probe
from quadriga.models.reward_model import build_reward_model
from quadriga.models.scorers import PolicyScorer, RewardScorer, ValueScorer
from quadriga.models.weight_files import write_safetensors
from quadriga.models.weight_names import ConvertedFiles
from quadriga.protocol import DataProto
from quadriga.rollout import HFEngine, NativeEngine, SamplingParams
from tests import models_page
from tests.architectures import MATRIX, OTHERS, config_of, make_model
from tests.numerics.recording import Recording

TEMPERATURE, MICRO = 0.7, MicroBatching(None, 30)
ALONE = ("Qwen3-Next", "Falcon-H1")  # rows are computed one at a time: layers keep a state
REFUSED = ("BERT as a decoder", "BERT")


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a small model, as transformers saves it."""

    def make(name: str) -> Path:
        folder = tmp_path_factory.getbasetemp() / "architectures" / name.replace(" ", "_")
        if not folder.exists():
            make_model(config_of(name), "eager").save_pretrained(folder)
        return folder

    return make


def row_by_row(
    model: PreTrainedModel, batch: DataProto, temperature: float = TEMPERATURE
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies [b, T], each row alone."""
    columns = batch.batch
    mask = columns["response_mask"]
    width = columns["input_ids"].shape[1] - mask.shape[1]
    log_probs, entropies = [], []
    for tokens, seen in zip(columns["input_ids"], columns["attention_mask"].bool(), strict=True):
        prompt, length = int(seen[:width].sum()), int(seen[width:].sum())
        logits = model(input_ids=tokens[seen][None], use_cache=False).logits[0, prompt - 1 : -1]
        scores = (logits / temperature).log_softmax(-1)
        found = (
            scores.gather(-1, tokens[seen][prompt:, None])[:, 0],
            -(scores.exp() * scores).sum(-1),
        )
        for values, kept in zip(found, (log_probs, entropies), strict=True):
            kept.append(torch.nn.functional.pad(values, (0, mask.shape[1] - length)))
    return torch.stack(log_probs) * mask, torch.stack(entropies) * mask


def gradients_row_by_row(
    model: PreTrainedModel, batch: DataProto, config: ActorConfig
) -> dict[str, Tensor]:
    columns, mask = batch.batch, batch.batch["response_mask"]
    log_probs, entropies = row_by_row(model, batch)
    losses, _ = vanilla(
        columns["old_log_probs"],
        log_probs,
        columns["advantages"],
        mask,
        clip_ratio_low=config.clip_ratio_low,
        clip_ratio_high=config.clip_ratio_high,
        clip_ratio_c=config.clip_ratio_c,
    )
    loss = agg_loss(losses, mask, config.loss_agg_mode) - config.entropy_coeff * agg_loss(
        entropies, mask, config.loss_agg_mode
    )
    loss.backward()
    return {
        name: torch.zeros_like(one) if one.grad is None else one.grad
        for name, one in model.named_parameters()
    }


def engine_of(folder: Path) -> Recording:
    """A training engine on a model as training loads it."""
    model = load_causal_lm(folder, dtype=torch.float32)
    training = Training(OptimConfig(), grad_clip=1.0, max_nonfinite_steps=3)
    return Recording(
        PolicyScorer(model), dtype=torch.float32, device=torch.device("cpu"), training=training
    )


@pytest.mark.parametrize("name", [*MATRIX, *(name for name in OTHERS if name not in REFUSED)])
def test_log_probs_and_gradients(
    name: str, folder_of: Callable[[str], Path], batch: DataProto
) -> None:
    """Packed where it can be, with shared prompts and in micro-batches: what rows alone give. Linear attention in
    chunks multiplies its own rounding, by how much depends on the CPU's kernels."""
    folder = folder_of(name)
    reference = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    config = ActorConfig(entropy_coeff=0.05)
    log_probs, entropies = (one.detach() for one in row_by_row(reference, batch))
    batch.batch["old_log_probs"] = log_probs
    expected = gradients_row_by_row(reference, batch, config)
    engine = engine_of(folder)
    if name in MATRIX:
        assert is_packed(engine.model) == (name not in ALONE)
    scores = infer(engine, batch, MICRO, temperature=TEMPERATURE, with_entropy=True)
    torch.testing.assert_close(scores["log_probs"], log_probs, atol=1e-5, rtol=0)
    torch.testing.assert_close(scores["entropy"], entropies, atol=1e-5, rtol=0)
    update(
        engine,
        batch,
        PolicyObjective(config),
        Passes(len(batch), 1, MICRO),
        lr=0.0,
        temperature=TEMPERATURE,
    )
    assert set(engine.recorded) == set(expected)
    largest = max(float(one.norm()) for one in expected.values())
    for parameter, gradient in expected.items():
        off = float((engine.recorded[parameter] - gradient).norm())
        bound = 5e-5 if name == "Qwen3-Next" else 1e-5
        assert off <= bound * max(float(gradient.norm()), 0.1 * largest), (
            parameter,
            off,
            float(gradient.norm()),
            largest,
        )


def test_an_architecture_that_cannot_be_computed_is_refused() -> None:
    """Tokens that see those behind them, and a head that is more than a projection."""
    for name in REFUSED:
        with pytest.raises(
            EngineError, match="model bert: got logits that are not the products of its head"
        ):
            way_of(config_of(name))


FEATURES: dict[str, tuple[str, dict[str, Any]]] = {
    "soft-capping of scores": ("Gemma 2", {"attn_logit_softcapping": None}),
    "soft-capping of logits": ("Gemma 2", {"final_logit_softcapping": None}),
    "scaling of logits": ("Granite", {"logits_scaling": 1.0}),
    "sliding window": ("Mistral", {"sliding_window": None}),
    "sliding windows of some layers": ("Gemma 3 (text)", {"layer_types": ["full_attention"] * 2}),
    "YaRN": ("Qwen2.5", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    "partial rotary": ("Phi-3", {"partial_rotary_factor": 1.0}),
    "positions without rotation": ("SmolLM3", {"no_rope_layers": [1, 1, 1, 1]}),
}


@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_acts(feature: str, batch: DataProto) -> None:
    """Without it transformers' own log-probs are others, by much more than the test above lets pass."""
    name, without = FEATURES[feature]
    config, plain = config_of(name), config_of(name)
    for key, value in without.items():
        if key == "partial_rotary_factor":
            plain.rope_parameters = {**plain.rope_parameters, key: value}
        setattr(plain, key, value)
    assert require_apart(make_model(config, "eager"), make_model(plain, "eager"), batch)


def test_sinks_act(batch: DataProto) -> None:
    """As above, for the sinks of gpt-oss: without a share of the attention they change nothing."""
    model, without = (make_model(config_of("gpt-oss"), "eager") for _ in range(2))
    for layer in without.model.layers:
        layer.self_attn.sinks.data.fill_(-1e4)
    assert require_apart(model, without, batch)


def test_a_tied_head_acts(batch: DataProto) -> None:
    """As above, for a head that is the embedding."""
    model, without = (make_model(config_of("Qwen2.5"), "eager") for _ in range(2))
    without.lm_head.weight = torch.nn.Parameter(without.lm_head.weight.detach().roll(1, 0))
    assert require_apart(model, without, batch)


def test_latent_attention_acts(batch: DataProto) -> None:
    """As above, for the positions of DeepSeek-V3: a part of its keys that all heads share, beside the latent one."""
    model, without = (make_model(config_of("DeepSeek-V3"), "eager") for _ in range(2))
    for layer in without.model.layers:
        layer.self_attn.kv_a_proj_with_mqa.weight.data[-model.config.qk_rope_head_dim :] = 0.0
    assert require_apart(model, without, batch)


def test_linear_attention_acts(batch: DataProto) -> None:
    """As above, for the layers of Qwen3-Next that keep a state: they tell nothing to the others."""
    model, without = (make_model(config_of("Qwen3-Next"), "eager") for _ in range(2))
    for layer in without.model.layers:
        if hasattr(layer, "linear_attn"):
            layer.linear_attn.out_proj.weight.data.zero_()
    assert require_apart(model, without, batch)


@torch.no_grad()
def require_apart(model: PreTrainedModel, other: PreTrainedModel, batch: DataProto) -> bool:
    one, two = (row_by_row(each, batch)[0] for each in (model, other))
    return float((one - two).abs().max()) > 1e-2


@pytest.mark.parametrize("name", [*ALONE, "LFM2", "Bamba", "Granite 4 (hybrid)", "Bloom", "Mamba"])
def test_packed_in_spite_of_its_layers_is_refused(
    name: str, folder_of: Callable[[str], Path]
) -> None:
    """The probe names the architecture and a token, where a model is packed that cannot be."""
    model = load_causal_lm(folder_of(name), dtype=torch.float32)
    assert probe(PolicyScorer(model), "actor") <= 1e-4
    model.config._attn_implementation = ATTENTION_NAME
    kind = type(model).__name__
    with pytest.raises(
        EngineError,
        match=rf"actor, {kind}: got log-probs that differ by .* at token \d of response",
    ):
        probe(PolicyScorer(model), "actor")


def test_the_probe_finds_an_error_in_a_head_and_a_body(folder_of: Callable[[str], Path]) -> None:
    """A cap that is forgotten, for a critic a window, and weights that are NaN. Torch's generator stays."""
    model = load_causal_lm(folder_of("Gemma 2"), dtype=torch.float32)
    critic = ValueScorer(load_causal_lm(folder_of("Mistral"), dtype=torch.float32))
    state = torch.get_rng_state()
    way_of(config_of("OLMo 3"))
    assert probe(PolicyScorer(model), "actor") <= 1e-4
    wrong = PolicyScorer(model)
    wrong.score = lambda *call: {
        name: one + 0.1 for name, one in PolicyScorer.score(wrong, *call).items()
    }
    with pytest.raises(EngineError, match=r"Gemma2ForCausalLM: got log-probs that differ by 0\.1"):
        probe(wrong, "actor")
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    with pytest.raises(EngineError, match=r"not finite, by transformers' own forward.*damaged"):
        probe(PolicyScorer(model), "actor")
    assert probe(critic, "critic") <= 1e-4
    for layer in critic.model.model.layers:
        layer.self_attn.forward = forgetful(layer.self_attn)
    with pytest.raises(
        EngineError, match="critic, MistralForCausalLM: got hidden states or scores that differ by"
    ):
        probe(critic, "critic")
    assert torch.equal(torch.get_rng_state(), state)


def test_the_probe_finds_an_error_in_a_reward_head(
    folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """The scores are those of transformers' classifier, and are not where a bias is added that it has not."""
    judge = build_reward_model(str(folder_of("Qwen3")), pad_token_id=3, device=torch.device("cpu"))
    judge.score.weight.data.normal_(generator=torch.Generator().manual_seed(2))
    assert probe(RewardScorer(judge), "reward_model") <= 1e-4
    assert judge.config.pad_token_id == 3
    wrong = RewardScorer(judge)
    wrong.score = lambda *call: {
        name: one + 0.1 for name, one in RewardScorer.score(wrong, *call).items()
    }
    with pytest.raises(
        EngineError,
        match="reward_model, Qwen3ForSequenceClassification: got hidden states or scores",
    ):
        probe(wrong, "reward_model")


def forgetful(module: Any) -> Callable[..., Any]:
    """The forward of an attention without its window."""
    other = copy.copy(module)
    vars(other).pop("forward", None)
    other.config = copy.copy(module.config)
    other.config.sliding_window = None
    return other.forward


def test_longrope_rows_beyond_its_limit_are_computed_alone(
    tmp_path: Path, batch: DataProto
) -> None:
    """Rows on both sides of the length at which the frequencies change: each as if it were alone."""
    config = config_of("Phi-3")
    config.original_max_position_embeddings = 10
    size = 4  # pairs of a head of 16 that turns by half
    config.rope_parameters = {
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * size, "long_factor": [2.0, 3.0, 4.0, 5.0],
        "original_max_position_embeddings": 10, "factor": 4.0, "partial_rotary_factor": 0.5,
    }  # fmt: skip
    model = make_model(config, "eager")
    model.save_pretrained(tmp_path)
    assert length_limit(config) == 10
    lengths = batch.batch["attention_mask"].sum(-1)
    assert lengths.min() <= 10 < lengths.max()
    found = infer(engine_of(tmp_path), batch, MICRO, temperature=TEMPERATURE)["log_probs"]
    torch.testing.assert_close(found, row_by_row(model, batch)[0].detach(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", [name for name in MATRIX if name not in ALONE])
def test_native_is_hf_and_training(name: str, folder_of: Callable[[str], Path]) -> None:
    """Greedy tokens of both engines are equal, and the log-probs are those of training."""
    folder = folder_of(name)
    prompts = [[5, 6, 7, 8, 9, 10, 11, 12], [3, 4], [5, 6, 7, 8, 9, 10, 11, 12]]
    sampling = [SamplingParams(max_tokens=10, temperature=0.0) for _ in prompts]
    generated = []
    for engine in (
        NativeEngine(load_causal_lm(folder, dtype=torch.float32), eos_token_ids=()),
        HFEngine(load_causal_lm(folder, dtype=torch.float32, attention="sdpa"), eos_token_ids=()),
    ):
        generated.append(engine.generate_batch(prompts, sampling))
        engine.close()
    native, hf = generated
    assert [one.token_ids for one in native] == [one.token_ids for one in hf]
    reference = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    for prompt, one in zip(prompts, native, strict=True):
        tokens = torch.tensor([prompt + list(one.token_ids)])
        with torch.no_grad():
            scores = (
                reference(input_ids=tokens, use_cache=False)
                .logits[0, len(prompt) - 1 : -1]
                .log_softmax(-1)
            )
        expected = scores.gather(-1, tokens[0, len(prompt) :, None])[:, 0]
        torch.testing.assert_close(torch.tensor(one.log_probs), expected, atol=1e-4, rtol=0)
        assert math.isfinite(sum(one.log_probs))


class InMemory:
    """The weights of an engine, as a folder has them."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self.weights, self.shapes = weights, {name: one.shape for name, one in weights.items()}

    def read(self, name: str) -> Tensor:
        return self.weights[name]


@pytest.mark.parametrize("name", MATRIX)
def test_weights_arrive_bit_for_bit(
    name: str, folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """In a rollout engine that had others, and in the folder that `hf_model` writes, read by transformers."""
    engine = engine_of(folder_of(name))
    weights = {key: one.clone() for key, one in engine.weights()}
    attention = ATTENTION_NAME if is_packed(engine.model) else "sdpa"
    other = load_causal_lm(folder_of(name), dtype=torch.float32, attention=attention)
    for parameter in other.parameters():
        parameter.data.zero_()
    rollout = NativeEngine(other) if is_packed(engine.model) else HFEngine(other)
    rollout.load_weights(weights.items(), version=1)
    received = dict(rollout.named_weights())
    assert all(torch.equal(received[key], one) for key, one in weights.items())
    rollout.close()
    engine.model.config.save_pretrained(tmp_path)
    write_safetensors(tmp_path, ConvertedFiles(InMemory(weights), engine.model, to_files=True))
    read, info = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    loaded = read.state_dict()
    assert all(torch.equal(loaded[key], one) for key, one in weights.items())


def test_the_page_says_what_is_tested() -> None:
    """docs/models.md is what `python -m tests.models_page` prints."""
    page = Path(__file__).parents[2] / "docs" / "models.md"
    assert page.read_text(encoding="utf-8") == models_page.text()
