# SPDX-License-Identifier: Apache-2.0
"""What the products of a decode step cost, by the form of the weights and the number of rows.

    .venv/bin/python benchmarks/products.py --model outputs/models/smollm2-135m-instruct

All linear modules of the model in bfloat16, one after the other, so that each weight comes from memory as in a step.
The forms take turns and the best of some rounds is told, in milliseconds, beside those of torch's own products with
parameters in either dtype. The last row is what it takes to make a form once. It is where `max_rows` of the forms in
`rollout/native/products.py` comes from.
"""

import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import nn

from quadriga.models.load import load_causal_lm
from quadriga.rollout.native.products import OwnWeight, PackedWeight, WideWeight, can_pack

ROWS = (1, 4, 8, 16, 24, 32, 48, 64, 96, 128)
Multiply = Callable[[torch.Tensor], torch.Tensor]


def own(weight: torch.Tensor) -> Multiply:
    """The bfloat16 parameter itself, by our own loop."""
    return OwnWeight([weight], None).multiply


def packed(weight: torch.Tensor) -> Multiply:
    """bfloat16, in oneDNN's order."""
    return PackedWeight([weight], None).multiply


def wide(weight: torch.Tensor) -> Multiply:
    """Float32, in MKL's order."""
    return WideWeight([weight], None).multiply


def plain(weight: torch.Tensor) -> Multiply:
    """The parameter itself."""
    return partial(nn.functional.linear, weight=weight)


def plain_float32(weight: torch.Tensor) -> Multiply:
    """The parameter of a model in float32."""
    wide = weight.float()
    return lambda states: nn.functional.linear(states.float(), wide)


def forms(weights: list[torch.Tensor]) -> dict[str, Callable[[torch.Tensor], Multiply]]:
    """Those that this machine has."""
    known: dict[str, Callable[[torch.Tensor], Multiply]] = {
        "linear, bfloat16": plain,
        "linear, float32": plain_float32,
    }
    if OwnWeight.is_supported(weights):
        known["own loop, bfloat16"] = own
    return known | ({"packed, bfloat16": packed} if can_pack() else {}) | {"packed, float32": wide}


def milliseconds(work: Callable[[], object]) -> float:
    """Of one call."""
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) * 1e3


def step(products: list[Multiply], inputs: Mapping[int, torch.Tensor], sizes: list[int]) -> None:
    """All products of a step."""
    for multiply, size in zip(products, sizes, strict=True):
        multiply(inputs[size]).bfloat16()


def main() -> int:
    """Print a table."""
    parser = ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, help="a Hugging Face folder")
    parser.add_argument("--rounds", type=int, default=8, help="of which the best is told")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = load_causal_lm(args.model, dtype=torch.bfloat16)
    weights = [module.weight.detach() for module in model.modules() if type(module) is nn.Linear]
    sizes = [weight.shape[1] for weight in weights]
    made, making = {}, {}
    for name, form in forms(weights).items():
        start = time.perf_counter()
        made[name] = [form(weight) for weight in weights]
        making[name] = (time.perf_counter() - start) * 1e3
    print("| rows | " + " | ".join(made) + " |\n" + "|---" * (len(made) + 1) + "|")
    with torch.inference_mode():
        for num_rows in ROWS:
            inputs = {size: torch.randn(num_rows, size).bfloat16() for size in sizes}
            best = dict.fromkeys(made, float("inf"))
            for _ in range(args.rounds):
                for name, products in made.items():
                    best[name] = min(
                        best[name], milliseconds(partial(step, products, inputs, sizes))
                    )
            print(f"| {num_rows} | " + " | ".join(f"{best[name]:.1f}" for name in made) + " |")
    print("| to make | " + " | ".join(f"{making[name]:.0f}" for name in made) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
