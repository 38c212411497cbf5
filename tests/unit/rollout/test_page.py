# SPDX-License-Identifier: Apache-2.0
"""docs/rollout.md: its engine keeps the contract of engines, its configurations load, its keys exist."""

import inspect
import re
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from quadriga.cli.config import main
from quadriga.config import load_config
from quadriga.config import rollout as names
from quadriga.errors import ConfigError
from quadriga.workers.rollout_engines import ENGINES, make_rollout_engine

REPOSITORY = Path(__file__).parents[3]
PAGE = (REPOSITORY / "docs" / "rollout.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(python|yaml)\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)
DOTTED = re.findall(r"`((?!quadriga\.)[a-z_]+(?:\.[a-z_]+)+)(?:=[^`]*)?`", PAGE)
ROWS = re.findall(
    r"^\| (`[a-z_`, ]+`) \|",
    PAGE[PAGE.index("| key |") : PAGE.index("## On-policy or off-policy")],
    flags=re.MULTILINE,
)
SHORT = [f"rollout.{key}" for row in ROWS for key in re.findall(r"`([a-z_]+)`", row)]
KEYS = sorted({*DOTTED, *SHORT})
OPEN = ("engine_kwargs.",)
"""Dictionaries whose entries are no keys."""


def _contract() -> ModuleType:
    """The tests that every engine keeps to."""
    path = REPOSITORY / "tests" / "contract" / "test_rollout_engines.py"
    spec = spec_from_file_location("contract_of_engines", path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CONTRACT = _contract()
DEMANDS = {
    name: demand
    for name, demand in inspect.getmembers(CONTRACT, inspect.isfunction)
    if name.startswith("test_") and "engine" in inspect.signature(demand).parameters
}


@pytest.fixture
def kind() -> Any:
    """The class of the page."""
    (code,) = [text for kind, text in BLOCKS if kind == "python"]
    names: dict[str, Any] = {}
    exec(compile(code, "docs/rollout.md", "exec"), names)
    return names["LastTokenEngine"]


@pytest.fixture
def engine(kind: Any) -> Any:
    """The engine of the page, on the weights of the contract's model."""
    weights = CONTRACT._model("sdpa").named_parameters()
    return kind(weights, eos_token_ids=(CONTRACT.EOS,), tokenizer=CONTRACT.Pairs())


def test_names_and_classes() -> None:
    """Each engine that a configuration can name has a class, and the other way round."""
    assert set(names.ENGINES) == set(ENGINES)


def test_two_lines_name_it(kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CONTRIBUTING's recipe: a configuration can name what is in both tables, and nothing else."""
    model = CONTRACT._model("sdpa")
    model.save_pretrained(tmp_path)
    model.generation_config.save_pretrained(tmp_path)
    overrides = [
        f"actor_rollout_ref.model.path={tmp_path}",
        "actor_rollout_ref.rollout.name=last_token",
    ]
    with pytest.raises(
        ConfigError, match=r"rollout\.name: got 'last_token', expected one of native, "
    ):
        load_config(overrides)
    monkeypatch.setattr(names, "ENGINES", [*names.ENGINES, kind.name])
    monkeypatch.setitem(ENGINES, kind.name, kind)
    place = {"device": torch.device("cpu"), "dtype": torch.float32}
    engine = make_rollout_engine(load_config(overrides).config, CONTRACT.Pairs(), **place)
    wanted = kind(model.named_parameters(), eos_token_ids=(CONTRACT.EOS,)).generate_batch(
        CONTRACT.PROMPTS, CONTRACT._params()
    )
    assert engine.generate_batch(CONTRACT.PROMPTS, CONTRACT._params()) == wanted


@pytest.mark.parametrize("name", DEMANDS)
def test_the_engine_keeps_the_contract(name: str, engine: Any) -> None:
    """Each demand that has no case of its own, and each case of the others."""
    demand: Callable[..., None] = DEMANDS[name]
    marks = [mark for mark in getattr(demand, "pytestmark", []) if mark.name == "parametrize"]
    if not marks:
        demand(engine)
    for mark in marks:
        argument, cases = mark.args
        for case in cases:
            demand(engine, **{argument: case})


def test_the_contract_demands_something() -> None:
    """So that the test above cannot run dry; likewise the one of keys."""
    assert len(DEMANDS) >= 12
    assert {"rollout.n", "rollout.stop", "rollout.min_p", "algorithm.filter_groups.enable"} <= set(
        KEYS
    )


def test_new_weights_change_the_answers(engine: Any) -> None:
    """And an incomplete set leaves an engine that generates nothing."""
    params = CONTRACT._params(do_sample=False)
    before = engine.generate_batch(CONTRACT.PROMPTS, params)
    weights = dict(CONTRACT._model("sdpa", seed=1).named_parameters())
    engine.load_weights(weights.items(), 3)
    after = engine.generate_batch(CONTRACT.PROMPTS, params)
    assert [one.token_ids for one in after] != [one.token_ids for one in before]
    del weights["model.embed_tokens.weight"]
    with pytest.raises(Exception, match=r"without model\.embed_tokens\.weight"):
        engine.load_weights(weights.items(), 4)
    with pytest.raises(Exception, match="not loaded completely"):
        engine.generate_batch(CONTRACT.PROMPTS, params)


@pytest.mark.parametrize("text", [text for kind, text in BLOCKS if kind == "yaml"])
def test_a_configuration_loads(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And every value of it is in the resolved tree."""
    (tmp_path / "page.yaml").write_text(text)
    assert main(["show", "--config", str(tmp_path / "page.yaml")]) == 0
    printed = capsys.readouterr().out
    for words in re.findall(r"^ *\w+: ([\w./]+) *(?:#.*)?$", text, flags=re.MULTILINE):
        assert f": {words}\n" in printed


@pytest.mark.parametrize("key", [key for key in KEYS if not key.startswith(OPEN)])
def test_a_key_in_the_text_exists(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Keys may be named by their last parts, or as a section; those of the table are below `rollout`."""
    assert main(["keys", key]) == 0
    printed = capsys.readouterr().out
    assert re.search(rf"^(\S+\.)?{re.escape(key)}(\.\S+)? = ", printed, flags=re.MULTILINE)
