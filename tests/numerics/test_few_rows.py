# SPDX-License-Identifier: Apache-2.0
"""Parameters with fewer rows than FSDP has ranks: one rank has no shard of them, and all gather them in full."""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.numerics import few_rows
from tests.numerics.few_rows import RANKS
from tests.numerics.launching import run_ranks


def test_parameters_with_fewer_rows_than_ranks(tmp_path: Path) -> None:
    config = LlamaConfig(
        hidden_size=8,
        intermediate_size=1,  # one row in gate_proj and up_proj
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=13,  # the ranks do not divide it either
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "model")
    run_ranks(Path(few_rows.__file__), RANKS, tmp_path, num_ports=1)

    expected = {name: parameter.detach() for name, parameter in model.named_parameters()}
    joined = {name: torch.full_like(parameter, torch.nan) for name, parameter in expected.items()}
    num_empty = 0
    for rank in range(RANKS):
        gathered, shards = torch.load(tmp_path / f"{rank}.pt")
        torch.testing.assert_close(gathered, expected, rtol=0, atol=0)
        for name, start, shard in shards:
            num_empty += not shard.numel()
            joined[name][start[0] : start[0] + len(shard)] = shard
    assert num_empty == 2, "gate_proj and up_proj"
    torch.testing.assert_close(joined, expected, rtol=0, atol=0)
