# SPDX-License-Identifier: Apache-2.0
"""vLLM on a vision-language model: responses as of transformers, before and after new weights, in process or not."""

import asyncio
import json
import signal
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quadriga.config import load_config
from quadriga.data import VisionProcessor, load_processor
from quadriga.data.videos import open_video
from quadriga.errors import RolloutError
from quadriga.protocol.memory import images_key
from quadriga.rollout import Completion, HFEngine, Images, SamplingParams
from quadriga.rollout.http import HTTPEngine
from quadriga.rollout.setup import EngineSetup
from quadriga.rollout.vllm.engine import VLLMEngine
from quadriga.weight_sync import CopiedWeights
from small_servers import serving
from tests.vision_folder import (
    FAMILIES,
    named,
    noise,
    picture,
    tiny_model,
    tiny_tokenizer,
    write_vision_folder,
)

pytestmark = pytest.mark.skipif(
    find_spec("torchvision") is None, reason="no torchvision here: scripts/install-vllm installs it"
)
PLACE = "<|vision_start|><|image_pad|><|vision_end|>"
FILM = "<|vision_start|><|video_pad|><|vision_end|>"
ASKED: list[tuple[str, list[Any]]] = [
    (f"which {PLACE} ?", [noise(16, 16, 0)]),
    (f"which {PLACE} ?", [noise(16, 16, 1)]),
    ("which color ? and w1", []),
    (f"{PLACE} and {PLACE} color ?", [noise(24, 8, 2), picture("red", 8, 32)]),
    (f"{PLACE} " + "w1 w2 w3 " * 30, [noise(100, 70, 4)]),
    (f"{FILM} which {PLACE} ?", [noise(16, 16, 5)]),
    (f"w1 {FILM} and {FILM} ?", []),
]
FILMS = [
    {
        "frames": np.random.default_rng(seed).integers(0, 256, (*shape, 3), dtype=np.uint8),
        "fps": fps,
    }
    for seed, (shape, fps) in enumerate([((12, 24, 16), 4), ((5, 40, 20), 2), ((9, 16, 16), 3.3)])
]
"""For the places of videos, in their order; their sizes change, and all but the second have frames left out."""


def pixels_of(family: str) -> dict[str, int]:
    """Other sizes than those in the model's folder; vLLM takes none for GLM-4V."""
    return {} if family == "glm4v" else {"max_pixels": 512}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    """A kind of model."""
    return request.param


@pytest.fixture(scope="module")
def pictures_folder(tmp_path_factory: pytest.TempPathFactory, family: str) -> Path:
    """The model of seed 0."""
    return write_vision_folder(tmp_path_factory.mktemp("seeing"), family)


@pytest.fixture(scope="module")
def small(
    start: Callable[..., VLLMEngine], pictures_folder: Path, family: str
) -> Callable[..., VLLMEngine]:
    """Starts an engine that makes images smaller than the model's files say, where vLLM takes other sizes."""

    def make(**rollout: Any) -> VLLMEngine:
        sizes = {"max_model_len": 160, "max_num_seqs": 8, "max_num_batched_tokens": 512}
        pixels = {f"mm_processor_kwargs.{name}": value for name, value in pixels_of(family).items()}
        return start(path=str(pictures_folder), data=pixels, **sizes | rollout)

    return make


@pytest.fixture(scope="module")
def engine(small: Callable[..., VLLMEngine]) -> Iterator[VLLMEngine]:
    """One for all tests of a family."""
    one = small()
    yield one
    one.close()


@pytest.fixture(scope="module")
def processor(pictures_folder: Path, family: str) -> VisionProcessor:
    """As the data have it."""
    found = load_processor(pictures_folder, options=pixels_of(family))
    assert found is not None
    return found


def requests(
    processor: VisionProcessor, family: str, **sampling: Any
) -> tuple[list[list[int]], list[SamplingParams], list[Images | None]]:
    """Two prompts that differ in their image alone, one of text, one with two images, one of several blocks, one with a
    video and an image (of GLM-4V with the video alone), and one with two videos."""
    prompts, images, films, rules = [], [], iter(FILMS), processor.frame_rules("here")

    def encode(texts: list[str]) -> list[list[int]]:
        return tiny_tokenizer(family)(texts, add_special_tokens=False)["input_ids"]

    for text, pictures in ASKED:
        if family == "glm4v" and FILM in text:
            text, pictures = (
                f"w1 {FILM} ?",
                [],
            )  # transformers takes no image beside it, and vLLM no second video
        opened = [
            open_video(next(films), folder=Path(), where="here") for _ in range(text.count(FILM))
        ]
        clips = [rules.read(one, where="here") for one in opened]
        seen = processor.prompt(
            encode([named(text, family)])[0],
            pictures,
            160,
            where="here",
            clips=clips,
            encode=encode,
        )
        prompts.append(seen.ids)
        data = seen.columns()["multi_modal_data"]
        videos = tuple(zip(data.get("video", ()), data.get("video_metadata", ()), strict=True))
        keys = (tuple(seen.short_ids), images_key(seen.inputs))
        one = Images(seen.pictures, seen.inputs, seen.positions, *keys, videos)
        images.append(one if seen.inputs else None)
    params = {"max_tokens": 8, "temperature": 0.0, **sampling}
    return prompts, [SamplingParams(seed=5, **params) for _ in prompts], images


def require_equal(found: list[Completion], wanted: list[Completion]) -> None:
    """Tokens, and log-probabilities within rounding."""
    for one, other in zip(found, wanted, strict=True):
        assert one.token_ids == other.token_ids and one.finish_reason == other.finish_reason
        torch.testing.assert_close(one.log_probs, other.log_probs, atol=3e-4, rtol=0)


def test_answers_are_transformers(
    engine: VLLMEngine, processor: VisionProcessor, family: str
) -> None:
    """Greedy, with the same images under one set of weights after another: nothing is kept of an image."""
    asked = requests(processor, family)
    for version, seed in enumerate((0, 1, 0), start=1):
        model = tiny_model(family, seed)
        CopiedWeights().publish(model.named_parameters(), engine, version)
        require_equal(engine.generate_batch(*asked), HFEngine(model).generate_batch(*asked))
        assert engine.weight_version == version


def test_seeds_and_images_decide(
    engine: VLLMEngine, processor: VisionProcessor, family: str
) -> None:
    CopiedWeights().publish(tiny_model(family).named_parameters(), engine, 9)
    prompts, sampling, images = requests(processor, family, temperature=1.0)
    together = engine.generate_batch(prompts, sampling, images)
    assert prompts[0] == prompts[1] and together[0].log_probs != together[1].log_probs
    for row in range(len(prompts)):
        alone = engine.generate_batch(
            prompts[row : row + 1], sampling[row : row + 1], images[row : row + 1]
        )
        assert alone[0].token_ids == together[row].token_ids


def test_another_expansion_is_an_error(
    engine: VLLMEngine, pictures_folder: Path, family: str
) -> None:
    """The data take images of other sizes than the engine was told of."""
    processor = load_processor(
        pictures_folder, options={"max_pixels": 256} if family == "glm4v" else {}
    )
    assert processor is not None
    prompts, sampling, images = requests(processor, family)
    with pytest.raises(
        RolloutError,
        match=r"rollout\.name=vllm: got \d+ tokens of a prompt with images.*expected the (104|94) tokens",
    ):
        engine.generate_batch(prompts, sampling, images)
    assert len(engine.generate_batch(prompts[2:3], sampling[2:3])) == 1, "it goes on"


def test_beside(small: Callable[..., VLLMEngine], processor: VisionProcessor, family: str) -> None:
    """Weights over shared memory, requests awaited one by one."""
    engine = small(mode="async")
    try:
        prompts, sampling, images = requests(processor, family)
        for version, seed in enumerate((0, 1), start=1):
            model = tiny_model(family, seed)
            CopiedWeights().publish(model.named_parameters(), engine, version)

            async def ask() -> list[Completion]:
                rows = zip(prompts, sampling, images, strict=True)
                return list(await asyncio.gather(*(engine.generate(*row) for row in rows)))

            wanted = HFEngine(model).generate_batch(prompts, sampling, images)
            require_equal(asyncio.run(ask()), wanted)
            require_equal(engine.generate_batch(prompts, sampling, images), wanted)
    finally:
        engine.close()


@pytest.mark.parametrize("family", ["qwen2_5_vl", "glm4v"], indirect=True)
def test_a_server_of_it(
    pictures_folder: Path, processor: VisionProcessor, family: str, tmp_path: Path
) -> None:
    """The engine `http` against vLLM's own server, which makes the tokens of the data out of texts and images."""
    options = [
        "--model", str(pictures_folder), "--served-model-name", "small", "--dtype", "float32", "--max-model-len", "160",
        "--enforce-eager", "--kv-cache-memory-bytes", str(32 << 20), "--trust-request-chat-template",
        "--mm-processor-kwargs", json.dumps(pixels_of(family)),
    ]  # fmt: skip
    variables = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCH_COMPILE_DISABLE": "1"}
    rollout, path = "actor_rollout_ref.rollout", f"actor_rollout_ref.model.path={pictures_folder}"
    rows = [
        rows
        for rows in zip(*requests(processor, family), strict=True)
        if rows[2] is None or not rows[2].videos
    ]
    prompts, sampling, images = map(list, zip(*rows, strict=True))
    assert sum(one is not None for one in images) == 4
    module, log = "vllm.entrypoints.openai.api_server", tmp_path / "log.txt"
    with serving(module, options, variables, log, signal.SIGTERM) as (url, _):
        words = [
            f"{rollout}.name=http",
            f"+{rollout}.engine_kwargs.http={{urls: ['{url}'], model: small}}",
            path,
        ]
        config = load_config(words).config
        own = config.actor_rollout_ref.rollout.engine_kwargs["http"]
        setup = EngineSetup(config, tiny_tokenizer(family), own, torch.device("cpu"), torch.float32)
        engine = HTTPEngine.from_config(setup)
        wanted = HFEngine(tiny_model(family)).generate_batch(prompts, sampling, images)
        require_equal(engine.generate_batch(prompts, sampling, images), wanted)
        other = load_processor(pictures_folder, options={"max_pixels": 256})
        assert other is not None
        prompts, sampling, images = requests(other, family)
        with pytest.raises(
            RolloutError,
            match=r"got \d+ other tokens of a prompt with images, expected the \d+ tokens of the data",
        ):
            engine.generate_batch(prompts[4:5], sampling[4:5], images[4:5])
        engine.close()
