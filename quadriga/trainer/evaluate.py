# SPDX-License-Identifier: Apache-2.0
"""A policy without training: responses to prompts, and their grades."""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from quadriga.config import Config
from quadriga.data import collate_fn
from quadriga.data.pictures import read_picture
from quadriga.data.rl_dataset import prompt_columns
from quadriga.data.tokenizing import ChatEncoder
from quadriga.data.vision import with_parts
from quadriga.errors import DataError
from quadriga.protocol import DataProto
from quadriga.protocol.columns import object_array
from quadriga.rewards import RewardManager
from quadriga.trainer.build import build_reward, build_tokenizer, build_val_loader, frozen_workers
from quadriga.trainer.responses import repeat_prompts
from quadriga.trainer.rewards import ModelReward
from quadriga.trainer.roles import Role
from quadriga.trainer.validate import Validator, interval, means, sample_values
from quadriga.workers.generation import build_processor


class Grades(NamedTuple):
    """Metrics by name, the 95 % confidence intervals of those that are means of scores, and all graded rows."""

    metrics: dict[str, float]
    intervals: dict[str, tuple[float, float]]
    rows: list[dict[str, Any]]

    @classmethod
    def of(cls, rows: list[dict[str, Any]]) -> "Grades":
        """Those of rows with `data_source`, `uid`, `score`, what graders add, and perhaps `pred`."""
        values = sample_values(rows)
        scores = {name: one for name, one in values.items() if "/std" not in name}
        return cls(means(values), {name: interval(one) for name, one in scores.items()}, rows)


def evaluate(config: Config) -> Grades:
    """Grades of `actor_rollout_ref.model.path` on `data.val_files`; all rows go to `trainer.validation_data_dir` too.
    Raises DataError: there are no validation files."""
    if not config.data.val_files:
        raise DataError("data.val_files", got="nothing", expected="the prompts to answer", fix="Set data.val_files.")
    tokenizer = build_tokenizer(config)
    loader = build_val_loader(config, tokenizer)
    roles = (Role.ActorRollout, Role.RewardModel) if config.reward_model.enable else (Role.ActorRollout,)
    with (
        closing(build_reward(config, tokenizer, loader)) as grader,
        frozen_workers(config, tokenizer, *roles) as (policy, *models),
    ):
        reward: RewardManager = ModelReward(models[0], grader) if models else grader
        rows, errors = Validator(config, tokenizer, policy, reward, loader).graded(0)
    grades = Grades.of(rows)
    return grades._replace(metrics=grades.metrics | errors)


def answer(
    config: Config, chats: Sequence[list[dict[str, str]]], images: Sequence[Sequence[str]] | None = None
) -> list[list[str]]:
    """Responses to chats, `rollout.n` for each, with the sampling of `actor_rollout_ref.rollout`.
    Raises DataError: a prompt is longer than `data.max_prompt_length`, or its images are wrong.
    `chats`: lists of messages with `role` and `content`.
    `images`: files for the `<image>`s of each chat, in their order. None: there are none."""
    rows, tokenizer, processor = [], build_tokenizer(config), build_processor(config)
    encoder = ChatEncoder(tokenizer, config.data.apply_chat_template_kwargs)
    for number, (chat, files) in enumerate(zip(chats, images or [()] * len(chats), strict=True)):
        where = f"prompt {number}"
        if processor is None and files:
            fix = "Take a vision-language model, or leave out the images."
            raise DataError(where, got="images, for a model that reads text", expected="text", fix=fix)
        pictures = [read_picture(one, folder=Path(), where=f"{where}, image {i}") for i, one in enumerate(files)]
        messages = chat if processor is None else with_parts(chat, pictures, where=where)[0]
        text = encoder.render(messages, where=where)
        rows.append(prompt_columns(text, pictures, (), encoder, processor, config.data, where=where))
    prompts, num_samples = DataProto.from_single_dict(collate_fn(rows)), config.actor_rollout_ref.rollout.n
    prompts.non_tensor_batch["uid"] = object_array(str(row) for row in range(len(rows)))
    prompts.meta_info |= {"global_steps": 0, "do_sample": config.actor_rollout_ref.rollout.do_sample}
    with frozen_workers(config, tokenizer, Role.ActorRollout) as (policy,):
        responses = policy.generate_sequences(repeat_prompts(prompts, num_samples))
    return texts_of(tokenizer, responses, num_samples)


def texts_of(tokenizer: Any, responses: DataProto, num_samples: int) -> list[list[str]]:
    """What the policy itself wrote, `num_samples` texts for each prompt."""
    rows = zip(responses.batch["responses"], responses.batch["response_mask"].bool(), strict=True)
    texts = [tokenizer.decode(tokens[mask], skip_special_tokens=True) for tokens, mask in rows]
    return [texts[start : start + num_samples] for start in range(0, len(texts), num_samples)]
