# SPDX-License-Identifier: Apache-2.0
"""An adapter that vLLM applies beside its weights: what it answers, what each publication is, and what is refused."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from quadriga.errors import RolloutError, WeightSyncError
from quadriga.models.adapter_files import AdapterFiles, write_factors
from quadriga.rollout.interface import SamplingParams
from quadriga.rollout.vllm.cores import InProcessCore, ProcessCore
from quadriga.rollout.vllm.engine import VLLMEngine
from quadriga.weight_sync import CopiedWeights
from small_adapters import LORA, adapted, by_peft, published
from small_models import EOS, greedy, model

LONG = [2 + number * 7 % 250 for number in range(200)]
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13], LONG]
GREEDY = [SamplingParams(max_tokens=24, temperature=0.0)] * len(PROMPTS)
UP = "model.layers.1.mlp.up_proj.lora_B.default.weight"

Make = Callable[..., VLLMEngine]


@pytest.fixture(scope="module")
def engine(start: Make) -> Iterator[VLLMEngine]:
    """One in this process, with the frozen weights."""
    one = start(model=LORA)
    CopiedWeights().publish(published(adapted(0), with_frozen=True), one, 1)
    yield one
    one.close()


def require_greedy_of(engine: VLLMEngine, reference: Any) -> list[list[int]]:
    """Its tokens are the likeliest of the reference."""
    found = engine.generate_batch(PROMPTS, GREEDY)
    for prompt, one in zip(PROMPTS, found, strict=True):
        tokens, log_probs = greedy(reference, prompt, 24)
        assert (one.token_ids, one.finish_reason) == (
            tokens,
            "stop" if tokens[-1] == EOS else "length",
        )
        torch.testing.assert_close(one.log_probs, log_probs, atol=3e-4, rtol=0)
    return [one.token_ids for one in found]


def publish(engine: VLLMEngine, seed: int, version: int) -> None:
    """The adapter alone."""
    CopiedWeights().publish(published(adapted(seed), with_frozen=False), engine, version)


def test_greedy_is_peft(engine: VLLMEngine, tmp_path: Path) -> None:
    """With several adapters one after the other, packed and plain modules; none of them says what the model says."""
    answers = []
    for version, seed in enumerate((1, 2, 1), start=2):
        publish(engine, seed, version)
        answers.append(require_greedy_of(engine, by_peft(adapted(seed), tmp_path / str(version))))
        assert engine.weight_version == version
    assert answers[0] == answers[2] != answers[1]
    assert answers[0] != [greedy(model(0), prompt, 24)[0] for prompt in PROMPTS]


def test_each_publication_is_new(engine: VLLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A KV cache computed under an earlier adapter is not found, even if vLLM's prefix cache is not emptied.

    Nothing is left behind: vLLM has one adapter, and no folder stays.
    """
    ask = engine.core.ask

    def keeps_its_cache(method: str, *args: Any, **given: Any) -> Any:
        return True if method == "reset_prefix_cache" else ask(method, *args, **given)

    expected = {seed: require_known(engine, seed, 10 + seed) for seed in (1, 2)}
    monkeypatch.setattr(engine.core, "ask", keeps_its_cache)
    numbers = set()
    for version in range(20, 40):
        publish(engine, 1 + version % 2, version)
        found = engine.generate_batch(PROMPTS, GREEDY)
        assert [one.token_ids for one in found] == expected[1 + version % 2], version
        held = ask("list_loras")
        assert len(held) == 1
        numbers |= held
        assert not Path(engine._slot.request.lora_path).exists()
    assert len(numbers) == 20


def require_known(engine: VLLMEngine, seed: int, version: int) -> list[list[int]]:
    """What it answers under an adapter, with an empty cache."""
    publish(engine, seed, version)
    return [one.token_ids for one in engine.generate_batch(PROMPTS, GREEDY)]


def test_versions_cost_no_memory(engine: VLLMEngine) -> None:
    """What this process holds does not grow by an adapter's size with each."""
    process, size = (
        psutil.Process(),
        sum(tensor.nbytes for _, tensor in published(adapted(1), with_frozen=False)),
    )
    for version in range(50, 60):
        publish(engine, 1, version)
    before = process.memory_info().rss
    for version in range(60, 160):
        publish(engine, 1, version)
    assert process.memory_info().rss - before < 20 * size


class Meddling(VLLMEngine):
    """Changes one number of one matrix: in the folder, before or after the fingerprints are taken of it."""

    when = "adapter_fingerprints"

    def _make_core(self) -> InProcessCore | ProcessCore:
        core = super()._make_core()
        plain = core.ask

        def ask(method: str, *args: Any, **given: Any) -> Any:
            if (
                method == "collective_rpc"
                and args[0] == "adapter_fingerprints"
                and self.when == args[0]
            ):
                self._meddle(given["args"][0])
            if method == "add_lora" and self.when == method:
                self._meddle(args[0].lora_path)
            found = plain(method, *args, **given)
            if method == "add_lora" and self.when == "remove_lora":
                plain(self.when, args[0].lora_int_id)
            return found

        core.ask = ask  # pyrefly: ignore[bad-assignment]
        return core

    def _meddle(self, folder: str) -> None:
        files = AdapterFiles(Path(folder))
        factors = {name: files.read(name) for name in files.shapes}
        factors[UP][3, 1] += 1e-3
        write_factors(Path(folder), factors)


def test_another_adapter_than_was_sent_is_seen(start: Make, tmp_path: Path) -> None:
    """Changed before vLLM's processes read it, changed when vLLM reads it, gone afterwards; then all is well again."""
    engine = start(Meddling, model=LORA)
    sync = CopiedWeights()
    told = {
        "adapter_fingerprints": rf"1 of \d+ weights that differ: {UP}",
        "add_lora": rf"process 0: got 1 matrices that no layer of vLLM's holds: {UP}",
        "remove_lora": r"got adapters \[\] in vLLM, expected only number \d+",
    }
    for version, (when, message) in enumerate(told.items(), start=1):
        engine.when = when
        with pytest.raises(WeightSyncError, match=message):
            sync.publish(
                published(adapted(2), with_frozen=not engine.has_frozen_weights), engine, version
            )
        with pytest.raises(RolloutError, match="not loaded completely"):
            engine.generate_batch(PROMPTS, GREEDY)
    engine.when = ""
    sync.publish(published(adapted(2), with_frozen=False), engine, 9)
    sync.verify(engine, 9)
    require_greedy_of(engine, by_peft(adapted(2), tmp_path / "peft"))
    with pytest.raises(WeightSyncError, match="got version 9, expected version 10"):
        sync.verify(engine, 10)
    engine.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda pairs: [one for one in pairs if one[0] != UP], f"a stream without 1 of .*: {UP}"),
        (
            lambda pairs: [
                *pairs,
                ("model.layers.9.mlp.up_proj.lora_A.default.weight", torch.zeros(4, 64)),
            ],
            "layers.9",
        ),
        (
            lambda pairs: [(pairs[0][0], torch.zeros(8, 64)), *pairs[1:]],
            r"expected shape \(4, 64\)",
        ),
        (
            lambda pairs: [*pairs, ("model.norm.weight", torch.ones(64))],
            "a stream without .* model.embed_tokens",
        ),
    ],
    ids=["missing", "unknown", "another rank", "some frozen weights"],
)
def test_an_incomplete_adapter_is_refused(
    engine: VLLMEngine, tmp_path: Path, change: Any, message: str
) -> None:
    """Nothing is generated until one has come. The frozen weights stay: no bucket of them was complete."""
    with pytest.raises(WeightSyncError, match=message):
        engine.load_weights(change(list(published(adapted(1), with_frozen=False))), 4)
    with pytest.raises(RolloutError, match="not loaded completely"):
        engine.generate_batch(PROMPTS, GREEDY)
    assert engine.has_frozen_weights
    engine.load_weights(published(adapted(1), with_frozen=False), 5)
    require_greedy_of(engine, by_peft(adapted(1), tmp_path / "peft"))


def test_the_frozen_weights_come_first(start: Make) -> None:
    """An adapter alone is no complete set of weights; one of a rank that vLLM has no room for is given more."""
    engine = start(model=LORA | {"lora_rank": 9, "target_modules": "all-linear"})
    with pytest.raises(RolloutError, match="not loaded completely"):
        engine.generate_batch(PROMPTS, GREEDY)
    one = adapted(3, size=0.1, lora_rank=9, target_modules="all-linear")
    with pytest.raises(WeightSyncError, match="a stream without 21 of 49 weights"):
        engine.load_weights(published(one, with_frozen=False), 1)
    engine.load_weights(published(one, with_frozen=True), 1)
    require_greedy_of(engine, one)
    engine.close()


def test_asleep(engine: VLLMEngine, tmp_path: Path) -> None:
    """An adapter that comes meanwhile is there afterwards."""
    engine.sleep()
    publish(engine, 2, 200)
    engine.wake()
    require_greedy_of(engine, by_peft(adapted(2), tmp_path / "peft"))


@pytest.mark.parametrize(
    "place", [{"mode": "async"}, {"tensor_model_parallel_size": 2}], ids=["beside", "two processes"]
)
def test_in_processes_of_their_own(start: Make, tmp_path: Path, place: dict[str, Any]) -> None:
    """Beside this one, and in two that share the layers: with the frozen weights at first, then without."""
    engine = start(model=LORA, **place)
    sync = CopiedWeights()
    for version, seed in enumerate((1, 2), start=1):
        sync.publish(published(adapted(seed), with_frozen=version == 1), engine, version)
        sync.verify(engine, version)
        require_greedy_of(engine, by_peft(adapted(seed), tmp_path / str(version)))
    engine.close()
