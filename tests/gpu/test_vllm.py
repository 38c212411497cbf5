# SPDX-License-Identifier: Apache-2.0
"""vLLM on a CUDA device, in this process and in one of its own: asleep, published to, awake, generating, twice."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from quadriga.config import load_config
from quadriga.rollout import SamplingParams
from quadriga.rollout.setup import EngineSetup
from quadriga.rollout.vllm.engine import VLLMEngine
from quadriga.weight_sync import CopiedWeights

pytest.importorskip("vllm")
pytestmark = pytest.mark.gpu

PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13]]


def make_model(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes = {
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
    }
    config = LlamaConfig(
        **sizes,
        num_key_value_heads=4,
        vocab_size=512,
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=1,
    )
    return LlamaForCausalLM(config).to("cuda", torch.bfloat16).eval()


@pytest.mark.parametrize(
    "more", [{}, {"enforce_eager": True}, {"mode": "async"}], ids=["graphs", "eager", "beside"]
)
def test_sleep_publish_wake_generate_twice(tmp_path: Path, more: dict[str, Any]) -> None:
    """New weights give other tokens than those before, the same weights the same ones; asleep it gives back what it
    took. Does not show it for several GPUs."""
    make_model(0).save_pretrained(tmp_path)
    words = models.BPE(vocab={chr(0x100 + number): number for number in range(512)}, merges=[])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(words), pad_token="Ā", eos_token="ā"
    )
    tokenizer.save_pretrained(tmp_path)
    keys = {"name": "vllm", "max_model_len": 256, "gpu_memory_utilization": 0.3, **more}
    lines = [f"actor_rollout_ref.rollout.{key}={value}" for key, value in keys.items()]
    config = load_config([f"actor_rollout_ref.model.path={tmp_path}", *lines]).config
    engine = VLLMEngine.from_config(
        EngineSetup(config, tokenizer, {}, torch.device("cuda", 0), torch.bfloat16)
    )
    params = [SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)] * len(PROMPTS)
    found, free = [], []
    try:
        for version, seed in enumerate((0, 1, 0, 1), start=1):
            engine.sleep()
            gc.collect()
            torch.cuda.empty_cache()
            free.append(torch.cuda.mem_get_info()[0])
            CopiedWeights().publish(make_model(seed).named_parameters(), engine, version)
            engine.wake()
            assert torch.cuda.mem_get_info()[0] < free[-1] - 0.1 * torch.cuda.mem_get_info()[1]
            found.append([one.token_ids for one in engine.generate_batch(PROMPTS, params)])
    finally:
        engine.close()
    assert found[0] == found[2] != found[1] == found[3]
    assert max(free) - min(free) < 1 << 29
