# SPDX-License-Identifier: Apache-2.0
"""Which image belongs to which prompt."""

import pytest

from quadriga.cli.generate import distribute_images
from quadriga.errors import ConfigError


def test_images_fill_their_places_in_order() -> None:
    assert distribute_images(["<image> or <image>?", "w", "<image>"], ["a", "b", "c"]) == (
        ["<image> or <image>?", "w", "<image>"], [["a", "b"], [], ["c"]],
    )  # fmt: skip


def test_a_single_prompt_gets_them_in_front() -> None:
    assert distribute_images(["which?"], ["a", "b"]) == (["<image><image>which?"], [["a", "b"]])


def test_without_images_a_text_is_a_text() -> None:
    assert distribute_images(["an <image> tag", "w"], []) == (["an <image> tag", "w"], [[], []])


@pytest.mark.parametrize(("prompts", "images"), [(["<image>"], ["a", "b"]), (["w", "v"], ["a"])])
def test_more_images_than_places(prompts: list[str], images: list[str]) -> None:
    places = "".join(prompts).count("<")
    with pytest.raises(
        ConfigError,
        match=f"got <image> {places} times in the prompts, and --image {len(images)} times",
    ):
        distribute_images(prompts, images)
