# SPDX-License-Identifier: Apache-2.0
"""The page docs/models.md, of the table that the tests of architectures go through.

python -m tests.models_page > docs/models.md
"""

import textwrap

from quadriga.config import Layout, ModelShape
from quadriga.config.layout import check_model
from quadriga.errors import ConfigError, EngineError
from quadriga.models.architecture import way_of
from tests.architectures import MATRIX, OTHERS, config_of

LAYOUTS = {
    "one process": Layout(),
    "fsdp 2": Layout(dp_shard=2),
    "sp 2": Layout(sp=2),
    "tp 2": Layout(tp=2),
    "pp 2": Layout(pp=2),
}
_BEFORE = """# Models

Which architectures are computed, how, and in which layouts. `python -m tests.models_page` prints this page.

```bash
.venv/bin/quadriga doctor --model PATH   # how this model is computed, and how far it is from transformers
```

How an architecture is computed is tried before its weights are read, on a small float32 model of the same
configuration: rows packed with shared prompts, beside transformers' own forward (eager) of each row alone. Where they
agree, rows are **packed**. Where they do not, because layers keep a state (convolution, Mamba, linear attention) or
compute attention in their own way (ALiBi, chunks), each row is computed **alone** by transformers' attention: a
micro-batch of its own, its prompt computed again for each response. That is exact and slower, is said at start-up, and
takes `rollout.name=hf`. What transformers cannot compute, or whose logits are more than products with one matrix, is
refused. In one process and float32 the weights themselves are compared once more before the first step.

`tests/numerics/test_models.py` and `test_model_layouts.py` hold each cell: log-probs, entropies and gradients within
1e-5 of transformers' (gradients of Qwen3-Next: 5e-5); greedy tokens of `native` equal to those of `hf`; two ranks equal
to one process after three optimizer steps; weights in the rollout and in `hf_model` bit for bit. Models are small and
random.

"""
_AFTER = """
A number is the reason for an empty cell, which a run is told before a process starts:

{reasons}

Each *yes* of a layout is tested with all weights and with an adapter: in all linear modules, or in those of attention
for mixtures of experts and Falcon-H1, where PEFT's *all-linear* takes in routers, experts or Mamba layers, and is
refused.

Not part of the table: vLLM, which loads some of these models only, and of mixtures of experts Qwen2-MoE, Qwen3-MoE,
GLM-4-MoE and Mixtral ([rollout.md](rollout.md)); models with images, which [data.md](data.md) treats.

## Others

Tested for log-probs and gradients alone.

{others}

## Positions

`rope_parameters` of a model can be replaced by `actor_rollout_ref.model.override_config`. YaRN, linear and Llama 3
scaling do not depend on the length of a sequence. With LongRoPE rows of more than `original_max_position_embeddings`
tokens are computed alone. Dynamic scaling begins beyond the positions that a model has, where sequences are refused.
"""


def obstacle(name: str, layout: Layout) -> str:
    """Why a configuration with this layout is refused before a process starts; empty if it is not."""
    config = config_of(name)
    if (layout.sp, layout.tp, layout.pp) != (1, 1, 1) and way_of(config).reason:
        return "rows are computed alone, on ranks that share weights by FSDP only"
    plan = getattr(config, "base_model_tp_plan", None)
    shape = ModelShape(name, config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads, plan)
    try:
        check_model(layout, shape, "actor")
    except ConfigError as error:
        return error.got
    return ""


def text() -> str:
    """The page."""
    reasons: list[str] = []
    lines = ["| architecture | rows | `native` | FSDP2 | sequence | tensor | pipeline |", "|---" * 7 + "|"]
    for name in MATRIX:
        is_packed = not way_of(config_of(name)).reason
        cells = [name, "packed" if is_packed else "alone", "yes" if is_packed else "no: `hf`"]
        for layout in ("fsdp 2", "sp 2", "tp 2", "pp 2"):
            if (reason := obstacle(name, LAYOUTS[layout])) and reason not in reasons:
                reasons.append(reason)
            cells.append(f"({reasons.index(reason) + 1})" if reason else "yes")
        lines.append(f"| {' | '.join(cells)} |")
    found: dict[str, list[str]] = {"packed": [], "alone": [], "refused": []}
    for name in OTHERS:
        try:
            kind = "alone" if way_of(config_of(name)).reason else "packed"
        except EngineError:
            kind = "refused"
        found[kind].append(name)
    numbered = "\n".join(f"{number}. {reason}" for number, reason in enumerate(reasons, 1))
    listed = (
        textwrap.fill(f"- {kind}: {', '.join(names)}", 116, subsequent_indent="  ") for kind, names in found.items()
    )
    return _BEFORE + "\n".join(lines) + "\n" + _AFTER.format(reasons=numbered, others="\n".join(listed))


if __name__ == "__main__":
    print(text(), end="")
