# SPDX-License-Identifier: Apache-2.0
"""`quadriga doctor`: sound and unsound environments."""

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from quadriga.cli import doctor
from quadriga.cli.doctor import core_requirements, main, requirement_problem
from quadriga.observe.probe import Capability
from tests.architectures import config_of, make_model


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out the imports of extras, which take seconds and have tests of their own."""
    there = Capability("wandb", "0.30.0", True, "imports", "tracks runs")
    gone = Capability(
        "mlflow", "", False, "not installed; pip install -e '.[mlflow]'", "tracks runs"
    )
    monkeypatch.setattr(
        doctor,
        "probe_capabilities",
        lambda extras, *, try_all: [there, gone][: 1 if try_all else 2],
    )


def test_the_core_is_read_from_the_package_itself() -> None:
    found = {one.name: one for one in core_requirements()}
    assert {
        "torch",
        "transformers",
        "tensordict",
        "torchdata",
        "datasets",
        "pyarrow",
        "pydantic",
    } <= found.keys()
    assert str(found["torch"].specifier) == ">=2.11"
    assert "wandb" not in found


@pytest.mark.parametrize(
    ("needed", "found", "problem"),
    [
        ("p>=2.11", "2.13.0+cpu", ""),
        ("p>=2.11", "2.11", ""),
        ("p>=2.11", "2.12.0.dev1", ""),
        ("p>=2.11", "2.9.1", "not a usable version; pip install -U 'p>=2.11'"),
        ("p>=2.11", "", "not installed; pip install 'p>=2.11'"),
        ("p", "0.1", ""),
        ("p", "", "not installed; pip install 'p'"),
    ],
)
def test_a_requirement_is_met_or_says_what_to_do(needed: str, found: str, problem: str) -> None:
    assert requirement_problem(Requirement(needed), found) == problem


def test_this_environment_is_sound(quick, capsys) -> None:
    assert main([]) == 0
    printed = capsys.readouterr().out
    assert "yes  wandb" in printed
    assert "no   mlflow" in printed
    assert "dtype on c" in printed
    assert "tracks runs (imports)" in printed
    assert "Everything that the core needs is installed." in printed
    assert main(["--try-all"]) == 0
    assert "mlflow" not in capsys.readouterr().out


def test_a_missing_requirement_is_status_one(
    quick, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "core_requirements", lambda: [Requirement("zebra>=1.0")])
    assert main([]) == 1
    assert (
        "NO   zebra          -            not installed; pip install 'zebra>=1.0'"
        in capsys.readouterr().out
    )


def test_a_torch_that_does_not_load_is_said(quick, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> list[str]:
        raise OSError("libgomp.so.1: cannot open shared object file")

    monkeypatch.setattr(doctor, "_machine_lines", broken)
    assert main([]) == 1
    assert "torch does not load: libgomp.so.1" in capsys.readouterr().out


def test_a_model_is_compared_with_transformers(capsys, tmp_path: Path) -> None:
    """Nothing else is printed. What it finds wrong is in the tests of `models/probe.py`."""
    make_model(config_of("Gemma 2"), "eager").save_pretrained(tmp_path)
    assert main(["--model", str(tmp_path)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "architecture: Gemma2ForCausalLM"
    assert printed[1].startswith("rows are computed packed, with shared prompts; ")
    assert (
        re.search(r"off by at most \de-0\d nats, 0.0001 allowed", printed[2]) and len(printed) == 3
    )
