# SPDX-License-Identifier: Apache-2.0
"""What every section of the configuration is made of: the base class and the types with a range."""

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError


class Section(BaseModel):
    """A part of the tree: frozen, strict, and unwilling to take a key that it does not know."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


@dataclass(frozen=True)
class Meaning:
    """Says in words what a type with a hand-written check accepts."""

    words: str


def refuse(expected: str, fix: str = "") -> PydanticCustomError:
    """The error that a validator raises; the loader turns it into the house form."""
    return PydanticCustomError("refused", "expected {expected}. {fix}", {"expected": expected, "fix": fix})


def _minus_one_or_positive(value: int) -> int:
    if value != -1 and value < 1:
        raise refuse("-1 or a whole number of at least 1")
    return value


def _minus_one_or_more(value: int) -> int:
    if value < -1:
        raise refuse("-1, 0 or a larger whole number")
    return value


def _path_text(value: Any) -> Any:
    return fspath(value) if isinstance(value, PathLike) else value


def _paths_text(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_path_text(one) for one in value]
    return _path_text(value)


def _dtype_name(value: Any) -> Any:
    return {"fp32": "float32", "bf16": "bfloat16"}.get(value, value) if isinstance(value, str) else value


Count = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
MinusOneOrCount = Annotated[int, Meaning("-1 or a whole number of at least 1"), AfterValidator(_minus_one_or_positive)]
MinusOneOrMore = Annotated[int, Meaning("-1, 0 or a larger whole number"), AfterValidator(_minus_one_or_more)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Name = Annotated[str, Field(min_length=1)]
PathText = Annotated[str, BeforeValidator(_path_text)]
PathTexts = Annotated[str | list[str], BeforeValidator(_paths_text)]
Dtype = Annotated[Literal["auto", "bfloat16", "float32"], BeforeValidator(_dtype_name)]
LossAggMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
KLKind = Literal[
    "kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+"
]


def follow(given: Any, followers: Mapping[str, Any]) -> Any:
    """Fills keys that were not given; what it returns is validated like anything that the user wrote."""
    return {**followers, **given} if isinstance(given, Mapping) else given
