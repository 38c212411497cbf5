# SPDX-License-Identifier: Apache-2.0
"""Images of a prompt: expansion and positions against transformers, the data set's rows, and what is refused."""

import io
import pickle

import numpy as np
import pytest
import torch
import transformers

from quadriga.data import RLHFDataset, collate_fn, load_processor
from quadriga.data.media import with_parts
from quadriga.data.vision import VisionProcessor, as_vision
from quadriga.errors import DataError
from quadriga.protocol import DataProto
from tests.vision_folder import (
    END,
    FAMILIES,
    IMAGE,
    START,
    VIDEO,
    WORDS,
    named,
    noise,
    picture,
    their_processor,
    tiny_model,
    tiny_tokenizer,
    write_vision_folder,
)


@pytest.fixture
def processor(processors) -> VisionProcessor:
    return processors["qwen2_5_vl"]


@pytest.fixture
def dataset(shown):
    """A data set of rows, each a prompt and its images."""

    def make(*rows, name: str = "t.parquet", **values) -> RLHFDataset:
        listed = [{"prompt": prompt, "images": images} for prompt, images in rows]
        return shown(*listed, name=name, **({"max_prompt_length": 64} | values))

    return make


def png(image) -> dict:
    file = io.BytesIO()
    image.save(file, "PNG")
    return {"bytes": file.getvalue(), "path": None}


SIZES = [[(16, 16)], [(24, 8), (8, 40)], [(100, 30), (9, 9), (33, 64)], []]
"""Width and height in pixels of the images of a prompt; some are resized."""


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_expansion_and_positions_are_those_of_transformers(family: str, sizes, processors):
    """Prompts with no image to three of them, between texts of several lengths. Says nothing of real vocabularies."""
    images = [noise(*size, seed) for seed, size in enumerate(sizes)]
    texts = [
        f"{'w1 ' * (place + 1)}<|vision_start|><|image_pad|><|vision_end|>"
        for place in range(len(images))
    ]
    text = named("<user> which " + " ".join(texts) + " color ? <assistant>", family)
    tokenizer, processor = tiny_tokenizer(family), processors[family]
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    found = processor.prompt(ids, images, 1000, where="here")

    given = {
        "text": [text],
        "images": images or None,
        "return_tensors": "pt",
        "add_special_tokens": False,
    }
    wanted = their_processor(family, processor)(**given)
    assert found.ids == wanted["input_ids"][0].tolist()
    assert found.short_ids == ids and ids.count(IMAGE) == len(images)
    for name in ("pixel_values", "image_grid_thw"):
        assert (name in found.inputs) == bool(images)
        assert not images or torch.equal(found.inputs[name], wanted[name])

    row = wanted["input_ids"]
    if images:
        positions, delta = tiny_model(family).model.get_rope_index(
            row, mm_token_type_ids=(row == IMAGE).int(), image_grid_thw=wanted["image_grid_thw"]
        )
        assert torch.equal(found.positions, positions[:, 0])
        # An answer goes on from the last column, in all three rows alike.
        assert found.positions[:, -1].tolist() == [row.shape[1] - 1 + int(delta)] * 3
    else:
        assert found.positions.tolist() == [list(range(row.shape[1]))] * 3


@pytest.mark.parametrize("size", [(16, 16), (24, 8), (100, 30), (9, 9), (200, 3)])
def test_tokens_are_counted_without_pixels(size, processor: VisionProcessor):
    inputs = processor.inputs([noise(*size)], where="")
    width, height = size
    assert (
        processor.num_tokens(height, width, where="") == int(inputs["image_grid_thw"].prod()) // 4
    )
    assert processor.num_tokens(height, width, where="") == processor.num_tokens(
        width, height, where=""
    )


def test_two_images_side_by_side_stay_two(processor: VisionProcessor):
    """transformers would take them for one, as no text stands between."""
    ids = processor.expand([7, IMAGE, IMAGE, 8], iter([2, 2]), iter(()))
    assert ids == [7, *[IMAGE] * 4, 8]
    positions, delta = processor.get_rope_index(ids, torch.tensor([[1, 2, 4], [1, 4, 2]]))
    assert delta == 0 and positions.tolist() == [
        [0, 1, 1, 3, 3, 5],
        [0, 1, 1, 3, 4, 5],
        [0, 1, 2, 3, 3, 5],
    ]


def test_a_row(dataset, processor):
    data = dataset(
        ("which color ? <image> and <image>", [png(picture("red")), png(noise(24, 8))]),
        ("w1 w2", []),
    )
    item = data[0]
    place = [START, IMAGE, END]
    words = {word: number for number, word in enumerate(WORDS)}
    asked = [words[word] for word in ("<user>", "which", "color", "?")]
    short = [*asked, *place, words["and"], *place, words["<assistant>"]]
    assert item["raw_prompt_ids"] == short
    expanded = [
        *asked,
        START,
        *[IMAGE] * 4,
        END,
        words["and"],
        START,
        *[IMAGE] * 3,
        END,
        words["<assistant>"],
    ]
    size = len(expanded)
    assert item["input_ids"][-size:].tolist() == expanded and not item["input_ids"][:-size].any()
    assert item["attention_mask"].sum() == size
    assert item["position_ids"].shape == (3, 64) and not item["position_ids"][:, :-size].any()
    assert item["position_ids"][0, -size:].tolist() == [
        *range(5),
        5,
        5,
        5,
        5,
        7,
        8,
        9,
        10,
        10,
        10,
        13,
        14,
    ]
    assert item["multi_modal_data"]["image"][0].getpixel((0, 0)) == (255, 0, 0)
    assert item["multi_modal_inputs"]["pixel_values"].shape == (16 + 12, 3 * 2 * 4 * 4)
    assert item["multi_modal_inputs"]["image_grid_thw"].tolist() == [[1, 4, 4], [1, 2, 6]]
    assert "images" not in item

    text = data[1]
    assert text["multi_modal_data"] == {} and text["multi_modal_inputs"] == {}
    assert text["position_ids"][:, -4:].tolist() == [[0, 1, 2, 3]] * 3


def test_a_batch_shares_images_among_samples(dataset):
    data = dataset(("<image> ?", [png(picture("red"))]), ("w1", None))
    batch = DataProto.from_single_dict(collate_fn([data[0], data[1]]))
    assert batch.batch["position_ids"].shape == (2, 3, 64)
    repeated = batch.repeat(3, interleave=True)
    column = repeated.non_tensor_batch["multi_modal_inputs"]
    assert column[0] is column[1] is column[2] and column[3] == {}
    sent = pickle.loads(pickle.dumps(repeated)).non_tensor_batch["multi_modal_inputs"]
    assert sent[0]["pixel_values"] is sent[2]["pixel_values"], "on its way it travels once"


def test_forms_of_a_prompt(dataset, tmp_path):
    noise(16, 16).save(tmp_path / "a.png")
    parts = [{"type": "image", "text": None}, {"type": "text", "text": "which <image>"}]
    chat = [{"role": "system", "content": "w1"}, {"role": "user", "content": parts}]
    data = dataset((chat, ["a.png", str(tmp_path / "a.png")]), name="t.jsonl", return_raw_chat=True)
    item = data[0]
    assert item["raw_prompt"][0]["content"] == "w1"
    assert item["raw_prompt"][1]["content"] == [
        {"type": "image"}, {"type": "text", "text": "which "}, {"type": "image"},
    ]  # fmt: skip
    first, second = item["multi_modal_data"]["image"]
    assert np.array_equal(first, second) and item["raw_prompt_ids"].count(IMAGE) == 2
    assert len(dataset(("<image> ?", "a.png"), name="t.jsonl")[0]["multi_modal_data"]["image"]) == 1


def test_places_and_images_must_agree(dataset):
    image = png(picture("red"))
    for prompt, images, told in [
        (
            "<image> and <image>",
            [image],
            "got 2 <image> in the prompt, and 1 images, expected as many <image> as images",
        ),
        ("which ?", [image], "got 0 <image> in the prompt, and 1 images"),
        ("<image> ?", [], "got 1 <image> in the prompt, and 0 images"),
        (
            "<video> ?",
            [],
            "got 1 <video> in the prompt, and 0 videos, expected as many <video> as videos",
        ),
        ("<|image_pad|> ?", [], "got 1 image tokens in the rendered chat, for 0 images"),
        ("<|video_pad|> ?", [], "got 1 video tokens in the rendered chat, for 0 videos"),
        (
            [{"role": "user", "content": [{"type": "audio"}]}],
            [],
            "got the part \"{'type': 'audio'}\" of a message",
        ),
    ]:
        name = "t.jsonl" if not images else "t.parquet"
        with pytest.raises(DataError) as raised:
            dataset((prompt, images), name=name)[0]
        column = "" if "rendered" in told else ", column 'prompt'"
        assert f"{name} row 0{column}: {told}" in str(raised.value)


def test_errors_name_row_and_image(dataset):
    image = png(picture("red"))
    with pytest.raises(
        DataError,
        match=r"t\.parquet row 1, column 'images' or a message, image 1: got 5 bytes, which is no image",
    ):
        dataset(
            ("<image> ?", [image]),
            ("<image> and <image> ?", [image, {"bytes": b"words", "path": None}]),
        )
    with pytest.raises(
        DataError,
        match=r"row 0, column 'images' or a message, image 0: got an image that the processor of .* refus",
    ):
        dataset(("<image> ?", [png(picture("red", 500, 2))]))[0]


def test_an_image_that_breaks_off_behind_its_header(dataset, capsys):
    broken = png(noise(32, 32))
    broken["bytes"] = broken["bytes"][:-1000]
    rows = [("<image> ?", [one]) for one in (png(noise(8, 8)), broken, png(noise(16, 16)))]
    data = dataset(*rows, on_bad_row="skip")
    assert [data[item]["index"] for item in range(len(data))] == [0, 2]
    assert "1 bad rows are left out" in (said := capsys.readouterr().out)
    assert "row 1, column 'images' or a message, image 0: got" in said
    with pytest.raises(DataError, match=r"row 1, column 'images' or a message, image 0: got"):
        dataset(*rows)[1]


def test_too_long(dataset):
    rows = [
        ("<image> ?", [png(noise(32, 32))]),
        ("<image> ?", [png(noise(8, 8))]),
        ("w1 " * 30, []),
    ]
    short = {"max_prompt_length": 10}
    for mode in ("error", "left"):
        with pytest.raises(
            DataError,
            match=r"row 0: got 21 tokens, 16 of them of images, expected at most data\.max_pro",
        ):
            dataset(*rows, **short, truncation=mode)
    data = dataset(*rows[1:], **short, truncation="left")
    assert data[0]["raw_prompt_ids"].count(IMAGE) == 1
    assert len(data[1]["raw_prompt_ids"]) == 10 and data[1]["position_ids"].shape == (3, 10)
    for workers in (1, 2):
        kept = dataset(
            *rows, **short, filter_overlong_prompts=True, filter_overlong_prompts_workers=workers
        )
        assert len(kept) == 1 and kept[0]["multi_modal_data"]["image"][0].size == (8, 8)


def test_the_filter_measures_images_each_time(dataset, tmp_path):
    rows = [("<image> ?", ["a.png"]), ("w1", [])]
    settings = {"name": "t.jsonl", "max_prompt_length": 10, "filter_overlong_prompts": True}
    for size, num_kept in ((8, 2), (32, 1), (8, 2)):
        noise(size, size).save(tmp_path / "a.png")
        assert len(dataset(*rows, **settings)) == num_kept
    (tmp_path / "a.png").unlink()
    with pytest.raises(
        DataError,
        match=r"t\.jsonl row 0, column 'images' or a message, image 0: got the image 'a\.png', which is not there",
    ):
        dataset(*rows, **settings)


def test_a_model_that_reads_text(dataset):
    with pytest.raises(
        DataError, match=r"row 0, column 'images': got images, for a text-only model"
    ):
        dataset(("which ?", [png(picture("red"))]), ("w1", []), family=None)
    data = dataset(("w1", []), family=None)
    assert data[0]["images"] == [] and data[0]["position_ids"].shape == (64,)
    text = dataset(("which ?", [png(picture("red"))]), family=None, image_key=None)[0]
    assert "multi_modal_data" not in text and len(text["images"]) == 1


def test_a_prompt_that_ends_with_an_image(processor: VisionProcessor):
    with pytest.raises(DataError, match="got a prompt that ends with an image or a video"):
        processor.prompt([7, IMAGE], [picture("red")], 99, where="here")


@pytest.mark.parametrize("family", ["qwen2_5_vl", "glm4v"])
def test_loading(tmp_path, family: str):
    folder = write_vision_folder(tmp_path / "model", family)
    loaded = load_processor(folder)
    image = noise(100, 30)
    assert (loaded.image_token_id, loaded.video_token_id, loaded.merge_size) == (IMAGE, VIDEO, 2)
    whole = transformers.AutoImageProcessor.from_pretrained(folder)(
        images=[image], return_tensors="pt"
    )
    assert torch.equal(
        loaded.inputs([image], where="")["pixel_values"], whole["pixel_values"].float()
    )
    small = load_processor(folder, options={"max_pixels": 256})
    assert small.num_tokens(30, 100, where="") < loaded.num_tokens(30, 100, where="")
    assert int(small.inputs([image], where="")["image_grid_thw"].prod()) == 4 * small.num_tokens(
        30, 100, where=""
    )

    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(
        DataError, match=r"image processor of .*model: got .* expected preprocessor_config\.json"
    ):
        load_processor(folder)


def test_a_model_without_eyes_has_no_processor(tmp_path):
    transformers.Qwen2Config().save_pretrained(tmp_path)
    assert load_processor(tmp_path) is None
    with pytest.raises(
        DataError,
        match=r"mm_processor_kwargs: got .*a model of type qwen2, expected a vision-language model",
    ):
        load_processor(tmp_path, options={"max_pixels": 256})


def test_processors_of_transformers(processor):
    ours = as_vision(their_processor("qwen2_5_vl", processor))
    assert (ours.image_token_id, ours.video_token_id, ours.merge_size) == (IMAGE, VIDEO, 2)
    assert as_vision(None) is None and as_vision(processor) is processor
    with pytest.raises(DataError, match="got no image processor"):
        as_vision(tiny_tokenizer())


def test_parts_leave_text_alone():
    messages = [{"role": "user", "content": "w1 w2"}]
    assert with_parts(messages, [], where="") == (messages, [], [])


def test_a_part_may_hold_an_array():
    frames = np.zeros((2, 8, 8, 3), np.uint8)
    content = [{"type": "video", "video": frames}, {"type": "video"}]
    messages, _, videos = with_parts(
        [{"role": "user", "content": content}], [], ["b.mp4"], where=""
    )
    assert messages[0]["content"] == [{"type": "video"}, {"type": "video"}]
    assert videos[0] is frames
    assert videos[1] == "b.mp4"


def test_images_inside_parts(dataset, tmp_path):
    """A path, a file:// URL, bytes, each under the keys that are used for it; between those of the column."""
    image = noise(20, 20)
    image.save(tmp_path / "one.png")
    url = f"file://{tmp_path}/one.png"
    expected = dataset(("w1 <image> w2 <image>", [png(image)] * 2), name="a.jsonl_not.parquet")[0]
    for first in (
        {"type": "image", "image": "one.png", "text": None},
        {"type": "image", "path": "one.png"},
        {"type": "image", "image": {"path": "one.png"}},
        {"image": url},
        {"type": "image_url", "image_url": {"url": url}},
    ):
        content = [{"type": "text", "text": "w1 "}, first, {"type": "text", "text": " w2 <image>"}]
        for column in ([png(image)], [{"image": "one.png"}, None]):
            row = dataset(([{"role": "user", "content": content}], column), name="b.parquet")[0]
            assert row["raw_prompt_ids"] == expected["raw_prompt_ids"]
            ours, theirs = row["multi_modal_inputs"], expected["multi_modal_inputs"]
            assert torch.equal(ours["pixel_values"], theirs["pixel_values"])
    for part, message in (
        (
            {"type": "image", "image": "none.png"},
            "image 0: got the image 'none.png', which is not there",
        ),
        ({"type": "image", "image": "https://example.org/a.png"}, "got the URL"),
        (
            {"type": "image", "image": {"image": "one.png", "max_pixels": 400}},
            r"max_pixels beside the image.*mm_proc",
        ),
        ({"type": "image", "image": "one.png", "max_pixels": 400}, r"the part .* of a message"),
        (
            {"type": "image", "image": "../one.png"},
            r"image 0: got the image '\.\./one\.png', which leads out of its",
        ),
    ):
        with pytest.raises(DataError, match=message):
            dataset(([{"role": "user", "content": [part]}], []), name="c.parquet")


def test_images_inside_parts_are_measured(dataset, tmp_path, capsys):
    noise(60, 60).save(tmp_path / "large.png")
    noise(20, 20).save(tmp_path / "small.png")
    parts = [{"type": "image", "image": name} for name in ("large.png", "small.png")]
    rows = [([{"role": "user", "content": [part]}], []) for part in parts]
    short = dataset(*rows[1:], filter_overlong_prompts=True)[0]["attention_mask"].sum()
    assert len(dataset(*rows, filter_overlong_prompts=True, max_prompt_length=int(short))) == 1
    assert "1 of 2 prompts" in capsys.readouterr().out


def test_rows_without_images_between_others(dataset, write, config, processor):
    """A missing, an empty and a null column are the same, in one file or in several."""
    facts = {
        "data_source": "exact_match",
        "reward_model": {"style": "rule", "ground_truth": "red"},
        "prompt": "w1 w2",
    }
    rows = [facts, {**facts, "images": None}, {**facts, "images": []}, {**facts, "images": [None]}]
    first = write("some.jsonl", [*rows, {**facts, "images": ["a.png"], "prompt": "w1 <image>"}])
    noise(20, 20).save(first.parent / "a.png")
    files = [first, write("none.parquet", [facts])]
    data = RLHFDataset(files, tiny_tokenizer(), config(max_prompt_length=64), processor)
    batch = collate_fn([data[number] for number in range(6)])
    assert [len(one) for one in batch["multi_modal_data"]] == [0, 0, 0, 0, 1, 0]
    assert {tuple(data[number]["raw_prompt_ids"]) for number in (1, 2, 3, 5)} == {
        tuple(data[0]["raw_prompt_ids"])
    }
