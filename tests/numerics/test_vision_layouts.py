# SPDX-License-Identifier: Apache-2.0
"""Vision-language models learn in two processes what they learn in one, over gloo; one also after a checkpoint.

What none of this proves: the same on NCCL, or with more processes than two.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from transformers import AutoModelForImageTextToText, PreTrainedTokenizerFast

from quadriga.models.weight_files import open_weights
from tests.numerics.launching import run_ranks
from tests.numerics.vision_batch import vision_batch, vision_rows
from tests.numerics.vision_layouts import CASES, FAMILY, LAYOUTS
from tests.tiny_vision import FAMILIES, MIXTURE, save_vision_model, vision_model

PROGRAM = Path(__file__).with_name("vision_layouts.py")
TOLERANCE = 1e-5
HEADS = {"num_key_value_heads": 2}
"""One for each rank of tensor parallelism."""
OF_THE_CUT = ("packed_tokens", "perf/")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all that was learned is written."""
    folder = tmp_path_factory.mktemp("vision_layouts")
    for family in (*FAMILIES, MIXTURE):
        save_vision_model(folder / family, family, **HEADS)
        batch = vision_batch(vision_model(family=family), vision_rows(family))
        batch.batch["values"] = batch.batch["advantages"] * 0.3
        batch.batch["returns"] = batch.batch["advantages"] + 1.0
        torch.save(batch, folder / f"{family}.pt")
    (folder / FAMILY / "preprocessor_config.json").write_text('{"patch_size": 4}')
    backend = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "<unk>": 2}, unk_token="<unk>"))
    PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>"
    ).save_pretrained(folder / FAMILY)
    run_ranks(PROGRAM, 2, folder, num_ports=1)
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Any]:
    """What every layout gave."""
    return torch.load(folder / "1.pt") | torch.load(folder / "2.pt")


def require_close(
    got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float
) -> None:
    """Each tensor differs by at most so much of its largest number."""
    assert list(got) == list(expected)
    for name, tensor in expected.items():
        assert (got[name] - tensor).abs().max() <= tolerance * tensor.abs().max(), name


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS[2])
@pytest.mark.parametrize("case", CASES, ids=", ".join)
def test_two_processes_are_one(results: dict[str, Any], layout: str, case: tuple[str, str]) -> None:
    """Log-probs or values, metrics and weights, those of an adapter merged; also where one process has images and the
    other has none."""
    # In bfloat16 a micro-batch cut elsewhere rounds elsewhere.
    tolerance = 0.05 if case[1].endswith("bfloat16") else TOLERANCE
    got, expected = results[layout, *case], results["one process", *case]
    require_close(got["asked"], expected["asked"], tolerance)
    require_close(got["weights"], expected["weights"], tolerance)
    for one, other in zip(got["metrics"], expected["metrics"], strict=True):
        for name in other:
            if not any(part in name for part in OF_THE_CUT):
                assert one[name] == pytest.approx(
                    other[name], rel=tolerance, abs=0.1 * tolerance
                ), name


@pytest.mark.slow
@pytest.mark.parametrize("layout", [name for size in (1, 2) for name in LAYOUTS[size]])
def test_what_learns_and_what_does_not(results: dict[str, Any], layout: str) -> None:
    """The vision encoder and the decoder both; of a frozen encoder no bit moves."""
    start = dict(vision_model(**HEADS).named_parameters())

    def moved(kind: str) -> set[str]:
        weights = results[layout, FAMILY, kind]["weights"]
        return {name.split(".")[1] for name in start if not torch.equal(weights[name], start[name])}

    assert moved("policy") == moved("critic") == {"visual", "language_model"}
    assert moved("frozen") == {"language_model"}


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("kind", ["policy", "frozen"])
def test_a_checkpoint_brings_back_all_of_it(results: dict[str, Any], size: int, kind: str) -> None:
    """To the last bit, and with it the moments: the run goes on as it would have."""
    found = results[f"{size} goes on, {kind}"]
    assert any(
        not torch.equal(found["saved"][name], weight) for name, weight in found["weights"].items()
    )
    for name, weight in found["weights"].items():
        assert torch.equal(found["resumed"][name], weight), name


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_transformers_loads_what_was_written(
    results: dict[str, Any], folder: Path, size: int
) -> None:
    """The folder `huggingface` has the names that transformers writes, all weights, and the settings of the images; the
    distributed weights beside it have them too, of a frozen encoder as well."""
    place = folder / f"saved {size} frozen"
    saved = results[f"{size} goes on, frozen"]["saved"]
    model, info = AutoModelForImageTextToText.from_pretrained(
        place / "huggingface", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, saved[name]), name
    written = {
        name for file in (place / "huggingface").glob("*.safetensors") for name in load_file(file)
    }
    assert written == set(open_weights(folder / FAMILY).shapes)
    assert set(open_weights(place).shapes) == set(saved)
    for target in (place, place / "huggingface"):
        assert (target / "preprocessor_config.json").read_text() == '{"patch_size": 4}'
