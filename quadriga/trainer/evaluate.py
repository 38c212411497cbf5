# SPDX-License-Identifier: Apache-2.0
"""A policy without training: responses to prompts, and grades; of a file that has responses the grades alone."""

from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch.utils.data import SequentialSampler

from quadriga.config import Config
from quadriga.data import RLHFDataset, collate_fn, create_dataloader
from quadriga.data.files import RowTable, read_table, resolve_files, written_aside
from quadriga.data.pictures import read_picture
from quadriga.data.rl_dataset import prompt_columns
from quadriga.data.tokenizing import ChatEncoder, shortened
from quadriga.data.vision import with_parts
from quadriga.errors import ConfigError, DataError
from quadriga.observe.watchdog import watched
from quadriga.protocol import DataProto
from quadriga.protocol.columns import object_array
from quadriga.rewards import RewardManager
from quadriga.rewards.registry import load_reward_manager
from quadriga.rewards.samples import SampleManager, Samples, ground_truth
from quadriga.trainer.build import build_frozen, build_processor, build_reward, build_tokenizer, build_val_loader
from quadriga.trainer.responses import generate_responses, repeat_prompts
from quadriga.trainer.rewards import ModelReward
from quadriga.trainer.roles import Role
from quadriga.trainer.validate import Validator, sample_metrics


def evaluate(config: Config) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Validation metrics of `actor_rollout_ref.model.path` on `data.val_files`, and the first sample rows.
    Raises DataError: there are no validation files."""
    if not config.data.val_files:
        raise DataError("data.val_files", got="nothing", expected="the prompts to answer", fix="Set data.val_files.")
    tokenizer = build_tokenizer(config)
    loader = build_val_loader(config, tokenizer)
    with ExitStack() as opened:
        reward: RewardManager = opened.enter_context(closing(build_reward(config, tokenizer, loader)))
        policy = opened.enter_context(closing(build_frozen(Role.ActorRollout, config, tokenizer)))
        if config.reward_model.enable:
            model = opened.enter_context(closing(build_frozen(Role.RewardModel, config, tokenizer)))
            reward = ModelReward(model, reward)
        return Validator(config, tokenizer, policy, reward, loader).run(0)


def answer(
    config: Config, chats: Sequence[list[dict[str, str]]], images: Sequence[Sequence[str]] | None = None
) -> list[list[str]]:
    """Responses to chats, `rollout.n` for each, with the sampling of `actor_rollout_ref.rollout`.

    Args:
        chats: lists of messages with `role` and `content`.
        images: files for the `<image>`s of each chat, in their order. None: there are none.

    Raises:
        DataError: a prompt is longer than `data.max_prompt_length`, or its images are wrong.
    """
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
        rows.append(prompt_columns(text, pictures, encoder, processor, config.data, where=where))
    prompts, num_samples = DataProto.from_single_dict(collate_fn(rows)), config.actor_rollout_ref.rollout.n
    prompts.non_tensor_batch["uid"] = object_array(str(row) for row in range(len(rows)))
    prompts.meta_info |= {"global_steps": 0, "do_sample": config.actor_rollout_ref.rollout.do_sample}
    with closing(build_frozen(Role.ActorRollout, config, tokenizer)) as policy:
        responses = policy.generate_sequences(repeat_prompts(prompts, num_samples))
    return _texts(tokenizer, responses, num_samples)


def answer_files(config: Config, output: Path) -> int:
    """Write the rows of `data.val_files` with a column `responses`, `rollout.n` texts for each row, as Parquet.

    The sampling is that of `actor_rollout_ref.rollout`, the prompts are in `data.prompt_key`, and `data.val_batch_size`
    of them are in work at a time.

    Returns the number of rows.
    Raises DataError: a prompt is wrong or too long, not every row would get responses, or the file cannot be written.
    """
    data, tokenizer, num_samples = config.data, build_tokenizer(config), config.actor_rollout_ref.rollout.n
    where = "data.val_files"
    tables = [read_table(file) for file in resolve_files(data.val_files, data.cache_dir, where=where)]
    options = {"max_samples": data.val_max_samples, "required_columns": (data.prompt_key,)}
    rows = RLHFDataset(data.val_files, tokenizer, data, build_processor(config), is_train=False, **options)
    if len(rows) != (num_rows := sum(map(len, tables))):
        got = f"{len(rows)} of {num_rows} rows, by data.filter_overlong_prompts or data.val_max_samples"
        fix = "Set data.truncation=left to shorten long prompts."
        raise DataError(where, got=got, expected="all of them", fix=fix)
    order, size = SequentialSampler(rows), data.val_batch_size
    loader = create_dataloader(rows, data, batch_size=size, sampler=order, drop_last=False)
    texts: list[list[str]] = []
    with closing(build_frozen(Role.ActorRollout, config, tokenizer)) as policy:
        for columns in watched(loader, "a batch of prompts"):
            prompts = DataProto.from_single_dict(columns)
            # By the row, so that what is sampled does not depend on how many are in work at a time.
            prompts.non_tensor_batch["uid"] = object_array(str(len(texts) + row) for row in range(len(prompts)))
            prompts.meta_info |= {"global_steps": 0, "do_sample": config.actor_rollout_ref.rollout.do_sample}
            texts += _texts(tokenizer, generate_responses(policy, config, prompts, num_samples), num_samples)
            print(f"{len(texts)} of {len(rows)} prompts have their responses", flush=True)
    try:
        whole = pa.concat_tables([table.to_arrow() for table in tables], promote_options="permissive")
    except pa.ArrowException as error:
        fix = "Give the files columns of one type each, or respond to one file at a time."
        raise DataError(where, got=str(error), expected="rows that one Parquet file can hold", fix=fix) from error
    whole = whole.drop_columns([name for name in whole.column_names if name == "responses"])
    with written_aside(output.expanduser(), where="--output") as draft:
        pq.write_table(whole.append_column("responses", pa.array(texts, pa.list_(pa.string()))), draft)
    return len(texts)


def score_file(
    config: Config, path: str, response_key: str = "responses", reward_model_key: str = "reward_model"
) -> dict[str, float]:
    """Metrics of the responses that the rows of a file have, graded as in validation, without a model.

    Args:
        config: its reward manager and score function grade; `data.reward_fn_key` names the column of the data source.
        path: a parquet, json or jsonl file.
        response_key: column with the responses of a row, a text or a list of texts.
        reward_model_key: column with the `ground_truth`.

    Returns:
        `test_score/SOURCE`, the mean over rows of the mean score of a row, and the metrics of `validation_metrics`.

    Raises:
        ConfigError: a reward manager that needs a model or a batch of tokens.
        DataError, RewardError: the file is wrong, or too many responses could not be graded.
    """
    (file, *more) = resolve_files(path, config.data.cache_dir, where="responses")
    table, source_key = read_table(file), config.data.reward_fn_key
    missing = [key for key in (source_key, response_key, reward_model_key) if key not in table.columns]
    if more or missing:
        got = f"{1 + len(more)} files" if more else f"the columns {', '.join(table.columns)}"
        fix = "The columns are named by data.reward_fn_key, --response-key and --reward-model-key."
        expected = "one" if more else f"{' and '.join(map(repr, missing))} among them"
        raise DataError(str(path), got=got, expected=expected, fix="Grade them one by one." if more else fix)
    samples, numbers = _samples_of(table, source_key, response_key, reward_model_key)
    with closing(load_reward_manager(config, None)) as manager:
        reads_texts = isinstance(manager, SampleManager) and type(manager).shaped is SampleManager.shaped
        if config.reward_model.enable or not reads_texts:
            name = "reward_model.enable" if config.reward_model.enable else "reward_model.reward_manager"
            got, expected = "a grader that reads tokens", "one that grades a text"
            fix = "Name a score function: custom_reward_function.path."
            raise ConfigError(name, got=got, expected=expected, fix=fix)
        outcomes = manager.grade_all(samples)
    graded = zip(samples.rows, numbers, outcomes, strict=True)
    facts = [
        {**one.extra, "data_source": row["data_source"], "uid": number, "score": one.score}
        for row, number, one in graded
    ]
    metrics = sample_metrics(facts)
    named = ((name.partition("/")[2].rpartition("/reward/mean@"), value) for name, value in metrics.items())
    return {f"test_score/{source}": value for (source, found, _), value in named if found} | metrics


def _samples_of(table: RowTable, source: str, responses: str, truths: str) -> tuple[Samples, list[int]]:
    """The responses in the rows of a file, and the number of the row of each."""
    rows, places, numbers = [], [], []
    for number in range(len(table)):
        row, place = table[number], f"{table.path} row {number}"
        texts = [row[responses]] if isinstance(row[responses], str) else row[responses]
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
            got, expected = shortened(row[responses]), "a text, or a list of texts"
            raise DataError(f"{place}, column {responses!r}", got=got, expected=expected)
        known = {"data_source": row[source], "ground_truth": ground_truth(row[truths], place, truths)}
        rows += [{**known, "solution_str": text, "extra_info": row.get("extra_info") or {}} for text in texts]
        places += [place] * len(texts)
        numbers += [number] * len(texts)
    return Samples(rows, torch.zeros(len(rows), dtype=torch.int64), 0, places), numbers


def _texts(tokenizer: Any, responses: DataProto, num_samples: int) -> list[list[str]]:
    """What the policy itself wrote, `num_samples` texts for each prompt."""
    masks = responses.batch["response_mask"].bool()
    texts = [
        tokenizer.decode(tokens[mask], skip_special_tokens=True)
        for tokens, mask in zip(responses.batch["responses"], masks, strict=True)
    ]
    return [texts[start : start + num_samples] for start in range(0, len(texts), num_samples)]
