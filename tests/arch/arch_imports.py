# SPDX-License-Identifier: Apache-2.0
"""Rules about imports: which layer may know which, where an import may stand, who owns which third party."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator

from arch_tree import Source
from quadriga.moved import path_today

_CORE = frozenset(
    {
        "openmp",
        "lazy",
        "errors",
        "engine_traits",
        "redact",
        "partition",
        "background",
        "streams",
        "descendants",
        "programs",
        "config",
        "observe",
        "protocol",
    }
)
_BELOW_TRAINER = _CORE | {
    "user_file",
    "algorithms",
    "rewards",
    "data",
    "single_controller",
    "workers",
}
_BELOW_WORKERS = _BELOW_TRAINER - {"workers"} | {
    "models",
    "planning",
    "engines",
    "rollout",
    "weight_sync",
}

# Each layer and what it may import besides itself. The order is the one in which they stand on each other.
LAYERS: dict[str, frozenset[str]] = {
    "openmp": frozenset(),
    "lazy": frozenset({"openmp"}),
    "redact": frozenset(),
    "errors": frozenset({"redact"}),
    "partition": frozenset(),
    "moved": frozenset(),
    "declared_algorithms": frozenset(),
    "background": frozenset(),
    "descendants": frozenset(),
    "streams": frozenset(),
    "programs": frozenset({"descendants", "lazy", "streams"}),
    "http_client": frozenset({"errors", "background"}),
    "engine_traits": frozenset({"errors"}),
    "config": frozenset({"errors", "redact", "declared_algorithms", "engine_traits"}),
    "observe": frozenset({"errors", "config", "streams"}),
    "user_file": frozenset({"errors", "observe"}),
    "user_function": frozenset({"errors"}),
    "protocol": frozenset({"errors", "lazy"}),
    "algorithms": frozenset({"errors", "user_file", "declared_algorithms"}),
    "rewards": _CORE | {"user_file", "http_client"},
    "data": _CORE | {"user_file", "http_client"},
    "recipes": frozenset({"errors", "config", "observe", "data", "rewards"}),
    "models": frozenset({"errors", "partition", "config", "observe"}),
    "planning": frozenset({"errors", "config", "models"}),
    "single_controller": _CORE,
    "engines": _CORE | {"algorithms", "models"},
    "weight_sync": frozenset({"errors", "partition", "config", "observe"}),
    "rollout": _CORE | {"user_file", "http_client", "models", "rewards", "weight_sync"},
    "serve": _CORE | {"rollout"},
    "workers": _BELOW_WORKERS,
    "trainer": _BELOW_TRAINER | {"serve"},
    "replay": _BELOW_WORKERS | {"workers", "trainer"},
    "view": _CORE | {"data", "serve", "trainer"},
    "cli": _BELOW_WORKERS | {"workers", "trainer", "view", "replay"},
    "config_draft": _CORE | {"user_file", "user_function", "data", "rewards"},
    "api": _BELOW_TRAINER | {"config_draft", "trainer"},
    "__main__": frozenset({"cli"}),
    "quadriga_verl.commands": frozenset(
        {"errors", "config", "declared_algorithms", "engine_traits"}
    ),
    "quadriga_verl.cli": frozenset(
        {"errors", "config", "trainer", "cli", "quadriga_verl.commands"}
    ),
    "quadriga_verl.config_translate": frozenset(
        {"errors", "config", "quadriga_verl.cli", "quadriga_verl.commands"}
    ),
    "quadriga_verl.core_algos": frozenset({"errors", "algorithms"}),
    "quadriga_verl.shim": _BELOW_WORKERS
    | {"http_client", "workers", "trainer", "quadriga_verl.core_algos"},
}

# Old import paths of modules that moved, as import strings.
MOVED = "quadriga/moved.py"

# The one place where a name in the configuration becomes a class, by import string, so that it may name any layer.
BUILD = "quadriga/trainer/build.py"

# A command that stands among the trainers, where people who come from verl look for it; it only calls the command line.
COMMAND = "quadriga/trainer/main_ppo.py"

# Extras, and what only one file has any business with. The subpackage of torch stands for the package it needs.
ONE_FILE_EACH = frozenset(
    {
        "accelerate",
        "gem",
        "gguf",
        "gymnasium",
        "httpx2",
        "math_verify",
        "matplotlib",
        "mcp",
        "mlflow",
        "peft",
        "sglang",
        "skyrl_gym",
        "swanlab",
        "tensorboard",
        "textarena",
        "uvicorn",
        "vllm",
        "wandb",
    }
)
# An extra that is too large for one file has a folder of its own, or some files.
ONE_FOLDER_EACH: dict[str, str | tuple[str, ...]] = {
    "ray": "quadriga/single_controller/ray/",
    "megatron": "quadriga/engines/megatron/",
    # Two applications: the policy's and the page's.
    "starlette": ("quadriga/serve/app.py", "quadriga/view/app.py"),
}
_ALSO = {"torch.utils.tensorboard": "tensorboard"}

# Engines are told apart by what they declare (quadriga/engine_traits), not by their names or classes. Config may
# compare names of training engines, and BUILD looks them up.
ROLLOUT_ENGINES = frozenset({"native", "hf", "vllm", "sglang", "http", "scripted"})
TRAINING_ENGINES = frozenset({"fsdp", "fsdp2", "megatron"})
ENGINE_CLASSES = frozenset(
    {"NativeEngine", "HFEngine", "VLLMEngine", "SGLangEngine", "HTTPEngine", "ScriptedEngine"}
)

_IMPORT_STRING = re.compile(r"quadriga(\.\w+)+(:\w+)?")


def unknown_layer(source: Source) -> Iterator[str]:
    """A package or module directly under quadriga/, or a folder beside it, that the table of layers does not have."""
    if source.layer and source.layer not in LAYERS:
        yield source.at(
            1,
            f"the layer {source.layer!r} is not in the table of layers; say there what it may import",
        )


def upward_import(source: Source) -> Iterator[str]:
    """An import of a layer that this one must not know, as a statement or as an import string."""
    if not source.layer:
        return
    layer_here = "cli" if source.name == COMMAND else source.layer
    allowed = LAYERS.get(layer_here, frozenset()) | {layer_here, source.layer, "__version__", ""}
    mentioned = [(entry.layer, entry.line) for entry in source.imports() if entry.layer is not None]
    mentioned += [
        ("recipes", entry.line) for entry in source.imports() if entry.top == "quadriga_recipes"
    ]
    if source.name not in (BUILD, MOVED):
        mentioned += list(_import_strings(source.tree))
    for layer, line in mentioned:
        if layer not in allowed:
            may = ", ".join(sorted(LAYERS.get(source.layer, ()))) or "nothing"
            yield source.at(line, f"{source.layer} imports {layer}; of ours it may import {may}")


def _import_strings(tree: ast.Module) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and _IMPORT_STRING.fullmatch(node.value)
        ):
            yield node.value.split(".")[1].partition(":")[0], node.lineno


def old_import_path(source: Source) -> Iterator[str]:
    """An import of a module by the path that it had before it moved."""
    for entry in source.imports():
        moved = path_today(entry.module)
        if moved is not None:
            yield source.at(entry.line, f"imports {entry.module}, which is {moved} now")


def file_at_old_path(sources: Iterable[Source]) -> Iterator[str]:
    """A file where the table of old import paths has one that moved: nothing could import it."""
    for source in sources:
        module = source.name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        if path_today(module) is not None:
            yield source.at(1, f"{module} stands in {MOVED} as an old path")


def late_import(source: Source) -> Iterator[str]:
    """An import of one of our modules inside a function; a package's `__getattr__` (PEP 562) may load by string."""
    for entry in source.imports():
        is_lazy_table = not entry.is_statement and entry.function == "__getattr__"
        if entry.layer is not None and entry.function and not is_lazy_table:
            yield source.at(
                entry.line,
                f"{entry.function}() imports {entry.module}; move it to the top of the file",
            )


def compared_engine_name(source: Source) -> Iterator[str]:
    """A comparison with the name or class of an engine, whose traits say what it can do."""
    if source.name == BUILD:
        return
    names = ROLLOUT_ENGINES
    if source.layer != "config":
        # "hf" and "http" have other meanings, too.
        names = names - {"hf", "http"} | TRAINING_ENGINES
    for node in ast.walk(source.tree):
        compared: set[str] = set()
        if isinstance(node, ast.Compare | ast.MatchValue):
            constants = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
            compared = names & {value for value in constants if isinstance(value, str)}
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance":
            classes = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
            compared = ENGINE_CLASSES & classes
        for name in sorted(compared):
            line = getattr(node, "lineno", 0)
            yield source.at(line, f"compares with the engine {name}; read its traits instead")


def shared_third_party(sources: Iterable[Source]) -> Iterator[str]:
    """A third party of one file that is imported in several."""
    importers: dict[str, dict[str, int]] = defaultdict(dict)
    for source in sources:
        for entry in source.imports():
            name = next(
                (party for module, party in _ALSO.items() if entry.module.startswith(module)),
                entry.top,
            )
            if name in ONE_FILE_EACH:
                importers[name].setdefault(source.name, entry.line)
    for name, files in sorted(importers.items()):
        if len(files) > 1:
            where = ", ".join(f"{file}:{line}" for file, line in sorted(files.items()))
            yield f"{name} is imported in {len(files)} files ({where}); let one of them own it"


def strayed_third_party(source: Source) -> Iterator[str]:
    """A third party of one folder that is imported outside it."""
    for entry in source.imports():
        folder = ONE_FOLDER_EACH.get(entry.top)
        if folder is not None and not source.name.startswith(folder):
            yield source.at(
                entry.line, f"imports {entry.top}, which is the business of {folder} alone"
            )
