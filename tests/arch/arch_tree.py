# SPDX-License-Identifier: Apache-2.0
"""What the rules look at: a Python file as text and as a syntax tree, its imports, its functions."""

import ast
import io
import subprocess
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
BRANCHES = (
    ast.If,
    ast.IfExp,
    ast.For,
    ast.AsyncFor,
    ast.While,
    ast.ExceptHandler,
    ast.match_case,
    ast.comprehension,
)


COUNTED_TOKENS = {tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING}


@dataclass(frozen=True)
class Import:
    """One imported module, however the file asks for it."""

    module: str
    line: int
    function: str | None
    is_statement: bool

    @property
    def top(self) -> str:
        """`numpy` of `numpy.random`."""
        return self.module.partition(".")[0]

    @property
    def layer(self) -> str | None:
        """`data` of `quadriga.data.files`, an empty string for `quadriga` itself, None for the work of others.

        `quadriga_verl.shim` of `quadriga_verl.shim.data`.
        """
        package, _, rest = self.module.partition(".")
        if package == "quadriga_verl":
            return ".".join(self.module.split(".")[:2])
        return rest.partition(".")[0] if package == "quadriga" else None


@dataclass(frozen=True)
class Source:
    """A Python file. `name` is its path from the root of the repository, with slashes."""

    name: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree; a file that does not parse fails the test with Python's own message."""
        return ast.parse(self.text, filename=self.name)

    @property
    def layer(self) -> str:
        """`data` for `quadriga/data/tables.py`, `errors` for `quadriga/errors.py`, `recipes` for the second package,
        `quadriga_verl.shim` for `packages/quadriga_verl/shim/data.py`."""
        parts = self.name.removeprefix("quadriga/").removesuffix(".py").split("/")
        if parts[0] == "packages":
            return "" if parts[2] == "__init__" else ".".join(parts[1:3])
        return "" if parts[0] == "__init__" else parts[0]

    @cached_property
    def num_tokens(self) -> int:
        """Python's tokens without comments, line ends and strings that stand alone, such as docstrings."""
        text_lines: set[int] = set()
        for node in ast.walk(self.tree):
            if is_text(node):
                text_lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        return sum(
            token.type in COUNTED_TOKENS and token.start[0] not in text_lines for token in tokens
        )

    def at(self, line: int, sentence: str) -> str:
        """A complaint in the form that editors make a link of."""
        return f"{self.name}:{line}: {sentence}"

    def imports(self) -> list[Import]:
        """Every import of the file: statements anywhere, `import_module("literal")`, and import strings of our own."""
        return list(_imports(self, self.tree, None))

    def functions(self) -> Iterator[tuple[str, FunctionNode]]:
        """Every function and method with its dotted name, nested ones too."""
        yield from _functions(self.tree, "")


def is_text(node: ast.AST) -> bool:
    """Whether a statement is a string that stands alone: a docstring, or the description of a field."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, FunctionNode]]:
    for child in ast.iter_child_nodes(node):
        name = prefix
        if isinstance(child, FunctionNode | ast.ClassDef):
            name = f"{prefix}{child.name}."
            if isinstance(child, FunctionNode):
                yield name[:-1], child
        yield from _functions(child, name)


def _imports(source: Source, node: ast.AST, function: str | None) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, child.lineno, function, True) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield from _imported_from(source, child, function)
        elif isinstance(child, ast.Call):
            yield from _imported_by_call(child, function)
        inner = child.name if isinstance(child, FunctionNode) else function
        yield from _imports(source, child, inner)


def _imported_from(source: Source, node: ast.ImportFrom, function: str | None) -> Iterator[Import]:
    module = node.module or ""
    if node.level:
        parents = source.name.removesuffix(".py").split("/")[: -node.level]
        module = ".".join([*parents, module]).strip(".")
    if module in ("quadriga", "quadriga_verl"):
        yield from (
            Import(f"{module}.{alias.name}", node.lineno, function, True) for alias in node.names
        )
    else:
        yield Import(module, node.lineno, function, True)


def _imported_by_call(call: ast.Call, function: str | None) -> Iterator[Import]:
    called = (
        call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    )
    if (
        called in {"import_module", "__import__"}
        and call.args
        and isinstance(call.args[0], ast.Constant)
    ):
        yield Import(str(call.args[0].value), call.lineno, function, False)


@cache
def package_sources() -> tuple[Source, ...]:
    """Every file of the wheel: the package, the recipes and the support of verl beside it."""
    return _sources("quadriga", "recipes", "packages")


@cache
def all_sources() -> tuple[Source, ...]:
    """Every Python file that we write: the three packages, the tests, the benchmarks, the examples."""
    return _sources("quadriga", "recipes", "packages", "tests", "benchmarks", "examples", "scripts")


def _sources(*folders: str) -> tuple[Source, ...]:
    files = sorted(path for folder in folders for path in (REPOSITORY / folder).rglob("*.py"))
    return tuple(
        Source(path.relative_to(REPOSITORY).as_posix(), path.read_text(encoding="utf-8"))
        for path in files
    )


def complexity(function: FunctionNode) -> int:
    """The cyclomatic complexity after McCabe: one, and one for every branch, those of nested functions included."""
    return 1 + sum(isinstance(node, BRANCHES) for node in ast.walk(function))


def num_lines(function: FunctionNode) -> int:
    """Lines from `def` to the last one of the body, without the docstring."""
    docstring = function.body[0] if ast.get_docstring(function, clean=False) else None
    own = (docstring.end_lineno or docstring.lineno) - docstring.lineno + 1 if docstring else 0
    return (function.end_lineno or function.lineno) - function.lineno + 1 - own


def num_parameters(function: FunctionNode) -> int:
    """Named parameters; `self`, `cls`, `*args` and `**kwargs` do not count."""
    arguments = function.args
    names = [
        argument.arg
        for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    ]
    return len([name for name in names if name not in {"self", "cls"}])


@cache
def tracked_files() -> tuple[str, ...]:
    """Every file that is, or on the next commit would be, in the repository."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, check=True, text=True
    ).stdout
    return tuple(
        sorted(name for name in listed.split("\0") if name and (REPOSITORY / name).is_file())
    )
