# SPDX-License-Identifier: Apache-2.0
"""Private names of vLLM that the package uses are those of the contract, which all versions fulfil."""

import ast
import json
from pathlib import Path

from quadriga.rollout.vllm import library
from vllm_contract import CONTRACT, FIRST_RUNNER, SECOND_RUNNER, missing_names, names_of

PACKAGE = Path(library.__file__).parent


def runner_names() -> set[tuple[str, str]]:
    """Attributes of vLLM's model runner that the package reads, and the function that reads each."""
    found: set[tuple[str, str]] = set()
    for file in PACKAGE.glob("*.py"):
        for function in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(function, ast.FunctionDef):
                continue
            for node in ast.walk(function):
                owner: ast.expr | None = None
                name = ""
                if isinstance(node, ast.Attribute):
                    owner, name = node.value, node.attr
                elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "getattr":
                    owner, constant, *_ = node.args
                    name = getattr(constant, "value", "")
                last = getattr(owner, "attr", getattr(owner, "id", ""))
                if last in ("model_runner", "runner"):
                    found.add((name, f"{file.stem}.{function.name}"))
    return found


def test_both_model_runners_have_what_is_read_of_them() -> None:
    """What only one runner has is read in the one function that knows both."""
    known = [set(CONTRACT[title][1]) for title in (FIRST_RUNNER, SECOND_RUNNER)]
    names = runner_names()
    assert {"get_model", "kv_caches", "requests", "req_states"} <= {name for name, _ in names}
    for name, function in names:
        if function == "library.drawn_tokens":
            assert name in known[0] | known[1], name
        else:
            assert name in known[0] & known[1], f"{function} reads {name}"


def test_the_versions_have_all_names() -> None:
    file = Path(__file__).with_name("contract.json")
    missing = json.loads(file.read_text(encoding="utf-8"))["missing"]
    assert missing.keys() == {"0.30.0", "0.31.0", "0.32.0", "0.33.0"}
    least, newest = min(missing), max(missing)
    assert least.startswith(library.LEAST) and newest.startswith(library.NEWEST_READ)
    assert not any(missing.values())


def test_names_of_a_class() -> None:
    source = "class One:\n    flag: bool = True\n    def go(self):\n        self.state = 1\n"
    assert names_of(source, "One") >= {"flag", "go", "state"} and not names_of(source, "Two")
    assert missing_names(lambda file: None)[SECOND_RUNNER] == sorted(CONTRACT[SECOND_RUNNER][1])
