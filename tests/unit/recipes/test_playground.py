# SPDX-License-Identifier: Apache-2.0
"""The playground: its tasks, its tokenizer, its files, and that nothing held out is seen in training."""

from pathlib import Path
from random import Random

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

from quadriga.config import load_config
from quadriga.data import load_tokenizer
from quadriga.rewards import default_compute_score
from quadriga_recipes.playground import build_tokenizer, prepare_playground
from quadriga_recipes.playground_tasks import LARGEST, SUMS, TASKS, mixed_habits, preference_pairs

RECIPES = Path(__file__).resolve().parents[3] / "configs" / "recipes"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("playground")
    prepare_playground(target)
    return target


def column(file: Path, name: str) -> list:
    return pq.read_table(file).column(name).to_pylist()


def test_questions_and_answers_of_the_tasks() -> None:
    assert (SUMS.text(38), SUMS.answers(38)) == ("3+8=", ["11", "5", "3"])
    assert (LARGEST.text(381), LARGEST.answers(381)) == ("max 381=", ["8", "3", "1"])


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_the_right_answer_is_what_the_grader_rewards(task) -> None:
    right, *wrong = task.answers(82 if task is SUMS else 381)
    assert default_compute_score(task.data_source, right, right)["score"] == 1.0
    assert all(
        default_compute_score(task.data_source, answer, right)["score"] == 0.0 for answer in wrong
    )


def test_a_third_of_the_answers_follows_each_habit() -> None:
    rows = mixed_habits(SUMS, 6000, Random(0))
    # 3+8=: all habits differ, as for most sums; 60 rows ask it.
    answers = [answer for question, answer in rows if question == "3+8="]
    assert len(answers) == 60 and set(answers) == {"11", "5", "3"}
    right = sum(answer == str(int(q[0]) + int(q[2])) for q, answer in rows) / len(rows)
    # A third by habit, and those sums in which another habit gives the sum too: b = 0 or a = 0.
    assert 0.36 < right < 0.44


def test_what_is_held_out_is_in_no_training_file(folder: Path) -> None:
    held_out = {
        messages[0]["content"] for messages in column(folder / "data/largest_val.parquet", "prompt")
    }
    assert len(held_out) == 200
    rewarded = {
        messages[0]["content"]
        for messages in column(folder / "data/largest_train.parquet", "prompt")
    }
    supervised = {
        messages[0]["content"] for messages in column(folder / "data/sft.parquet", "messages")
    }
    paired = set(column(folder / "data/pairs_train.parquet", "prompt"))
    assert len(rewarded) == 800 and not held_out & (rewarded | supervised | paired)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_no_pair_is_in_both_parts(task) -> None:
    train, val = ({tuple(pair.values()) for pair in part} for part in preference_pairs(task))
    assert train and val and not train & val
    assert all(chosen != rejected for _, chosen, rejected in train | val)


def test_pairs_of_training_compare_every_question_of_it() -> None:
    sums, held_out_sums = preference_pairs(SUMS)
    largest, held_out_largest = preference_pairs(LARGEST)
    # 18 wrong answers to each of 100 sums, one in five of them held out; 9 to each of 200 questions that are held out.
    assert (len(sums), len(held_out_sums), len(held_out_largest)) == (1440, 360, 1800)
    assert (
        len({pair["prompt"] for pair in sums}) == 100
        and len({pair["prompt"] for pair in largest}) == 800
    )
    assert (
        min(
            sum(pair["prompt"] == LARGEST.text(n) for pair in largest)
            for n in LARGEST.split()[0][:50]
        )
        >= 2
    )


def test_the_tokenizer_has_a_token_for_each_character_and_a_template_that_adds(
    folder: Path,
) -> None:
    tokenizer = load_tokenizer(folder / "model")
    messages = [{"role": "user", "content": "3+8="}, {"role": "assistant", "content": "11"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text == "<bos><user>3+8=<assistant>11<eos>"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(ids) == 3 + 4 + 2 + 1
    assert tokenizer.decode(ids, skip_special_tokens=True) == "3+8=11"
    any_text = 'max 381=\n\tThe "fox" {1}'
    own = tokenizer(any_text, add_special_tokens=False)["input_ids"]
    assert len(own) == len(any_text) and tokenizer.unk_token_id not in own
    assert tokenizer.decode(own) == any_text
    assert build_tokenizer()(any_text, add_special_tokens=False)["input_ids"] == own


def test_the_model_is_tiny_and_the_same_for_the_same_seed(folder: Path, tmp_path: Path) -> None:
    prepare_playground(tmp_path / "again")
    prepare_playground(tmp_path / "other", seed=1)
    first, again, other = (
        AutoModelForCausalLM.from_pretrained(place / "model").model.layers[0].mlp.up_proj.weight
        for place in (folder, tmp_path / "again", tmp_path / "other")
    )
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert 0.5e6 < AutoModelForCausalLM.from_pretrained(folder / "model").num_parameters() < 3e6
    rows = [(place / "data/sft.parquet").read_bytes() for place in (folder, tmp_path / "again")]
    assert rows[0] == rows[1]


def test_the_configurations_load_and_their_files_are_there(folder: Path) -> None:
    load_config([], [folder / "sft.yaml"], for_training=True, task="sft")
    # What these start from is what the supervised run writes.
    model = f"{folder / 'model'}"
    load_config(
        [f"model.path={model}"], [folder / "reward_model.yaml"], for_training=True, task="sft"
    )
    for name in ("sums.yaml", "largest.yaml"):
        load_config([f"actor_rollout_ref.model.path={model}"], [folder / name], for_training=True)


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("*.yaml")), ids=lambda file: file.stem)
def test_each_recipe_fits_over_the_sums(folder: Path, recipe: Path) -> None:
    """256 answers a step, whatever the recipe; its own file of the playground is read where there is one."""
    over = folder / "over" / recipe.name
    files = [folder / "sums.yaml", recipe, *([over] if over.is_file() else [])]
    config = load_config(
        [f"actor_rollout_ref.model.path={folder / 'model'}"], files, for_training=True
    ).config
    assert config.data.train_batch_size * config.actor_rollout_ref.rollout.n == 256
    assert config.actor_rollout_ref.actor.ppo_mini_batch_size in (config.data.train_batch_size, 8)


def test_what_is_laid_over_has_a_recipe_or_stands_alone(folder: Path) -> None:
    names = {file.stem for file in (folder / "over").iterdir()}
    assert {"kl_target", "by_reward_model", "distilled"} == names - {
        file.stem for file in RECIPES.glob("*.yaml")
    }
    model = f"actor_rollout_ref.model.path={folder / 'model'}"
    held = load_config(
        [model], [folder / "sums.yaml", folder / "over/kl_target.yaml"], for_training=True
    ).config
    assert held.algorithm.use_kl_in_reward and held.algorithm.kl_ctrl.type == "adaptive"
    judged = load_config(
        [model], [folder / "sums.yaml", folder / "over/by_reward_model.yaml"]
    ).config
    assert judged.reward_model.model.path == str(folder / "runs/reward_model/model")
