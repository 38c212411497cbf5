# SPDX-License-Identifier: Apache-2.0
"""What the roles' workers do alike."""

from pathlib import Path

import pytest
import torch

from quadriga.config import ActorConfig, RolloutConfig
from quadriga.engines.micro_batches import MicroBatching
from quadriga.engines.process_group import ALONE, ProcessGroup
from quadriga.errors import CheckpointError, ConfigError, EngineError
from quadriga.workers.roles import HF_FOLDER, choose_device, inference_pieces, passes, save_with_tokenizer


class Recorder:
    """Stands for an engine and for a tokenizer: notes what it is asked to save, and fails on request."""

    def __init__(self, error: Exception | None = None, replicas: ProcessGroup = ALONE) -> None:
        self.replicas = replicas
        self.saved: list[tuple[str, frozenset[str]]] = []
        self.error = error

    def save(self, directory: Path, contents: frozenset[str]) -> None:
        self.saved.append((directory.name, contents))

    def save_pretrained(self, directory: Path) -> None:
        if self.error:
            raise self.error
        (directory / "tokenizer.json").write_text("{}")


@pytest.mark.parametrize(
    ("contents", "folders", "tokenizers"),
    [
        ({"model", "optimizer", "extra"}, [("actor", {"model", "optimizer"})], ["actor"]),
        ({"optimizer"}, [("actor", {"optimizer"})], []),
        ({"model", "hf_model"}, [("actor", {"model"}), (HF_FOLDER, {"model"})], ["actor", HF_FOLDER]),
        ({"hf_model"}, [("actor", set()), (HF_FOLDER, {"model"})], [HF_FOLDER]),
    ],
)
def test_parts_of_a_checkpoint(contents: set[str], folders: list, tokenizers: list[str], tmp_path: Path) -> None:
    engine = Recorder()
    save_with_tokenizer(engine, tmp_path / "actor", frozenset(contents), Recorder())
    assert engine.saved == folders
    assert sorted(path.parent.name for path in tmp_path.rglob("tokenizer.json")) == sorted(tokenizers)


def test_only_the_first_replica_writes(tmp_path: Path) -> None:
    engine = Recorder(replicas=ProcessGroup(rank=1, size=2))
    save_with_tokenizer(engine, tmp_path / "actor", frozenset({"model"}), Recorder())
    assert engine.saved == [] and not (tmp_path / "actor").exists()


def test_failed_save_is_one_error(tmp_path: Path) -> None:
    """The tokenizers library raises a bare Exception when the disk is full; an error of our own stays what it is."""
    with pytest.raises(CheckpointError, match="Exception: No space left"):
        save_with_tokenizer(Recorder(), tmp_path, frozenset({"model"}), Recorder(Exception("No space left")))
    with pytest.raises(EngineError, match="mine"):
        save_with_tokenizer(Recorder(), tmp_path, frozenset({"model"}), Recorder(EngineError("mine")))


def test_device_by_name() -> None:
    assert choose_device("cpu") == torch.device("cpu")
    assert choose_device("auto").type in ("cpu", "cuda")
    with pytest.raises(ConfigError, match=r"trainer\.device: got 'cuda:99'.*trainer\.device=auto"):
        choose_device("cuda:99")


def test_passes_count_prompts_times_answers() -> None:
    """Every step has shuffles of its own, and each of its epochs another one."""
    config = ActorConfig(ppo_mini_batch_size=4, ppo_epochs=3, ppo_micro_batch_size_per_gpu=2, shuffle=True)
    how = [passes(config, 5, share_prompts=True, global_step=step) for step in (1, 2)]
    assert (how[0].mini_batch_size, how[0].num_epochs) == (20, 3)
    assert how[0].micro == MicroBatching(2, config.ppo_max_token_len_per_gpu, True)
    seeds = [one.shuffle_seed + epoch for one in how for epoch in range(3)]
    assert len(set(seeds)) == 6


def test_no_shuffle_has_no_seed() -> None:
    assert passes(ActorConfig(), 1, share_prompts=True, global_step=1).shuffle_seed is None


@pytest.mark.parametrize(
    ("settings", "num_sequences"),
    [
        ({}, None),
        ({"log_prob_micro_batch_size_per_gpu": 3}, 3),
        ({"log_prob_micro_batch_size_per_gpu": 3, "log_prob_use_dynamic_bsz": True}, None),
    ],
)
def test_pieces_without_gradients(settings: dict, num_sequences: int | None) -> None:
    config = RolloutConfig(log_prob_max_token_len_per_gpu=99, **settings)
    assert inference_pieces(config, share_prompts=False) == MicroBatching(num_sequences, 99, False)
