# SPDX-License-Identifier: Apache-2.0
"""`quadriga sft` from its command line to the model that it writes, on a model of a few thousand weights."""

import gzip
import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from quadriga.cli.main import main
from quadriga.data.vision import load_processor
from quadriga.errors import WorkerLostError
from quadriga.models.weight_files import open_weights
from quadriga.protocol import DataProto
from quadriga.trainer.sft import SupervisedTrainer
from quadriga_recipes.playground import build_tokenizer as playground_tokenizer
from quadriga_recipes.playground import write_model
from tests.vision_folder import COLORS, picture, tiny_tokenizer, write_vision_folder


def chat(question: str, *rest: str) -> dict[str, Any]:
    contents = (question, *rest)
    return {
        "messages": [
            {"role": ("user", "assistant")[i % 2], "content": text}
            for i, text in enumerate(contents)
        ]
    }


CHATS = [chat(f"say {letter}", letter * 3, "again", letter) for letter in "abcdefgh"]
PAIRS = [
    {"prompt": f"say {letter}", "chosen": letter * 3, "rejected": other * (2 + number % 3)}
    for number, (letter, other) in enumerate(zip("abcdefgh", "hgfedcba", strict=True))
]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained model of the playground."""
    return write_model(tmp_path_factory.mktemp("start") / "model", 0)


@pytest.fixture
def sft(start: Path, tmp_path: Path) -> Callable[..., Path]:
    """`sft(rows, *overrides, run="run")`: a run that must succeed; returns its directory."""

    def run_here(rows: list[dict[str, Any]], *overrides: str, run: str = "run") -> Path:
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        words = [
            f"data.train_files={file}",
            f"data.val_files={file}",
            "data.max_length=48",
            "data.train_batch_size=5",
            f"model.path={start}",
            "optim.lr=3e-3",
            "engine.fsdp_config.model_dtype=float32",
            "trainer.total_training_steps=4",
            "trainer.logger=[jsonl]",
            f"trainer.default_local_dir={tmp_path / run}",
            "trainer.save_freq=-1",
            *overrides,
        ]
        assert main(["sft", *list({word.partition("=")[0]: word for word in words}.values())]) == 0
        return tmp_path / run

    return run_here


def metrics(run: Path) -> dict[int, dict[str, float]]:
    (file,) = run.glob("*.jsonl")
    steps: dict[int, dict[str, float]] = {}
    for line in file.read_text().splitlines():
        row = json.loads(line)
        if "step" in row:
            steps.setdefault(row["step"], {}).update(row.get("metrics", row))
    return steps


def answer_loss(folder: Path) -> float:
    """Mean loss of the assistant's tokens of CHATS, by transformers alone and with the marks set by hand."""
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder).eval(),
        AutoTokenizer.from_pretrained(folder),
    )
    losses = []
    for row in CHATS:
        ids, marks = [tokenizer.bos_token_id], [False]
        for message in row["messages"]:
            is_answer = message["role"] == "assistant"
            text = f"<{message['role']}>{message['content']}" + ("<eos>" if is_answer else "")
            tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
            ids, marks = ids + tokens, marks + [False] + [is_answer] * (len(tokens) - 1)
        with torch.no_grad():
            log_probs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        losses += [-float(log_probs[i - 1, ids[i]]) for i in range(1, len(ids)) if marks[i]]
    return sum(losses) / len(losses)


def test_the_loss_is_that_of_the_answers_and_falls(sft, start: Path) -> None:
    """The validation losses before and after are those that transformers computes for the two folders."""
    run = sft(CHATS, "trainer.total_training_steps=12")
    logged = metrics(run)
    assert logged[0]["val/loss"] == pytest.approx(answer_loss(start), rel=1e-4)
    assert logged[12]["val/loss"] == pytest.approx(answer_loss(run / "model"), rel=1e-3)
    assert logged[12]["val/loss"] < 0.7 * logged[0]["val/loss"]


def test_how_a_batch_is_cut_changes_nothing(sft) -> None:
    """Losses of four steps, packed and one row at a time; equality of the weights bit by bit is not claimed."""
    runs = [
        sft(CHATS, f"engine.micro_batch_size_per_gpu={size}", run=f"{size}")
        for size in ("null", "1")
    ]
    packed, single = ([metrics(run)[step]["train/loss"] for step in range(1, 5)] for run in runs)
    assert packed == pytest.approx(single, rel=1e-4)


def test_lost_gradients_are_warned_of_once(sft, caplog: pytest.LogCaptureFixture) -> None:
    """The first step makes the weights so large that the gradients of the next two are not finite."""
    run = sft(CHATS, "data.val_files=null", "optim.lr=1e30", "trainer.total_training_steps=3")
    assert [line["train/nonfinite_steps"] for line in metrics(run).values()] == [0, 1, 1]
    assert caplog.text.count("a gradient was not finite") == 1


@pytest.mark.parametrize("objective", ["sft", "reward_model"])
def test_a_resumed_run_is_the_run_that_was_not(sft, objective: str) -> None:
    rows = PAIRS if objective == "reward_model" else CHATS
    how = (f"objective={objective}", "trainer.save_freq=2")
    whole = sft(rows, *how, run="whole")
    sft(rows, *how, "trainer.total_training_steps=2", run="halves")
    halves = sft(rows, *how, run="halves")
    weights = [next((run / "model").glob("*.safetensors")).read_bytes() for run in (whole, halves)]
    assert weights[0] == weights[1]
    assert [metrics(run)[4]["train/loss"] for run in (whole, halves)] == [
        metrics(whole)[4]["train/loss"]
    ] * 2


@pytest.mark.skipif(
    find_spec("megatron") is None, reason="no megatron-core here: pip install -e '.[megatron]'"
)
@pytest.mark.parametrize("objective", ["sft", "reward_model"])
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_megatron_learns_the_same(sft, objective: str, processes: int) -> None:
    """In this process, and on Ray in two, a policy with tensor parallelism: losses of four steps, and the folder."""
    rows = PAIRS if objective == "reward_model" else CHATS
    how = (f"objective={objective}", "optim.eps=1e-3")
    two = ["trainer.backend=ray", "trainer.n_gpus_per_node=2"]
    two += ["engine.tensor_model_parallel_size=2"] if objective == "sft" else []
    theirs = sft(rows, *how, run="fsdp")
    ours = sft(
        rows, *how, "engine.strategy=megatron", *(two if processes == 2 else []), run="megatron"
    )
    losses = [[metrics(run)[step]["train/loss"] for step in range(1, 5)] for run in (ours, theirs)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    left, right = (open_weights(run / "model") for run in (ours, theirs))
    assert left.shapes == right.shapes
    for name in right.shapes:
        torch.testing.assert_close(left.read(name), right.read(name), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("objective", "rows"), [("sft", CHATS), ("reward_model", PAIRS)])
def test_a_step_that_loses_workers_twice_is_skipped(
    sft, objective: str, rows: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sequences are written, and the model is that of the other steps."""
    update = SupervisedTrainer.update

    def disturbed(trainer: SupervisedTrainer, batch: DataProto) -> None:
        if trainer.global_steps == 2:
            raise WorkerLostError("actor[rank 1/2] died in update", got="SIGSEGV")
        update(trainer, batch)

    monkeypatch.setattr(SupervisedTrainer, "update", disturbed)
    run = sft(
        rows, f"objective={objective}", "trainer.save_freq=1", "trainer.total_training_steps=3"
    )
    lines = (run / "quarantine" / "step_2.jsonl").read_text().splitlines()
    texts = [json.loads(line)["texts"] for line in lines]
    assert len(texts) == 5
    assert {len(each) for each in texts} == {1 if objective == "sft" else 2}
    assert all("<user>say " in text and "<assistant>" in text for each in texts for text in each)
    steps = metrics(run)
    assert steps[2]["recovery/skipped_steps"] == 1.0 and "train/loss" not in steps[2]
    assert "train/loss" in steps[3] and (run / "model").is_dir()


def test_a_reward_model_learns_the_order_and_its_pairs_need_not_stay_together(sft) -> None:
    """Order by transformers' own classifier on the folder; one answer a micro-batch changes nothing."""
    how = ("objective=reward_model", "trainer.total_training_steps=40", "optim.lr=5e-4")
    run = sft(PAIRS, *how)
    apart = sft(
        PAIRS,
        *how,
        "engine.micro_batch_size_per_gpu=1",
        "trainer.total_training_steps=5",
        run="apart",
    )
    logged = metrics(run)
    assert logged[0]["val/loss"] == pytest.approx(0.6931, abs=1e-4)
    assert logged[40]["val/accuracy"] == 1.0
    losses = [[metrics(one)[step]["train/loss"] for step in range(1, 6)] for one in (run, apart)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    model = AutoModelForSequenceClassification.from_pretrained(run / "model").eval()
    assert model.config.num_labels == 1
    tokenizer = playground_tokenizer()
    for pair in PAIRS:
        texts = [
            f"<bos><user>{pair['prompt']}<assistant>{pair[key]}<eos>"
            for key in ("chosen", "rejected")
        ]
        scores = [
            model(**tokenizer(text, add_special_tokens=False, return_tensors="pt")).logits[0, 0]
            for text in texts
        ]
        assert scores[0] > scores[1]


@pytest.mark.parametrize(
    ("rows", "overrides", "said"),
    [
        ([*CHATS, {"messages": []}], [], "rows.jsonl row 8: got the messages []"),
        ([*CHATS, chat("say a", "")], [], "row 8, message 1: got an empty turn of the assistant"),
        ([*CHATS, chat("say a" * 20, "a")], [], "expected at most data.max_length=48"),
        (
            [PAIRS[0] | {"rejected": "aaa"}],
            ["objective=reward_model"],
            "row 0: got two equal responses",
        ),
    ],
)
def test_a_bad_row_ends_the_run_before_its_first_step(
    sft, capsys, rows, overrides: list[str], said: str
) -> None:
    with pytest.raises(AssertionError):
        sft(rows, *overrides)
    printed = capsys.readouterr()
    assert said in printed.err and "Traceback" not in printed.err
    assert "1/4" not in printed.out


def test_what_is_due_after_each_epoch_is_due_after_its_last_step(sft, tmp_path: Path) -> None:
    """Sixteen rows are three steps of five an epoch; the last step of the run is the fourth. The second is profiled."""
    profile = (
        "global_profiler.tool=torch",
        "global_profiler.steps=[2]",
        f"global_profiler.save_path={tmp_path / 'p'}",
    )
    path = sft(
        CHATS * 2,
        "trainer.test_freq=after_each_epoch",
        "trainer.save_freq=after_each_epoch",
        *profile,
    )
    assert b"aten::mm" in gzip.decompress((tmp_path / "p" / "step_2.json.gz").read_bytes())
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "val/loss" in line] == [0, 3, 4]
    assert sorted(one.name for one in path.glob("global_step_*")) == [
        "global_step_3",
        "global_step_4",
    ]


@pytest.fixture
def paint(sft, tmp_path: Path) -> Callable[..., Path]:
    """`paint(rows, *overrides)`: a run of a tiny vision-language model, with pictures of one color."""
    for color in COLORS:
        picture(color).save(tmp_path / f"{color}.png")
    model = f"model.path={write_vision_folder(tmp_path / 'sees')}"
    sizes = ("data.train_batch_size=4", "data.val_batch_size=3")
    return lambda rows, *words, run="run": sft(rows, model, *sizes, *words, run=run)


def test_supervised_learning_of_colors(paint, tmp_path: Path) -> None:
    """A picture in the second turn, and rows without any: the validation loss is that of transformers, row by row,
    before and after, and it falls below what one answer for all would have."""
    rows = [
        {**chat("w1", "w2", "which <image> color ?", color), "images": [f"{color}.png"]}
        for color in COLORS
    ] + [chat("w1", "w2")]
    run = paint(rows, "trainer.total_training_steps=30", "engine.micro_batch_size_per_gpu=2")
    logged = metrics(run)
    assert logged[0]["val/loss"] == pytest.approx(
        losses_of(tmp_path / "sees", rows, tmp_path), rel=1e-4
    )
    assert logged[30]["val/loss"] == pytest.approx(
        losses_of(run / "model", rows, tmp_path), rel=1e-3
    )
    assert logged[30]["val/loss"] < 0.1


def losses_of(folder: Path, rows: list[dict[str, Any]], pictures: Path) -> float:
    """Mean loss of the assistant's tokens by transformers alone."""
    model, processor = (
        AutoModelForImageTextToText.from_pretrained(folder).eval(),
        load_processor(folder),
    )
    tokenizer, losses = tiny_tokenizer(), []
    image, _ = processor.media_ids
    for row in rows:
        ids, marks, shown = [], [], [Image.open(pictures / one) for one in row.get("images", ())]
        seen = processor.inputs(shown, where="")
        for number, message in enumerate(row["messages"]):
            text = message["content"].replace(
                "<image>", "<|vision_start|><|image_pad|><|vision_end|>"
            )
            is_last = number == len(row["messages"]) - 1
            tokens = tokenizer(f"<{message['role']}> {text}{' <eos>' if is_last else ''}")[
                "input_ids"
            ]
            tokens = [one for token in tokens for one in [token] * (4 if token == image else 1)]
            ids, marks = (
                ids + tokens,
                marks + [False] + [message["role"] == "assistant"] * (len(tokens) - 1),
            )
        row_ids = torch.tensor([ids])
        with torch.no_grad():
            logits = model(row_ids, mm_token_type_ids=(row_ids == image).int(), **seen).logits[0]
        log_probs = logits.log_softmax(-1)
        losses += [-float(log_probs[i - 1, ids[i]]) for i in range(1, len(ids)) if marks[i]]
    return sum(losses) / len(losses)


def test_a_reward_model_that_sees(paint) -> None:
    """It learns which color is the right one, which without the picture nothing tells; and goes on from its folder."""
    rows = [
        {"prompt": "<image> ?", "images": [f"{color}.png"], "chosen": color, "rejected": other}
        for color in COLORS
        for other in COLORS
        if other != color
    ]
    how = (
        "objective=reward_model",
        "optim.lr=1e-3",
        "data.train_batch_size=12",
        "data.val_batch_size=12",
    )
    run = paint(rows, *how, "trainer.total_training_steps=30")
    logged = metrics(run)
    assert logged[0]["val/loss"] == pytest.approx(0.6931, abs=1e-4)
    assert logged[30]["val/accuracy"] == 1.0
    again = paint(
        rows, *how, "trainer.total_training_steps=1", f"model.path={run / 'model'}", run="again"
    )
    assert metrics(again)[0]["val/loss"] == pytest.approx(logged[30]["val/loss"], rel=1e-4)
