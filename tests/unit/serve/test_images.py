# SPDX-License-Identifier: Apache-2.0
"""Images in the messages of a call, for a vision-language model."""

import base64
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from quadriga.data import load_processor
from tests.unit.serve.conftest import Halves, Served
from tests.unit.serve.test_server import CHAT
from tests.vision_folder import picture, tiny_tokenizer, write_vision_folder


def _url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def _png(color: str, width: int = 16) -> bytes:
    file = io.BytesIO()
    picture(color, width).save(file, "PNG")
    return file.getvalue()


def _message(*urls: str) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [{"type": "text", "text": "which color <|image_pad|> ?"}]
    parts += [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"role": "user", "content": parts}


def test_images_reach_the_engine(serve: Callable[..., Served], tmp_path: Path) -> None:
    """Each image has its embeddings' tokens, and an image that differs has another seed."""
    engine = Halves("red")
    engine.tokenizer = tiny_tokenizer()
    engine.processor = processor = load_processor(write_vision_folder(tmp_path))
    assert processor is not None
    served = serve(engine)
    for colors in (("red", "blue"), ("red", "green")):
        content = _message(*(_url(_png(color)) for color in colors))
        body = {"messages": [content], "return_token_ids": True}
        answer = served.post(CHAT, body).json()
        # Two images of 16 x 16 pixels, of 4 embeddings each; the text cannot add another one.
        assert answer["prompt_token_ids"].count(processor.image_token_id) == 8
        images = engine.images[-1]
        assert images is not None and images.short_prompt.count(processor.image_token_id) == 2
        expected = processor.inputs([picture(color) for color in colors], where="a test")
        assert torch.equal(images.inputs["pixel_values"], expected["pixel_values"])
        assert images.position_ids.shape == (3, len(answer["prompt_token_ids"]))
    first, second = [params.seed for [(_, params)] in engine.batches]
    assert first != second

    for message, expected_text in (
        (_message("http://127.0.0.1/red.png"), "the server opens no addresses"),
        (_message("data:image/png;base64,?"), "expected base64"),
        (_message(_url(b"/etc/passwd")), "no image that can be read"),
        (_message(*[_url(_png("red"))] * 33), "got 33 images, expected at most 32"),
        ({"role": "user", "content": [{"type": "video_url"}]}, "expected 'text' or 'image_url'"),
    ):
        response = served.post(CHAT, {"messages": [message]})
        assert response.status_code == 400
        assert expected_text in response.json()["error"]["message"]
    assert len(engine.batches) == 2
