# SPDX-License-Identifier: Apache-2.0
"""Rules about the package as a whole: its size, functions that only cost a name, and the words it is written in."""

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from arch_tree import REPOSITORY, FunctionNode, Source

MAX_SHORT_LINES = 3


class Size(NamedTuple):
    """How large a package is."""

    lines: int
    files: int
    functions: int


# The most that each package may have. Lower a row freely. Raise one only together with a reason in REASONS: what the
# package can do now that it could not, and why no existing file, class or key could carry it.
SIZES: dict[str, Size] = {
    "algorithms": Size(2254, 34, 95),
    "cli": Size(1073, 10, 41),
    "compat": Size(2139, 10, 202),
    "config": Size(3870, 21, 176),
    "data": Size(4008, 18, 238),
    "engines": Size(4190, 24, 223),
    "models": Size(3789, 20, 228),
    "observe": Size(1704, 13, 112),
    "protocol": Size(1488, 10, 97),
    "rewards": Size(4054, 30, 231),
    "rollout": Size(9406, 45, 582),
    "single_controller": Size(3422, 15, 214),
    "trainer": Size(6420, 31, 388),
    "verl": Size(1787, 6, 127),
    "weight_sync": Size(867, 6, 63),
    "workers": Size(2314, 13, 139),
    "": Size(2039, 13, 130),
}
REASONS: dict[str, str] = {
    "algorithms": "losses per token or refused, an estimator's uid, verl's numbers where ours differed;"
    " divergences from a teacher",
    "cli": "`quadriga data inspect`; "
    "what a command has started ends with it; `quadriga verl`, `quadriga config translate`, files of responses",
    "compat": "files that import verl run, with verl's contracts: an adapter for each of its kinds of files; the"
    " specification's programs call the functions of a step, samplers and worker groups by verl's names,"
    " and its trainer by its constructor; its agent loops with images",
    "config": "restarts, limits of stalls and phases, fallback to older checkpoints, state copies: a key"
    " each; a finished run told from another; checks before a model loads; what Megatron, experts and"
    " routers take and refuse, in generation too, what a rank keeps of a model;"
    " asynchronous training, by mini-batch, with vLLM; teachers; rows whose number is not known; float16;"
    " processes with several devices, on which vLLM generates beside training, and what is said of them",
    "data": "a bad row is named by file, row and column; all rows are checked at the start; rows of a program; "
    "pictures inside content parts; rows that are generated between batches, a curriculum; videos.py: frames that a"
    " model is shown of a file, a list or an array, cut without torchvision; rows mapped from a cache, bad ones left"
    " out, lengths without a tokenizer; batches that a thread reads; streaming.py: rows that are read"
    " as they are needed, a block at a time; words of prompts counted once; what is decoded kept up to a bound;"
    " images and videos in chats and pairs; GLM-4V; libraries that load when a row needs them;"
    " processes that count tokens as programs of their own, which load no torch (prompt_lengths.py, media.py);"
    " nulls of Parquet, columns with names of the batch, chats in JSON, prompts that are continued, ends of turns,"
    " formats of images",
    "engines": "copies of the state in memory that outlives a rank; Megatron-core as second engine (megatron/); weights"
    " that go between layouts part by part; experts on their ranks; router replay; a teacher in the loss; float16"
    " with a dynamic loss scale; memory of long sequences that is flat in their number",
    "models": "parameters without values are not initialized;"
    " lists of files lead nowhere outside their folder; experts' names in files and in modules;"
    " architectures that are tried before weights are read, windows, caps, sinks; a probe; routers;"
    " gradients whose sums lie in their own memory; images and videos whose tokens are on several ranks;"
    " several targets of a token; float16; GLM-4V, and reward models with images; a plan for Qwen3-VL's layers;"
    " kernels for CUDA: attention of all segments in two calls (varlen.py), norms and gates in one (fused_triton.py)",
    "observe": "metrics of a step in parts; one thread for all waits, which outlives a failed report;"
    " waits for users' code name its line, and a start-up its parts; services get no step twice; SIGTERM says what is"
    " on the disk; the bar and the curve of a notebook's cell; a dead signal is told; which CPUs multiply float16",
    "protocol": "chats that end with the assistant (chats.py), for data, rollout and workers; files of a DataProto that"
    " cannot name code: the pickle that they take the place of was one line",
    "rewards": "an allow-list of system calls, folders in memory, raw streams, children that end, bounded"
    " prints; coroutine functions, many at a time, each with its limit; files by path, package and class;"
    " a process that died before it had a sample costs none; bounds on expressions and CPU time, so that no response is"
    " a grader's failure",
    "rollout": "engines are made again and join; conversations have limits of time and of prints; CUDA graphs of"
    " decode steps, a cache that fits the memory; handles of a GPU's memory to SGLang; experts in vLLM;"
    " servers that score; `native` computes experts of any gate, bias and order; float16;"
    " weights in profiles; images in later turns, and to servers; a decode step on CUDA by kernels of its own"
    " (kernels_triton.py), in place of some 70 of torch's in a layer; vLLM takes weights between two steps, with the"
    " version of each token; what it is told is a file of its own; groups of `native` take weights under way",
    "single_controller": "heartbeat, state copies of the nodes, restart of workers and of the own cluster;"
    " a handler of SIGTERM that Ray's does not replace; worker modules that load beside the driver's work;"
    " what that is started with; methods that wait beside others; processes with several devices",
    "trainer": "lock of a run's folder, fallback to older checkpoints, recovery, engines that come and go;"
    " a driver whose threads sleep, and whose imports run beside the start of the cluster; "
    "settings that changed, rows that are bad, models that end a run, steps one by one; files of responses"
    " that go on after a kill; asynchronous training: what starts where and when, in other processes too,"
    " batches that are generated ahead, updates by mini-batch; checkpoints with sequences under way and"
    " rounds of dynamic sampling (async_state.py), of several engines, too; records that are repeated on Ray;"
    " rules beside the schedule;"
    " what overlap would bring, simulated by the schedule (simulation.py);"
    " prompts that are read ahead",
    "verl": "verl's command lines: Hydra's words, defaults by version, what becomes of each key, shell scripts,"
    " teachers; float16; experts of a rollout; programs that generate beside training; bounds that are null",
    "weight_sync": "a meeting whose receiver died is given up; whole tensors from the parts of all ranks",
    "workers": "state copies; engines that are made again; generation beside training, also where the driver is another"
    " process, which gets what is under way and is waited for between steps, and on the ranks of a group;"
    " teachers, loaded or served; experts of a checkpoint; the sizes of models before they are loaded; reward models"
    " with images; GLM-4V in vLLM; ends of groups are told together, for each answer takes time of the engine's core",
    "": "what users' code starts ends with it, wandb's service last, and shared memory with those that had it"
    " (descendants.py, which also ends the sessions of a run's own clusters); keys are hidden where they are printed"
    " (redact.py); `quadriga.train` and its relatives (api.py); grading and counting share their start (programs.py);"
    " imports without the collector (lazy.py)",
}

# Short functions with one caller that are worth their name: "file:function" and why.
SHORT_AND_WORTH_IT: dict[str, str] = {
    "quadriga/rollout/vllm/library.py:executor.Executor._distributed_args": "what vLLM calls",
    "quadriga/models/experts.py:RouteRecorder._hear": "a hook of torch's modules",
    "quadriga/rollout/native/generation.py:Request._note_a_cancel": "a callback of a future",
    "quadriga/engines/parallel/tensor.py:_gathered": "the forward of a module",
    "quadriga/data/rl_dataset.py:RLHFDataset.items_by_entry": "what a mixture asks of a data set, users' own too",
    "quadriga/data/loading.py:_begin_worker": "what torch calls in each process of a loader",
    "quadriga/http_client.py:direct_client": "the one file that imports httpx2",
    "quadriga/background.py:off_the_loop": "half of a pair with `run_coroutine`",
    "quadriga/cli/generate.py:answer_rows": "what `quadriga verl` calls by its name",
    "quadriga/compat/verl/__init__.py:Finder.exec_module": "what an import calls",
    "quadriga/compat/verl/tools.py:BaseTool.get_openai_tool_schema": "verl's, which people's tools override",
    "quadriga/compat/verl/ray_trainer.py:RayPPOTrainer._update_actor": "stands in for a method of a worker group",
    "quadriga/data/generated.py:DynamicGenDataset.on_batch_end": "what the loop calls",
    "quadriga/compat/verl/loops.py:AgentLoopBase.process_vision_info": "verl's, which people's loops call",
    "quadriga/compat/verl/data.py:RLHFDataset._download": "verl's, which people's datasets override",
    "quadriga/compat/verl/rewards.py:_Adapted._made": "a coroutine that runs in another thread's loop",
    "quadriga/compat/verl/rewards.py:_Adapted._run_all": "a coroutine that runs in another thread's loop",
    "quadriga/config/keys.py:is_key_of_verl": "the table stays private to the file",
    "quadriga/config/yaml_text.py:_Loader.construct_yaml_int": "what PyYAML calls",
    "quadriga/models/weight_files.py:_member": "stands in for getattr in an unpickler",
    "quadriga/observe/tracking/base.py:RecordedSteps.has": "half of a pair with `add`",
    "quadriga/protocol/disk.py:_Reader.from_json.decoded": "a hook of json.loads",
    "quadriga/protocol/memory.py:whole_steps": "the layout of the memory is known in one file; tests read it too",
    "quadriga/rollout/agent_loop/guards.py:_raise_in_users_code": "a signal handler",
    "quadriga/engines/fsdp/offload.py:ActivationsOnHost._note": "a hook of a module that torch calls",
    "quadriga/engines/fsdp/offload.py:ActivationsOnHost._to_device": "a hook of saved tensors that torch calls",
    "quadriga/rollout/balancer.py:Balancer._make_again": "what Restarts calls in a thread",
    "quadriga/single_controller/ray/cluster.py:_drop_noise": "a handler that Ray calls",
    "quadriga/single_controller/ray/cluster.py:renew_own_cluster": "its list stays private to the file",
    "quadriga/trainer/async_schedule.py:Schedule.may_start": "the gate, which a test takes out",
    "quadriga/trainer/rollout_pool.py:RolloutPool._restart": "what Restarts calls in a thread",
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
_PRIVATE = {word: re.compile(rf"(?<![\w`.])(?:{word})(?![\w`])", re.IGNORECASE) for word in PRIVATE_WORDS}

# Parts of names that stood for an idea for which the field has a name.
PRIVATE_NAMES = re.compile(
    r"crew|outgoing|parcel|kept_?answers|seeing|stop_?texts|last_?words|letters?\b|partners?|deal_rows", re.IGNORECASE
)


def package_of(source: Source) -> str:
    """`data` for `quadriga/data/loading.py`, empty for a module directly under quadriga/."""
    parts = source.name.split("/")
    return parts[1] if len(parts) > 2 else ""


def sizes(sources: Iterable[Source]) -> dict[str, Size]:
    """The size of each package."""
    found: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for source in sources:
        if not source.name.startswith("quadriga/"):
            continue  # recipes/ is a package of its own
        counts = found[package_of(source)]
        counts[0] += len(source.text.splitlines())
        counts[1] += 1
        counts[2] += sum(1 for _ in source.functions())
    return {name: Size(*counts) for name, counts in found.items()}


def grown_package(sources: Iterable[Source]) -> Iterator[str]:
    """A package that is larger than its row in the table."""
    for name, size in sorted(sizes(sources).items()):
        allowed = SIZES.get(name, Size(0, 0, 0))
        if any(now > most for now, most in zip(size, allowed, strict=True)):
            yield (
                f"quadriga/{name}: got {size}, expected at most {allowed}. Find what can go, or edit SIZES in "
                "tests/arch/arch_house.py and say why in REASONS"
            )


def body_of(function: FunctionNode) -> list[ast.stmt]:
    """The statements of a function below its docstring."""
    return function.body[1:] if ast.get_docstring(function, clean=False) is not None else function.body


def short_functions_used_once(sources: Iterable[Source]) -> Iterator[tuple[str, str]]:
    """Functions of at most three lines that are named in one place only: "file:function", and where it stands."""
    listed = list(sources)
    uses: Counter[str] = Counter()
    for source in listed:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Name):
                uses[node.id] += 1
            elif isinstance(node, ast.Attribute):
                uses[node.attr] += 1
    # A table beside a module names its functions too.
    folders = {source.name: (REPOSITORY / source.name).parent for source in listed}
    texts = {folder: "".join(map(Path.read_text, folder.glob("*.tsv"))) for folder in set(folders.values())}
    tables = {folder: set(re.findall(r"\w+", text)) for folder, text in texts.items()}
    functions = [(source, name, node) for source in listed for name, node in source.functions()]
    defined = Counter(node.name for _, _, node in functions)
    for source, name, node in functions:
        body = body_of(node)
        lines = (node.end_lineno or 0) - body[0].lineno + 1 if body else 0
        is_single = uses[node.name] == 1 == defined[node.name] and not node.decorator_list
        is_in_table = name in tables[folders[source.name]]
        if lines <= MAX_SHORT_LINES and is_single and not is_in_table and not node.name.startswith("__"):
            yield f"{source.name}:{name}", source.at(node.lineno, f"{name} has {lines} lines and one caller; inline it")


def see_docstring(source: Source) -> Iterator[str]:
    """A docstring that only sends the reader elsewhere."""
    for name, node in source.functions():
        if (ast.get_docstring(node) or "").startswith("See "):
            yield source.at(node.lineno, f"{name}: say what it does, or inherit the docstring by writing none")


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
