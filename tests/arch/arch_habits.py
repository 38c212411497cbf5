# SPDX-License-Identifier: Apache-2.0
"""Rules about habits: headers, docstrings, names, exceptions, left-overs."""

import ast
import re
from collections.abc import Iterator
from typing import TypeGuard

from arch_tree import FunctionNode, Source

SPDX = "# SPDX-License-Identifier: Apache-2.0"
NAMELESS = frozenset({"utils", "util", "common", "helpers", "helper", "misc"})
BROAD = frozenset({"Exception", "BaseException"})

# Where anything may be raised and every one of it is passed on in another form: "file:function" and that form.
CATCHES_ANYTHING: dict[str, str] = {
    "quadriga/rollout/environments/process.py:_serve": "the driver raises it; only its episode ends",
    "quadriga/rollout/environments/process.py:_discard": "printed: the episode is over, and no call waits for it",
    "quadriga/rollout/environments/user_classes.py:ToolEnvironment.step": "a tool raises what the model should read",
    "quadriga/rewards/graders/math.py:compute_score": "a response is never the grader's failure; told as ungradable",
    "quadriga/observe/tracking/__init__.py:Tracking._call_each": "all trackers are called, then one error is raised",
    "quadriga/observe/watchdog.py:_WaitingBlock.report": "a description that fails is part of the report",
    "quadriga/trainer/asynchronous/batches.py:AsyncBatches._handling_event": "the trainer's thread raises it",
    "quadriga/serve/engines.py:Engines._run": "raised where the calls are awaited, each answered with it",
    "quadriga/rollout/call_queue.py:CallQueue._answer": "the call is generated again, alone, which raises",
    "quadriga/trainer/asynchronous/streams.py:RemoteStream._listen": "the trainer's thread raises it, or goes on",
    "quadriga/data/prompt_lengths.py:_measure_in_processes": "prompts are counted in this process; a notice says why",
    "quadriga/data/prompt_lengths.py:_answer_requests": "the driver raises it, or counts itself and says why",
    "quadriga/rewards/graders/math.py:_is_same": "every pair is compared first, then the first failure is raised",
    "quadriga/rewards/process.py:_grade_in_turn": "what a grader raises is its outcome: counted and stored",
    "quadriga/rewards/process.py:_grade_concurrently.grade": "likewise, of a coroutine function",
    "quadriga/rewards/managers/naive.py:InProcessRewardManager._grade": "likewise, of one in this process",
    "quadriga/single_controller/ray/process.py:WorkerProcess._run": "what a worker raises is its answer to the driver",
    "quadriga/single_controller/worker_group.py:LocalWorkerGroup.start_all": "the future has it; `resolve` raises it",
    "quadriga/rollout/agent_loop/tool_calls.py:_run_and_deliver": "what a tool raises is raised where it was called",
    "quadriga/rollout/balancer.py:Balancer.generate": "the next engine is asked; if none answers, all is raised",
    "quadriga/rollout/balancer.py:Balancer._close_dead": "it is left already, with its reason; a warning says the rest",
    "quadriga/rollout/interface.py:RolloutEngine._generate_pending": "every caller gets it, raised where it awaits",
}

_LEFT_OVER = re.compile(r"#.*\b(TO" + r"DO|FIX" + r"ME|XX" + r"X|HA" + r"CK)\b")


def no_licence_line(source: Source) -> Iterator[str]:
    """A file whose first line does not name the licence."""
    if source.text.partition("\n")[0] != SPDX:
        yield source.at(1, f"the first line must be `{SPDX}`")


def no_module_docstring(source: Source) -> Iterator[str]:
    """A file that does not say what it is for."""
    if not ast.get_docstring(source.tree):
        yield source.at(2, "no docstring at the top; say in a sentence what the file is for")


def no_public_docstring(source: Source) -> Iterator[str]:
    """A public class or function of a module without a docstring."""
    for node in source.tree.body:
        is_public = isinstance(node, FunctionNode | ast.ClassDef) and not node.name.startswith("_")
        if is_public and not ast.get_docstring(node) and not _is_overload(node):
            yield source.at(node.lineno, f"{node.name} is public and has no docstring")


def _is_overload(node: FunctionNode | ast.ClassDef) -> bool:
    return any(ast.unparse(decorator).endswith("overload") for decorator in node.decorator_list)


def nameless_module(source: Source) -> Iterator[str]:
    """A module whose name says nothing about what is in it."""
    for part in source.name.removesuffix(".py").split("/"):
        if part in NAMELESS:
            yield source.at(
                1, f"no module or package is called {part!r}; name it for what is in it"
            )


def swallowed_exception(source: Source) -> Iterator[str]:
    """An `except` that takes anything without raising, or that does nothing at all."""
    for name, node in broad_handlers(source):
        if f"{source.name}:{name}" not in CATCHES_ANYTHING:
            yield source.at(
                node.lineno,
                f"{name} catches anything and raises nothing; name what is expected here",
            )
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            yield source.at(node.lineno, "a bare except; name what is expected here")
        elif isinstance(node, ast.ExceptHandler) and all(
            isinstance(part, ast.Pass) for part in node.body
        ):
            yield source.at(
                node.lineno,
                "an exception is passed over in silence; say what happened, or let it go up",
            )
        elif isinstance(node, ast.Call) and _is_broad_suppress(node):
            yield source.at(node.lineno, "suppress() of anything; name what is expected here")


def _is_broad_suppress(call: ast.Call) -> bool:
    return ast.unparse(call.func).endswith("suppress") and bool(
        BROAD & {ast.unparse(part) for part in call.args}
    )


def broad_handlers(source: Source) -> Iterator[tuple[str, ast.ExceptHandler]]:
    """The handlers that catch anything and raise nothing, each with the function it stands in."""
    for name, node in _handlers(source):
        caught = (
            {part.id for part in ast.walk(node.type) if isinstance(part, ast.Name)}
            if node.type
            else BROAD
        )
        if caught & BROAD and not any(isinstance(part, ast.Raise) for part in ast.walk(node)):
            yield name, node


def _handlers(source: Source) -> Iterator[tuple[str, ast.ExceptHandler]]:
    owners = {}
    for name, function in source.functions():
        # An inner function comes after the one around it, so that the innermost owner stays.
        owners.update({id(node): name for node in ast.walk(function)})
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ExceptHandler):
            yield owners.get(id(node), "the module"), node


def locale_encoding(source: Source) -> Iterator[str]:
    """A text file or the output of a program that is read or written in whatever encoding the locale has."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and _uses_locale(node):
            yield source.at(
                node.lineno, f"{ast.unparse(node.func)}() names no encoding; say encoding='utf-8'"
            )


def _uses_locale(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    if "encoding" in keywords:
        return False
    if {keywords.get("text"), keywords.get("universal_newlines")} & {"True"}:
        return True
    if name in ("read_text", "write_text"):
        return len(call.args) <= (name == "write_text")
    # What opens files: with a mode of text, or without one where reading text is the default.
    modes = [
        part.value
        for part in [*call.args, *(keyword.value for keyword in call.keywords)]
        if _is_mode(part)
    ]
    owner = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    if name in ("fdopen", "NamedTemporaryFile", "TemporaryFile") or (
        name == "open" and owner in ("gzip", "bz2")
    ):
        return any("b" not in mode for mode in modes)
    is_pathlibs = bool(owner) and not call.args and not call.keywords
    if name == "open" and owner in ("", "io"):
        return all("b" not in mode for mode in modes)
    return name == "open" and (is_pathlibs or any("b" not in mode for mode in modes))


def _is_mode(node: ast.expr) -> TypeGuard[ast.Constant]:
    return isinstance(node, ast.Constant) and bool(re.fullmatch("[rwax][bt+]*", str(node.value)))


def left_over(source: Source) -> Iterator[str]:
    """A comment that announces work instead of explaining code."""
    for number, line in enumerate(source.text.splitlines(), start=1):
        if _LEFT_OVER.search(line):
            yield source.at(
                number, "a note of work not done; do it, or file it where work is filed"
            )
