# SPDX-License-Identifier: Apache-2.0
"""Videos of a prompt: frames, tokens and positions against transformers, the data set's rows, and what is refused.

Without torchvision the comparisons with transformers' processors are skipped, and without PyAV what reads files.
"""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quadriga.data import RLHFDataset, collate_fn, create_dataloader, load_processor
from quadriga.data.videos import TIME_TEXT_TYPES, FrameRules, _open_container, open_video
from quadriga.data.vision import VisionProcessor
from quadriga.errors import DataError
from quadriga.protocol import DataProto
from tests.tiny_vision import token_types
from tests.vision_folder import (
    FAMILIES,
    FILM,
    IMAGE,
    VIDEO,
    moving_dot,
    named,
    noise,
    their_processor,
    tiny_model,
    write_vision_folder,
)

needs_torchvision = pytest.mark.skipif(
    find_spec("torchvision") is None,
    reason="no torchvision here, which transformers' video processors need",
)
needs_av = pytest.mark.skipif(
    find_spec("av") is None, reason="no PyAV here: pip install -e '.[video]'"
)
PLACE = {
    "image": "<|vision_start|><|image_pad|><|vision_end|>",
    "video": "<|vision_start|><|video_pad|><|vision_end|>",
}


def video(num_frames: int, height: int, width: int, seed: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed)
    return random.integers(0, 256, (num_frames, height, width, 3), dtype=np.uint8)


def rope_index(family: str, wanted: Any) -> torch.Tensor:
    """Positions [3, P] of transformers; behind a video the text goes on where the models' own code has it.

    Qwen2-VL and Qwen2.5-VL were trained with text behind the largest position of a video, which vLLM gives it, too;
    transformers has it behind the height and the width alone, so that it may stand between the frames.
    """
    ids, grids = (
        wanted["input_ids"],
        {name: wanted[name] for name in wanted if name.endswith(("thw", "grid_ts"))},
    )
    if "second_per_grid_ts" in grids:
        grids["second_per_grid_ts"] = torch.as_tensor(grids["second_per_grid_ts"])
    positions, _ = tiny_model(family).model.get_rope_index(
        ids, wanted["mm_token_type_ids"], **grids
    )
    positions = positions[:, 0].clone()
    if family not in TIME_TEXT_TYPES:
        kinds = wanted["mm_token_type_ids"][0].tolist()
        for place in range(1, len(kinds)):
            if kinds[place - 1] == 2 and kinds[place] != 2:
                positions[:, place:] += positions[:, :place].max() + 1 - positions[:, place].min()
    return positions


SHAPES = [
    (8, 16, 16, 4.0),
    (7, 24, 40, 2.0),
    (30, 9, 33, 10.0),
    (4, 100, 30, 1.5),
    (41, 12, 20, 29.97),
]
"""Frames, height, width and frames for each second."""


@needs_torchvision
@pytest.mark.parametrize("family", FAMILIES)
@given(
    clips=st.lists(
        st.tuples(
            st.integers(2, 40),
            st.integers(8, 60),
            st.integers(8, 60),
            st.sampled_from([1.0, 2.0, 7.5, 29.97]),
        ),
        min_size=1,
        max_size=2,
    ),
    has_image=st.booleans(),
)
@settings(max_examples=15, deadline=None)
def test_frames_tokens_and_positions_are_those_of_transformers(
    processors, family: str, clips, has_image: bool
):
    """Videos of any size, alone, in pairs and behind an image. Says nothing of real vocabularies."""
    require_equal(processors[family], family, clips, has_image)


@needs_torchvision
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_videos_of_some_sizes(processors, family: str, shape):
    require_equal(processors[family], family, [shape], True)


def require_equal(processor: VisionProcessor, family: str, shapes: Any, has_image: bool) -> None:
    rules = processor.frame_rules("")
    arrays = [video(*shape[:3], seed=number) for number, shape in enumerate(shapes)]
    facts = [
        {"total_num_frames": len(a), "fps": shape[3]}
        for a, shape in zip(arrays, shapes, strict=True)
    ]
    images = [noise(20, 12)] if has_image else []
    text = f"<user> w1 {PLACE['image'] * has_image} which {' w2 '.join([PLACE['video']] * len(arrays))} ? <assistant>"
    text = named(text, family)
    whole = their_processor(family, processor, with_videos=True)
    given = {"text": [text], "images": images or None, "videos": arrays, "video_metadata": facts}
    wanted = whole(**given, return_tensors="pt", add_special_tokens=False)

    clips = []
    for array, shape in zip(arrays, shapes, strict=True):
        given = open_video({"frames": array, "fps": shape[3]}, folder=None, where="")
        clips.append(rules.read(given, where=""))
    tokenizer = whole.tokenizer

    def encode(texts: list[str]) -> list[list[int]]:
        return tokenizer(texts, add_special_tokens=False)["input_ids"]

    found = processor.prompt(encode([text])[0], images, 10**6, where="", clips=clips, encode=encode)
    assert found.ids == wanted["input_ids"][0].tolist()
    for name in ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw"):
        assert (name in found.inputs) == (name in wanted)
        assert name not in wanted or torch.equal(found.inputs[name], wanted[name]), name
    if family == "qwen2_5_vl":
        assert torch.allclose(
            found.inputs["second_per_grid_ts"], torch.as_tensor(wanted["second_per_grid_ts"])
        )
    assert torch.equal(found.positions, rope_index(family, wanted))


@pytest.mark.parametrize("family", FAMILIES)
def test_positions_of_short_videos_are_those_of_transformers(processors, family: str):
    """Where time is no longer than the sides there is one answer to what follows; needs no torchvision."""
    processor = processors[family]
    grids = torch.tensor([[2, 6, 8], [1, 4, 4]])
    each = [12, 4]
    ids, start, end = [7, 8], 3, 4
    for grid, count in zip(grids.tolist(), each, strict=True):
        if family == "qwen3_vl":
            ids += [token for _ in range(grid[0]) for token in (9, start, *[VIDEO] * count, end)]
        elif family == "glm4v":
            ids += [
                FILM[0],
                *[token for _ in range(grid[0]) for token in (start, *[IMAGE] * count, end, 9)],
                FILM[1],
            ]
        else:
            ids += [start, *[VIDEO] * (count * grid[0]), end]
    ids += [start, *[IMAGE] * 6, end, 10]
    seconds = torch.tensor([0.5, 0.5]) if family == "qwen2_5_vl" else None
    row, image = torch.tensor([ids]), torch.tensor([[1, 4, 6]])
    kinds = token_types(row)
    more = {} if seconds is None else {"second_per_grid_ts": seconds}
    wanted, delta = tiny_model(family).model.get_rope_index(row, kinds, image, grids, **more)
    found, ours = processor.get_rope_index(ids, image, grids, seconds)
    assert torch.equal(found, wanted[:, 0]) and ours == int(delta)


def test_text_behind_a_long_video_stands_behind_all_of_it(processors):
    """Four seconds of patches of 2 by 2: 0, 4, 8, 12 along time, and the text goes on at 13 (see `rope_index`)."""
    ids = [VIDEO] * 4 + [9, 9]
    found, delta = processors["qwen2_5_vl"].get_rope_index(
        ids, None, torch.tensor([[4, 2, 2]]), torch.tensor([1.0])
    )
    assert (
        found.tolist() == [[0, 4, 8, 12, 13, 14], [0, 0, 0, 0, 13, 14], [0, 0, 0, 0, 13, 14]]
        and delta == 9
    )


@pytest.fixture
def dataset(shown):
    def make(*rows, name: str = "v.jsonl", **values) -> RLHFDataset:
        return shown(*rows, name=name, **({"max_prompt_length": 256} | values))

    return make


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row(dataset, tmp_path, family: str):
    """A list of frames, an array, and a part of a message that brings its own, beside an image; the same lengths
    whether frames are read or counted."""
    frames = [f"{number}.png" for number in range(4)]
    for name, frame in zip(frames, moving_dot("right", 4), strict=True):
        frame.save(tmp_path / name)
    noise(16, 16).save(tmp_path / "a.png")
    listed = {"prompt": "w1 <video> and <image> ?", "videos": [frames], "images": ["a.png"]}
    array = np.stack([np.array(frame) for frame in moving_dot("right", 4)]).tolist()
    part = [
        {"type": "text", "text": "w1 "},
        {"type": "video", "video": frames},
        {"type": "text", "text": " and <image> ?"},
    ]
    rows = [
        listed,
        listed | {"videos": [array]},
        listed | {"videos": [], "prompt": [{"role": "user", "content": part}]},
    ]
    data = dataset(*rows, family=family)
    items = [data[number] for number in range(3)]
    inputs = items[0]["multi_modal_inputs"]
    assert inputs["video_grid_thw"].tolist() == [[2, 4, 4]] and inputs[
        "pixel_values_videos"
    ].shape == (32, 96)
    assert ("second_per_grid_ts" in inputs) == (family == "qwen2_5_vl")
    seen = items[0]["multi_modal_data"]
    assert [one.shape for one in seen["video"]] == [(4, 3, 16, 16)] and len(seen["image"]) == 1
    assert seen["video_metadata"][0]["frames_indices"] == [0, 1, 2, 3]
    assert items[0]["raw_prompt_ids"].count(VIDEO) == 1
    tokens = (
        (items[0]["input_ids"] == IMAGE).sum() - 4
        if family == "glm4v"
        else (items[0]["input_ids"] == VIDEO).sum()
    )
    assert tokens == 8
    for item in items[1:]:
        assert torch.equal(item["input_ids"], items[0]["input_ids"])
        assert torch.equal(
            item["multi_modal_inputs"]["pixel_values_videos"], inputs["pixel_values_videos"]
        )
    assert "videos" not in items[0] and "images" not in items[0]
    length = int(items[0]["attention_mask"].sum())
    assert (
        len(dataset(*rows, family=family, filter_overlong_prompts=True, max_prompt_length=length))
        == 3
    )
    with pytest.raises(DataError, match="got prompts of"):
        dataset(*rows, family=family, filter_overlong_prompts=True, max_prompt_length=length - 1)
    light = dataset(*rows, family=family, return_multi_modal_inputs=False)
    assert "multi_modal_inputs" not in light[0]
    (added,) = create_dataloader(
        light, light.config, batch_size=None, sampler=range(3), drop_last=False
    )
    for item, made in zip(items, added["multi_modal_inputs"], strict=True):
        own = item["multi_modal_inputs"]
        assert own.keys() == made.keys() and all(torch.equal(own[name], made[name]) for name in own)
    batch = DataProto.from_single_dict(collate_fn(items)).repeat(2, interleave=True)
    assert (
        batch.non_tensor_batch["multi_modal_inputs"][0]
        is batch.non_tensor_batch["multi_modal_inputs"][1]
    )


def test_a_prompt_with_a_video_is_not_cut(dataset, tmp_path):
    rows = [{"prompt": "<video> ?", "videos": [np.zeros((4, 16, 16, 3), int).tolist()]}]
    with pytest.raises(
        DataError,
        match=r"row 0: got 13 tokens, 8 of them of videos, expected.*or fps and max_frames",
    ):
        dataset(*rows, max_prompt_length=12, truncation="left")


def test_tags_and_videos_that_differ(dataset):
    clip = np.zeros((2, 8, 8, 3), int).tolist()
    for prompt, videos, told in [
        (
            "<video> and <video>",
            [clip],
            "got 2 <video> in the prompt, and 1 videos, expected as many <video> as videos",
        ),
        ("which ?", [clip], "got 0 <video> in the prompt, and 1 videos"),
        ("<video> ?", [], "got 1 <video> in the prompt, and 0 videos"),
    ]:
        with pytest.raises(DataError) as raised:
            dataset({"prompt": prompt, "videos": videos})[0]
        assert f"v.jsonl row 0, column 'prompt': {told}" in str(raised.value)
    text = dataset({"prompt": "the <video> of w1", "videos": [clip]}, video_key=None)[0]
    assert "videos" in text and text["multi_modal_data"] == {}


def test_a_text_model_says_what_it_cannot_see(dataset):
    """A tag in a text, or media in a column: never in silence; with the key null a tag is text."""
    for row, told in [
        ({"prompt": "<video> ?"}, "row 0, column 'prompt': got <video>, for a text-only model"),
        ({"prompt": "<image> ?"}, "row 0, column 'prompt': got <image>, for a text-only model"),
        (
            {"prompt": "w1", "videos": ["a.mp4"]},
            "row 0, column 'videos': got videos, for a text-only model",
        ),
    ]:
        with pytest.raises(DataError, match=told):
            dataset(row, family=None)[0]
        with pytest.raises(DataError, match=told):
            dataset(row, family=None, filter_overlong_prompts=True)[0]
    assert dataset({"prompt": "<video> <image>"}, family=None, video_key=None, image_key=None)[0][
        "input_ids"
    ].any()


BAD = [
    ([], "got a video without frames"),
    ([[[1, 2], [3]]], "a video of uneven lists|got an array"),
    (np.zeros((2, 8, 8), int).tolist(), "got an array"),
    (np.full((1, 8, 8, 3), 300).tolist(), "got an array .* expected .* from 0 to 255"),
    (
        np.zeros((1, 2, 900, 3), int).tolist(),
        "got frames of 2 by 900 pixels, expected sides that differ at most 200",
    ),
    (["none.png"], ", frame 0: got the image 'none.png', which is not there"),
    (["a.png", "b.png"], "got frames of 2 sizes, such as 8 by 8 and 16 by 16"),
    ({"frames": ["a.png"], "fps": 0}, "got fps 0, expected frames per second, above 0"),
    ({"video": "a.mp4", "nframes": 3}, "got a video with video, nframes, expected a path"),
    ({"video": "a.png", "fps": 3}, "got fps beside a file"),
    ("../a.mp4", "which leads out of its folder"),
    ("https://example.org/a.mp4", "got the URL"),
    ("none.mp4", "got the video 'none.mp4', which is not there"),
    (3, "got the video 3, expected a path"),
]


@pytest.mark.parametrize(("value", "told"), BAD, ids=[told[:30] for _, told in BAD])
def test_a_bad_video(dataset, tmp_path, value, told: str):
    noise(8, 8).save(tmp_path / "a.png")
    noise(16, 16).save(tmp_path / "b.png")
    with pytest.raises(
        DataError, match=rf"v\.jsonl row 0, column 'videos' or a message, video 0.*{told}"
    ):
        dataset({"prompt": "<video> ?", "videos": [value]})[0]


@pytest.mark.skipif(find_spec("av") is not None, reason="PyAV is here")
def test_a_file_without_pyav(dataset, tmp_path):
    (tmp_path / "a.mp4").write_bytes(b"words")
    with pytest.raises(
        DataError, match=r"got a video file, without PyAV to read it, expected PyAV.*\.\[video\]"
    ):
        dataset({"prompt": "<video> ?", "videos": ["a.mp4"]})[0]


def encoded(path: Path, arrays: np.ndarray, form: str = "mp4", **options: Any) -> bytes:
    """A file with these frames, ten a second."""
    import av

    with av.open(str(path), "w", format=form, options=options) as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.bit_rate = 4_000_000
        stream.height, stream.width, stream.pix_fmt, stream.gop_size = (
            *arrays.shape[1:3],
            "yuv420p",
            12,
        )
        for array in arrays:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(array, format="rgb24")))
        container.mux(stream.encode())
    return path.read_bytes()


@needs_av
def test_files(dataset, tmp_path):
    """Bytes and a path are the same; the frames that are taken are those of their times, near the start and beyond a
    gap that is skipped; an hour is thinned."""
    levels = np.repeat(np.arange(250, dtype=np.uint8), 32 * 48 * 3).reshape(250, 32, 48, 3)
    data = encoded(tmp_path / "a.mp4", levels)
    of_file = dataset({"prompt": "<video> ?", "videos": ["a.mp4"]}, max_prompt_length=9999)[0]
    seen = of_file["multi_modal_data"]
    assert len(seen["video_metadata"][0]["frames_indices"]) == 50
    assert (
        seen["video_metadata"][0]["total_num_frames"] == 250
        and seen["video_metadata"][0]["fps"] == 10.0
    )
    wanted = np.array(seen["video_metadata"][0]["frames_indices"])
    assert np.abs(seen["video"][0].mean((1, 2, 3)) - wanted).max() < 3
    clip = open_video({"bytes": data}, folder=tmp_path, where="")
    few = FrameRules(4, 2, 2, 64, 1024, (0.0,) * 3, (1.0,) * 3, max_frames=2, min_frames=2).read(
        clip, where=""
    )
    assert few.indices == (0, 125)
    assert np.abs(few.frames.float().mean((1, 2, 3)).numpy() - [0, 125]).max() < 3


@needs_av
@pytest.mark.parametrize("form", ["mp4", "mpegts"])
def test_frames_between_those_that_are_taken_are_not_decoded(tmp_path, monkeypatch, form: str):
    """Of four minutes eight frames are shown: what is decoded begins at a keyframe before each. mpegts has no index."""
    levels = np.arange(2400, dtype=np.int64)[:, None, None, None] // 10
    arrays = np.broadcast_to(levels.astype(np.uint8), (2400, 16, 16, 3))
    encoded(tmp_path / "a.mp4", arrays, form=form)
    count = [0]

    class Counting:
        def __init__(self, container: Any) -> None:
            self.container = container

        def __getattr__(self, name: str) -> Any:
            return getattr(self.container, name)

        def decode(self, stream: Any) -> Iterator[Any]:
            for frame in self.container.decode(stream):
                count[0] += 1
                yield frame

    @contextmanager
    def counted(source: Any, where: str) -> Iterator[tuple[Any, Any]]:
        with _open_container(source, where) as (container, stream):
            yield Counting(container), stream

    monkeypatch.setattr("quadriga.data.videos._open_container", counted)
    opened = open_video("a.mp4", folder=tmp_path, where="")
    rules = FrameRules(4, 2, 2, 64, 256, (0.0,) * 3, (1.0,) * 3, max_frames=8)
    clip = rules.read(opened, where="")
    assert opened.num_frames == 2400 and len(clip.indices) == 8
    assert (
        np.abs(clip.frames.float().mean((1, 2, 3)).numpy() - np.array(clip.indices) // 10).max() < 3
    )
    assert count[0] <= 8 * 14 + 1


@needs_av
def test_bad_files(dataset, tmp_path):
    data = encoded(tmp_path / "first.mp4", video(30, 32, 32), movflags="faststart")
    last = encoded(tmp_path / "last.mp4", video(30, 32, 32))
    silent = io.BytesIO()
    import av

    with av.open(silent, "w", format="wav") as container:
        stream = container.add_stream("pcm_s16le", rate=8000, layout="mono")
        frame = av.AudioFrame.from_ndarray(
            np.zeros((1, 800), np.int16), format="s16", layout="mono"
        )
        frame.rate = 8000
        container.mux(stream.encode(frame))
    for name, content, told in [
        ("words.mp4", b"words", "which is no video that can be read"),
        ("cut.mp4", data[: len(data) // 2], "no video that can be read|breaks off at frame"),
        ("index.mp4", last[:-200], "no video that can be read|without frames|breaks off"),
        ("silent.wav", silent.getvalue(), "got a file without a video stream"),
        ("empty.mp4", b"", "no video that can be read"),
    ]:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(
            DataError, match=rf"v\.jsonl row 0, column 'videos' or a message, video 0: .*({told})"
        ):
            dataset({"prompt": "<video> ?", "videos": [name]}, max_prompt_length=9999)[0]


def test_settings_of_a_model_and_of_the_run(tmp_path):
    folder = write_vision_folder(tmp_path / "model", "qwen3_vl")
    rules = load_processor(folder).frame_rules("")
    assert (rules.min_pixels, rules.max_pixels, rules.patch_size, rules.fps) == (
        64,
        1024,
        4,
        2.0,
    ) and rules.limits_whole_clip
    told = load_processor(
        folder, options={"max_pixels": 256, "fps": 4.0, "max_frames": 6}
    ).frame_rules("")
    assert (told.max_pixels, told.limits_whole_clip, told.fps, told.max_frames) == (
        256,
        False,
        4.0,
        6,
    )
    clip = told.clip(open_video(video(30, 40, 40), folder=tmp_path, where=""), where="")
    assert len(clip.indices) == 6 and clip.size == (16, 16)
    own = '{"size": {"shortest_edge": 64, "longest_edge": 4096}, "patch_size": 4, "fps": 1, "max_frames": 9}'
    (folder / "video_preprocessor_config.json").write_text(own)
    rules = load_processor(folder).frame_rules("")
    assert (rules.max_pixels, rules.fps, rules.max_frames) == (4096, 1, 9)
