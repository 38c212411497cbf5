# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels of a decode step, interpreted on the CPU, against torch: for test_heads_triton.py.

Prints one line for each case that agrees. Attention is in float16: the interpreter keeps bfloat16 as integers of 16
bits, and its matrix product multiplies those.
"""

import itertools

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from quadriga.models.attention import ATTENTION_NAME, AttentionOptions
from quadriga.rollout import NativeEngine
from quadriga.rollout.interface import SamplingParams
from quadriga.rollout.native import attention, generation, kernels_triton, network
from quadriga.rollout.native.kernels import KeysAndValues, SlotPlaces
from quadriga.rollout.native.kernels_triton import TritonKernels, draw
from quadriga.rollout.native.network import TorchElementwise
from quadriga.rollout.sampler import NUM_DRAWS, SamplingRules, sample


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Up to three roundings of half precision, which the interpreter does towards zero for bfloat16."""
    bound = 2**-5 if expected.dtype == torch.bfloat16 else 2**-10
    torch.testing.assert_close(found.float(), expected.float(), rtol=bound, atol=bound * 0.05)


def check_elementwise(dtype: torch.dtype, size: int, head_size: int) -> None:
    """Norms with and without a sum before them, rotary positions of all heads but the last two, gates."""
    generator = torch.Generator().manual_seed(size)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    ours, theirs = TritonKernels(), TorchElementwise()
    states, added, weight = normal(2, 3, size), normal(2, 3, size), normal(size)
    close(ours.normalize(states, weight, 1e-6), theirs.normalize(states, weight, 1e-6))
    expected = theirs.add_and_normalize(states, added, weight, 1e-6)
    for one, other in zip(
        ours.add_and_normalize(states, added.clone(), weight, 1e-6), expected, strict=True
    ):
        close(one, other)
    for num_heads in (3, 13):
        heads, cos, sin = (
            normal(2, 3, num_heads, head_size),
            normal(2, 3, head_size),
            normal(2, 3, head_size),
        )
        expected = theirs.rotate(heads, num_heads - 1, cos, sin)
        found = ours.rotate(heads.clone(), num_heads - 1, cos, sin)
        bound = 2**-5 if dtype == torch.bfloat16 else 2**-9  # of products that nearly cancel
        torch.testing.assert_close(found.float(), expected.float(), rtol=bound, atol=bound)
    wide = normal(2, 3, 2 * size)
    close(ours.gate(wide), theirs.gate(wide))


def exact_attention(query, key, value, scale, own, prefixes, places, options) -> torch.Tensor:
    """In float64, row by row, over the keys that a row sees."""
    rows = []
    for row, (place, length, written) in enumerate(
        zip(*(one.tolist() for one in places), strict=True)
    ):
        keys, values = (
            torch.cat(
                (shared[place, :, :length], mine[row, :, :written], new[row][:, None]), 1
            ).double()
            for shared, mine, new in zip(prefixes, own, (key, value), strict=True)
        )
        if options.window is not None:
            keys, values = keys[:, -options.window :], values[:, -options.window :]
        scores = query[row].double().unflatten(0, (len(keys), -1)) @ keys.mT * scale  # [K, G, X]
        if options.softcap is not None:
            scores = (scores / options.softcap).tanh() * options.softcap
        if options.sinks is not None:
            sinks = options.sinks.double().view(len(keys), -1, 1)
            scores = torch.cat((scores, sinks), -1)
            values = torch.cat((values, torch.zeros_like(values[:, :1])), 1)
        rows.append((scores.softmax(-1) @ values).flatten(0, 1))
    return torch.stack(rows)


def check_attention(
    num_keys: int, group: int, size: int, parts: int, options: AttentionOptions
) -> None:
    """Prefixes of several lengths, which rows share, and responses that hold nothing, some, or all but one token."""
    kernels_triton._MAX_PARTS = parts
    generator = torch.Generator().manual_seed(size + group)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).half()

    lengths, places = [150, 7, 64], [0, 1, 0, 2, 2]
    written = torch.tensor([0, 69, 33, 5, 1])
    num_rows, num_heads = len(places), num_keys * group
    prefixes = KeysAndValues(normal(3, num_keys, 150, size), normal(3, num_keys, 150, size))
    own = KeysAndValues(normal(6, num_keys, 70, size), normal(6, num_keys, 70, size))
    # As the product leaves them: side by side.
    states = normal(num_rows, num_heads + 2 * num_keys, size)
    query, key, value = states.split((num_heads, num_keys, num_keys), 1)
    at = SlotPlaces(
        torch.tensor(places), torch.tensor([lengths[place] for place in places]), written
    )
    scale = size**-0.5
    expected = exact_attention(query, key, value, scale, own, prefixes, at, options)
    before = own.keys.clone()
    found = TritonKernels().attend(query, key, value, scale, own, prefixes, at, options)
    torch.testing.assert_close(found.double(), expected, rtol=4e-3, atol=4e-3)
    for row, number in enumerate(written.tolist()):
        assert torch.equal(own.keys[row, :, number], key[row]) and torch.equal(
            own.values[row, :, number], value[row]
        )
        before[row, :, number] = key[row]
    assert torch.equal(own.keys, before)  # and nothing else was written


def check_sampling(num_tokens: int, temperatures: list[float]) -> None:
    """The tokens of `sample`, and its log-probabilities; 0 makes a row greedy."""
    generator = torch.Generator().manual_seed(num_tokens)
    logits = 3 * torch.randn(len(temperatures), num_tokens, generator=generator)
    logits[:, -1] = logits.amax(-1)  # a tie
    params = [SamplingParams(max_tokens=1, temperature=one) for one in temperatures]
    rules = SamplingRules.from_params(params)
    uniforms = torch.from_numpy(np.random.default_rng(0).random((len(temperatures), NUM_DRAWS)))
    found = draw(logits, rules.temperature, rules.is_greedy, uniforms)
    tokens, *log_probs = sample(logits.clone(), rules, uniforms)
    assert found[:, 0].long().equal(tokens)
    for ours, theirs in zip(found.T[1:], log_probs, strict=True):
        torch.testing.assert_close(ours.float(), theirs, rtol=1e-5, atol=1e-5)


def check_generation() -> None:
    """Responses of an engine whose decode steps these kernels compute, in float32: tokens and log-probabilities."""
    sizes = {
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = Qwen3Config(
        **sizes, head_dim=16, num_hidden_layers=2, vocab_size=300, initializer_range=0.1
    )
    config._attn_implementation = ATTENTION_NAME
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).eval()
    sampling = [
        SamplingParams(max_tokens=4 + row, temperature=0.5 * (row % 3), seed=row)
        for row in range(5)
    ]
    prompts = [[1, 2, 3], [4], [1, 2, 3], [5, 6, 7, 8], [4]]
    expected = NativeEngine(model, eos_token_ids=()).generate_batch(prompts, sampling)
    engine = NativeEngine(model, eos_token_ids=())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "compiled_attention", lambda *_: TritonKernels())
        patch.setattr(generation, "can_launch_triton", lambda _: True)
        patch.setattr(network, "kernels", TritonKernels)
        patch.setattr(network.Kernels, "can_compute", lambda *_: True)
        found = engine.generate_batch(prompts, sampling)
    assert isinstance(engine._network, network.PlainNetwork)
    assert isinstance(engine._network.elementwise, TritonKernels)
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids == other.token_ids
        np.testing.assert_allclose(one.log_probs, other.log_probs, atol=1e-4)
        np.testing.assert_allclose(one.sampling_log_probs, other.sampling_log_probs, atol=1e-4)


if __name__ == "__main__":
    check_generation()
    print("agrees: generation")
    for dtype, (size, head_size) in itertools.product(
        (torch.bfloat16, torch.float16), ((64, 16), (96, 80), (1536, 128))
    ):
        check_elementwise(dtype, size, head_size)
        print(f"agrees: elementwise, {dtype}, {size}, heads of {head_size}")
    shapes = [(2, 1, 64), (1, 2, 80), (2, 3, 96), (2, 6, 128), (1, 8, 256), (3, 7, 16), (1, 17, 32)]
    for (num_keys, group, size), parts in itertools.product(shapes, (1, 2, 8)):
        check_attention(num_keys, group, size, parts, AttentionOptions())
        print(f"agrees: attention, {num_keys} x {group} heads of {size}, {parts} parts")
    sinks = torch.randn(4, generator=torch.Generator().manual_seed(0))
    for parts in (1, 4):
        for options in (
            AttentionOptions(window=40),
            AttentionOptions(window=100, softcap=2.0),
            AttentionOptions(sinks=sinks),
        ):
            check_attention(2, 2, 32, parts, options)
            print(f"agrees: {options}, {parts} parts")
    for num_tokens in (5, 256, 700, 9000, 150_001):
        for temperatures in ([1.0] * 24, [0.7, 1.0, 0.0, 1.5] * 6, [0.0] * 3):
            check_sampling(num_tokens, temperatures)
            print(f"agrees: sampling among {num_tokens}, temperatures {temperatures[:4]}")
