# SPDX-License-Identifier: Apache-2.0
"""The ways through the code that docs/architecture.md draws consist of functions that exist."""

import re
from importlib import import_module
from importlib.util import find_spec

import pytest

from arch_imports import LAYERS
from arch_tree import REPOSITORY

PAGE = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")
WAYS = {title: re.findall(r"`(quadriga(?:\.\w+){2,})`", text) for title, text in re.findall(
    r"^### (.+?)\n(.*?)(?=^##)", PAGE, flags=re.DOTALL | re.MULTILINE
)}  # fmt: skip

# To be lowered as the way gets shorter; raised only with a reason.
MAX_OPENED, MAX_OPENED_FILES = 24, 13


def named(dotted: str) -> object:
    """What a dotted name stands for: modules as far as they go, then attributes.

    Raises:
        ImportError, AttributeError: nothing has this name.
    """
    parts = dotted.split(".")
    depth = 1
    while depth < len(parts) and find_spec(".".join(parts[: depth + 1])) is not None:
        depth += 1
        if not hasattr(import_module(".".join(parts[:depth])), "__path__"):
            break
    found: object = import_module(".".join(parts[:depth]))
    for name in parts[depth:]:
        found = getattr(found, name)
    return found


def test_five_ways() -> None:
    """An update, a generation, a weight sync, a reward, a configuration key: each of several functions."""
    assert len(WAYS) == 5 and all(len(names) > 8 for names in WAYS.values()), {
        way: len(WAYS[way]) for way in WAYS
    }


def test_weight_sync_with_vllm_is_short() -> None:
    """From the trainer to vLLM's own processes: functions to read, and files to open."""
    other = re.compile(
        r"SharedWeights|reshard|causal_model|sglang|broadcast|send_weights|receive_weights|RolloutPool"
        r"|copy_weights|stream"
    )
    way = [name for name in WAYS["A weight sync"] if not other.search(name)]
    assert any(name.endswith("WorkerExtension.load_bucket") for name in way)
    assert len(way) <= 9 and len({getattr(named(name), "__module__", name) for name in way}) <= 5, (
        way
    )


@pytest.mark.parametrize("dotted", sorted({name for names in WAYS.values() for name in names}))
def test_function_exists(dotted: str) -> None:
    """A function or class of that name stands in the module of that name."""
    if ".ray." in dotted:
        pytest.importorskip("ray")
    found = named(dotted)
    assert callable(found), f"{dotted} is no function"
    assert getattr(found, "__module__", dotted).startswith("quadriga."), f"{dotted} is not ours"


def test_the_way_of_an_update_on_ray_is_short() -> None:
    """What a reader opens, from `update_actor` in the loop to the first backward pass: the list of that section."""
    pytest.importorskip("ray")
    section = PAGE.partition("### An update\n")[2].partition("\n### ")[0]
    opened = re.findall(r"^ *- `(quadriga[.\w]+)`:", section, flags=re.MULTILINE)
    files = {named(dotted).__module__ for dotted in opened}
    assert 20 < len(opened) == len(set(opened)) <= MAX_OPENED and len(files) <= MAX_OPENED_FILES, (
        opened,
        files,
    )


def test_every_layer_is_on_the_page() -> None:
    """In the order of the table that the rules about imports hold."""
    assert re.findall(r"^\| `([\w.]+)` \|", PAGE, flags=re.MULTILINE) == list(LAYERS)


def test_what_is_gone_is_found() -> None:
    """A name that nothing has is an error."""
    with pytest.raises(AttributeError):
        named("quadriga.engines.step.teach")
