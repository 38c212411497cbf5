# SPDX-License-Identifier: Apache-2.0
"""The compiled loops against torch's operators, and what happens where they cannot be compiled.

What it does not prove: that they are faster, and anything on a processor without AVX-512.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from quadriga.models.attention import ATTENTION_NAME
from quadriga.rollout import NativeEngine, SamplingParams
from quadriga.rollout.native import attention, elementwise, kernels, products
from quadriga.rollout.native.elementwise import TorchElementwise, elementwise_for
from quadriga.rollout.native.kernels import Kernels, about_kernels

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
NOT_FINITE = (float("nan"), float("inf"), -float("inf"))


@pytest.fixture
def loops() -> Kernels:
    """The compiled loops of this machine."""
    found = kernels.kernels()
    if found is None:
        pytest.skip(about_kernels())
    return found


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Normal numbers, the same for the same shape."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@DTYPES
@pytest.mark.parametrize("num_rows", [1, 5, 40])
@pytest.mark.parametrize("operation", ["normalize", "rotate", "gate"])
def test_small_things_round_as_torch_does(loops: Kernels, operation: str, num_rows: int, dtype: torch.dtype) -> None:
    """In bfloat16 bit for bit, as training computes them; in float32 but for the order of sums."""
    compute: dict[str, Callable[..., torch.Tensor]] = {
        "normalize": lambda way: way.normalize(
            random(1, num_rows, 96, dtype=dtype)[:, :, :64], random(64, dtype=dtype), 1e-5
        ),
        "rotate": lambda way: way.rotate(
            random(num_rows, 1, 7, 32, dtype=dtype),
            5,
            *(random(num_rows, 1, 32, dtype=dtype).mul(turn) for turn in (1, -0.5)),
        ),
        "gate": lambda way: way.gate(8 * random(num_rows, 1, 192, dtype=dtype)),
    }
    found, expected = compute[operation](loops), compute[operation](TorchElementwise())
    assert found.dtype == dtype
    close = 0 if dtype == torch.bfloat16 else 2e-6
    torch.testing.assert_close(found, expected, atol=close, rtol=close)


@DTYPES
def test_the_gate_far_from_zero(loops: Kernels, dtype: torch.dtype) -> None:
    """Where exp leaves its range on either side, and where a number is none."""
    gate = torch.tensor([-200.0, -88.0, -87.0, 0.0, 87.0, 88.0, 200.0, *NOT_FINITE[:2]] + [1.0] * 23).to(dtype)
    states = torch.cat((gate, torch.full_like(gate, 2.0)))[None]
    torch.testing.assert_close(
        loops.gate(states), TorchElementwise().gate(states), atol=1e-30, rtol=1e-6, equal_nan=True
    )


@pytest.mark.parametrize("value", NOT_FINITE)
def test_what_is_no_number_stays_none(loops: Kernels, value: float) -> None:
    """A broken weight must not become an ordinary result on its way through bfloat16."""
    states, weight = random(3, 32, dtype=torch.bfloat16), random(8, 32, dtype=torch.bfloat16)
    states[1, 4] = value
    for dtype in (torch.bfloat16, torch.float32):
        found = loops.multiply(states, [weight], None, dtype)
        expected = (states.float() @ weight.float().T).to(dtype)
        torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2, equal_nan=True)
        assert not found[1].isfinite().any()


def test_a_row_does_not_depend_on_the_others(loops: Kernels) -> None:
    """Bit for bit, however many rows are multiplied with it."""
    weights = [random(12, 64, dtype=torch.bfloat16), random(4, 64, dtype=torch.bfloat16)]
    states = random(23, 64, dtype=torch.bfloat16)
    together = loops.multiply(states, weights, None, torch.float32)
    for row in (0, 7, 22):
        assert torch.equal(loops.multiply(states[row : row + 1], weights, None, torch.float32)[0], together[row])


def test_sizes_that_do_not_fit_are_not_taken(loops: Kernels) -> None:
    """They are left to torch, each for itself."""
    good = random(8, 32, dtype=torch.bfloat16)
    assert loops.can_multiply(good)
    for bad in (good[:7], good[:, :31], good.float(), random(32, 8, dtype=torch.bfloat16).T):
        assert not loops.can_multiply(bad)
    assert loops.can_attend(80)
    assert not loops.can_attend(24)
    cpu = torch.device("cpu")
    assert isinstance(elementwise_for({torch.bfloat16}, cpu, 64, 32), Kernels)
    for dtypes, size in (({torch.bfloat16}, 48), ({torch.float16}, 64), ({torch.bfloat16, torch.float32}, 64)):
        assert isinstance(elementwise_for(dtypes, cpu, 64, size), TorchElementwise)


def test_tensors_that_are_not_what_they_are_taken_for(loops: Kernels) -> None:
    """Another dtype or gaps between numbers would be read as something else: neither gets that far."""
    weight = random(8, 32, dtype=torch.bfloat16)
    for states in (random(2, 32, dtype=torch.float32), random(2, 64, dtype=torch.bfloat16)[:, :32]):
        with pytest.raises(AssertionError):
            loops.multiply(states, [weight], None, torch.bfloat16)
    with pytest.raises(AssertionError):
        loops.normalize(weight, random(32, dtype=torch.float32), 1e-5)
    with pytest.raises(AssertionError):
        loops.gate(random(64, 2, dtype=torch.float32).T)


def _model(dtype: torch.dtype) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 200}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "initializer_range": 0.1}
    config = LlamaConfig(**sizes, **heads, eos_token_id=1)
    config._attn_implementation = ATTENTION_NAME
    return LlamaForCausalLM(config).to(dtype).eval()


@pytest.mark.parametrize("kind", ["bfloat16", "float32", "float16"])
def test_without_them_the_answers_are_the_same(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """In float32 every token; in other dtypes the log-probabilities of the first ones differ by rounding."""
    dtype = getattr(torch, kind)
    model = _model(dtype)
    prompts = [[5, 6, 7, 8 + row // 3] for row in range(9)]
    params = [SamplingParams(max_tokens=70 + row, seed=row, ignore_eos=True) for row in range(9)]
    with_loops = NativeEngine(model).generate_batch(prompts, params)
    for module in (attention, elementwise, products):
        monkeypatch.setattr(module, "kernels", lambda: None)
    monkeypatch.setattr(products, "about_kernels", lambda: "no compiled loops")
    engine = NativeEngine(model)
    without = engine.generate_batch(prompts, params)
    assert "loops compiled" not in engine.description
    if dtype == torch.float32:
        assert [one.token_ids for one in with_loops] == [one.token_ids for one in without]
    for one, other in zip(with_loops, without, strict=True):
        same = [mine == yours for mine, yours in zip(one.token_ids, other.token_ids, strict=True)]
        for number in range((*same, False).index(False)):
            close = 2e-5 if dtype == torch.float32 else 0.1
            assert one.log_probs[number] == pytest.approx(other.log_probs[number], abs=close)


def _compiler(folder: Path, script: str) -> str:
    """A PATH on which gcc is this script."""
    folder.mkdir()
    program = folder / "gcc"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return f"{folder}:/usr/bin:/bin"


def test_why_there_are_none(loops: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No compiler, one that fails, one that makes no library, a folder that takes no files: each is said."""
    again = kernels._find.__wrapped__
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert again() == (None, "no compiled loops, for there is no C compiler here (gcc would make generation faster)")
    fails = '[ "$1" = --version ] || { echo no space >&2; exit 1; }'
    monkeypatch.setenv("PATH", _compiler(tmp_path / "fails", fails))
    found, why = again()
    assert found is None
    assert "kernels.c" in why
    assert why.endswith("failed: no space")
    writes = 'while [ "$#" -gt 1 ]; do shift; done; [ "$1" = --version ] || echo nothing > "$1"'
    monkeypatch.setenv("PATH", _compiler(tmp_path / "writes", writes))
    found, why = again()
    assert found is None
    assert "they cannot be made, kept or loaded" in why
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert "they cannot be made, kept or loaded" in again()[1]


def test_they_are_compiled_once(loops: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second time the file is there, and nothing else is left beside it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert kernels._find.__wrapped__()[0] is not None
    (library,) = (tmp_path / "quadriga").iterdir()
    monkeypatch.setattr(kernels, "_compile", lambda *_: pytest.fail("compiled again"))
    assert kernels._find.__wrapped__()[1] == f"loops compiled with {loops.compiler}"
    assert library.name.startswith("kernels-")
