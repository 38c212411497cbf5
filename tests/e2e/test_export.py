# SPDX-License-Identifier: Apache-2.0
"""What becomes of a trained model: export, generate and eval, from a run, a checkpoint and a Hugging Face folder."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from quadriga.cli import export
from quadriga.cli.main import main
from quadriga.models.weight_files import open_weights

LONG = ("data.max_prompt_length=32", "data.max_response_length=8")


@pytest.fixture
def run(alone: Callable[..., Path]) -> Path:
    """A run whose model has learned to write `a`; tests leave it as it is."""
    return alone(
        "trainer.total_training_steps=8",
        "data.train_batch_size=8",
        "actor_rollout_ref.rollout.n=8",
        "actor_rollout_ref.actor.optim.lr=2e-2",
        "trainer.save_freq=8",
        "trainer.test_freq=8",
    )


def trained_model(folder: Path) -> PreTrainedModel:
    """The model of a checkpoint's actor, filled in tensor by tensor."""
    model = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(folder), dtype=torch.float32
    )
    files = open_weights(folder)
    unused = model.load_state_dict({name: files.read(name) for name in files.shapes}, strict=False)
    assert unused.unexpected_keys == [] and unused.missing_keys == ["lm_head.weight"]
    return model.eval()


def umask() -> int:
    os.umask(mask := os.umask(0))
    return mask


def logits(model: Path | PreTrainedModel) -> torch.Tensor:
    """Of a fixed run of tokens; a folder is loaded by transformers alone."""
    if isinstance(model, Path):
        model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.arange(3, 20)[None]).logits


def test_export_is_the_trained_model(
    run: Path, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In float32 to the last bit; from a run and from its checkpoint alike; the tokenizer and its template with it."""
    outputs = []
    for number, source in enumerate((run, run / "global_step_8")):
        outputs.append(tmp_path / f"out{number}")
        assert (
            main(["export", str(source), "--output", str(outputs[-1]), "--dtype", "float32"]) == 0
        )
    trained = logits(trained_model(run / "global_step_8" / "actor"))
    assert not torch.allclose(trained, logits(home / "model"), atol=0.1)
    for output in outputs:
        assert torch.equal(logits(output), trained)
        tokenizer = AutoTokenizer.from_pretrained(output)
        assert (
            tokenizer.chat_template == AutoTokenizer.from_pretrained(home / "model").chat_template
        )


def test_export_in_half_the_bytes(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """bfloat16 is the default, and what is written is the rounded weights; over another file only if it is said."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("mine")
    assert main(["export", str(run), "--output", str(tmp_path / "out")]) == 2
    assert "got a folder with files" in capsys.readouterr().err
    assert (tmp_path / "out" / "config.json").read_text() == "mine"
    assert main(["export", str(run), "--output", str(tmp_path / "out"), "--overwrite"]) == 0
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()} == {
        0o666 & ~umask()
    }
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    trained = trained_model(run / "global_step_8" / "actor")
    assert exported.dtype == torch.bfloat16
    for (name, one), other in zip(exported.named_parameters(), trained.parameters(), strict=True):
        assert torch.equal(one, other.bfloat16()), name


def test_export_in_one_file_or_in_several(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights of another number of files that were there before are replaced, too."""
    output = tmp_path / "out"
    trained = logits(trained_model(run / "global_step_8" / "actor"))
    arguments = ["export", str(run), "--output", str(output), "--dtype", "float32", "--overwrite"]
    single = ["model.safetensors"]
    for limit in (export.FILE_BYTES, 20_000, export.FILE_BYTES):
        monkeypatch.setattr(export, "FILE_BYTES", limit)
        assert main(arguments) == 0
        names = sorted(path.name for path in output.glob("model*"))
        assert (names == single) == (limit > 20_000), names
        assert "model.safetensors" not in names or names == single
        assert torch.equal(logits(output), trained)


def test_export_keeps_the_ways_to_stop(
    train: Callable[..., Path], home: Path, tmp_path: Path
) -> None:
    """A model names the tokens that end an answer beside its weights, and settings that transformers will not save."""
    source = tmp_path / "model"
    source.mkdir()
    for path in (home / "model").iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    settings = {"eos_token_id": [1, 7], "temperature": 0.6, "do_sample": False}
    (source / "generation_config.json").write_text(json.dumps(settings))
    run = train(f"actor_rollout_ref.model.path={source}", "trainer.save_freq=2")
    assert main(["export", str(run), "--output", str(tmp_path / "out")]) == 0
    for folder in (run / "global_step_2" / "actor", tmp_path / "out"):
        written = json.loads((folder / "generation_config.json").read_text())
        assert {name: written[name] for name in settings} == settings


def test_hf_model_beside_the_weights(train: Callable[..., Path], tmp_path: Path) -> None:
    """`hf_model` alone is a checkpoint to export, not one to resume from."""
    run = train(
        "trainer.save_freq=2",
        "actor_rollout_ref.actor.checkpoint.save_contents=[hf_model]",
        run="light",
    )
    full = train("trainer.save_freq=2", run="full")
    assert main(["export", str(run), "--output", str(tmp_path / "out"), "--dtype", "float32"]) == 0
    assert torch.equal(
        logits(tmp_path / "out"), logits(trained_model(full / "global_step_2" / "actor"))
    )
    assert not (run / "global_step_2" / "actor" / "model").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["/nowhere/run", "--output", "{tmp}/out"], "/nowhere/run: got no such folder"),
        (["{tmp}", "--output", "{tmp}/out"], "config.json"),
        (["{home}/model", "--output", "{tmp}/file/out"], "--output"),
        (
            ["{home}/model", "--output", "{home}/../{home.name}/model"],
            "the folder that is exported",
        ),
    ],
)
def test_export_refuses(
    arguments: list[str], words: str, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("in the way")
    assert main(["export", *(word.format(tmp=tmp_path, home=home) for word in arguments)]) == 1
    assert words in capsys.readouterr().err


def test_export_refuses_a_damaged_checkpoint(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run, tmp_path / "run")
    (file,) = (tmp_path / "run" / "global_step_8" / "actor" / "model").glob("*.distcp")
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    assert main(["export", str(tmp_path / "run"), "--output", str(tmp_path / "out")]) == 1
    assert f"{file}: got other content than was written" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_generate_answers_with_the_trained_model(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From a run, a checkpoint, and its export: the same greedy answers, of the letter that was learned."""
    assert main(["export", str(run), "--output", str(tmp_path / "out"), "--dtype", "float32"]) == 0
    greedy = (
        "actor_rollout_ref.rollout.do_sample=False",
        "actor_rollout_ref.actor.fsdp_config.model_dtype=float32",
    )
    printed = []
    for source in (run, run / "global_step_8", tmp_path / "out"):
        capsys.readouterr()
        asked = ["--prompt", "say a 3", "--prompt", "say a 4"]
        assert main(["generate", str(source), *asked, *LONG, *greedy]) == 0
        printed.append(capsys.readouterr().out.splitlines())
    assert printed[0][0] == "> say a 3" and printed[0][2] == "> say a 4"
    assert printed[0][1].count("a") >= 4
    assert printed[0] == printed[1] == printed[2]


def test_generate_refuses_what_the_template_refuses(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = (
        "actor_rollout_ref.model.custom_chat_template=\"{{ raise_exception('no such role') }}\""
    )
    assert main(["generate", str(home / "model"), "--prompt", "a", *LONG, template]) == 1
    assert "prompt 0: got messages that the chat template refuses" in capsys.readouterr().err


def test_generate_refuses_a_long_prompt(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(run), "--prompt", "a" * 40, *LONG]) == 1
    assert (
        "prompt 0: got 42 tokens, expected at most data.max_prompt_length=32. Raise that length"
        in capsys.readouterr().err
    )


def test_generate_asks_for_what_fits(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Behind a prompt of 3 tokens; a number that does not fit is refused before the model is loaded."""
    asked = ["generate", str(home / "model"), "--prompt", "a", "data.max_prompt_length=32"]
    asked.append("actor_rollout_ref.rollout.max_model_len=12")
    assert main(asked) == 0
    assert "responses: at most 9 tokens (--max-tokens)" in capsys.readouterr().err
    assert main([*asked, "--max-tokens", "10"]) == 2
    message = "got 10 tokens behind a prompt of 3, expected at most 9: the model has 12 positions"
    printed = capsys.readouterr()
    assert message in printed.err and "loading" not in printed.out


def test_eval_measures_what_validation_measured(
    run: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last validation of a run, by another command."""
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    expected = last["val-core/letters/reward/mean@1"]
    capsys.readouterr()
    data = (
        f"data.val_files={home / 'val.parquet'}",
        f"custom_reward_function.path={home / 'reward.py'}",
    )
    exact = "actor_rollout_ref.actor.fsdp_config.model_dtype=float32"
    assert main(["eval", str(run), *LONG, *data, exact, "trainer.log_val_generations=1"]) == 0
    output = capsys.readouterr().out
    assert f"val-core/letters/reward/mean@1  {expected:.4f}" in output
    assert "'say a 20" in output


def test_eval_without_data(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(run), *LONG]) == 1
    assert "data.val_files" in capsys.readouterr().err
