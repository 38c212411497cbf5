# SPDX-License-Identifier: Apache-2.0
"""The forward passes of every role at real sizes on `cuda`, as rank 0 of 64, without a GPU and without memory.

What none of it proves: values, kernels, time and memory of a GPU, and backward passes: autograd does not run there.
"""

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensorDeviceMismatchError,
    unset_fake_temporarily,
)
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    Qwen2Config,
)

from quadriga.config.layout import Layout
from quadriga.engines.fsdp.engine import FSDPEngine
from quadriga.engines.packing import RowTokens, pack
from quadriga.engines.parallel.processes import Processes
from quadriga.engines.process_group import ProcessGroup
from quadriga.models.attention import ATTENTION_NAME
from quadriga.models.fused import fuse
from quadriga.models.scorers import PolicyScorer, RewardScorer, ScoreQuestion, Scorer, ValueScorer
from quadriga.rollout.interface import SamplingParams
from quadriga.rollout.native.generation import Generation, GenerationRequest
from quadriga.rollout.native.network import Network, PlainNetwork
from quadriga.rollout.native.scheduler import Scheduler
from quadriga.rollout.sampler import NUM_DRAWS, SamplingRules, sample
from tests.rehearsal_cuda.conftest import WORLD_SIZE

CUDA = torch.device("cuda", 0)
KINDS: dict[str, tuple[type[Scorer], str]] = {
    "actor": (PolicyScorer, "log_probs"),
    "critic": (ValueScorer, "values"),
    "reward model": (RewardScorer, "scores"),
}
SHARDED = {
    "fsdp 64": Layout(dp_shard=64),
    "fsdp 32 x tp 2": Layout(dp_shard=32, tp=2),
    "hybrid 8 x 8": Layout(dp_replicate=8, dp_shard=8),
    "fsdp 32 x sp 2": Layout(dp_shard=32, sp=2),
}


def make_model(kind: str = "actor", dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """The sizes of a model of 1.5B: six query heads for a key head, heads of 128."""
    config = Qwen2Config(
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=4,
        num_attention_heads=12,
        num_key_value_heads=2,
        vocab_size=151_936,
        max_position_embeddings=32_768,
        tie_word_embeddings=kind == "actor",
        num_labels=1,
        pad_token_id=0,
    )
    made = AutoModelForSequenceClassification if kind == "reward model" else AutoModelForCausalLM
    with CUDA:
        model = made.from_config(config, dtype=dtype, attn_implementation=ATTENTION_NAME)
    fuse(model)
    return model.eval()


def batch(
    num_rows: int = 8, prompt: int = 512, response: int = 1024, *, share_prompts: bool = True
):
    """Responses of several lengths to two prompts, packed."""
    rows = []
    for number in range(num_rows):
        length = response - 16 * number
        tokens = np.arange(prompt + length) % 1000
        rows.append(
            RowTokens(
                prompt_key=number % 2,
                num_prompt_tokens=prompt,
                num_response_tokens=length,
                prompt=tokens[:prompt],
                response=tokens[prompt:],
                positions=np.arange(prompt + length),
                loss_indices=np.arange(length),
            )
        )
    return pack(rows, response, share_prompts=share_prompts, device=CUDA)


@pytest.mark.parametrize("share_prompts", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_role_computes_on_the_device(fake, kind: str, share_prompts: bool) -> None:
    """Actor (and so the reference), critic and reward model in bfloat16, as one of 64 replicas."""
    scorer, name = KINDS[kind]
    made = scorer(make_model(kind))
    layout = Layout(dp_replicate=64)
    world = ProcessGroup(0, 1, CUDA)
    processes = Processes(layout, layout.place(0), world, world)
    engine = FSDPEngine(made, dtype=torch.bfloat16, device=CUDA, processes=processes)
    packed = batch(share_prompts=share_prompts)
    (outputs,) = engine.forward([packed], ScoreQuestion(1.0, with_entropy=kind == "actor"))
    assert outputs[name].device == CUDA and outputs[name].dtype == torch.float32
    assert outputs[name].shape == packed.targets.shape


@pytest.mark.parametrize("layout", SHARDED)
@pytest.mark.parametrize("kind", ["actor", "critic"])
def test_a_shard_computes_on_the_device(
    fake, ranks, monkeypatch: pytest.MonkeyPatch, kind: str, layout: str
) -> None:
    """Weights over 64 ranks, gathered layer by layer."""
    scorer, name = KINDS[kind]
    world = ProcessGroup(0, WORLD_SIZE, CUDA)
    with unset_fake_temporarily():  # the meshes are real
        processes = Processes.arrange(world, SHARDED[layout])
    engine = FSDPEngine(
        scorer(make_model(kind)), dtype=torch.bfloat16, device=CUDA, processes=processes
    )
    held = sum(one.to_local().numel() for one in engine.model.parameters())
    assert held < engine.num_parameters / (64 if "hybrid" not in layout else 8) * 1.1
    # Every rank has as many micro-batches; the others would say so.
    monkeypatch.setattr(ProcessGroup, "gather", lambda self, value: [value] * self.size)
    packed = batch()
    (outputs,) = engine.forward([packed], ScoreQuestion(1.0, with_entropy=kind == "actor"))
    assert outputs[name].device == CUDA and outputs[name].shape == packed.targets.shape


@pytest.mark.parametrize("network", [PlainNetwork, Network])
def test_generation_computes_on_the_device(fake, network: type[Network]) -> None:
    """Prefill of two prompts, a decode step of eight rows, and their sampling with top-k."""
    generation = Generation(network(make_model()), Scheduler(256, 8192), 0)
    sampling = [
        SamplingParams(max_tokens=64, temperature=0.7, top_k=50, seed=seed) for seed in range(8)
    ]
    requests = [
        GenerationRequest(range(100 + 50 * (number % 2)), one, (), None)
        for number, one in enumerate(sampling)
    ]
    generation.scheduler.add(requests)
    seen = []

    def take(logits: torch.Tensor, rules: SamplingRules, first: int) -> None:
        """In place of what reads the tokens, which fake tensors do not have."""
        seen.append(tuple(logits.shape))
        plain = SamplingRules.from_params([SamplingParams(max_tokens=1)] * len(logits), CUDA)
        drawn = sample(
            logits, plain, torch.empty(len(logits), NUM_DRAWS, dtype=torch.float64, device=CUDA)
        )
        assert all(one.device == CUDA and one.shape == logits.shape[:1] for one in drawn)
        for request in generation.scheduler.running[first:]:
            request.add(1, -1.0, -1.0)

    generation._sample = take
    for _ in range(3):
        generation.advance()
    assert seen == [(8, 151_936)] * 4  # first tokens, then three steps


# ---- what it finds ------------------------------------------------------------------------------


def test_mixed_devices_a_wrong_dtype_and_a_read_are_found(fake) -> None:
    scorer = PolicyScorer(make_model())
    packed = batch()
    with pytest.raises(FakeTensorDeviceMismatchError):
        scorer.model.get_input_embeddings().weight[:2] + torch.ones(1536)
    with pytest.raises(AssertionError, match=r"factors of \['torch\.bfloat16', 'torch\.float32'\]"):
        torch.ones(4, 1536, device=CUDA) @ scorer.model.get_input_embeddings().weight.t()
    with pytest.raises(DataDependentOutputException):
        packed.targets.sum().item()
