# SPDX-License-Identifier: Apache-2.0
"""A policy without training: responses to prompts, and their grades; in files too.

    OUTPUT            the rows of a file of prompts with a column `responses`; whole, or not there
    OUTPUT.part/      as long as it is not: `responses.jsonl`, a line for each batch with the texts of each prompt, and
                      `config.yaml`, the settings that they were generated with

Prompts are in work in the order of their rows, and what is sampled for one depends on its row alone. So a call that was
killed goes on with the batch that it was at, and its file is that of a call that was left alone.
"""

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from quadriga.config import Config, show
from quadriga.data import RLHFDataset, collate_fn, create_dataloader
from quadriga.data.files import RowTable, read_table, resolve_files, written_aside
from quadriga.data.media import with_parts
from quadriga.data.pictures import read_picture
from quadriga.data.rl_dataset import prompt_columns
from quadriga.data.tokenizing import ChatEncoder, shortened
from quadriga.errors import ConfigError, DataError
from quadriga.observe.progress import Progress
from quadriga.observe.watchdog import watched
from quadriga.protocol import DataProto
from quadriga.protocol.columns import object_array
from quadriga.rewards import RewardManager
from quadriga.rewards.registry import load_reward_manager
from quadriga.rewards.samples import SampleManager, Samples, ground_truth, policy_text
from quadriga.trainer.build import build_reward, build_tokenizer, build_val_loader, frozen_workers
from quadriga.trainer.prompts import assign_row_uids
from quadriga.trainer.responses import ModelReward, generate_responses, repeat_prompts
from quadriga.trainer.roles import Role
from quadriga.trainer.run_lock import run_lock
from quadriga.trainer.settings import CONFIGURATION, CONTENT, Settings
from quadriga.trainer.validate import Validator, interval, means, sample_values
from quadriga.workers.generation import build_processor, prompt_context


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
        raise DataError(
            "data.val_files",
            got="nothing",
            expected="the prompts to answer",
            fix="Set data.val_files.",
        )
    tokenizer = build_tokenizer(config)
    loader = build_val_loader(config, tokenizer, prompt_context(config, tokenizer))
    roles = (
        (Role.ActorRollout, Role.RewardModel)
        if config.reward_model.enable
        else (Role.ActorRollout,)
    )
    with (
        closing(build_reward(config, tokenizer, loader)) as grader,
        frozen_workers(config, tokenizer, *roles) as (policy, *models),
    ):
        reward: RewardManager = ModelReward(models[0], grader) if models else grader
        rows, errors = Validator(config, tokenizer, policy, reward, loader).graded(0)
    grades = Grades.of(rows)
    return grades._replace(metrics=grades.metrics | errors)


def answer(
    config: Config,
    chats: Sequence[list[dict[str, str]]],
    images: Sequence[Sequence[str]] | None = None,
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
            raise DataError(
                where, got="images, for a model that reads text", expected="text", fix=fix
            )
        pictures = [
            read_picture(one, folder=Path(), where=f"{where}, image {i}")
            for i, one in enumerate(files)
        ]
        messages = chat if processor is None else with_parts(chat, pictures, where=where)[0]
        text = encoder.render(messages, where=where)
        rows.append(
            prompt_columns(text, pictures, (), encoder, processor, config.data, where=where)
        )
    prompts, num_samples = (
        DataProto.from_single_dict(collate_fn(rows)),
        config.actor_rollout_ref.rollout.n,
    )
    prompts.non_tensor_batch["uid"] = object_array(str(row) for row in range(len(rows)))
    prompts.meta_info |= {
        "global_steps": 0,
        "do_sample": config.actor_rollout_ref.rollout.do_sample,
    }
    with frozen_workers(config, tokenizer, Role.ActorRollout) as (policy,):
        responses = policy.generate_sequences(repeat_prompts(prompts, num_samples))
    return texts_of(tokenizer, responses, num_samples)


def texts_of(tokenizer: Any, responses: DataProto, num_samples: int) -> list[list[str]]:
    """What the policy itself wrote, `num_samples` texts for each prompt."""
    rows = zip(responses.batch["responses"], responses.batch["response_mask"].bool(), strict=True)
    texts = [policy_text(tokenizer, tokens.tolist(), mask.tolist()) for tokens, mask in rows]
    return [texts[start : start + num_samples] for start in range(0, len(texts), num_samples)]


RESPONSES = "responses.jsonl"
_OUTPUT = "--output"
AT_A_TIME = 256  # prompts whose responses are on the disk, or lost, together
_READ = ("data.", "actor_rollout_ref.")  # beginnings of the keys that responses depend on


def answer_files(config: Config, output: Path) -> int:
    """Write the rows of `data.val_files` with a column `responses`, `rollout.n` texts for each row, as Parquet.

    The sampling is that of `actor_rollout_ref.rollout`, the prompts are in `data.prompt_key`, and `data.val_batch_size`
    of them, or `AT_A_TIME`, are in work at a time. The same call after one that was cut short goes on where it was.

    Returns the number of rows.
    Raises DataError: a prompt is wrong or too long, not every row would get responses, what is there of the output was
        begun with other settings, or it cannot be written.
    """
    data, tokenizer, num_samples = (
        config.data,
        build_tokenizer(config),
        config.actor_rollout_ref.rollout.n,
    )
    where = "data.val_files"
    tables = [
        read_table(file) for file in resolve_files(data.val_files, data.cache_dir, where=where)
    ]
    options: dict[str, Any] = {
        "max_samples": data.val_max_samples,
        "required_columns": (data.prompt_key,),
    }
    options["context"] = prompt_context(config, tokenizer)
    rows = RLHFDataset(
        data.val_files, tokenizer, data, build_processor(config), is_train=False, **options
    )
    if len(rows) != (num_rows := sum(map(len, tables))):
        got = f"{len(rows)} of {num_rows} rows, by data.filter_overlong_prompts or data.val_max_samples"
        fix = "Leave both out: a file of fewer rows takes a part, data.truncation=left shortens long prompts."
        raise DataError(where, got=got, expected="all of them", fix=fix)
    output = output.expanduser()
    with unfinished(output, config) as part:
        texts = part.texts
        if len(texts) < num_rows:
            size, left = data.val_batch_size or AT_A_TIME, range(len(texts), num_rows)
            loader = create_dataloader(rows, data, batch_size=size, sampler=left, drop_last=False)
            with (
                frozen_workers(config, tokenizer, Role.ActorRollout) as (policy,),
                Progress(num_rows, initial=len(texts), description="prompts") as progress,
            ):
                for columns in watched(loader, "a batch of prompts"):
                    prompts = DataProto.from_single_dict(columns)
                    assign_row_uids(prompts, rows, len(texts))
                    prompts.meta_info |= {
                        "global_steps": 0,
                        "do_sample": config.actor_rollout_ref.rollout.do_sample,
                    }
                    responses = generate_responses(policy, config, prompts, num_samples)
                    part.add(texts_of(tokenizer, responses, num_samples))
                    tokens = responses.batch["response_mask"].sum(-1).float().mean().item()
                    progress.update(len(texts), {"tokens a response": f"{tokens:.0f}"})
        try:
            whole = pa.concat_tables(
                [table.to_arrow() for table in tables], promote_options="permissive"
            )
        except pa.ArrowException as error:
            fix = "Give the files columns of one type each, or respond to one file at a time."
            raise DataError(
                where, got=str(error), expected="rows that one Parquet file can hold", fix=fix
            ) from error
        whole = whole.drop_columns([name for name in whole.column_names if name == "responses"])
        with written_aside(output, where=_OUTPUT) as draft:
            pq.write_table(
                whole.append_column("responses", pa.array(texts, pa.list_(pa.string()))), draft
            )
    shutil.rmtree(part.folder)
    return num_rows


class Unfinished:
    """The responses that are there of an output: texts of each prompt, in the order of the rows.

    Raises DataError: the disk refuses, or the file that has them is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.texts = folder, list[list[str]]()
        path = folder / RESPONSES
        with _on_disk(path):
            self._file = path.open("a+b")
            self._file.seek(0)
            lines = self._file.read().split(b"\n")
            # What a call was writing when it ended has no end.
            self._file.truncate(self._file.tell() - len(lines.pop()))
        for number, line in enumerate(lines, start=1):
            try:
                self.texts += json.loads(line)
            except ValueError as error:
                fix = f"Delete {folder} to begin anew."
                expected = "the texts of a batch"
                raise DataError(
                    f"{path} line {number}", got=str(error), expected=expected, fix=fix
                ) from error

    def add(self, texts: list[list[str]]) -> None:
        """The texts of each prompt of the next batch; they are on the disk when this returns."""
        with _on_disk(self.folder):
            self._file.write(f"{json.dumps(texts)}\n".encode())
            self._file.flush()
            os.fsync(self._file.fileno())
        self.texts += texts

    def close(self) -> None:
        self._file.close()


@contextmanager
def unfinished(output: Path, config: Config) -> Iterator[Unfinished]:
    """What there is of an output, which no other process writes to meanwhile.
    Raises DataError: it was begun with other settings, or the disk refuses; CheckpointError: another process writes."""
    folder, now = output.with_name(f"{output.name}.part"), _settings(config)
    file = folder / CONFIGURATION
    with run_lock(folder, _OUTPUT):
        before, responses = Settings.read(file, config.task), folder / RESPONSES
        changes = (
            before.changes(now) if before else [f"{file}: it cannot be read"] * responses.exists()
        )
        if changes := [
            one for one in changes if one.startswith((*_READ, str(file))) or one.endswith(CONTENT)
        ]:
            fix = f"Give the settings that it was begun with, or delete {folder} to begin anew. What differs:"
            got = f"{folder}, which was begun with other settings"
            raise DataError(_OUTPUT, got=got, expected="the same", fix="\n  ".join([fix, *changes]))
        if before is None:
            digests = "".join(f"# {digest}  {name}\n" for name, digest in now.files.items())
            with written_aside(file, where=_OUTPUT) as draft:
                draft.write_text(
                    f"{show(config)}{digests}", encoding="utf-8", errors="backslashreplace"
                )
        with closing(Unfinished(folder)) as part:
            if part.texts:
                print(
                    f"{folder}: {len(part.texts)} prompts have their responses; the others follow.",
                    flush=True,
                )
            yield part


@contextmanager
def _on_disk(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        fix = "Free some space, or change the permissions; the same call goes on."
        got, expected = f"{path} ({error.strerror or error})", "a place that can be written"
        raise DataError(_OUTPUT, got=got, expected=expected, fix=fix) from error


def _settings(config: Config) -> Settings:
    """Those of a call; a model's files are known by their sizes and times."""
    now, folder = Settings.of(config), Path(config.actor_rollout_ref.model.path).expanduser()
    files = [(file.name, file.stat()) for file in sorted(folder.glob("*")) if file.is_file()]
    digest = sha256(
        repr([(name, found.st_size, found.st_mtime_ns) for name, found in files]).encode()
    ).hexdigest()
    return replace(now, files=now.files | {str(folder): digest})


def score_file(
    config: Config,
    path: str,
    response_key: str = "responses",
    reward_model_key: str = "reward_model",
) -> Grades:
    """Grades of the responses that the rows of a file have, graded as in validation, without a model.
    Returns `test_score/SOURCE`, the mean over rows of the mean score of a row, and the metrics of validation.

    Args:
        config: its reward manager and score function grade; `data.reward_fn_key` names the column of the data source.
        path: a parquet, json or jsonl file.
        response_key: column with the responses of a row, a text or a list of texts.
        reward_model_key: column with the `ground_truth`.

    Raises:
        ConfigError: a reward manager that needs a model or a batch of tokens.
        DataError, RewardError: the file is wrong, or too many responses could not be graded.
    """
    (file, *more) = resolve_files(path, config.data.cache_dir, where="responses")
    table, source_key = read_table(file), config.data.reward_fn_key
    missing = [
        key for key in (source_key, response_key, reward_model_key) if key not in table.columns
    ]
    if more or missing:
        got = f"{1 + len(more)} files" if more else f"the columns {', '.join(table.columns)}"
        fix = "The columns are named by data.reward_fn_key, --response-key and --reward-model-key."
        expected = "one" if more else f"{' and '.join(map(repr, missing))} among them"
        raise DataError(
            str(path), got=got, expected=expected, fix="Grade them one by one." if more else fix
        )
    samples, numbers = _samples_of(table, source_key, response_key, reward_model_key)
    with closing(load_reward_manager(config, None)) as manager:
        reads_texts = (
            isinstance(manager, SampleManager) and type(manager).shaped is SampleManager.shaped
        )
        if config.reward_model.enable or not reads_texts:
            name = (
                "reward_model.enable"
                if config.reward_model.enable
                else "reward_model.reward_manager"
            )
            got, expected = "a grader that reads tokens", "one that grades a text"
            fix = "Name a score function: custom_reward_function.path."
            raise ConfigError(name, got=got, expected=expected, fix=fix)
        outcomes = manager.grade_all(samples)
    known = [
        {"data_source": row["data_source"], "uid": own}
        for row, own in zip(samples.rows, numbers, strict=True)
    ]
    facts = [
        {**one.extra, **own, "score": one.score} for one, own in zip(outcomes, known, strict=True)
    ]
    grades = Grades.of(facts)
    named = ((name.partition("/")[2].rpartition("/reward/mean@"), name) for name in grades.metrics)
    sources = {f"test_score/{source}": name for (source, found, _), name in named if found}
    metrics = {short: grades.metrics[name] for short, name in sources.items()} | grades.metrics
    intervals = {
        short: grades.intervals[name] for short, name in sources.items()
    } | grades.intervals
    return Grades(metrics, intervals, facts)


def _samples_of(
    table: RowTable, source: str, responses: str, truths: str
) -> tuple[Samples, list[int]]:
    """The responses in the rows of a file, and the number of the row of each."""
    rows, places, numbers = [], [], []
    for number in range(len(table)):
        row, place = table[number], f"{table.path} row {number}"
        texts = [row[responses]] if isinstance(row[responses], str) else row[responses]
        if (
            not isinstance(texts, list)
            or not texts
            or not all(isinstance(text, str) for text in texts)
        ):
            got, expected = shortened(row[responses]), "a text, or a list of texts"
            raise DataError(f"{place}, column {responses!r}", got=got, expected=expected)
        known = {
            "data_source": row[source],
            "ground_truth": ground_truth(row[truths], place, truths),
        }
        rows += [
            {**known, "solution_str": text, "extra_info": row.get("extra_info") or {}}
            for text in texts
        ]
        places += [place] * len(texts)
        numbers += [number] * len(texts)
    return Samples(rows, torch.zeros(len(rows), dtype=torch.int64), 0, places), numbers
