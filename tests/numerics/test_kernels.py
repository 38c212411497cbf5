# SPDX-License-Identifier: Apache-2.0
"""The compiled loops against torch's operators, and what happens where they cannot be compiled.

What it does not prove: that they are faster, and anything on a processor without AVX-512.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from quadriga.models.attention import ATTENTION_NAME
from quadriga.rollout import NativeEngine, SamplingParams
from quadriga.rollout.native import attention, kernels, network, products
from quadriga.rollout.native.kernels import Kernels, KeysAndValues, SlotPlaces, about_kernels
from quadriga.rollout.native.network import PlainNetwork, TorchElementwise

DTYPES = pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"]
)
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


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Of torch, and so of the loops."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@DTYPES
@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("num_rows", [1, 5, 40])
@pytest.mark.parametrize("operation", ["normalize", "rotate", "gate"])
def test_small_things_round_as_torch_does(
    loops: Kernels, operation: str, num_rows: int, dtype: torch.dtype
) -> None:
    """In bfloat16 the same, but where the order of a sum decides how it is rounded; in float32 to the last bits."""
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
    is_half = dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=2**-7 if is_half else 2e-6)
    assert not is_half or (found != expected).float().mean() < 0.01


@DTYPES
def test_the_gate_far_from_zero(loops: Kernels, dtype: torch.dtype) -> None:
    """Where exp leaves its range on either side, and where a number is none."""
    gate = torch.tensor(
        [-200.0, -88.0, -87.0, 0.0, 87.0, 88.0, 200.0, *NOT_FINITE] + [1.0] * 22
    ).to(dtype)
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


@pytest.mark.parametrize(
    "pattern", [0x7FC00001, 0x7F800001, 0x7F800000], ids=["quiet", "signalling", "infinite"]
)
def test_a_broken_key_breaks_the_answers_that_see_it(loops: Kernels, pattern: int) -> None:
    """Whatever stands in the bits of what is no number: exp must not make a share of it."""
    attended = Attended(3, 2, 1, 32, torch.float32)
    attended.prefixes.keys.view(torch.int32)[1, 0, 2, 5] = pattern
    found = attended.by(loops)  # rows 0 and 2 see prefix 0, row 1 sees prefix 1
    assert not found[1, 0].isfinite().any()
    assert found[1, 1].isfinite().all()
    assert found[::2].isfinite().all()


class Attended:
    """A token of each slot, prefixes, and responses so far, of any shape."""

    def __init__(
        self, num_rows: int, num_key_heads: int, group: int, size: int, dtype: torch.dtype
    ) -> None:
        shapes = [(2, num_key_heads, 70, size), (num_rows, num_key_heads, 9, size)]
        self.prefixes, self.own = (
            KeysAndValues(random(*shape, dtype=torch.float32), -random(*shape, dtype=torch.float32))
            for shape in shapes
        )
        self.token = random(num_rows, num_key_heads * (group + 2), size, dtype=dtype)
        self.sizes = (num_key_heads * group, num_key_heads, num_key_heads)
        rows = torch.arange(num_rows)
        self.places = SlotPlaces(rows % 2, 66 + rows % 2, rows % 9)

    def by(self, loops: Kernels) -> torch.Tensor:
        """What the loop computes."""
        query, key, value = self.token.split(self.sizes, 1)
        return loops.attend(query, key, value, 0.2, self.own, self.prefixes, self.places)

    def exactly(self) -> torch.Tensor:
        """The same, row by row in float64."""
        query, key, value = (part.double() for part in self.token.split(self.sizes, 1))
        rows = []
        for row, (place, length, written) in enumerate(
            zip(*(part.tolist() for part in self.places), strict=True)
        ):
            keys, values = (
                torch.cat((shared[place, :, :length], own[row, :, :written], new[row, :, None]), 1)
                .double()
                .repeat_interleave(self.sizes[0] // self.sizes[1], 0)
                for shared, own, new in zip(self.prefixes, self.own, (key, value), strict=True)
            )
            rows.append(((query[row, :, None] @ keys.mT * 0.2).softmax(-1) @ values)[:, 0])
        return torch.stack(rows)


@DTYPES
@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("num_rows", [1, 23])
@pytest.mark.parametrize(
    ("group", "size"),
    [(1, 16), (2, 48), (3, 64), (4, 128), (5, 32), (6, 16), (7, 80), (8, 256), (13, 16)],
)
def test_attention_of_any_shape(
    loops: Kernels, dtype: torch.dtype, num_rows: int, group: int, size: int
) -> None:
    """Against float64; the token's own key and value are in the cache afterwards."""
    attended = Attended(num_rows, 2, group, size, dtype)
    expected, found = attended.exactly(), attended.by(loops)
    assert found.dtype == dtype
    close = 2e-6 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(found.double(), expected, atol=max(close * 1e-2, 5e-6), rtol=close)
    for part, cache in zip(attended.token.split(attended.sizes, 1)[1:], attended.own, strict=True):
        rows = torch.arange(num_rows)
        assert torch.equal(cache[rows, :, attended.places.num_written], part.float())


@pytest.mark.usefixtures("num_threads")
def test_a_row_does_not_depend_on_the_others(loops: Kernels) -> None:
    """Bit for bit, however many rows are multiplied with it."""
    weights = [random(12, 64, dtype=torch.bfloat16), random(4, 64, dtype=torch.bfloat16)]
    biases = [random(12, dtype=torch.bfloat16), random(4, dtype=torch.bfloat16)]
    states = random(23, 64, dtype=torch.bfloat16)
    together = loops.multiply(states, weights, biases, torch.float32)
    expected = states.double() @ torch.cat(weights).double().T + torch.cat(biases).double()
    torch.testing.assert_close(together.double(), expected, atol=1e-5, rtol=0)
    for row in (0, 7, 22):
        assert torch.equal(
            loops.multiply(states[row : row + 1], weights, biases, torch.float32)[0], together[row]
        )


def test_sizes_that_do_not_fit_are_not_taken(loops: Kernels) -> None:
    """They are left to torch, each for itself."""
    good = random(8, 32, dtype=torch.bfloat16)
    assert loops.can_multiply(good)
    for bad in (good[:7], good[:, :31], good.float(), random(32, 8, dtype=torch.bfloat16).T):
        assert not loops.can_multiply(bad)
    assert loops.can_attend(80)
    assert not loops.can_attend(24)
    assert isinstance(PlainNetwork(_model(torch.bfloat16)).elementwise, Kernels)
    mixed = _model(torch.bfloat16)
    mixed.get_submodule("model.norm").float()
    for model in (_model(torch.bfloat16, width=48), _model(torch.float16), mixed):
        assert isinstance(PlainNetwork(model).elementwise, TorchElementwise)


def test_tensors_that_are_not_what_they_are_taken_for(loops: Kernels) -> None:
    """Another dtype or gaps between numbers would be read as something else: neither gets that far."""
    weight = random(8, 32, dtype=torch.bfloat16)
    for states in (random(2, 32, dtype=torch.float32), random(2, 64, dtype=torch.bfloat16)[:, :32]):
        with pytest.raises(AssertionError):
            loops.multiply(states, [weight], None, torch.bfloat16)
    states = weight[:2]
    bad: list[Callable[[], object]] = [
        lambda: loops.multiply(states, [random(8, 64, dtype=torch.bfloat16)], None, torch.bfloat16),
        lambda: loops.multiply(states, [weight], [random(8, dtype=torch.float32)], torch.bfloat16),
        lambda: loops.normalize(weight, random(32, dtype=torch.float32), 1e-5),
        lambda: loops.normalize(weight, random(16, dtype=torch.bfloat16), 1e-5),
        lambda: loops.gate(random(64, 2, dtype=torch.float32).T),
        lambda: loops.rotate(
            random(4, 2, 3, 32, dtype=torch.float32),
            2,
            *[random(1, 2, 32, dtype=torch.float32)] * 2,
        ),
    ]
    for number, call in enumerate(bad):
        with pytest.raises(AssertionError):
            call()
            pytest.fail(f"number {number} was taken")
    attended = Attended(3, 2, 1, 32, torch.float32)
    attended.own = KeysAndValues(attended.own.keys[..., :16], attended.own.values)
    with pytest.raises(AssertionError):
        attended.by(loops)


def _model(dtype: torch.dtype, width: int = 96) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": width,
        "num_hidden_layers": 2,
        "vocab_size": 200,
    }
    heads = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "initializer_range": 0.1,
    }
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
    for module in (attention, network, products):
        monkeypatch.setattr(module, "kernels", lambda: None)
    without = NativeEngine(model).generate_batch(prompts, params)
    if dtype == torch.float32:
        assert [one.token_ids for one in with_loops] == [one.token_ids for one in without]
    for one, other in zip(with_loops, without, strict=True):
        same = [mine == yours for mine, yours in zip(one.token_ids, other.token_ids, strict=True)]
        num_same = (*same, False).index(False)
        assert num_same > 5
        for number in range(num_same):
            close = 2e-5 if dtype == torch.float32 else 0.1
            assert one.log_probs[number] == pytest.approx(other.log_probs[number], abs=close)


def _compiler(folder: Path, script: str) -> str:
    """A PATH on which gcc is this script."""
    folder.mkdir()
    program = folder / "gcc"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return f"{folder}:/usr/bin:/bin"


def test_why_there_are_none(
    loops: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No compiler, one that fails, one that makes no library, a folder that takes no files: each is said."""
    again = kernels._load_once.__wrapped__
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert again() == (
        None,
        "no compiled loops: no C compiler is installed (gcc would make generation faster)",
    )
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
    assert "XDG_CACHE_HOME sets the folder" in why
    monkeypatch.undo()
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert "XDG_CACHE_HOME sets the folder" in again()[1]
    (tmp_path / "open" / "quadriga").mkdir(parents=True)
    (tmp_path / "open" / "quadriga").chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "open"))
    assert "other users can write to" in again()[1]
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", _no_home)
    assert "no home" in again()[1]


def _no_home() -> Path:
    raise RuntimeError("no home")


def test_they_are_compiled_once(
    loops: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second time the file is there, and nothing else is left beside it; a broken one is made again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert kernels._load_once.__wrapped__()[0] is not None
    (library,) = (tmp_path / "quadriga").iterdir()
    monkeypatch.setattr(kernels, "_compile", lambda *_: pytest.fail("compiled again"))
    assert kernels._load_once.__wrapped__()[1] == f"loops compiled with {loops.compiler}"
    assert library.name.startswith("kernels-")
    monkeypatch.undo()
    other = tmp_path / "other"
    monkeypatch.setenv("XDG_CACHE_HOME", str(other))
    (other / "quadriga").mkdir(parents=True, mode=0o700)
    broken = other / "quadriga" / library.name
    broken.write_text("cut off")
    assert kernels._load_once.__wrapped__()[0] is not None
    assert broken.stat().st_size == library.stat().st_size
