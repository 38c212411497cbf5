# SPDX-License-Identifier: Apache-2.0
"""Imports run downwards, stand at the top of their file, and an extra is the business of one file."""

import subprocess
import sys

import pytest

import arch_imports
from arch_tree import REPOSITORY, Source, all_sources, package_sources

RULES = [
    arch_imports.unknown_layer,
    arch_imports.upward_import,
    arch_imports.late_import,
    arch_imports.compared_engine_name,
    arch_imports.strayed_third_party,
]

BAD = [
    (arch_imports.unknown_layer, "quadriga/magic/wand.py", ""),
    (
        arch_imports.upward_import,
        "quadriga/data/dataset.py",
        "from quadriga.trainer.build import build",
    ),
    (arch_imports.upward_import, "quadriga/data/dataset.py", "import quadriga.models"),
    (arch_imports.upward_import, "quadriga/data/dataset.py", "from quadriga import rewards"),
    (arch_imports.upward_import, "quadriga/data/dataset.py", "from ..rewards import register"),
    (
        arch_imports.upward_import,
        "quadriga/data/deep/model.py",
        "from ...models.load import load_causal_lm",
    ),
    (arch_imports.upward_import, "quadriga/errors.py", "from quadriga.config import Config"),
    (
        arch_imports.upward_import,
        "quadriga/algorithms/kl.py",
        "def f():\n    from quadriga.protocol import DataProto",
    ),
    (
        arch_imports.upward_import,
        "quadriga/protocol/wire.py",
        "x = import_module('quadriga.workers').ActorWorker",
    ),
    (
        arch_imports.upward_import,
        "quadriga/trainer/fit.py",
        "ENGINES = {'vllm': 'quadriga.rollout.vllm:VLLMEngine'}",
    ),
    (
        arch_imports.upward_import,
        "quadriga/trainer/build.py",
        "from quadriga_recipes.playground import SPECIAL",
    ),
    (
        arch_imports.upward_import,
        "recipes/quadriga_recipes/x.py",
        "from quadriga.trainer.build import build",
    ),
    (
        arch_imports.old_import_path,
        "quadriga/trainer/fit.py",
        "from quadriga.trainer.async_rules import Rules",
    ),
    (
        arch_imports.old_import_path,
        "quadriga/trainer/fit.py",
        "def f():\n    import_module('quadriga.trainer.stream_pool')",
    ),
    (
        arch_imports.late_import,
        "quadriga/data/dataset.py",
        "def f():\n    from quadriga.errors import DataError",
    ),
    (
        arch_imports.late_import,
        "quadriga/data/dataset.py",
        "def f():\n    import_module('quadriga.errors')",
    ),
    (
        arch_imports.late_import,
        "quadriga/data/__init__.py",
        "def __getattr__(name):\n    import quadriga.data.dataset",
    ),
    (
        arch_imports.compared_engine_name,
        "quadriga/workers/critic.py",
        "if config.name == 'vllm': pass",
    ),
    (
        arch_imports.compared_engine_name,
        "quadriga/trainer/ray_trainer.py",
        "x = name in ('native', 'hf')",
    ),
    (arch_imports.compared_engine_name, "quadriga/config/rollout.py", "x = name == 'http'"),
    (
        arch_imports.compared_engine_name,
        "quadriga/config/rollout.py",
        "match name:\n    case 'vllm':\n        pass",
    ),
    (
        arch_imports.compared_engine_name,
        "quadriga/workers/stream.py",
        "isinstance(engine, NativeEngine | VLLMEngine)",
    ),
    (arch_imports.strayed_third_party, "quadriga/single_controller/worker_group.py", "import ray"),
    (
        arch_imports.strayed_third_party,
        "quadriga/trainer/task_runner.py",
        "def f():\n    from ray.util import state",
    ),
    (
        arch_imports.strayed_third_party,
        "quadriga/single_controller/ray.py",
        "import_module('ray.exceptions')",
    ),
]

GOOD = [
    (
        arch_imports.strayed_third_party,
        "quadriga/single_controller/ray/pools.py",
        "import ray\nimport ray.util",
    ),
    (
        arch_imports.strayed_third_party,
        "quadriga/trainer/build.py",
        "from quadriga.single_controller import ray",
    ),
    (
        arch_imports.old_import_path,
        "quadriga/trainer/fit.py",
        "from quadriga.trainer.asynchronous.rules import Rules",
    ),
    (arch_imports.compared_engine_name, "quadriga/config/actor.py", "x = name == 'megatron'"),
    (
        arch_imports.upward_import,
        "quadriga/data/dataset.py",
        "from quadriga.protocol import DataProto",
    ),
    (
        arch_imports.upward_import,
        "quadriga/data/dataset.py",
        "from .tokenizing import load_tokenizer",
    ),
    (
        arch_imports.upward_import,
        "quadriga/trainer/build.py",
        "ENGINES = {'hf': 'quadriga.rollout.hf:HFEngine'}",
    ),
    (
        arch_imports.late_import,
        "quadriga/data/x.py",
        "def __getattr__(name):\n    import_module('quadriga.data.dataset')",
    ),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_package(rule) -> None:
    """No file of the package breaks the rule."""
    complaints = [complaint for source in package_sources() for complaint in rule(source)]
    assert not complaints, "\n".join(complaints)


def test_one_file_owns_each_extra() -> None:
    """vLLM, wandb and the like are each imported in one file."""
    complaints = list(arch_imports.shared_third_party(package_sources()))
    assert not complaints, "\n".join(complaints)


def test_old_import_paths_are_free() -> None:
    """No file stands where a module was before it moved, and our own tests import the new path."""
    complaints = list(arch_imports.file_at_old_path(package_sources()))
    for source in all_sources():
        complaints += arch_imports.old_import_path(source)
    assert not complaints, "\n".join(complaints)
    for name in ("quadriga/trainer/simulation.py", "quadriga/trainer/simulation/__init__.py"):
        assert list(arch_imports.file_at_old_path([Source(name, "")]))


@pytest.mark.parametrize(("rule", "name", "text"), BAD)
def test_rule_complains(rule, name: str, text: str) -> None:
    """A file that breaks the rule is found."""
    assert list(rule(Source(name, text)))


@pytest.mark.parametrize(("rule", "name", "text"), GOOD)
def test_rule_is_silent(rule, name: str, text: str) -> None:
    """A file that keeps the rule is left in peace."""
    assert list(rule(Source(name, text))) == []


def test_shared_extra_is_found() -> None:
    """An extra in two files is found in whatever form it is imported; in one file it may stand twice."""
    one = Source("quadriga/observe/a.py", "import wandb\nimport wandb.util\nimport numpy")
    two = Source(
        "quadriga/observe/b.py", "import numpy\ndef f():\n    return import_module('wandb')"
    )
    board = Source("quadriga/observe/c.py", "from torch.utils.tensorboard import SummaryWriter")
    other = Source("quadriga/observe/d.py", "import tensorboard")
    assert list(arch_imports.shared_third_party([one, board])) == []
    assert "a.py:1" in next(arch_imports.shared_third_party([one, two]))
    assert len(list(arch_imports.shared_third_party([one, two, board, other]))) == 2


def test_layers_stand_on_each_other() -> None:
    """The table of layers has no cycle: each imports only what stands before it."""
    seen: set[str] = set()
    for layer, allowed in arch_imports.LAYERS.items():
        # The four of the core are mutually ordered by their own rows; protocol stands beside observe.
        assert allowed <= seen, f"{layer} imports {sorted(allowed - seen)}, which stand above it"
        seen.add(layer)


@pytest.mark.parametrize(
    "modules",
    [
        "quadriga",
        "quadriga.errors",
        "quadriga.config",
        "quadriga.cli.main",
        "quadriga.rewards",
        "quadriga.data",
    ],
)
def test_import_is_light(modules: str) -> None:
    """The module answers without loading torch or ray: `--help`, `config show`, and the processes that grade."""
    heavy = "[name for name in ('torch', 'ray', 'transformers', 'datasets') if name in sys.modules]"
    program = f"import sys, {modules}; sys.exit(' '.join({heavy}) or 0)"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"importing {modules} also loads, or fails with: {done.stderr}"


def test_the_controller_needs_no_ray() -> None:
    """The controller and the trainer run where Ray is not installed."""
    program = (
        "import sys, quadriga.single_controller, quadriga.trainer; sys.exit('ray' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"ray was loaded, or: {done.stderr}"
