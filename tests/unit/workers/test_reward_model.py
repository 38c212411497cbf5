# SPDX-License-Identifier: Apache-2.0
"""The reward model's worker, called directly: transformers' own scores, whatever the batch looks like."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    Gemma3TextConfig,
    Gemma3TextForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from quadriga.config import Config
from quadriga.errors import ConfigError, DataError, EngineError, RewardError
from quadriga.models.reward_model import add_score_head, build_reward_model
from quadriga.protocol import DataProto
from quadriga.protocol.columns import object_array
from quadriga.workers import RewardModelWorker
from quadriga.workers.reward_model import SequenceTokens
from tests.numerics.vision_batch import vision_batch, vision_rows
from tests.tiny_vision import token_types, vision_model

TEMPLATE = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} end {% endfor %}"
Make = Callable[..., Path]
Start = Callable[..., RewardModelWorker]


def spaced(words: list[str], template: str | None) -> PreTrainedTokenizerFast:
    """A tokenizer of words between spaces; the first two pad and end."""
    backend = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=words[2])
    )
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=words[0], eos_token=words[1], unk_token=words[2]
    )
    tokenizer.chat_template = template
    return tokenizer


POLICY_WORDS = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(3, 23))]
# In another order: the same id is another word.
JUDGE_WORDS = [
    "<pad>",
    "<eos>",
    "<unk>",
    "user",
    "assistant",
    "end",
    *(f"w{number}" for number in range(22, 2, -1)),
]


@pytest.fixture(scope="module")
def policy() -> PreTrainedTokenizerFast:
    return spaced(POLICY_WORDS, "{{ messages[0]['content'] }}")


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """`make(tokenizer, **changes)`: a folder with a random Llama that scores, some entries of its config changed."""

    def build(tokenizer: PreTrainedTokenizerBase | None, **changes: Any) -> Path:
        torch.manual_seed(1)
        options = {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 32,
            "max_position_embeddings": 32,
            "pad_token_id": 0,
            "eos_token_id": 1,
            "bos_token_id": None,
            "num_labels": 1,
        }
        folder = tmp_path / f"judge{len(list(tmp_path.iterdir()))}"
        model = LlamaForSequenceClassification(LlamaConfig(**(options | changes)))
        torch.nn.init.normal_(model.score.weight)  # scores of some size, so that a wrong one shows
        model.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        return folder

    return build


@pytest.fixture
def start(config: Config, policy: PreTrainedTokenizerFast) -> Start:
    """`start(folder, model={}, **keys)`: a worker with its model loaded, and what it chose as `worker.chosen`."""

    def run(folder: Path, model: dict[str, Any] | None = None, **keys: Any) -> RewardModelWorker:
        model = {"path": str(folder), "fsdp_config": {"model_dtype": "float32"}} | (model or {})
        reward = type(config.reward_model)(enable=True, model=model, **keys)
        worker = RewardModelWorker(config.model_copy(update={"reward_model": reward}), policy)
        worker.chosen = worker.init_model()
        return worker

    return run


@pytest.fixture
def answers() -> DataProto:
    """Prompts of 2, 2, 4 and 3 tokens on the left, responses of 3, 1, 5 and 2 on the right; the first two share one."""
    prompts = torch.tensor([[0, 0, 5, 6], [0, 0, 5, 6], [7, 8, 9, 3], [0, 12, 11, 4]])
    responses = torch.tensor(
        [[4, 9, 1, 0, 0], [10, 0, 0, 0, 0], [11, 12, 13, 14, 1], [6, 6, 0, 0, 0]]
    )
    input_ids = torch.cat([prompts, responses], 1)
    attention = (input_ids != 0).long()
    chats = np.empty(4, dtype=object)
    chats[:] = [
        [{"role": "user", "content": text}]
        for text in ("w5 w6", "w5 w6", "w7 w8 w9 w3", "w12 w11 w4")
    ]
    return DataProto.from_dict(
        tensors={
            "input_ids": input_ids,
            "attention_mask": attention,
            "position_ids": (attention.cumsum(-1) - 1).clamp(min=0),
            "response_mask": attention[:, 4:],
        },
        non_tensors={"raw_prompt": chats, "uid": np.array(["p", "p", "q", "r"], dtype=object)},
    )


def scores_alone(folder: Path, rows: list[list[int]]) -> torch.Tensor:
    """Transformers' scores of rows, each in a call of its own."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return torch.stack([model(input_ids=torch.tensor([row])).logits[0, 0] for row in rows])


def placed(scores: torch.Tensor, data: DataProto) -> torch.Tensor:
    """Scores at the last valid token of each response."""
    mask = data.batch["response_mask"]
    columns = torch.zeros(mask.shape)
    columns[torch.arange(len(scores)), mask.sum(-1) - 1] = scores
    return columns


def tokens_of(data: DataProto) -> list[list[int]]:
    """The rows without padding."""
    pairs = zip(data.batch["input_ids"], data.batch["attention_mask"].bool(), strict=True)
    return [row[mask].tolist() for row, mask in pairs]


CUTS = [
    {},
    {"micro_batch_size_per_gpu": 3},
    {"forward_max_token_len_per_gpu": 9},
    {"micro_batch_size_per_gpu": 1, "use_dynamic_bsz": True},
]


@pytest.mark.parametrize("keys", CUTS, ids=str)
def test_scores_are_transformers_own_of_each_row_alone(
    make: Make,
    start: Start,
    policy: PreTrainedTokenizerFast,
    answers: DataProto,
    keys: dict[str, Any],
) -> None:
    """Ragged, padded on both sides, with a shared prompt and a response of one token, however the passes are cut.

    It does not prove that bfloat16 rounds alike, nor anything of several processes.
    """
    folder = make(policy)
    worker = start(folder, **keys)
    expected = placed(scores_alone(folder, tokens_of(answers)), answers)
    scored = worker.compute_rm_score(answers)
    assert scored.batch["rm_scores"].dtype == torch.float32
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(scored.batch["rm_scores"], expected, atol=1e-5, rtol=1e-5)
    assert scored.meta_info["metrics"]["reward/rm_cut"].value == 0
    assert "one tokenizer for both" in worker.chosen["reward inputs"]
    assert "float32, frozen" in worker.chosen["reward model"]


def test_no_rows_no_scores(
    make: Make, start: Start, policy: PreTrainedTokenizerFast, answers: DataProto
) -> None:
    """A process may get none of the rows."""
    for tokenizer in (policy, spaced(JUDGE_WORDS, TEMPLATE)):
        worker = start(make(tokenizer))
        assert worker.compute_rm_score(answers.select_idxs([])).batch["rm_scores"].shape == (0, 5)


def test_chats_are_rendered_by_another_template(
    make: Make, start: Start, answers: DataProto
) -> None:
    """Against a rendering by hand: the policy's words, in the judge's ids, between the judge's roles."""
    folder = make(spaced(JUDGE_WORDS, TEMPLATE))
    texts = [
        "user w5 w6 end assistant w4 w9 end",
        "user w5 w6 end assistant w10 end",
        "user w7 w8 w9 w3 end assistant w11 w12 w13 w14 end",
        "user w12 w11 w4 end assistant w6 w6 end",
    ]
    rows = [[JUDGE_WORDS.index(word) for word in text.split()] for text in texts]
    worker = start(folder)
    assert worker.reads_chats()
    assert "its vocabulary is not the policy's" in worker.chosen["reward inputs"]
    expected = placed(scores_alone(folder, rows), answers)
    torch.testing.assert_close(
        worker.compute_rm_score(answers).batch["rm_scores"], expected, atol=1e-5, rtol=1e-5
    )
    # The answers to one prompt share its tokens.
    first, second, third, _ = worker.sequences(answers)
    assert first.prompt == second.prompt == rows[0][:5]
    assert [*first.prompt, *first.response] == rows[0]
    assert third == SequenceTokens(rows[2], [])


def test_turns_of_a_response_are_rendered_with_their_roles(
    make: Make, start: Start, answers: DataProto
) -> None:
    """A response with a user's turn in it follows its prompt as three messages; the others are one turn each."""
    worker = start(make(spaced(JUDGE_WORDS, TEMPLATE)))
    turns = [
        {"role": "assistant", "content": "w4"},
        {"role": "user", "content": "w5"},
        {"role": "assistant", "content": "w9"},
    ]
    single = [{"role": "assistant", "content": "w10"}]
    data = answers.select_idxs([0, 1])
    data.non_tensor_batch["solution_messages"] = object_array([turns, single])
    first, second = worker.sequences(data)
    texts = [
        "user w5 w6 end assistant w4 end user w5 end assistant w9 end",
        "user w5 w6 end assistant w10 end",
    ]
    expected = [[JUDGE_WORDS.index(word) for word in text.split()] for text in texts]
    assert [[*row.prompt, *row.response] for row in (first, second)] == expected


def test_the_same_words_in_another_template_are_rendered_too(
    make: Make, start: Start, policy: PreTrainedTokenizerFast, answers: DataProto
) -> None:
    worker = start(make(spaced(POLICY_WORDS, TEMPLATE)))
    assert "its chat template is not the policy's" in worker.chosen["reward inputs"]
    forced = start(make(spaced(POLICY_WORDS, TEMPLATE)), model={"input_tokenizer": None})
    assert not forced.reads_chats()
    assert "input_tokenizer is null" in forced.chosen["reward inputs"]


def test_the_key_of_verl_forces_rendering(
    make: Make, start: Start, policy: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    policy.save_pretrained(tmp_path / "policy")
    worker = start(make(policy), model={"input_tokenizer": str(tmp_path / "policy")})
    assert worker.reads_chats()
    spaced(JUDGE_WORDS, TEMPLATE).save_pretrained(tmp_path / "other")
    with pytest.raises(ConfigError, match=r"input_tokenizer.*not that of the run's tokenizer"):
        start(make(policy), model={"input_tokenizer": str(tmp_path / "other")})


@pytest.mark.parametrize("is_rendered", [False, True])
def test_what_is_too_long_loses_its_beginning_and_is_counted(
    make: Make, start: Start, policy: PreTrainedTokenizerFast, answers: DataProto, is_rendered: bool
) -> None:
    """A limit of 6 tokens, by the key or by the model's positions; as many of the last tokens stay."""
    tokenizer = spaced(JUDGE_WORDS, TEMPLATE) if is_rendered else policy
    for changes, keys in (({}, {"max_length": 6}), ({"max_position_embeddings": 6}, {})):
        folder = make(tokenizer, **changes)
        worker = start(folder, **keys)
        whole = [[*row.prompt, *row.response] for row in worker.sequences(answers)]
        scored = worker.compute_rm_score(answers)
        expected = placed(scores_alone(folder, [row[-6:] for row in whole]), answers)
        torch.testing.assert_close(scored.batch["rm_scores"], expected, atol=1e-5, rtol=1e-5)
        assert scored.meta_info["metrics"]["reward/rm_cut"].value == (4 if is_rendered else 1)
        assert "up to 6 tokens" in worker.chosen["reward inputs"]
    with pytest.raises(ConfigError, match="max_length: got 33, expected at most 32"):
        start(make(tokenizer), max_length=33)


def test_a_cut_leaves_a_token_to_the_prompt() -> None:
    assert SequenceTokens([1, 2, 3], [4, 5]).cut(4) == SequenceTokens([2, 3], [4, 5])
    assert SequenceTokens([1, 2, 3], [4, 5]).cut(1) == SequenceTokens([5], [])
    assert SequenceTokens([1], [2, 3, 4]).cut(2) == SequenceTokens([3], [4])


@pytest.mark.parametrize(
    ("part", "columns"), [("prompt", slice(0, 4)), ("response", slice(4, None))]
)
def test_an_empty_part_of_a_row_is_refused(
    make: Make,
    start: Start,
    policy: PreTrainedTokenizerFast,
    answers: DataProto,
    part: str,
    columns: slice,
) -> None:
    answers.batch["attention_mask"][2, columns] = 0
    for tokenizer in (policy, spaced(JUDGE_WORDS, TEMPLATE)):
        with pytest.raises(
            EngineError, match=f"row 2 .* got an empty {part}, expected at least one token"
        ):
            start(make(tokenizer)).compute_rm_score(answers)


def test_a_token_beyond_the_vocabulary_is_refused(
    make: Make, start: Start, answers: DataProto
) -> None:
    worker = start(make(None, vocab_size=12), model={"input_tokenizer": None})
    with pytest.raises(EngineError, match="token id 14 of the policy, expected ids below 12"):
        worker.compute_rm_score(answers)


def test_chats_that_are_missing_or_refused(make: Make, start: Start, answers: DataProto) -> None:
    worker = start(make(spaced(JUDGE_WORDS, TEMPLATE)))
    with pytest.raises(DataError, match="column raw_prompt"):
        worker.compute_rm_score(answers.select(non_tensor_batch_keys=["uid"]))
    worker = start(make(spaced(JUDGE_WORDS, "{{ raise_exception('only two roles') }}")))
    with pytest.raises(
        DataError,
        match=r"prompt p: got a chat that the reward model's template refuses.*only two roles",
    ):
        worker.compute_rm_score(answers)


def test_a_score_that_is_not_finite_is_refused(
    make: Make, start: Start, policy: PreTrainedTokenizerFast, answers: DataProto
) -> None:
    worker = start(make(policy))
    worker.engine.scorer.model.score.weight.data.fill_(float("nan"))
    with pytest.raises(RewardError, match="4 of 4 scores that are not finite, first nan for row 0"):
        worker.compute_rm_score(answers)


def test_a_tokenizer_without_a_template(
    make: Make, start: Start, policy: PreTrainedTokenizerFast
) -> None:
    with pytest.raises(
        ConfigError,
        match="without a chat template, which is needed because its vocabulary is not the policy's",
    ):
        start(make(spaced(JUDGE_WORDS, None)))
    with pytest.raises(
        ConfigError, match=r"reward_model.model.path: .*a tokenizer that transformers can load"
    ):
        start(make(None))


def test_training_a_classifier_replaces_entries_of_its_config(make: Make, tmp_path: Path) -> None:
    add_score_head(vision_model()).save_pretrained(tmp_path / "sees")
    for folder, entry in (
        (make(None), "max_position_embeddings"),
        (tmp_path / "sees", "vision_start_token_id"),
    ):
        model = build_reward_model(
            str(folder),
            pad_token_id=0,
            device=torch.device("cpu"),
            override_config={entry: 7},
        )
        assert getattr(model.config, entry) == 7


def test_models_that_cannot_score(
    make: Make, start: Start, policy: PreTrainedTokenizerFast, model_path: Path, tmp_path: Path
) -> None:
    with pytest.raises(
        EngineError, match=r"no classification head: score.weight is not in model.safetensors"
    ):
        start(model_path)
    with pytest.raises(EngineError, match="a classifier with 3 labels, expected one label"):
        start(make(policy, num_labels=3))
    with pytest.raises(
        EngineError, match="expected a folder or hub name that transformers can load"
    ):
        start(tmp_path / "nowhere")
    folder = make(policy)
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        EngineError,
        match=r"no weights for 1 parameters: model.layers.1.mlp.up_proj.weight is not in",
    ):
        start(folder)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    bert = BertForSequenceClassification(BertConfig(**sizes, vocab_size=32, num_labels=1))
    bert.save_pretrained(tmp_path / "bert")
    with pytest.raises(EngineError, match="no projection named score"):
        start(tmp_path / "bert")
    shape = {**sizes, "head_dim": 8, "num_key_value_heads": 1, "vocab_size": 32, "num_labels": 1}
    gemma = Gemma3TextForSequenceClassification(
        Gemma3TextConfig(**shape, use_bidirectional_attention=True)
    )
    gemma.save_pretrained(tmp_path / "gemma")
    with pytest.raises(EngineError, match="tokens attend to later ones"):
        start(tmp_path / "gemma")


def test_scores_of_prompts_with_images(tmp_path: Path, start: Start) -> None:
    """One image, another one under the same tokens, none, two, and a video: the head's product with transformers' last
    hidden state of each row alone. What it cannot do is said."""
    model, rows = vision_model("eager"), vision_rows()
    batch = vision_batch(model, rows)
    add_score_head(model)
    torch.nn.init.normal_(model.score.weight, std=0.1)
    model.save_pretrained(tmp_path)
    worker = start(tmp_path, {"input_tokenizer": None})
    found = worker.compute_rm_score(batch).batch["rm_scores"]
    for number, row in enumerate(rows):
        ids = torch.tensor([[*row.prompt, *row.answer]])
        with torch.no_grad():
            states = model.model(
                input_ids=ids, mm_token_type_ids=token_types(ids), **row.images
            ).last_hidden_state
            expected = model.score(states[0, -1])
        torch.testing.assert_close(
            found[number, len(row.answer) - 1 : len(row.answer)], expected, atol=1e-5, rtol=1e-5
        )
    assert found[0, 3] != found[3, 3], "rows 0 and 3 differ in the image alone"
    short = start(tmp_path, {"input_tokenizer": None}, max_length=8)
    with pytest.raises(
        EngineError,
        match=r"reward model: got \d+ tokens, expected at most 8, for a row with images",
    ):
        short.compute_rm_score(batch)
    vision_model("eager").save_pretrained(tmp_path / "policy")
    with pytest.raises(
        EngineError, match=r"got no classification head: score\.weight is not in model\.safetensors"
    ):
        start(tmp_path / "policy", {"input_tokenizer": None})
