# SPDX-License-Identifier: Apache-2.0
"""The table of columns against the code that reads and writes them."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import quadriga
from quadriga.protocol import FIELDS

PACKAGE = Path(quadriga.__file__).parent
STORES = {"batch": True, "non_tensor_batch": False}
DESIGNED = [
    "input_ids",
    "attention_mask",
    "position_ids",
    "prompts",
    "responses",
    "response_mask",
    "rollout_log_probs",
    "old_log_probs",
    "ref_log_prob",
    "entropys",
    "values",
    "token_level_scores",
    "token_level_rewards",
    "reward_baselines",
    "rm_scores",
    "rollout_is_weights",
    "advantages",
    "returns",
    "uid",
    "raw_prompt_ids",
    "raw_prompt",
    "data_source",
    "reward_model",
    "extra_info",
    "index",
    "tools_kwargs",
    "interaction_kwargs",
    "multi_modal_data",
    "multi_modal_inputs",
    "full_prompts",
]


def render_fields() -> str:
    """The table as the page has it: tensors first, then objects."""
    lines = []
    for title, is_tensor in (("Tensors (`batch`)", True), ("Objects (`non_tensor_batch`)", False)):
        head = "| column | shape | dtype | meaning | written by | read by |"
        lines += [f"### {title}", "", head, "|---|---|---|---|---|---|"]
        for field in FIELDS.values():
            if field.is_tensor == is_tensor:
                written, read = ", ".join(field.written_by), ", ".join(field.read_by)
                lines.append(
                    f"| `{field.name}` | {field.shape} | {field.dtype} | {field.unit} | {written} | {read} |"
                )
        lines.append("")
    return "\n".join(lines)


def used_columns(source: str) -> Iterator[tuple[str, bool]]:
    """(column, whether it is used as a tensor) for every literal key in a piece of code."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            store = getattr(node.value, "attr", None)
            if store in STORES and isinstance(node.slice.value, str):
                yield node.slice.value, STORES[store]
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "from_dict"
        ):
            names = dict(zip(("tensors", "non_tensors"), node.args, strict=False))
            names.update({keyword.arg: keyword.value for keyword in node.keywords})
            for store, is_tensor in (("tensors", True), ("non_tensors", False)):
                keys = getattr(names.get(store), "keys", [])
                yield from ((key.value, is_tensor) for key in keys if isinstance(key, ast.Constant))


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_columns_in_the_code_are_in_the_table(path: Path) -> None:
    for name, is_tensor in used_columns(path.read_text(encoding="utf-8")):
        assert name in FIELDS, (
            f"{path.name} uses the column {name!r}: describe it in protocol/fields.tsv"
        )
        assert FIELDS[name].is_tensor == is_tensor, f"{path.name} uses {name!r} in the wrong store"


def test_the_search_finds_what_it_looks_for() -> None:
    source = 'a.batch["x"]; b.c.non_tensor_batch["y"] = 1; D.from_dict({"p": 1}, non_tensors={"q": 2}); {}["z"]'
    assert sorted(used_columns(source)) == [("p", True), ("q", False), ("x", True), ("y", False)]


def test_every_designed_column_is_described() -> None:
    assert set(DESIGNED) <= set(FIELDS)
    for name, field in FIELDS.items():
        assert (
            field.name == name
            and field.shape.startswith("(B")
            and field.unit
            and field.written_by
            and field.read_by
        )


def test_writers_and_readers_are_packages() -> None:
    packages = {path.name for path in PACKAGE.iterdir() if path.is_dir()}
    for field in FIELDS.values():
        assert {*field.written_by, *field.read_by} <= packages, field


def test_rendered_table_has_a_row_for_every_column() -> None:
    lines = render_fields().splitlines()
    assert [line.split("`")[1] for line in lines if line.startswith("| `")] == list(FIELDS)
    assert {line.count("|") for line in lines if line.startswith("|")} == {7}


def test_the_page_of_the_documentation_is_the_table() -> None:
    page = (PACKAGE.parent / "docs" / "batch_fields.md").read_text(encoding="utf-8")
    assert page.startswith("# ")
    assert page[page.index("### ") :] == render_fields(), (
        "put what render_fields gives into docs/batch_fields.md"
    )
