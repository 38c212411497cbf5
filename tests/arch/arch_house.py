# SPDX-License-Identifier: Apache-2.0
"""Rules about the package as a whole: its size, functions that only cost a name, and the words it is written in."""

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from arch_tree import REPOSITORY, FunctionNode, Source

MAX_SHORT_LINES = 3


# The most tokens that each package may have: its size when it was last changed on purpose, and 3 % of headroom. Lower a
# number freely. Raise one only for what the package can do now that it could not.
SIZES: dict[str, int] = {
    "algorithms": 15460,
    "cli": 11400,
    "config": 29870,
    "data": 36210,
    "engine_traits": 1260,
    "engines": 37110,
    "models": 31860,
    "observe": 18340,
    "planning": 9660,
    "protocol": 13020,
    "quadriga_verl": 41970,
    "replay": 8050,
    "rewards": 29220,
    "rollout": 93630,
    "serve": 10510,
    "single_controller": 24850,
    "trainer": 66500,
    "view": 13010,
    "weight_sync": 7370,
    "workers": 24250,
    "": 18000,
}

# Short functions with one caller that are worth their name: "file:function" and why.
SHORT_AND_WORTH_IT: dict[str, str] = {
    "quadriga/engines/parallel/tensor.py:_colwise_gathered_forward": "the forward of a module",
    "quadriga/data/rl_dataset.py:RLHFDataset.items_by_entry": "what a mixture asks of a data set, users' own too",
    "quadriga/data/loading.py:_begin_worker": "what torch calls in each process of a loader",
    "quadriga/background.py:off_the_loop": "half of a pair with `run_coroutine`",
    "quadriga/cli/generate.py:answer_rows": "what `quadriga verl` calls by its name",
    "quadriga/trainer/launch.py:run_ppo": "verl's name, which `quadriga verl` and users' scripts call",
    "quadriga/single_controller/dispatch.py:collect_list": "the default of a public argument",
    "quadriga/protocol/proto.py:DataProto.is_padding_enabled": "verl's method, which users call",
    "packages/quadriga_verl/shim/tools.py:BaseTool.get_openai_tool_schema": "verl's, which people's tools override",
    "packages/quadriga_verl/commands/programs.py:cut_prompts_at_end": "an entry of a table of rules",
    "packages/quadriga_verl/shim/rewards.py:_ManagerAdapter._make_manager": "a coroutine, run in the manager's thread",
    "quadriga/models/experts.py:_RouterHooks.clear_tokens": "a hook of a layer",
    "quadriga/data/generated.py:DynamicGenDataset.on_batch_end": "what the loop calls",
    "packages/quadriga_verl/shim/data.py:RLHFDataset._download": "verl's, which people's datasets override",
    "quadriga/config/yaml_text.py:_Loader.construct_yaml_int": "what PyYAML calls",
    "quadriga/models/weight_files.py:_get_enum_member": "stands in for getattr in an unpickler",
    "quadriga/observe/tracking/base.py:RecordedSteps.has": "half of a pair with `add`",
    "quadriga/rollout/balancer.py:Balancer._restart_engine": "what Restarts calls in a thread",
    "quadriga/serve/app.py:PolicyApp._health": "a route",
    "quadriga/serve/app.py:PolicyApp._answer_unexpected_error": "a handler that Starlette calls",
    "quadriga/serve/app.py:_wait_for_disconnect": "the task that watches a connection",
    "quadriga/serve/fields.py:_refuse_constant": "what json.loads calls",
    "quadriga/serve/seeds.py:Ask.give_back": "half of a pair with `Seeds.ask`",
    "quadriga/single_controller/ray/cluster.py:_drop_noise": "a handler that Ray calls",
    "quadriga/trainer/asynchronous/schedule.py:Schedule.may_start": "the gate, which a test takes out",
    "quadriga/trainer/asynchronous/batches.py:AsyncBatches._save.end_save": "a callback of a future",
    "quadriga/trainer/run_lock.py:_give_up_in_fork": "a hook of os.register_at_fork",
}
MAX_SHORT_USED_ONCE = 22

# Words of a dialect of our own, each with the word that the field uses.
PRIVATE_WORDS = {
    r"models? that sees?": "vision-language model",
    r"seeing engine": "engine with multimodal support",
    r"vision tower": "vision encoder",
    r"keys and values": "KV cache",
    r"shared context": "shared prefix",
    r"stop texts?": "stop strings",
    r"answers? (that|which) another policy": "off-policy samples",
    r"answers? kept|kept answers?": "rollout cache",
    r"asked and taught": "inference and update",
    r"teach(es|ing)?": "train, update",
    r"cut by (tensors|sequences|layers)": "tensor, sequence (Ulysses) or pipeline parallelism",
    r"whole weights": "replicated weights",
    r"process(es)? for a layer": "tensor-parallel ranks",
    r"processes? with a share|share of each weight": "FSDP shard",
    r"dealt out|deal rows": "balanced over data-parallel ranks",
    r"crew": "worker processes",
    r"parcels?": "shared-memory buckets",
    r"outgoing": "weight sync",
    r"last words": "crash log",
    r"bur(y|ied)": "mark dead",
    r"beside the actor": "colocated with the actor, out of process",
    r"partners?": "user simulator (an interaction)",
    r"others wrote": "third-party",
    r"of the run\.": "say what it is for",
    r"see the module": "say it here, or leave it out",
}
_PRIVATE = {
    word: re.compile(rf"(?<![\w`.])(?:{word})(?![\w`])", re.IGNORECASE) for word in PRIVATE_WORDS
}

# Parts of names that stood for an idea for which the field has a name.
PRIVATE_NAMES = re.compile(
    r"crew|outgoing|parcel|kept_?answers|seeing|stop_?texts|last_?words|letters?\b|partners?|deal_rows",
    re.IGNORECASE,
)


def package_of(source: Source) -> str:
    """`data` for `quadriga/data/loading.py`, empty for a module directly under quadriga/, `quadriga_verl` for the
    package of that name."""
    parts = source.name.split("/")
    return parts[1] if len(parts) > 2 else ""


def sizes(sources: Iterable[Source]) -> dict[str, int]:
    """Tokens of each package of `quadriga`, and under an empty name those of the modules beside them."""
    totals: Counter[str] = Counter()
    for source in sources:
        if source.name.startswith(("quadriga/", "packages/")):  # recipes/ is a package of its own
            totals[package_of(source)] += source.num_tokens
    return dict(totals)


def grown_package(sources: Iterable[Source]) -> Iterator[str]:
    """A package that is larger than its row in the table."""
    for name, size in sorted(sizes(sources).items()):
        allowed = SIZES.get(name, 0)
        if size > allowed:
            yield (
                f"quadriga/{name}: got {size} tokens, expected at most {allowed}. Find what can go, or raise the "
                "number in SIZES of tests/arch/arch_house.py"
            )


def body_of(function: FunctionNode) -> list[ast.stmt]:
    """The statements of a function below its docstring."""
    return (
        function.body[1:] if ast.get_docstring(function, clean=False) is not None else function.body
    )


def count_uses(sources: Iterable[Source]) -> Counter[str]:
    """How often each name is read, or listed in a table of its module, in any of the files."""
    uses: Counter[str] = Counter()
    for source in sources:
        # What a table of the module lists is called from wherever the table is read.
        registered = {name for statement in source.tree.body for name in names_in_table(statement)}
        uses.update(registered)
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Name):
                uses[node.id] += 1
            elif isinstance(node, ast.Attribute):
                uses[node.attr] += 1
    return uses


def short_functions_used_once(sources: Iterable[Source]) -> Iterator[tuple[str, str]]:
    """Functions of at most three lines that are named in one place only: "file:function", and where it stands."""
    listed = list(sources)
    uses = count_uses(listed)
    # A table beside a module names its functions too.
    folders = {source.name: (REPOSITORY / source.name).parent for source in listed}
    texts = {
        folder: "".join(map(Path.read_text, folder.glob("*.tsv")))
        for folder in set(folders.values())
    }
    tables = {folder: set(re.findall(r"\w+", text)) for folder, text in texts.items()}
    functions = [(source, name, node) for source in listed for name, node in source.functions()]
    defined = Counter(node.name for _, _, node in functions)
    for source, name, node in functions:
        body = body_of(node)
        lines = (node.end_lineno or 0) - body[0].lineno + 1 if body else 0
        is_single = uses[node.name] == 1 == defined[node.name] and not node.decorator_list
        is_in_table = name in tables[folders[source.name]]
        if (
            lines <= MAX_SHORT_LINES
            and is_single
            and not is_in_table
            and not node.name.startswith("__")
        ):
            yield (
                f"{source.name}:{name}",
                source.at(node.lineno, f"{name} has {lines} lines and one caller; inline it"),
            )


def names_in_table(statement: ast.stmt) -> Iterator[str]:
    """The names that a list, tuple or dictionary holds which a module assigns to a name."""
    value = statement.value if isinstance(statement, ast.Assign | ast.AnnAssign) else None
    if isinstance(value, ast.Dict | ast.List | ast.Tuple | ast.Set):
        for node in ast.walk(value):
            if isinstance(node, ast.Name):
                yield node.id


def see_docstring(source: Source) -> Iterator[str]:
    """A docstring that only sends the reader elsewhere."""
    for name, node in source.functions():
        if (ast.get_docstring(node) or "").startswith("See "):
            yield source.at(
                node.lineno, f"{name}: say what it does, or inherit the docstring by writing none"
            )


def prose_of(source: Source) -> Iterator[tuple[int, str]]:
    """Lines that people read, numbered: docstrings, and strings with a space in them."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield from enumerate(node.value.splitlines(), start=node.lineno)


def private_words(name: str, lines: Iterable[tuple[int, str]]) -> Iterator[str]:
    """Words of our own where the field has one."""
    for number, line in lines:
        for word, pattern in _PRIVATE.items():
            if pattern.search(line):
                yield f"{name}:{number}: {pattern.search(line)[0]!r}: the field says {PRIVATE_WORDS[word]}"


def private_names(source: Source) -> Iterator[str]:
    """Files, classes and functions that are named by a word of our own."""
    names = [(1, source.name.rpartition("/")[2])]
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    names += [(node.lineno, node.name) for node in ast.walk(source.tree) if isinstance(node, kinds)]
    for line, name in names:
        if PRIVATE_NAMES.search(name):
            yield source.at(line, f"{name!r} is a private word; use the field's")
