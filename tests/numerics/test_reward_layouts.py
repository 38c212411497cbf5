# SPDX-License-Identifier: Apache-2.0
"""A reward model that two processes share, in each way there is, scores as one process does.

What none of this proves: the same on NCCL, nor ways combined: the engine's own tests have those.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedTokenizerFast

from quadriga.protocol import DataProto
from tests.numerics.launching import run_ranks

PROGRAM = Path(__file__).with_name("reward_layouts.py")
VOCABULARY = 97
LAYOUTS = ("fsdp 2", "replicas 2", "sp 2", "tp 2", "pp 2")


@pytest.fixture(scope="module")
def results(
    tmp_path_factory: pytest.TempPathFactory, make_batch: Callable[[], DataProto]
) -> list[dict[str, Any]]:
    """What each of the two processes gave, by layout."""
    folder = tmp_path_factory.mktemp("judge")
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    model = LlamaForSequenceClassification(
        LlamaConfig(**sizes, num_hidden_layers=4, vocab_size=VOCABULARY, num_labels=1)
    )
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(folder / "judge")
    words = {f"w{number}": number for number in range(VOCABULARY)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w2"))
    )
    tokenizer.save_pretrained(folder / "judge")
    batch = make_batch()
    # Eleven rows: the data-parallel ranks have six and five.
    batch.select_idxs(list(range(11))).save_to_disk(folder / "batch")
    run_ranks(PROGRAM, 2, folder, num_ports=len(LAYOUTS))
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_are_those_of_one_process(results: list[dict[str, Any]], layout: str) -> None:
    _, _, alone = results[0]["alone"]
    answers = {
        dp_rank: scores for dp_rank, answers, scores in (one[layout] for one in results) if answers
    }
    assert sorted(answers) == ([0, 1] if layout in ("fsdp 2", "replicas 2") else [0])
    assert bool((alone.abs().sum(-1) > 1e-2).all())
    for dp_rank, scores in answers.items():
        torch.testing.assert_close(scores, alone[dp_rank :: len(answers)], atol=1e-5, rtol=1e-5)
