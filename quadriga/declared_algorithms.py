# SPDX-License-Identifier: Apache-2.0
"""Reads the declarations of estimators and policy losses from the source of `quadriga.algorithms`.

Configurations are checked before torch is loaded, so the package cannot be imported for that:

    @register_policy_loss("sapo", needs_advantage=True)
    def sapo(old_log_prob, ..., *, tau_pos: float = 1.0, tau_neg: float = 1.05): ...
                                   └──── options of its own, with a default ────┘
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_FOLDER = Path(__file__).parent / "algorithms"


@dataclass(frozen=True)
class Declaration:
    """Fields and options of a registered function.

    Attributes:
        fields: batch fields that the function reads.
        options: keyword-only parameters with a default other than None, which users set in
            `adv_options` or next to `loss_mode`. Parameters without a default are not included:
            they take the value of the key of that name in `algorithm` or
            `actor_rollout_ref.actor`. Nor are those with the default None, which the training step
            provides if it can.
        flags: names of the decorator's keyword arguments that are True, such as
            `needs_advantage`.
    """

    fields: tuple[str, ...]
    options: tuple[str, ...]
    flags: frozenset[str]


@cache
def read_declarations(decorator: str) -> dict[str, Declaration]:
    """Read the declarations of all functions that the package registers with a decorator.

    Args:
        decorator: `register_adv_est`, `register_policy_loss` or `register_batch_column`.

    Returns:
        The declarations by the functions' names in a configuration, sorted.
    """
    declarations = {}
    for path in _FOLDER.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if f"@{decorator}(" in text:
            declarations.update(_read_source(text, decorator))
    return dict(sorted(declarations.items()))


def _read_source(text: str, decorator: str) -> Iterator[tuple[str, Declaration]]:
    """Read the declarations in the source of a module.

    Yields:
        Registered name and declaration. A function may be registered under several names.
    """
    for function in ast.parse(text).body:
        if not isinstance(function, ast.FunctionDef):
            continue
        for call in function.decorator_list:
            if isinstance(call, ast.Call) and ast.unparse(call.func) == decorator:
                yield ast.literal_eval(call.args[0]), _read_declaration(function, call)


def _read_declaration(function: ast.FunctionDef, call: ast.Call) -> Declaration:
    """Read a declaration from a function and the call of its decorator.

    `required_fields` and `options` of the registry find the same in a loaded function.
    """
    arguments = function.args
    fields = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    # `kw_defaults` has None for a parameter without a default.
    options = [
        argument.arg
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if default is not None and ast.unparse(default) != "None"
    ]
    flags = [str(keyword.arg) for keyword in call.keywords if ast.literal_eval(keyword.value)]
    return Declaration(tuple(fields), tuple(options), frozenset(flags))


def loss_options() -> dict[str, tuple[str, ...]]:
    """Options of each policy loss, by its name.

    Some fields that a loss reads are computed by functions with options of their own
    (`register_batch_column`). These options are included.
    """
    columns = read_declarations("register_batch_column")
    options = {}
    for name, loss in read_declarations("register_policy_loss").items():
        names = list(loss.options)
        for field in loss.fields:
            if field in columns:
                names += columns[field].options
        options[name] = tuple(names)
    return options
