# SPDX-License-Identifier: Apache-2.0
"""The formula of an update's memory against the bytes of all live tensors, on the stand-in for CUDA.

It proves that no tensor is forgotten. It does not show what kernels take within one operator, nor the holes of the
allocator.
"""

import gc
import random
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from quadriga.config import ActorConfig, ModelConfig, OptimConfig
from quadriga.config.layout import Layout
from quadriga.engines import process_group
from quadriga.engines.batches import MicroBatching, Passes
from quadriga.engines.fsdp.engine import FSDPEngine, Memory, Training
from quadriga.engines.objectives import PolicyObjective
from quadriga.engines.parallel.processes import ONE_PROCESS, Processes
from quadriga.engines.step import infer, update
from quadriga.models.attention import ATTENTION_NAME
from quadriga.models.fused import fuse
from quadriga.models.lora import add_adapter
from quadriga.models.scorers import PolicyScorer
from quadriga.planning.memory import UpdateShape, forward_bytes, update_memory
from quadriga.planning.module_sizes import module_sizes
from quadriga.protocol import DataProto
from tests.rehearsal import kernels
from tests.rehearsal.stand_in import StandIn

CUDA = torch.device("cuda", 0)
GROUP = 4
NUM_SHAPES = 36
KINDS = ("kept", "recomputed", "adapter", "adapter recomputed", "sharded", "sharded recomputed")


@contextmanager
def ranks(layout: Layout, patch: pytest.MonkeyPatch) -> Iterator[Processes]:
    """Rank 0 of a layout. Its collectives send nothing, and what it gathers is not initialised."""
    if layout.is_whole:
        yield ONE_PROCESS
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=layout.world_size)
    process_group.Membership.num_meetings += 1
    patch.setattr(process_group.ProcessGroup, "gather", lambda self, value: [value] * self.size)
    try:
        yield Processes.arrange(process_group.ProcessGroup(0, layout.world_size, CUDA), layout)
    finally:
        dist.destroy_process_group()
        process_group.Membership.num_meetings += 1


def draw_model(draw: random.Random) -> torch.nn.Module:
    """A small Qwen2 or Qwen3, whose queries and keys are normed."""
    num_heads = draw.choice([2, 4, 8])
    config_class, model_class = draw.choice(
        [(Qwen2Config, Qwen2ForCausalLM), (Qwen3Config, Qwen3ForCausalLM)]
    )
    hidden_size = num_heads * draw.choice([16, 32])
    config = config_class(
        hidden_size=hidden_size,
        head_dim=hidden_size // num_heads,
        intermediate_size=draw.choice([160, 256, 384]),
        num_hidden_layers=draw.choice([1, 2, 3, 5]),
        num_attention_heads=num_heads,
        num_key_value_heads=draw.choice([1, 2]),
        vocab_size=draw.choice([64, 256, 512, 1024]),
        tie_word_embeddings=draw.random() < 0.5,
        max_position_embeddings=1024,
    )
    config._attn_implementation = ATTENTION_NAME
    model = model_class(config).eval()
    fuse(model)
    return model


def make_batch(num_prompts: int, num_prompt: int, num_response: int) -> DataProto:
    """Prompts with `GROUP` responses each, all of the same length."""
    num_rows = num_prompts * GROUP
    tokens = torch.randint(0, 64, (num_rows, num_prompt + num_response))
    tokens[:, :num_prompt] = tokens[::GROUP, :num_prompt].repeat_interleave(GROUP, 0)
    attention = torch.ones_like(tokens)
    return DataProto.from_dict(
        {
            "input_ids": tokens,
            "attention_mask": attention,
            "position_ids": attention.cumsum(-1) - 1,
            "responses": tokens[:, num_prompt:],
            "response_mask": attention[:, num_prompt:],
            "advantages": torch.randn(num_rows, 1).expand(num_rows, num_response).contiguous(),
        }
    )


@pytest.mark.parametrize("number", range(NUM_SHAPES))
def test_the_formula_counts_what_an_update_and_a_pass_hold(
    number: int, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Modules with a forward of their own refer to themselves, so earlier tests leave some.
    gc.collect()
    before = torch.cuda.memory_allocated()
    draw = random.Random(number)
    kind = KINDS[number % len(KINDS)]
    recomputes = kind.endswith("recomputed")
    rank = draw.choice([4, 8, 16]) if kind.startswith("adapter") else 0
    if rank and find_spec("peft") is None:
        pytest.skip("peft is not installed")
    num_shards = draw.choice([2, 4, 8]) if kind.startswith("sharded") else 1
    num_prompts, num_prompt, num_response = draw.choice([(1, 32, 96), (2, 100, 32), (3, 64, 20)])
    layout = Layout(dp_shard=num_shards)
    with kernels.installed(), ranks(layout, monkeypatch) as processes:
        model = draw_model(draw)
        sizes = module_sizes(model)
        assert not sizes.unknown_part
        if rank:
            add_adapter(model, ModelConfig(lora_rank=rank), 0)
        engine = FSDPEngine(
            PolicyScorer(model.to(CUDA) if layout.is_whole else model),
            dtype=torch.bfloat16,
            device=CUDA,
            training=Training(OptimConfig(), 1.0, 100),
            memory=Memory(gradient_checkpointing=recomputes),
            processes=processes,
        )
        del model
        # A gradient of uninitialised numbers may make no step, which would create them.
        for master in engine.optimizer.masters:
            engine.optimizer.moments(master)
        batch = make_batch(num_prompts, num_prompt, num_response)
        passes = Passes(len(batch) * num_shards, 1, MicroBatching(None, 1 << 20))
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            update(engine, batch, PolicyObjective(ActorConfig()), passes, lr=1e-6)
        peak = torch.cuda.max_memory_allocated() - before
        state = torch.cuda.memory_allocated() - before
        torch.cuda.reset_peak_memory_stats()
        infer(engine, batch, passes.micro)
        peak_of_pass = torch.cuda.max_memory_allocated() - before
        del engine
    shape = UpdateShape(
        # The last token of a response predicts nothing.
        num_tokens=num_prompts * (num_prompt + GROUP * (num_response - 1)),
        num_predicted=num_prompts * GROUP * num_response,
        recomputes=recomputes,
        num_shards=num_shards,
        adapter_rank=rank,
        # Sums of gradients stay from the first update on; FSDP's gradients do not.
        has_gradients=num_shards == 1,
    )
    predicted = update_memory(sizes, shape)
    assert predicted.total == pytest.approx(peak, rel=0.05), (kind, predicted)
    predicted_pass = state + forward_bytes(sizes, shape)
    # The steps of attention differ between architectures, so this is rougher.
    assert predicted_pass == pytest.approx(peak_of_pass, rel=0.12), kind
