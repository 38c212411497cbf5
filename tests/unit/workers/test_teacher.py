# SPDX-License-Identifier: Apache-2.0
"""The teachers' worker, called directly: transformers' own log-probs, by a model here or by a server, and refusals.

What it does not prove: that vLLM's server replies as the one here does.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from quadriga.config import Config, DistillationConfig
from quadriga.errors import ConfigError, EngineError, RolloutError
from quadriga.protocol import DataProto
from quadriga.workers.teacher import TeacherWorker, check_teachers, require_teachers
from tests.http_server import Handler, serving
from tests.unit.workers.conftest import VOCABULARY

TEMPERATURE, TOP = 0.7, 3
FLOAT32 = {"model_dtype": "float32"}
Make = Callable[..., str]
# Transformers patches its classes while it loads: two threads would leave them patched.
ONE_AT_A_TIME = Lock()


@pytest.fixture
def make(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> Make:
    """`make(seed, **changes)`: the folder of a random Llama, some entries of its config changed."""

    def build(seed: int, **changes: Any) -> str:
        torch.manual_seed(seed)
        sizes = {
            "hidden_size": 24,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
        }
        options = {
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 32,
            "eos_token_id": 1,
            "pad_token_id": 0,
        }
        model = LlamaForCausalLM(LlamaConfig(**(sizes | options | changes), bos_token_id=None))
        torch.nn.init.normal_(model.lm_head.weight)
        model.save_pretrained(tmp_path / f"{seed}")
        tokenizer.save_pretrained(tmp_path / f"{seed}")
        return str(tmp_path / f"{seed}")

    return build


@pytest.fixture
def answers() -> DataProto:
    """Prompts of 2, 2, 4 and 3 tokens, responses of 3, 1, 5 and 2, one with a token of a tool; two data sources."""
    prompts = torch.tensor([[0, 0, 5, 6], [0, 0, 5, 6], [7, 8, 9, 3], [0, 12, 11, 4]])
    responses = torch.tensor(
        [[4, 9, 1, 0, 0], [10, 0, 0, 0, 0], [11, 12, 13, 14, 1], [6, 6, 0, 0, 0]]
    )
    input_ids = torch.cat([prompts, responses], 1)
    attention = (input_ids != 0).long()
    mask = attention[:, 4:].clone()
    mask[2, 1] = 0
    return DataProto.from_dict(
        tensors={
            "input_ids": input_ids,
            "attention_mask": attention,
            "position_ids": (attention.cumsum(-1) - 1).clamp(min=0),
            "response_mask": mask,
        },
        non_tensors={"data_source": np.array(["sums", "sums", "words", "sums"], dtype=object)},
    )


def with_teacher(config: Config, temperature: float = TEMPERATURE, **keys: Any) -> Config:
    """The configuration with teachers, and the temperature of the rollout."""
    policy = config.actor_rollout_ref
    rollout = policy.rollout.model_copy(update={"temperature": temperature})
    distillation = DistillationConfig(enable=True, fsdp_config=FLOAT32, **keys)
    changed = {
        "actor_rollout_ref": policy.model_copy(update={"rollout": rollout}),
        "distillation": distillation,
    }
    return config.model_copy(update=changed)


def start(config: Config, tokenizer: PreTrainedTokenizerFast) -> TeacherWorker:
    """A worker with its teachers loaded; `chosen` is what it said."""
    worker = TeacherWorker(config, tokenizer)
    worker.chosen = worker.init_model()["teacher"]
    return worker


def distributions(folder: str, tokens: list[int], temperature: float = TEMPERATURE) -> torch.Tensor:
    """Transformers' log-probs [L, V] of each token but the first; the first row is nothing."""
    with ONE_AT_A_TIME:
        model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logp = (model(input_ids=torch.tensor([tokens])).logits[0] / temperature).log_softmax(-1)
    return torch.cat([torch.zeros(1, logp.shape[1]), logp[:-1]])


def expected(
    folders: list[str], data: DataProto, temperature: float = TEMPERATURE
) -> dict[str, torch.Tensor]:
    """The columns by the book, row by row."""
    shape = data.batch["response_mask"].shape
    found = {
        "teacher_log_prob": torch.zeros(shape),
        "teacher_top_log_probs": torch.zeros(*shape, TOP),
    }
    found["teacher_top_ids"] = torch.zeros(*shape, TOP, dtype=torch.int32)
    for row, folder in enumerate(folders):
        valid = data.batch["attention_mask"][row].bool()
        tokens, before = data.batch["input_ids"][row][valid].tolist(), int(valid[:4].sum())
        logp = distributions(folder, tokens, temperature)
        for place in data.batch["response_mask"][row].nonzero()[:, 0].tolist():
            at = before + place
            top = logp[at].topk(TOP)
            found["teacher_log_prob"][row, place] = logp[at, tokens[at]]
            found["teacher_top_log_probs"][row, place], found["teacher_top_ids"][row, place] = (
                top.values,
                top.indices,
            )
    return found


def assert_columns(got: DataProto, by_the_book: dict[str, torch.Tensor]) -> None:
    assert "timing_s/teacher" in got.meta_info["metrics"]
    for name, column in got.batch.items():
        torch.testing.assert_close(column, by_the_book[name], atol=1e-5, rtol=1e-5)


def test_each_data_source_has_its_teacher(
    config: Config, tokenizer: PreTrainedTokenizerFast, make: Make, answers: DataProto
) -> None:
    """One whose weights rest between steps gives the same numbers; of a source that is not named the default's."""
    sums, words = make(1), make(2)
    resting = {"fsdp_config": FLOAT32 | {"param_offload": True}}
    own = with_teacher(
        config, path=sums, teachers={"words": words}, loss_mode="forward_kl_topk", topk=TOP
    )
    worker = start(own, tokenizer)
    assert (
        f"{sums}, 0.0 M parameters, float32, frozen" in worker.chosen
        and f"; {words}, " in worker.chosen
    )
    by_the_book = expected([sums, sums, words, sums], answers)
    assert_columns(worker.compute_teacher_log_prob(answers), by_the_book)
    few = answers.select_idxs([0, 3])
    assert_columns(worker.compute_teacher_log_prob(few), expected([sums, sums], few))
    own = own.model_copy(
        update={"distillation": DistillationConfig(enable=True, path=sums, **resting)}
    )
    worker = start(own, tokenizer)
    assert "weights (0 MB) offloaded between phases" in worker.chosen
    for _ in range(2):
        got = worker.compute_teacher_log_prob(answers)
        assert list(got.batch.keys()) == ["teacher_log_prob"]
        assert_columns(got, expected([sums] * 4, answers))


class Teacher(Handler):
    """A server that replies as vLLM's does, with transformers' numbers; `self.server` says what is otherwise."""

    def answer(self, body: Any) -> None:
        """What it serves, tokens of a text, or the log-probs of a prompt."""
        if self.path == "/v1/models":
            self.reply(200, {"data": [{"id": "large", "max_model_len": self.server.max_model_len}]})
            return
        assert body["model"] == "large"
        if self.path == "/tokenize":
            tokens = self.server.tokenizer(body["prompt"], add_special_tokens=False)["input_ids"]
            self.reply(200, {"tokens": [(one + self.server.shift) % VOCABULARY for one in tokens]})
            return
        logp = distributions(self.server.folder, body["prompt"], 1.0)
        num_top = min(body["prompt_logprobs"], self.server.max_logprobs)
        entries: list[Any] = [None]
        for place, token in enumerate(body["prompt"][1:], start=1):
            ids = [token, *logp[place].topk(num_top).indices.tolist()]
            entries.append({str(one): {"logprob": logp[place, one].item()} for one in ids})
        self.reply(
            200, {"choices": [{"text": "x", "prompt_logprobs": entries[self.server.dropped :]}]}
        )


@pytest.fixture
def server(make: Make, tokenizer: PreTrainedTokenizerFast) -> Iterator[Any]:
    """A server with a teacher."""
    state = {"max_model_len": 32, "shift": 0, "max_logprobs": 20, "dropped": 0}
    with serving(Teacher, folder=make(1), tokenizer=tokenizer, **state) as one:
        yield one


def test_a_server_tells_the_same(
    config: Config, tokenizer: PreTrainedTokenizerFast, server: Any, answers: DataProto
) -> None:
    own = with_teacher(config, 1.0, path=server.url, loss_mode="forward_kl_topk", topk=TOP)
    check_teachers(own, tokenizer)
    worker = start(own, tokenizer)
    assert worker.chosen == f"large at {server.url}"
    assert_columns(
        worker.compute_teacher_log_prob(answers), expected([server.folder] * 4, answers, 1.0)
    )
    worker.close()


@pytest.mark.parametrize(
    ("changes", "keys", "message"),
    [
        ({"max_model_len": 9}, {}, r"room for 9 tokens.*expected at least 10"),
        ({"shift": 1}, {}, r"a tokenizer that reads text into other tokens"),
        (
            {},
            {"engine_kwargs": {"modle": "x"}},
            r"engine_kwargs: got modle, expected some of model, headers",
        ),
    ],
)
def test_a_server_that_cannot_be_used(
    config: Config,
    tokenizer: PreTrainedTokenizerFast,
    server: Any,
    changes: Any,
    keys: Any,
    message: str,
) -> None:
    vars(server).update(changes)
    with pytest.raises(ConfigError, match=message):
        check_teachers(with_teacher(config, 1.0, path=server.url, **keys), tokenizer)


def test_the_server_with_the_least_room_is_named(
    config: Config, tokenizer: PreTrainedTokenizerFast, server: Any
) -> None:
    with serving(Teacher, max_model_len=9) as small:
        paths = f"{server.url},{small.url}"
        with pytest.raises(ConfigError, match=f"{re.escape(small.url)}.*room for 9 tokens"):
            check_teachers(with_teacher(config, 1.0, path=paths), tokenizer)


def test_a_server_that_is_not_there(config: Config, tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(
        ConfigError, match=r"127\.0\.0\.1:9.*no reply to /v1/models.*distillation\.path"
    ):
        check_teachers(with_teacher(config, 1.0, path="http://127.0.0.1:9"), tokenizer)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"max_logprobs": 1},
            r"got \d tokens at place 1, expected the token of the response and the 3 likeliest.*--max",
        ),
        ({"dropped": 1}, r"got `prompt_logprobs` of \d tokens, expected those of \d tokens"),
    ],
)
def test_a_server_that_tells_less_than_is_asked(
    config: Config,
    tokenizer: PreTrainedTokenizerFast,
    server: Any,
    answers: DataProto,
    changes: Any,
    message: str,
) -> None:
    vars(server).update(changes)
    worker = start(
        with_teacher(config, 1.0, path=server.url, loss_mode="forward_kl_topk", topk=TOP), tokenizer
    )
    with pytest.raises(RolloutError, match=message):
        worker.compute_teacher_log_prob(answers)
    worker.close()


def test_teachers_that_know_other_tokens(
    config: Config,
    tokenizer: PreTrainedTokenizerFast,
    make: Make,
    tmp_path: Path,
    answers: DataProto,
) -> None:
    """Refused before anything starts; a larger vocabulary is one where only drawn tokens are asked for."""
    folder = make(1)
    check_teachers(with_teacher(config, path=folder), tokenizer)
    wider = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, pad_token="w0", eos_token="w1"
    )
    wider.add_tokens(["more"])
    wider.save_pretrained(folder)
    check_teachers(with_teacher(config, path=folder), tokenizer)
    with pytest.raises(
        ConfigError,
        match=r"teachers\.sums: got.*other ids for 1 tokens, first 'more' \(23; the stude",
    ):
        top = {"loss_mode": "forward_kl_topk", "topk": TOP}
        check_teachers(with_teacher(config, teachers={"sums": folder}, **top), tokenizer)
    with pytest.raises(
        ConfigError, match=r"distillation\.path: got.*first 'w\d+' \(\d+; the student's \d+\)"
    ):
        shifted = {
            word: (number + 1) % VOCABULARY for word, number in tokenizer.get_vocab().items()
        }
        other = type(tokenizer.backend_tokenizer)(
            type(tokenizer.backend_tokenizer.model)(shifted, unk_token="w2")
        )
        PreTrainedTokenizerFast(tokenizer_object=other).save_pretrained(folder)
        check_teachers(with_teacher(config, path=folder), tokenizer)
    (Path(folder) / "tokenizer.json").unlink()
    with pytest.raises(
        ConfigError, match=r"distillation\.path: got.*expected a model with its tokenizer"
    ):
        check_teachers(with_teacher(config, path=folder), tokenizer)
    with pytest.raises(ConfigError, match=r"with 8 positions, for sequences of up to 9 tokens"):
        check_teachers(with_teacher(config, path=make(3, max_position_embeddings=8)), tokenizer)
    padded = with_teacher(config, path=make(4, vocab_size=40), loss_mode="forward_kl_topk", topk=30)
    with pytest.raises(EngineError, match=r"expected ids below 23.*Lower distillation\.topk"):
        start(padded, tokenizer).compute_teacher_log_prob(answers)


def test_a_data_source_without_a_teacher(
    config: Config, tokenizer: PreTrainedTokenizerFast, make: Make
) -> None:
    own = with_teacher(config, teachers={"sums": make(1)})
    require_teachers(own, [("train.parquet, row 1", "sums")])
    with pytest.raises(
        ConfigError, match=r"data source 'words' \(train\.parquet, row 2\).*set distillation\.path"
    ):
        require_teachers(own, [("train.parquet, row 1", "sums"), ("train.parquet, row 2", "words")])
