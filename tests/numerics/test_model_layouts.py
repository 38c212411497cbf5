# SPDX-License-Identifier: Apache-2.0
"""Architectures that two ranks share learn what they learn in one process; one launch for all of them.

What none of this proves: the same on NCCL, and more than two ranks (test_layouts.py has that for one architecture).
"""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from quadriga.config import Layout
from quadriga.engines.process_group import ALONE
from quadriga.protocol import DataProto
from tests.architectures import MATRIX, config_of, make_model
from tests.models_page import LAYOUTS, obstacle
from tests.numerics.launching import run_ranks
from tests.numerics.layouts import ask, learn
from tests.numerics.model_layouts import MICRO, TWO_STEPS, make_engine
from tests.numerics.test_layouts import require_close

PROGRAM = Path(__file__).with_name("model_layouts.py")
CELLS = [
    (name, layout)
    for name in MATRIX
    for layout in LAYOUTS
    if layout != "one process" and not obstacle(name, LAYOUTS[layout])
]
# Tensor parallelism cuts the factors of an adapter as an architecture cuts its weights: all architectures have both.
# What other layouts do with an adapter depends on no architecture: each mixture has one of them, each layout several.
WITH_ADAPTER = [
    *(cell for cell in CELLS if cell[1] == "tp 2"),
    ("Llama 3", "fsdp 2"),
    ("SmolLM3", "pp 2"),
    ("Phi-3", "sp 2"),
    ("Qwen3-MoE", "fsdp 2"),
    ("Qwen3-Next", "fsdp 2"),
    ("Mixtral", "pp 2"),
    ("GLM-4-MoE", "sp 2"),
    ("DeepSeek-V3", "sp 2"),
    ("gpt-oss", "pp 2"),
    ("Falcon-H1", "fsdp 2"),
]
CASES = [*((*cell, "") for cell in CELLS), *((*cell, "LoRA") for cell in WITH_ADAPTER)]


@pytest.fixture(scope="module")
def results(
    tmp_path_factory: pytest.TempPathFactory, make_batch: Callable[[], DataProto]
) -> dict[str, Any]:
    """What every case gave, and each architecture in one process."""
    folder = tmp_path_factory.mktemp("model_layouts")
    batch = make_batch()
    batch.save_to_disk(folder / "batch")
    for name in MATRIX:
        make_model(config_of(name), "eager").save_pretrained(folder / name.replace(" ", "_"))
    (folder / "cases").write_text("\n".join(" | ".join(filter(None, case)) for case in CASES))
    run_ranks(PROGRAM, 2, folder, num_ports=1)
    found = torch.load(folder / "2.pt")
    for name, adapter in product(MATRIX, ("", "LoRA")):
        engine = make_engine(
            folder / name.replace(" ", "_"), Layout(), ALONE, has_adapter=bool(adapter)
        )
        asked = ask(engine, batch, MICRO)
        learn(engine, batch, "policy", TWO_STEPS)
        found[name + adapter] = {"asked": asked, "weights": dict(engine.weights())}
    return found


@pytest.mark.parametrize(("name", "layout", "adapter"), CASES)
def test_two_ranks_are_one_process(
    name: str, layout: str, adapter: str, results: dict[str, Any]
) -> None:
    """Log-probs and entropies, and the weights after two steps; those of an adapter are merged."""
    found, expected = (
        results[" | ".join(filter(None, (name, layout, adapter)))],
        results[name + adapter],
    )
    for key, values in expected["asked"].items():
        torch.testing.assert_close(found["asked"][key], values, atol=1e-5, rtol=0)
    require_close(found["weights"], expected["weights"])
