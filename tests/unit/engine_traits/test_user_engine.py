# SPDX-License-Identifier: Apache-2.0
"""Traits of an engine from a user's file: read as text, with errors that say what is missing and how to fix it."""

from pathlib import Path

import pytest

from quadriga.config import load_config
from quadriga.engine_traits import EngineTraits, traits_of
from quadriga.errors import ConfigError

MODULE = """
raise RuntimeError("the file must not be imported")

class Plain(RolloutEngine):
    traits = EngineTraits()

class Streaming(RolloutEngine):
    traits: EngineTraits = EngineTraits(takes_weights="between_tokens", server_options=("url",))

class Undeclared(RolloutEngine):
    name = "undeclared"

class Computed(RolloutEngine):
    traits = EngineTraits(is_deterministic=IS_DETERMINISTIC)

class Misspelt(RolloutEngine):
    traits = EngineTraits(take_weights="never")

class Wrong(RolloutEngine):
    traits = EngineTraits(spans_ranks="yes")
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The module as a file in the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MODULE)
    # A module of a name that no other test imports.
    (tmp_path / "declared_engines.py").write_text(MODULE)
    return tmp_path / "mine.py"


@pytest.mark.parametrize("place", ["mine.py", "pkg://declared_engines"])
def test_declared_traits(place: str, file: Path) -> None:
    assert traits_of(f"{place}:Plain") == EngineTraits()
    streaming = EngineTraits(takes_weights="between_tokens", server_options=("url",))
    assert traits_of(f"{place}:Streaming") == streaming


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("missing.py:Plain", ["expected a Python file", "There is no ", "missing.py"]),
        ("broken.py:Plain", ["expected a Python file", "broken.py, line 2"]),
        ("mine.py", ["Say which class", "mine.py:MyEngine"]),
        ("mine.py:Plane", ["a class in ", "mine.py (Plain, Streaming", "Did you mean 'Plain'?"]),
        ("mine.py:Undeclared", ["`traits = EngineTraits(...)` in the body of Undeclared in "]),
        ("mine.py:Computed", ["`traits = EngineTraits(...)`", "literal values"]),
        ("mine.py:Misspelt", ["EngineTraits has no take_weights, but takes_weights"]),
        ("mine.py:Wrong", ["traits in Wrong of ", "spans_ranks: Input should be a valid boolean"]),
        ("vlm", ["expected one of native, ", "path/to/engine.py:Class", "Did you mean 'vllm'?"]),
    ],
)
def test_refused(name: str, words: list[str], file: Path) -> None:
    """By every command that reads a configuration, with the key and the value."""
    file.with_name("broken.py").write_text("\nclass Plain(:\n")
    with pytest.raises(ConfigError) as caught:
        load_config([f"actor_rollout_ref.rollout.name={name}"])
    message = str(caught.value)
    assert f"actor_rollout_ref.rollout.name: got '{name}'" in message
    assert [word for word in words if word not in message] == []


def test_a_changed_file_is_read_again(file: Path) -> None:
    """As when a notebook loads a second configuration."""
    override = ["actor_rollout_ref.rollout.name=mine.py:Plain"]
    assert load_config(override).config.actor_rollout_ref.rollout.traits == EngineTraits()
    file.write_text(MODULE.replace("EngineTraits()", "EngineTraits(spans_ranks=True)"))
    assert load_config(override).config.actor_rollout_ref.rollout.traits.spans_ranks
