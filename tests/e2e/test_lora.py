# SPDX-License-Identifier: Apache-2.0
"""Runs of the command line that train an adapter, and what becomes of it: resume, export, generate, eval."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from quadriga.cli.main import main

MODEL = "actor_rollout_ref.model"
LORA = (
    f"{MODEL}.lora_rank=4",
    f"{MODEL}.lora_alpha=8",
    "actor_rollout_ref.actor.use_kl_loss=True",
    "actor_rollout_ref.actor.optim.lr=5e-2",
    "actor_rollout_ref.rollout.n=4",
    "trainer.save_freq=1",
)
LONG = ("data.max_prompt_length=32", "data.max_response_length=8")


def logits(model: PreTrainedModel | Path) -> torch.Tensor:
    """Of a fixed run of tokens; a folder is loaded by transformers alone."""
    if isinstance(model, Path):
        model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.arange(3, 20)[None]).logits


def with_adapter(home: Path, adapter: Path) -> PreTrainedModel:
    base = AutoModelForCausalLM.from_pretrained(home / "model", dtype=torch.float32)
    # Not imported where tests are collected, which every process does.
    return import_module("peft").PeftModel.from_pretrained(base, adapter)


@pytest.fixture
def run(train: Callable[..., Path]) -> Path:
    """Three steps."""
    contents = (
        "actor_rollout_ref.actor.checkpoint.save_contents=[model, optimizer, extra, hf_model]"
    )
    return train(*LORA, contents, "trainer.total_training_steps=3")


def test_what_a_run_writes(
    run: Path,
    home: Path,
    tmp_path: Path,
    metric_lines: Callable,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An adapter that PEFT loads, small; the merged model beside it; `export` writes either; all are the same model."""
    lines = metric_lines(run)
    assert len(lines) == 3 and lines[0]["actor/kl_loss"] == 0 and lines[2]["actor/kl_loss"] > 1e-4
    actor = run / "global_step_3" / "actor"
    assert not (actor / "frozen").exists()
    size = sum(file.stat().st_size for file in (actor / "model").iterdir())
    assert size < (home / "model" / "model.safetensors").stat().st_size / 2
    trained = logits(with_adapter(home, actor))
    assert float((trained - logits(home / "model")).abs().max()) > 0.05
    for name, options in {"merged": [], "adapter": ["--adapter"]}.items():
        output = tmp_path / name
        assert (
            main(["export", str(run), "--output", str(output), "--dtype", "float32", *options]) == 0
        )
    exported = logits(tmp_path / "merged")
    for found in (
        exported,
        logits(actor / "huggingface"),
        logits(with_adapter(home, tmp_path / "adapter")),
    ):
        torch.testing.assert_close(found, trained, atol=1e-5, rtol=1e-5)
    assert sorted(path.name for path in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    greedy = (
        "actor_rollout_ref.rollout.do_sample=False",
        "actor_rollout_ref.actor.fsdp_config.model_dtype=float32",
    )
    printed = []
    base = (str(home / "model"), f"{MODEL}.lora_adapter_path={tmp_path / 'adapter'}")
    for source in (
        (str(run),),
        (str(actor),),
        (str(tmp_path / "merged"),),
        base,
        (str(home / "model"),),
    ):
        capsys.readouterr()
        assert main(["generate", *source, "--prompt", "say a 3", *LONG, *greedy]) == 0
        printed.append(capsys.readouterr().out)
    assert len(set(printed[:4])) == 1 and printed[4] != printed[0]
    files = (
        f"data.val_files={home / 'val.parquet'}",
        f"custom_reward_function.path={home / 'reward.py'}",
    )
    assert main(["eval", str(run), *LONG, *files]) == 0


def test_choices_and_refusals_of_resume(
    train: Callable[..., Path],
    arguments: Callable[..., list[str]],
    metric_lines: Callable[[Path], list[dict[str, Any]]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Two steps and one more equal three, bit for bit. Another rank or scale, and none, are refused."""
    alone = train(*LORA, "trainer.total_training_steps=3", run="alone")
    assert "the actor with its adapter off" in capsys.readouterr().out
    resumed = train(*LORA, "trainer.total_training_steps=2", run="resumed")
    for change, said in (
        (
            f"{MODEL}.lora_rank=8",
            "got an adapter of rank 4 and scale 2, expected an adapter of rank 8 and scale 1",
        ),
        (
            f"{MODEL}.lora_alpha=4",
            "expected an adapter of rank 4 and scale 1, as actor_rollout_ref.model says",
        ),
        (f"{MODEL}.lora_rank=0", "got an adapter of rank 4 and scale 2, expected all weights"),
    ):
        words = arguments(*LORA, "trainer.total_training_steps=3", change, run="resumed")
        assert main(["train", *words]) == 1
        assert said in capsys.readouterr().err
    train(*LORA, "trainer.total_training_steps=3", run="resumed")
    assert metric_lines(resumed) == metric_lines(alone)
    one, other = (
        load_file(run / "global_step_3" / "actor" / "adapter_model.safetensors")
        for run in (alone, resumed)
    )
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_full_run_does_not_go_on_as_an_adapter(
    train: Callable[..., Path],
    arguments: Callable[..., list[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Nor has it an adapter to export."""
    run = train("trainer.save_freq=1", "trainer.total_training_steps=1", run="full")
    assert main(["train", *arguments(*LORA, run="full")]) == 1
    assert "got all weights, expected an adapter of rank 4" in capsys.readouterr().err
    assert main(["export", str(run), "--adapter", "--output", str(tmp_path / "out")]) == 1
    assert "got no adapter: all weights were trained" in capsys.readouterr().err


def test_an_adapter_that_matches_no_module(
    arguments: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Its user is told the modules that there are."""
    assert main(["train", *arguments(*LORA, f"{MODEL}.target_modules=[query_key_value]")]) == 1
    said = capsys.readouterr().err
    assert "no module named query_key_value" in said and "q_proj, k_proj, v_proj, o_proj" in said
    assert "Traceback" not in said
