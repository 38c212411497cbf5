# SPDX-License-Identifier: Apache-2.0
"""Types of fields: numbers with a range, names, paths, and choices that several sections share."""

from dataclasses import dataclass
from functools import partial
from os import PathLike, fspath
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, MinLen
from pydantic import BeforeValidator


@dataclass(frozen=True)
class Meaning:
    """Description of the values that a type with a custom check accepts."""

    words: str


def _replace_name(value: Any, **names: str) -> Any:
    """Replace a short or former name of a choice by the present one; other values stay.

    Args:
        value: the value of a key.
        names: present names, by short or former name.
    """
    return names.get(value, value) if isinstance(value, str) else value


def _path_text(value: Any) -> Any:
    """Convert paths to text, also inside a list; other values stay, for validation to refuse."""
    if isinstance(value, (list, tuple)):
        return [_path_text(path) for path in value]
    return fspath(value) if isinstance(value, PathLike) else value


Count = Annotated[int, Ge(1)]
MinusOneOrCount = Annotated[Literal[-1] | Count, Meaning("-1 or a whole number of at least 1")]
Share = Annotated[float, Ge(0), Le(1)]
TopShare = Annotated[float, Gt(0), Le(1)]
Name = Annotated[str, MinLen(1)]
PathText = Annotated[str, BeforeValidator(_path_text)]
PathTexts = Annotated[
    str | list[str],
    BeforeValidator(lambda value: "" if value is None else _path_text(value)),
    Meaning("text, or a list, each text, or null for none"),
]
_SHORT_DTYPES = BeforeValidator(
    partial(_replace_name, fp32="float32", bf16="bfloat16", fp16="float16")
)
Dtype = Annotated[Literal["auto", "bfloat16", "float16", "float32"], _SHORT_DTYPES]
ResumeMode = Annotated[
    Literal["auto", "disable", "resume_path"],
    BeforeValidator(partial(_replace_name, path="resume_path")),
]
LossAggMode = Literal[
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
    "rollout-mean-token-mean",
]
KLKind = Literal[
    "kl",
    "k1",
    "abs",
    "mse",
    "k2",
    "low_var_kl",
    "k3",
    "kl+",
    "k1+",
    "abs+",
    "mse+",
    "k2+",
    "low_var_kl+",
    "k3+",
]
