# SPDX-License-Identifier: Apache-2.0
"""Rules about size: how long a file and a function may be, how branched, with how many parameters.

These are upper limits. Most files and functions are much shorter.
"""

import ast
from collections.abc import Iterator

from arch_tree import Source, complexity, num_lines, num_parameters

MAX_FILE_TOKENS = 5000
MAX_FUNCTION_LINES = 100
MAX_COMPLEXITY = 15
MAX_PARAMETERS = 8
MAX_LOOP_LINES = 60
MAX_LOOP_COMPLEXITY = 8

# What must be larger, by name ("file" or "file:function"), with the reason.
LARGE_FILES: dict[str, str] = {
    "tests/contract/test_rollout_images.py": "every engine answers the same questions about images",
}
LARGE_FUNCTIONS: dict[str, str] = {}
MANY_PARAMETERS: dict[str, str] = {
    "quadriga/rollout/agent_loop/manager.py:AgentLoopManager.__init__": "services of its loops, each optional",
    "packages/quadriga_verl/core_algos.py:compute_policy_loss": "the signature is verl's, for users' code",
    "quadriga/algorithms/advantages/gigpo.py:gigpo": "five fields of the batch, and an option for each of its parts",
    "quadriga/algorithms/losses/vespo.py:vespo": "four fields of the batch, and two shapes of two parameters",
    "quadriga/models/heads.py:token_scores": "one pass over the vocabulary: what it reads, and what it is asked for",
    "quadriga/models/fused_triton.py:_norm_kernel": "a kernel takes pointers and sizes one by one",
    "quadriga/models/fused_triton.py:_norm_gradients_kernel": "a kernel takes pointers and sizes one by one",
    "quadriga/models/heads_triton.py:_logits": "a kernel takes pointers and sizes one by one",
    "quadriga/models/heads_triton.py:_statistics_kernel": "a kernel takes pointers and sizes one by one",
    "quadriga/models/heads_triton.py:_gradients_kernel": "a kernel takes pointers and sizes one by one",
    "quadriga/rollout/native/kernels_triton.py:_attend_to_keys": "a kernel takes pointers and sizes one by one",
    "quadriga/rollout/native/kernels_triton.py:_attention_kernel": "a kernel takes pointers and sizes one by one",
    "quadriga/rollout/native/kernels_triton.py:_combine_kernel": "a kernel takes pointers and sizes one by one",
    "quadriga/rollout/native/kernels_triton.py:_summarize_kernel": "a kernel takes pointers and sizes one by one",
    "quadriga/rollout/native/kernels_triton.py:_draw_kernel": "a kernel takes pointers and sizes one by one",
}

LOOP_FILE = "quadriga/trainer/ray_trainer.py"
LOOP_CLASS = "RayPPOTrainer"
LOOP_METHODS = ("steps", "step")


def long_file(source: Source) -> Iterator[str]:
    """A file that holds too much for one purpose."""
    if source.num_tokens > MAX_FILE_TOKENS and source.name not in LARGE_FILES:
        yield source.at(
            1, f"{source.num_tokens} tokens, at most {MAX_FILE_TOKENS}; split it by purpose"
        )


def long_function(source: Source) -> Iterator[str]:
    """A function that does not fit on a screen or two, its docstring aside."""
    for name, function in source.functions():
        lines = num_lines(function)
        if lines > MAX_FUNCTION_LINES and f"{source.name}:{name}" not in LARGE_FUNCTIONS:
            yield source.at(
                function.lineno, f"{name} has {lines} lines, at most {MAX_FUNCTION_LINES}"
            )


def branched_function(source: Source) -> Iterator[str]:
    """A function with too many ways through it."""
    for name, function in source.functions():
        paths = complexity(function)
        if paths > MAX_COMPLEXITY and f"{source.name}:{name}" not in LARGE_FUNCTIONS:
            yield source.at(
                function.lineno, f"{name} has a complexity of {paths}, at most {MAX_COMPLEXITY}"
            )


def many_parameters(source: Source) -> Iterator[str]:
    """A function that takes more than a reader can hold."""
    for name, function in source.functions():
        count = num_parameters(function)
        if count > MAX_PARAMETERS and f"{source.name}:{name}" not in MANY_PARAMETERS:
            yield source.at(
                function.lineno, f"{name} takes {count} parameters, at most {MAX_PARAMETERS}"
            )


def training_loop(source: Source) -> Iterator[str]:
    """The training loop: `steps` and `step` exist and fit on one screen."""
    if source.name != LOOP_FILE:
        return
    methods = {name: node for name, node in source.functions() if isinstance(node, ast.FunctionDef)}
    for method in LOOP_METHODS:
        name = f"{LOOP_CLASS}.{method}"
        if name not in methods:
            yield source.at(1, f"{name} is missing: the loop is read there")
            continue
        node = methods[name]
        lines, paths = num_lines(node), complexity(node)
        if lines > MAX_LOOP_LINES:
            yield source.at(
                node.lineno, f"{name} has {lines} lines, at most {MAX_LOOP_LINES}: one screen"
            )
        if paths > MAX_LOOP_COMPLEXITY:
            yield source.at(
                node.lineno, f"{name} has a complexity of {paths}, at most {MAX_LOOP_COMPLEXITY}"
            )
