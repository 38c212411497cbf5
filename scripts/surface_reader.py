# SPDX-License-Identifier: Apache-2.0
"""Reads what a surface snapshot can only see by importing a checkout; `surface.py` runs it.

    PYTHONPATH=CHECKOUT:CHECKOUT/recipes python -P scripts/surface_reader.py names CHECKOUT FOLDER

writes FOLDER/names.json, with the sections `modules`, `names`, `annotations`, `keys`, `commands`
and `help`. `runs` in place of `names` writes FOLDER/runs.json, with `metrics` and `files`.
`surface.py` describes the sections.
"""

import ast
import contextlib
import importlib
import inspect
import io
import json
import logging
import os
import re
import sys
import tomllib
from argparse import Action, ArgumentParser
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

Section = dict[str, str]
Snapshot = dict[str, Section]

SUBCOMMANDS = (("config", "translate"),)
"""Commands below another one that have a parser of their own."""
VERL_SHIM = "quadriga.compat.verl"
"""What stands in for verl; the path that earlier checkouts know too."""

# ---- packages of a checkout ---------------------------------------------------------------------


def find_settings(checkout: Path) -> dict[str, list[str]]:
    """The section `tool.setuptools.packages.find` of a checkout's pyproject.toml."""
    text = (checkout / "pyproject.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)["tool"]["setuptools"]["packages"]["find"]


def source_folders(checkout: Path) -> list[Path]:
    """The folders of a checkout that hold its packages."""
    return [(checkout / folder).resolve() for folder in find_settings(checkout)["where"]]


def import_path(checkout: Path) -> str:
    """The value of PYTHONPATH with which a process imports a checkout's packages."""
    return os.pathsep.join(map(str, source_folders(checkout)))


def find_packages(checkout: Path) -> dict[str, Path]:
    """Top-level packages of a checkout's wheel, with their folders."""
    packages: dict[str, Path] = {}
    for name in find_settings(checkout)["include"]:
        for folder in source_folders(checkout):
            if (folder / name / "__init__.py").exists():
                packages[name] = folder / name
    return packages


# ---- names --------------------------------------------------------------------------------------


class NameReader:
    """Collects the public names of modules.

    Attributes:
        packages: top-level packages of the checkout.
        sections: the sections `modules`, `names` and `annotations`.
    """

    def __init__(self, checkout: Path, packages: dict[str, Path]) -> None:
        self._checkout = checkout
        self.packages = packages
        self.sections: Snapshot = {"modules": {}, "names": {}, "annotations": {}}

    def read_all(self, earlier: Snapshot) -> None:
        """Read the modules of the packages, of verl's names, and of an earlier snapshot."""
        files = dict(find_modules(self.packages))
        for module_name, path in files.items():
            self._read_module(module_name, path)
        self._read_verl()
        self._read_earlier(earlier.get("modules", {}), earlier.get("names", {}))

    def _read_module(self, module_name: str, path: Path) -> None:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        module, state = import_state(module_name)
        self.sections["modules"][module_name] = state
        if module is None:
            for node in tree.body:
                self._add_node(f"{module_name}.", node)
            return
        for name in sorted(offered_names(module, tree, self.packages)):
            self._add(f"{module_name}.{name}", getattr(module, name))

    def _read_verl(self) -> None:
        """Read the names that `import verl` finds with `quadriga.compat.verl`."""
        modules = importlib.import_module(VERL_SHIM).MODULES
        for module_name, names in modules.items():
            module, state = import_state(module_name)
            self.sections["modules"][module_name] = state
            for name in sorted(names):
                try:
                    self._add(f"{module_name}.{name}", getattr(module, name), with_members=False)
                except ImportError as error:
                    self.sections["names"][f"{module_name}.{name}"] = f"needs {error.name}"

    def _read_earlier(self, modules: Section, names: Section) -> None:
        """Read what is left of an earlier snapshot, such as names that an alias has."""
        for module_name, state in modules.items():
            module, new_state = import_state(module_name)
            is_known = module_name in self.sections["modules"]
            if module is not None or new_state == state:
                self.sections["modules"].setdefault(module_name, new_state)
            for path, text in names.items():
                name = path.removeprefix(f"{module_name}.")
                if path == name or path in self.sections["names"]:
                    continue
                if module is None and new_state == state and not is_known:
                    # Nothing more can be seen of it without the package that it needs.
                    self.sections["names"][path] = text
                elif name.isidentifier() and hasattr(module, name):
                    self._add(path, getattr(module, name))

    def _add(self, path: str, value: Any, *, with_members: bool = True) -> None:
        names = self.sections["names"]
        if isinstance(value, logging.Logger):
            # Users get a logger by its name.
            return
        if isinstance(value, ModuleType):
            names[path] = "module"
        elif isinstance(value, type):
            names[path] = "class"
            self._add_parameters(path, value)
            if with_members:
                self._add_class(path, value)
        elif callable(value):
            names[path] = "function"
            self._add_parameters(path, value)
        elif type(value).__module__ == "builtins":
            names[path] = f"value: {type(value).__name__}"
        else:
            names[path] = "value"

    def _add_class(self, path: str, cls: type) -> None:
        names = self.sections["names"]
        for base in cls.__mro__[1:-1]:
            names[f"{path} is a {base.__name__}"] = ""
        for base in reversed(cls.__mro__):
            if base.__module__.partition(".")[0] not in self.packages:
                continue
            members = dict.fromkeys(vars(base).get("__annotations__", ())) | vars(base)
            for name, member in members.items():
                if not name.startswith("_"):
                    self._add_member(f"{path}.{name}", member)

    def _add_member(self, path: str, member: Any) -> None:
        if isinstance(member, staticmethod):
            self._add(path, member.__func__)
        elif isinstance(member, classmethod):
            self.sections["names"][path] = "class method"
            self._add_parameters(path, member.__func__, num_bound=1)
        elif inspect.isfunction(member):
            self.sections["names"][path] = "method"
            self._add_parameters(path, member, num_bound=1)
        else:
            # Properties, fields with a default and other values can replace one another.
            self.sections["names"][path] = "field"

    def _add_parameters(self, path: str, function: Callable[..., Any], num_bound: int = 0) -> None:
        """Describe the parameters of a function or a constructor, without the first `num_bound`."""
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):
            return
        parameters = list(signature.parameters.values())[num_bound:]
        for position, parameter in enumerate(parameters):
            entry = f"{path}({parameter.name})"
            default = None
            if parameter.default is not parameter.empty:
                default = self._text(parameter.default)
            self.sections["names"][entry] = describe_parameter(parameter.kind, position, default)
            if parameter.annotation is not parameter.empty:
                self.sections["annotations"][entry] = self._annotation(parameter.annotation)
        if signature.return_annotation is not signature.empty:
            result = self._annotation(signature.return_annotation)
            self.sections["annotations"][f"{path} ->"] = result

    def _annotation(self, annotation: Any) -> str:
        text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
        return self._stable(text)

    def _text(self, value: Any) -> str:
        """The representation of a default that is the same in every process."""
        if isinstance(value, set | frozenset):
            return f"{type(value).__name__}({sorted(map(repr, value))})"
        if isinstance(value, type) or inspect.isroutine(value):
            return value.__qualname__
        if isinstance(value, float | Enum | Path):
            return self._stable(repr(value))
        try:
            ast.literal_eval(repr(value))
        except (SyntaxError, ValueError):
            # The attributes of an object are its own business.
            return f"<{type(value).__name__}>"
        return self._stable(repr(value))

    def _stable(self, text: str) -> str:
        """Text without addresses and without the folder of the checkout."""
        text = re.sub(r" at 0x[0-9a-f]+", "", text)
        return text.replace(str(self._checkout), "CHECKOUT")

    def _add_node(self, prefix: str, node: ast.stmt, num_bound: int = 0) -> None:
        """Describe a statement of a module, or of a class in it, that cannot be imported."""
        names = self.sections["names"]
        is_definition = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        if is_definition and node.name.startswith("_"):
            return
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names[prefix + node.name] = "method" if num_bound else "function"
            self._add_node_parameters(prefix + node.name, node.args, num_bound)
        elif isinstance(node, ast.ClassDef):
            names[prefix + node.name] = "class"
            for base in node.bases:
                names[f"{prefix}{node.name} is a {ast.unparse(base)}"] = ""
            for child in node.body:
                if isinstance(child, ast.FunctionDef) and child.name == "__init__":
                    self._add_node_parameters(prefix + node.name, child.args, 1)
                self._add_node(f"{prefix}{node.name}.", child, num_bound=1)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for name in assigned_names(node):
                if not name.startswith("_"):
                    names[prefix + name] = "value"

    def _add_node_parameters(self, path: str, arguments: ast.arguments, num_bound: int) -> None:
        names = self.sections["names"]
        ordinary = [*arguments.posonlyargs, *arguments.args]
        num_required = len(ordinary) - len(arguments.defaults)
        for position, argument in enumerate(ordinary):
            if position < num_bound:
                continue
            kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
            if position < len(arguments.posonlyargs):
                kind = inspect.Parameter.POSITIONAL_ONLY
            default = None
            if position >= num_required:
                default = ast.unparse(arguments.defaults[position - num_required])
            entry = f"{path}({argument.arg})"
            names[entry] = describe_parameter(kind, position - num_bound, default)
        for argument, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
            default = ast.unparse(value) if value else None
            kind = inspect.Parameter.KEYWORD_ONLY
            names[f"{path}({argument.arg})"] = describe_parameter(kind, 0, default)
        if arguments.vararg:
            names[f"{path}({arguments.vararg.arg})"] = "*"
        if arguments.kwarg:
            names[f"{path}({arguments.kwarg.arg})"] = "**"


def describe_parameter(kind: Any, position: int, default: str | None) -> str:
    """How a parameter can be passed, and its default."""
    if kind is inspect.Parameter.VAR_POSITIONAL:
        return "*"
    if kind is inspect.Parameter.VAR_KEYWORD:
        return "**"
    passed = {
        inspect.Parameter.POSITIONAL_ONLY: f"positional only, number {position}",
        inspect.Parameter.POSITIONAL_OR_KEYWORD: f"number {position}",
        inspect.Parameter.KEYWORD_ONLY: "keyword",
    }[kind]
    return f"{passed}, required" if default is None else f"{passed}, default {default}"


def find_modules(packages: dict[str, Path]) -> Iterator[tuple[str, Path]]:
    """Module names of packages with their files, in order; `__main__` would run."""
    for package, folder in packages.items():
        for path in sorted(folder.rglob("*.py")):
            parts = [package, *path.relative_to(folder).with_suffix("").parts]
            if parts[-1] == "__init__":
                parts.pop()
            if parts[-1] != "__main__":
                yield ".".join(parts), path


def import_state(module_name: str) -> tuple[ModuleType | None, str]:
    """Import a module; returns it, or None, and why it cannot be imported."""
    try:
        return importlib.import_module(module_name), ""
    except ImportError as error:
        return None, f"needs {error.name}"


def offered_names(module: ModuleType, tree: ast.Module, packages: Iterable[str]) -> set[str]:
    """Public names that a module defines or passes on."""
    defined: set[str] = set()
    imported: set[str] = set()
    for node in top_level_statements(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            defined.update(assigned_names(node))
        elif isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] in packages:
            imported.update(alias.asname or alias.name for alias in node.names)
    if not str(module.__file__).endswith("__init__.py"):
        imported -= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    listed = set(getattr(module, "__all__", ()))
    public = {name for name in defined | imported if not name.startswith("_")}
    return {name for name in public | listed if hasattr(module, name)}


def top_level_statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """Statements of a module, those under `if` and `try` among them."""
    pending: list[ast.AST] = list(reversed(tree.body))
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If | ast.Try | ast.ExceptHandler | ast.With):
            pending.extend(reversed(list(ast.iter_child_nodes(node))))
        elif isinstance(node, ast.stmt):
            yield node


def assigned_names(node: ast.Assign | ast.AnnAssign) -> list[str]:
    """The names on the left-hand side of an assignment."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    names = []
    for target in targets:
        names += [part.id for part in ast.walk(target) if isinstance(part, ast.Name)]
    return names


# ---- keys and commands --------------------------------------------------------------------------


def read_keys() -> Section:
    """Configuration keys of each task."""
    config = importlib.import_module("quadriga.config")
    entries: Section = {}
    for task in ("rl", "sft", "reward_model"):
        for leaf in config.leaf_keys(task).values():
            schema = leaf.section.model_json_schema()["properties"][leaf.name]
            for word in ("title", "description", "default"):
                schema.pop(word, None)
            path = f"{task} {leaf.key}"
            for value in take_choices(schema):
                entries[f"{path}: takes {value}"] = ""
            entries[path] = f"default {leaf.default!r}"
            entries[f"{path}: type"] = json.dumps(schema, sort_keys=True)
            entries[f"{path}: flags"] = f"open {leaf.is_open}, text {leaf.is_text}"
    return entries


def take_choices(schema: Any) -> list[Any]:
    """Take the values of `enum` and `const` out of a JSON schema: new ones are additions."""
    choices: list[Any] = []
    if isinstance(schema, dict):
        choices += schema.pop("enum", [])
        if "const" in schema:
            choices.append(schema.pop("const"))
    children = schema.values() if isinstance(schema, dict) else schema
    for child in children:
        if isinstance(child, dict | list):
            choices += take_choices(child)
    return choices


def read_commands() -> Snapshot:
    """Options, arguments and help of `quadriga` and each of its commands."""
    main = importlib.import_module("quadriga.cli.main")
    sections: Snapshot = {"commands": {}, "help": {}}
    parsers: list[ArgumentParser] = []
    print_help = ArgumentParser.print_help

    def record(parser: ArgumentParser, file: Any = None) -> None:
        parsers.append(parser)
        print_help(parser, file)

    # argparse calls it for `--help`, whichever function has made the parser.
    ArgumentParser.print_help = record
    for words in ((), *((name,) for name in main.COMMANDS), *SUBCOMMANDS):
        output = io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
            main.main([*words, "--help"])
        name = " ".join(("quadriga", *words))
        sections["help"][name] = output.getvalue()
        sections["commands"] |= describe_parser(name, parsers.pop())
    ArgumentParser.print_help = print_help
    return sections


def describe_parser(name: str, parser: ArgumentParser) -> Section:
    """Options by their names, positional arguments by their numbers, and the same of subparsers."""
    entries: Section = {name: "command"}
    num_arguments = 0
    for action in parser._actions:
        if not action.option_strings:
            num_arguments += 1
        labels = action.option_strings or [f"argument {num_arguments}"]
        for label in labels:
            entries[f"{name} {label}"] = describe_action(action)
            for choice in action.choices or ():
                entries[f"{name} {label}: takes {choice}"] = ""
        if isinstance(action.choices, dict):
            for word, child in action.choices.items():
                entries |= describe_parser(f"{name} {word}", child)
    return entries


def describe_action(action: Action) -> str:
    """What an option or an argument takes."""
    parts = [type(action).__name__.strip("_").removesuffix("Action"), f"default {action.default!r}"]
    if action.nargs is not None:
        parts.append(f"nargs {action.nargs}")
    if action.type is not None:
        parts.append(f"type {getattr(action.type, '__name__', action.type)}")
    if action.required:
        parts.append("required")
    return "; ".join(parts)


# ---- runs ---------------------------------------------------------------------------------------

QUICK = (
    "trainer.total_training_steps=2",
    "trainer.save_freq=2",
    "trainer.device=cpu",
    "trainer.logger=[jsonl]",
)
SMALL = (
    "data.train_batch_size=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.rollout.n=4",
    "trainer.test_freq=2",
    "trainer.log_val_generations=2",
)
RUNS = {
    "critic": (
        "algorithm.adv_estimator=gae",
        "algorithm.use_kl_in_reward=true",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "critic.fsdp_config.model_dtype=float32",
    ),
    "asynchronous": ("async_training.enable=true", "async_training.deterministic=true"),
    "conversations": (
        "actor_rollout_ref.rollout.mode=async",
        "algorithm.filter_groups.enable=true",
    ),
}
"""Runs of `quadriga train` on the playground; `sft` and `reward_model` are beside them."""


# An untrained model is never right, and groups of equal scores are filtered out.
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": len(set(solution_str)) / 8, "length": len(solution_str)}
"""


def read_runs(folder: Path) -> Snapshot:
    """Names of metrics, and files, of two-step runs of the playground's model in this process."""
    main = importlib.import_module("quadriga.cli.main").main
    playground = folder / "playground"
    commands = {"prepare": ["prepare", "playground", "--output", str(playground)]}
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")
    own_files = [f"actor_rollout_ref.model.path={playground / 'model'}"]
    own_files.append(f"custom_reward_function.path={folder / 'reward.py'}")
    for name, words in RUNS.items():
        responses = f"trainer.rollout_data_dir={folder / name / 'responses'}"
        config = ["--config", f"{playground}/sums.yaml"]
        commands[name] = ["train", *config, *QUICK, *SMALL, *words, *own_files, responses]
    for name in ("sft", "reward_model"):
        small = ["data.train_batch_size=8", f"model.path={playground / 'model'}"]
        commands[name] = ["sft", "--config", f"{playground}/{name}.yaml", *QUICK, *small]
    sections: Snapshot = {"metrics": {}, "files": {}}
    for name, words in commands.items():
        if name == "prepare":
            run_command(main, words)
            continue
        run_command(main, [*words, f"trainer.default_local_dir={folder / name}"])
        for path in (folder / name).rglob("*"):
            if path.is_file():
                sections["files"][f"{name}: {path.relative_to(folder / name)}"] = ""
        for line in (folder / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
            sections["metrics"] |= {f"{name}: {metric}": "" for metric in json.loads(line)}
    return sections


def run_command(main: Callable[[list[str]], int], words: list[str]) -> None:
    """Run a command of `quadriga` in this process.

    Raises:
        SystemExit: it failed.
    """
    print(f"quadriga {' '.join(words)}", file=sys.stderr, flush=True)
    with contextlib.redirect_stdout(sys.stderr):
        status = main(words)
    if status:
        raise SystemExit(f"surface: quadriga {words[0]} ended with status {status}")


# ---- the program --------------------------------------------------------------------------------


def write_part(part: str, checkout: Path, folder: Path) -> None:
    """Take a part of the snapshot in this process, and write it into a folder."""
    snapshot: Snapshot = {}
    if part == "names":
        earlier = json.loads((folder / "earlier.json").read_text(encoding="utf-8"))
        reader = NameReader(checkout, find_packages(checkout))
        reader.read_all(earlier)
        snapshot = reader.sections | {"keys": read_keys()} | read_commands()
    else:
        snapshot = read_runs(folder)
    (folder / f"{part}.json").write_text(json.dumps(snapshot), encoding="utf-8")


if __name__ == "__main__":
    write_part(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
