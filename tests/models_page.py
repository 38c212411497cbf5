# SPDX-License-Identifier: Apache-2.0
"""The page docs/models.md, of the table that the tests of architectures go through.

python -m tests.models_page > docs/models.md
"""

import textwrap
from typing import Any

from quadriga.config import Layout, ModelShape
from quadriga.config.layout import check_model
from quadriga.errors import ConfigError, EngineError
from quadriga.models.architecture import tensor_plan, way_of
from tests.architectures import MATRIX, OTHERS, config_of
from tests.vision_folder import FAMILIES, MIXTURE, tiny_model

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
refused. Quantized weights (bitsandbytes, GPTQ, AWQ, FP8, MXFP4) are refused, too, for they cannot be trained: name the
model that they were made of, or a copy that transformers has dequantized. In one process and float32 the weights
themselves are compared once more before the first step.

`tests/numerics/test_models.py` and `test_model_layouts.py` hold each cell: log-probs, entropies and gradients within
1e-5 of transformers' (gradients of Qwen3-Next: 5e-5); greedy tokens of `native` equal to those of `hf`; two ranks equal
to one process after two optimizer steps; weights in the rollout and in `hf_model` bit for bit. Models are small and
random.

"""
_AFTER = """
A number is the reason for an empty cell, which a run is told before a process starts:

{reasons}

Each *yes* of a layout is tested with all weights. Each architecture is also tested with an adapter, under tensor
parallelism or, without it, in one other layout: in all linear modules, or in those of attention for mixtures of experts
and Falcon-H1, where PEFT's *all-linear* takes in routers, experts or Mamba layers, and is refused.

Not part of the table: vLLM, which loads some of these models only, and of mixtures of experts Qwen2-MoE, Qwen3-MoE,
GLM-4-MoE and Mixtral ([rollout.md](rollout.md)).

## Vision-language models

Packed, with images and videos ([rollout.md](rollout.md#prompts-with-images-and-videos)), by the type in config.json.
`tests/numerics/test_vision.py` and `test_native_vision.py` hold log-probs, entropies and gradients within 1e-5 of
transformers' and greedy tokens; `tests/contract/test_rollout_images.py` log-probs of both engines, in later turns too
(but of qwen3_vl_moe); `tests/numerics/test_vision_layouts.py` two ranks, equal to one process to 1e-5, with all weights
and with an adapter. An empty cell was not run.

{vision}

## Others

Tested for log-probs and gradients alone.

{others}

## Positions

`rope_parameters` of a model can be replaced by `actor_rollout_ref.model.override_config`. YaRN, linear and Llama 3
scaling do not depend on the length of a sequence. With LongRoPE rows of more than `original_max_position_embeddings`
tokens are computed alone. Dynamic scaling begins beyond the positions that a model has, where sequences are refused.
"""


def obstacle(name: str, layout: Layout, config: Any = None) -> str:
    """Why a configuration with this layout is refused before a process starts; empty if it is not."""
    config = config or config_of(name)
    if (layout.sp, layout.tp, layout.pp) != (1, 1, 1) and way_of(config).reason:
        return "rows are computed alone, on ranks that share weights by FSDP only"
    text = config.get_text_config()
    counts = (text.num_hidden_layers, text.num_attention_heads, text.num_key_value_heads)
    shape = ModelShape(name, *counts, tensor_plan(text))
    try:
        check_model(layout, shape, "actor")
    except ConfigError as error:
        return error.got
    return ""


def cell(name: str, layout: str, config: Any, reasons: list[str]) -> str:
    """The number of the reason for which a layout is refused, which is added to the others; empty if it is not."""
    if (reason := obstacle(name, LAYOUTS[layout], config)) and reason not in reasons:
        reasons.append(reason)
    return f"({reasons.index(reason) + 1})" if reason else ""


def text() -> str:
    """The page."""
    reasons: list[str] = []
    lines = [
        "| architecture | rows | `native` | FSDP2 | sequence | tensor | pipeline |",
        "|---" * 7 + "|",
    ]
    for name in MATRIX:
        is_packed = not way_of(config_of(name)).reason
        cells = [name, "packed" if is_packed else "alone", "yes" if is_packed else "no: `hf`"]
        for layout in ("fsdp 2", "sp 2", "tp 2", "pp 2"):
            cells.append(cell(name, layout, config_of(name), reasons) or "yes")
        lines.append(f"| {' | '.join(cells)} |")
    vision = ["| type | `native` | `hf` | FSDP2 | sequence | tensor | pipeline |", "|---" * 7 + "|"]
    for name in (*FAMILIES, MIXTURE):
        cells = [name, "yes", "" if name == MIXTURE else "yes"]
        for layout in ("fsdp 2", "sp 2", "tp 2", "pp 2"):
            cells.append(
                cell(name, layout, tiny_model(name, num_key_value_heads=2).config, reasons) or "yes"
            )
        vision.append(f"| {' | '.join(cells)} |")
    found: dict[str, list[str]] = {"packed": [], "alone": [], "refused": []}
    for name in OTHERS:
        try:
            kind = "alone" if way_of(config_of(name)).reason else "packed"
        except EngineError:
            kind = "refused"
        found[kind].append(name)
    numbered = "\n".join(f"{number}. {reason}" for number, reason in enumerate(reasons, 1))
    listed = (
        textwrap.fill(f"- {kind}: {', '.join(names)}", 116, subsequent_indent="  ")
        for kind, names in found.items()
    )
    after = {"reasons": numbered, "vision": "\n".join(vision), "others": "\n".join(listed)}
    return _BEFORE + "\n".join(lines) + "\n" + _AFTER.format(**after)


if __name__ == "__main__":
    print(text(), end="")
