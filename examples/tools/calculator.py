# SPDX-License-Identifier: Apache-2.0
"""A calculator as a tool: the function's signature and docstring are what the model reads."""

import ast
import operator
from collections.abc import Callable
from typing import Any

from quadriga.rollout.agent_loop import ToolError, function_tool

OPERATIONS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}


@function_tool
def calculator(expression: str) -> str:
    """Compute an arithmetic expression.

    Args:
        expression: numbers, + - * / and parentheses, such as "(3 + 4) * 12".
    """
    try:
        return f"{value(ast.parse(expression.strip(), mode='eval').body):g}"
    except (SyntaxError, ZeroDivisionError, OverflowError, RecursionError) as error:
        # The model made the mistake, so it reads why; anything else would end its conversation.
        raise ToolError(f"calculator: {error}") from error


def value(node: ast.expr) -> float:
    """The number that an expression stands for."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return float(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](value(node.left), value(node.right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](value(node.operand))
    raise ToolError(f"calculator: {ast.unparse(node)} is not arithmetic")
