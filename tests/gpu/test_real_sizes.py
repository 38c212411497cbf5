# SPDX-License-Identifier: Apache-2.0
"""The parts that compute, on a CUDA device at the sizes of published models: bfloat16 against float32, a full KV cache,
the head of a large vocabulary, checkpoints, another device than the first. Peaks of memory are printed (`-rP`).

In the rehearsal (scripts/test --rehearse) the same runs at small sizes on a stand-in, and no memory is compared.
"""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from quadriga.config import ActorConfig, OptimConfig
from quadriga.engines.batches import MicroBatching, Passes
from quadriga.engines.checkpoint import StateWriter, load_state
from quadriga.engines.fsdp.engine import ALL_KINDS, FSDPEngine, Memory, Training
from quadriga.engines.objectives import PolicyObjective
from quadriga.engines.step import infer, update
from quadriga.models.attention import ATTENTION_NAME
from quadriga.models.fused import fuse
from quadriga.models.heads import token_scores
from quadriga.models.scorers import PolicyScorer
from quadriga.protocol import DataProto
from quadriga.rollout import NativeEngine, SamplingParams
from quadriga.workers.base import choose_device

pytestmark = pytest.mark.gpu

IS_REHEARSAL = bool(os.environ.get("QUADRIGA_REHEARSAL"))
VOCABULARY = 307 if IS_REHEARSAL else 151_936
PROMPT, RESPONSE = (20, 30) if IS_REHEARSAL else (384, 1024)
SIZES = {"heads of 64": (64, 6), "heads of 128": (128, 2)}
PARTS = frozenset({"model", "optimizer"})


def make_model(
    head_size: int = 64, num_key_heads: int = 2, dtype: torch.dtype = torch.float32
) -> LlamaForCausalLM:
    """Two layers, six query heads for each key head."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=6 * num_key_heads * head_size,
        intermediate_size=4 * head_size,
        num_hidden_layers=2,
        num_attention_heads=6 * num_key_heads,
        num_key_value_heads=num_key_heads,
        vocab_size=VOCABULARY,
        max_position_embeddings=32_768,
        tie_word_embeddings=True,
    )
    config._attn_implementation = ATTENTION_NAME
    model = LlamaForCausalLM(config).to(dtype).eval()
    fuse(model)
    return model


def make_batch() -> DataProto:
    """Two prompts with three responses each, of several lengths."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (6, PROMPT + RESPONSE), generator=generator)
    tokens[:, :PROMPT] = tokens[:2, :PROMPT].repeat_interleave(3, 0)
    lengths = torch.tensor([RESPONSE - 4 * number for number in range(6)])
    attention = (torch.arange(PROMPT + RESPONSE) < PROMPT + lengths[:, None]).long()
    return DataProto.from_dict(
        tensors={
            "input_ids": tokens,
            "attention_mask": attention,
            "position_ids": (attention.cumsum(-1) - 1).clamp(min=0),
            "responses": tokens[:, PROMPT:],
            "response_mask": attention[:, PROMPT:],
            "advantages": torch.randn(6, 1, generator=generator).expand(6, RESPONSE).contiguous(),
        }
    )


def make_engine(
    model: LlamaForCausalLM, dtype: torch.dtype, memory: Memory, device: str = "cuda"
) -> FSDPEngine:
    """The model's float32 masters on the device, and what it computes with in `dtype`."""
    training = Training(OptimConfig(eps=1e-3), grad_clip=1.0, max_nonfinite_steps=3)
    where = torch.device(device)
    return FSDPEngine(
        PolicyScorer(model.to(where)), dtype=dtype, device=where, training=training, memory=memory
    )


def learn(engine: FSDPEngine, *, share_prompts: bool) -> torch.Tensor:
    """[6, T] log-probs after two optimizer steps."""
    micro = MicroBatching(None, 3 * (PROMPT + RESPONSE), share_prompts)
    passes = Passes(6, 1, micro)
    for _ in range(2):
        update(engine, make_batch(), PolicyObjective(ActorConfig()), passes, lr=1e-4)
    return infer(engine, make_batch(), micro)["log_probs"]


@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize("share_prompts", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_bfloat16_learns_as_float32(size: str, share_prompts: bool, is_checkpointed: bool) -> None:
    """Mean and largest difference of log-probs after an update; with the peak of memory of each."""
    results, memory = [], Memory(gradient_checkpointing=is_checkpointed)
    for dtype in (torch.float32, torch.bfloat16):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        engine = make_engine(make_model(*SIZES[size]), dtype, memory)
        results.append(learn(engine, share_prompts=share_prompts))
        print(f"{size}, {dtype}: {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB at the peak")
    difference = (results[0] - results[1]).abs()
    assert difference.mean() < 0.02 and difference.max() < 0.3


def test_shared_prompts_and_checkpointing_change_rounding_alone() -> None:
    """In float32; and prompts that are shared take less memory at the peak."""
    results, peaks = [], []
    for share_prompts, is_checkpointed in ((False, False), (True, False), (True, True)):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        engine = make_engine(
            make_model(), torch.float32, Memory(gradient_checkpointing=is_checkpointed)
        )
        results.append(learn(engine, share_prompts=share_prompts))
        peaks.append(torch.cuda.max_memory_allocated())
    for one in results[1:]:
        torch.testing.assert_close(one, results[0], atol=2e-3, rtol=2e-3)
    assert IS_REHEARSAL or peaks[2] < peaks[1] < peaks[0]


def test_generation_in_bfloat16_with_a_full_cache() -> None:
    """Requests that give way end with the tokens that they have with room: all but rare ones, where logits tie."""
    model = make_model(dtype=torch.bfloat16).to("cuda")
    generator = np.random.default_rng(0)
    prompts = [generator.integers(0, VOCABULARY, PROMPT).tolist() for _ in range(4)] * 4
    sampling = [
        SamplingParams(max_tokens=RESPONSE, temperature=1.0, seed=seed) for seed in range(16)
    ]
    tokens = []
    for share in (1.0, 0.3):
        room = (
            16 * (PROMPT + RESPONSE) * share * NativeEngine(model).cache_memory.token_bytes / 2**30
        )
        engine = NativeEngine(model, eos_token_ids=(), cache_gigabytes=room)
        tokens.append([one.token_ids for one in engine.generate_batch(prompts, sampling)])
    same = np.mean(
        [np.mean(np.array(one) == np.array(other)) for one, other in zip(*tokens, strict=True)]
    )
    assert all(len(one) == RESPONSE for one in tokens[1])
    assert same > (0.99 if IS_REHEARSAL else 0.3)  # one other token changes all that follow it


def test_the_head_of_a_large_vocabulary() -> None:
    """Log-probs, entropies and gradients at V = 151,936 in bfloat16 against float32 sums of the same numbers."""
    generator = torch.Generator().manual_seed(0)
    num_tokens, hidden_size = (7, 32) if IS_REHEARSAL else (1500, 896)
    hidden = torch.randn(num_tokens, hidden_size, generator=generator).bfloat16()
    weight = (
        torch.randn(VOCABULARY, hidden_size, generator=generator) / hidden_size**0.5
    ).bfloat16()
    targets = torch.randint(0, VOCABULARY, (num_tokens,), generator=generator).cuda()
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        leaves = [one.cuda().to(dtype).requires_grad_() for one in (hidden, weight)]
        scores = token_scores(*leaves, None, targets, with_entropy=True)
        (scores.log_probs.sum() + scores.entropy.sum()).backward()
        found.append([scores.log_probs, scores.entropy, *(leaf.grad.float() for leaf in leaves)])
    for number, (half, full) in enumerate(zip(*found, strict=True)):
        bound = 1e-3 if number < 2 else 0.03
        torch.testing.assert_close(half, full, rtol=bound, atol=bound * full.abs().max().item())


def require_it_comes_back(
    engine: FSDPEngine, folder: Path, learn: Callable[[], torch.Tensor]
) -> None:
    """What is loaded, after more steps, is bit for bit what was saved, and the engine computes with it.

    Args:
        learn: some optimizer steps, and log-probs after them.
    """

    def state() -> dict[str, torch.Tensor]:
        return {
            name: getattr(one, "_local_tensor", one).clone()
            for name, one in engine.state(PARTS).items()
        }

    learn()
    writer = StateWriter(engine.world)
    with engine.awake(*ALL_KINDS):
        saved = state()
        writer.start({folder / "saved": engine.state(PARTS)})
        writer.is_written(wait=True)
    expected = learn()
    with engine.awake(*ALL_KINDS):
        changed = state()
        load_state(folder / "saved", engine.state(PARTS), engine.world)
        engine.apply_loaded_state(PARTS)
    with engine.awake(*ALL_KINDS):
        assert all(torch.equal(one, saved[name]) for name, one in state().items())
        assert not all(torch.equal(one, saved[name]) for name, one in changed.items())
    torch.testing.assert_close(learn(), expected, atol=1e-2, rtol=1e-3)


@pytest.mark.parametrize("where", ["the device", "the host between phases", "the host"])
def test_a_checkpoint_brings_back_what_was_changed(tmp_path: Path, where: str) -> None:
    """Masters and moments are on the device, or offloaded by `param_offload` and its like, or by `offload_policy`."""
    engine = make_engine(make_model(), torch.bfloat16, Memory(offload_weights=where == "the host"))
    if where == "the host between phases":
        engine.offload_between_phases(ALL_KINDS, tmp_path, frees_gradients=True)
    require_it_comes_back(engine, tmp_path, lambda: learn(engine, share_prompts=True))


def test_another_device_than_the_first() -> None:
    """`cuda:1` becomes the current device, and Triton's kernels run there."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU here: cuda:1 was not tested")
    device = choose_device("cuda:1")
    try:
        assert torch.cuda.current_device() == 1
        engine = make_engine(make_model(), torch.bfloat16, Memory(), str(device))
        assert learn(engine, share_prompts=True).isfinite().all()
    finally:
        torch.cuda.set_device(0)
