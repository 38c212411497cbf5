# SPDX-License-Identifier: Apache-2.0
"""Uses a policy without training: generates responses and grades them, also from and to files.

    OUTPUT         the rows of a file of prompts with a column `responses`; complete, or not there
    OUTPUT.part/   exists until OUTPUT is complete
      responses.jsonl   one line per batch, with the texts of each prompt
      config.yaml       the settings that they were generated with

Responses are generated in the order of the rows, and what is sampled for a prompt depends only on
its row. So after a call that was killed, the next one continues with the batch that was lost, and
writes the same file as an uninterrupted call.
"""

import json
import os
import shutil
import sys
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
from quadriga.data.episodes import with_episodes
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
from quadriga.rewards.by_name import ROW
from quadriga.rewards.registry import load_reward_manager
from quadriga.rewards.samples import SampleManager, Samples, ground_truth, policy_text
from quadriga.trainer.build import build_reward, build_tokenizer, build_val_loader, frozen_workers
from quadriga.trainer.prompts import assign_row_uids
from quadriga.trainer.responses import ModelReward, generate_responses, repeat_prompts
from quadriga.trainer.roles import Role
from quadriga.trainer.rollout_rows import rollout_numbers
from quadriga.trainer.run_lock import run_lock
from quadriga.trainer.settings import CONFIGURATION, CONTENT, RunSettings
from quadriga.trainer.validate import Validator, interval, means, sample_values
from quadriga.workers.generation import build_processor, num_positions, prompt_context

RESPONSES = "responses.jsonl"
AT_A_TIME = 256  # prompts per batch; a killed call loses the responses of one batch
_OUTPUT = "--output"
_RESPONSE_KEYS = ("data.", "actor_rollout_ref.")  # prefixes of the keys that responses depend on


class Grades(NamedTuple):
    """Grades of responses.

    Attributes:
        metrics: values by name.
        intervals: 95 % confidence intervals of the metrics that are means of scores, by name.
        rows: all graded rows.
    """

    metrics: dict[str, float]
    intervals: dict[str, tuple[float, float]]
    rows: list[dict[str, Any]]

    @classmethod
    def of(cls, rows: list[dict[str, Any]]) -> "Grades":
        """Compute the metrics of graded rows, which have the columns of `sample_values`."""
        intervals = {}
        values = sample_values(rows)
        for name, values_of_prompts in values.items():
            # Standard deviations are not means of scores.
            if "/std" not in name:
                intervals[name] = interval(values_of_prompts)
        return cls(means(values), intervals, rows)


def evaluate(config: Config) -> Grades:
    """Grade `actor_rollout_ref.model.path` on `data.val_files`.

    If `trainer.validation_data_dir` is set, all rows are also written there.

    Raises:
        DataError: there are no validation files.
    """
    config = with_episodes(config)
    if not config.data.val_files:
        raise DataError(
            "data.val_files",
            got="nothing",
            expected="the prompts to answer",
            fix="Set data.val_files.",
        )
    tokenizer = build_tokenizer(config)
    loader = build_val_loader(config, tokenizer, prompt_context(config, tokenizer))

    roles = [Role.ActorRollout]
    if config.reward_model.enable:
        roles.append(Role.RewardModel)
    with (
        closing(build_reward(config, tokenizer, loader)) as grader,
        frozen_workers(config, tokenizer, *roles) as (policy, *reward_models),
    ):
        reward = ModelReward(reward_models[0], grader) if reward_models else grader
        # Step 0: the policy is not trained.
        rows, error_counts = Validator(config, tokenizer, policy, reward, loader).grade_all(0)
    grades = Grades.of(rows)
    return grades._replace(metrics=grades.metrics | error_counts)


def answer(
    config: Config,
    chats: Sequence[list[dict[str, str]]],
    images: Sequence[Sequence[str]] | None = None,
) -> list[list[str]]:
    """Generate `rollout.n` responses to each chat.

    Args:
        config: the resolved configuration; `actor_rollout_ref.rollout` has the sampling options.
        chats: lists of messages with `role` and `content`.
        images: image files of each chat, in the order of its `<image>`s. None: there are none.

    Returns:
        The texts of the responses to each chat.

    Raises:
        DataError: a prompt is longer than `data.max_prompt_length`, or its images are wrong.
    """
    tokenizer = build_tokenizer(config)
    processor = build_processor(config)
    encoder = ChatEncoder(tokenizer, config.data.apply_chat_template_kwargs)
    images = images or [()] * len(chats)

    # The rows of a data set, as `RLHFDataset` would make them of these chats.
    rows = []
    for number, (chat, files) in enumerate(zip(chats, images, strict=True)):
        where = f"prompt {number}"
        if processor is None and files:
            raise DataError(
                where,
                got="images, for a model that reads text",
                expected="text",
                fix="Take a vision-language model, or leave out the images.",
            )
        pictures = []
        for i, file in enumerate(files):
            pictures.append(read_picture(file, folder=Path(), where=f"{where}, image {i}"))
        # A processor expects messages whose content is a list of texts and images.
        messages = chat
        if processor is not None:
            messages, _, _ = with_parts(chat, pictures, where=where)
        text = encoder.render(messages, where=where)
        rows.append(
            prompt_columns(text, pictures, (), encoder, processor, config.data, where=where)
        )

    longest_prompt = max(int(row["attention_mask"].sum()) for row in rows)
    config = with_room(config, longest_prompt)
    rollout = config.actor_rollout_ref.rollout
    prompts = DataProto.from_single_dict(collate_fn(rows))
    prompts.non_tensor_batch["uid"] = object_array(str(row) for row in range(len(rows)))
    prompts.meta_info["global_steps"] = 0
    prompts.meta_info["do_sample"] = rollout.do_sample

    with frozen_workers(config, tokenizer, Role.ActorRollout) as (policy,):
        responses = policy.generate_sequences(repeat_prompts(prompts, rollout.n))
    return texts_of(tokenizer, responses, rollout.n)


def with_room(config: Config, num_prompt_tokens: int) -> Config:
    """Limit the length of responses so that the longest prompt and its response fit in the model.

    The default of `data.max_response_length` is lowered to what fits, and the length is printed. A
    value that the user has set is not changed: if it does not fit, it is refused.

    Args:
        config: the resolved configuration.
        num_prompt_tokens: tokens of the longest prompt.

    Raises:
        ConfigError: the user's value does not fit, or the prompt leaves no room for a response.
    """
    data = config.data
    context = num_positions(config)
    is_set_by_user = "max_response_length" in data.model_fields_set
    # Tokens of the longest response that fits; without a known context, all that are wanted.
    room = data.max_response_length
    if context is not None:
        room = min(room, context - num_prompt_tokens)

    if room < 1 or (is_set_by_user and room < data.max_response_length):
        fix = "Lower it, or leave it out: then it is what fits."
        if room < 1:
            fix = "Shorten the prompt."
        raise ConfigError(
            "data.max_response_length (--max-tokens)",
            got=f"{data.max_response_length} tokens behind a prompt of {num_prompt_tokens}",
            expected=f"at most {max(room, 0)}: the model has {context} positions",
            fix=fix,
        )
    if not is_set_by_user:
        print(f"responses: at most {room} tokens (--max-tokens)", file=sys.stderr)
    if room == data.max_response_length:
        return config
    data = data.model_copy(update={"max_response_length": room})
    return config.model_copy(update={"data": data})


def texts_of(tokenizer: Any, responses: DataProto, num_samples: int) -> list[list[str]]:
    """Decode the tokens that the policy itself has generated.

    Args:
        tokenizer: the tokenizer of the policy.
        responses: rows with `responses` and `response_mask` [B, T], the rollouts of one prompt
            after those of another.
        num_samples: rollouts of each prompt.

    Returns:
        The `num_samples` texts of each prompt. A rollout with several rows has the text of its
        first one.
    """
    masks = responses.batch["response_mask"].bool()
    rows = zip(rollout_numbers(responses), responses.batch["responses"], masks, strict=True)
    texts = []
    for rollout, tokens, mask in rows:
        # Rollouts are numbered in order, so a number without a text is that of a new rollout.
        if rollout == len(texts):
            texts.append(policy_text(tokenizer, tokens.tolist(), mask.tolist()))
    return [texts[start : start + num_samples] for start in range(0, len(texts), num_samples)]


# Responses in a file


def answer_files(config: Config, output: Path) -> int:
    """Write the rows of `data.val_files` and responses to them to a Parquet file.

    The column `responses` has `rollout.n` texts per row, sampled with the options of
    `actor_rollout_ref.rollout`. Prompts are in the column `data.prompt_key`; a batch has
    `data.val_batch_size` of them, or `AT_A_TIME`. A call after an interrupted one continues it.

    Args:
        config: the resolved configuration.
        output: the file to write.

    Returns:
        The number of rows.

    Raises:
        DataError: a prompt is wrong or too long, not every row would get responses, an interrupted
            call had other settings, or the output cannot be written.
        CheckpointError: another process writes to the output.
    """
    data = config.data
    tokenizer = build_tokenizer(config)
    files = resolve_files(data.val_files, data.cache_dir, where="data.val_files")
    # The tables for the output, with all columns. The data set reads the same files for prompts.
    tables = [read_table(file) for file in files]
    rows = RLHFDataset(
        data.val_files,
        tokenizer,
        data,
        build_processor(config),
        is_train=False,
        max_samples=data.val_max_samples,
        required_columns=(data.prompt_key,),
        context=prompt_context(config, tokenizer),
    )
    num_rows = sum(map(len, tables))
    if len(rows) != num_rows:
        raise DataError(
            "data.val_files",
            got=f"{len(rows)} of {num_rows} rows, by data.filter_overlong_prompts or "
            "data.val_max_samples",
            expected="all of them",
            fix="Leave both out. For a part of the rows, give a file that has only these; for long "
            "prompts, set data.truncation=left, which shortens them.",
        )
    longest_prompt = data.max_prompt_length
    if rows.longest_prompt is not None:
        longest_prompt = min(rows.longest_prompt, longest_prompt)
    config = with_room(config, longest_prompt)
    output = output.expanduser()
    with open_journal(output, config) as journal:
        if len(journal.texts) < num_rows:
            _answer_rest(config, tokenizer, rows, journal)
        _write_output(output, tables, journal.texts)
    # Deleted only once the output is complete: if this call is killed before, the next call finds
    # the responses in the journal.
    shutil.rmtree(journal.folder)
    return num_rows


class ResponseJournal:
    """Journal on disk of the responses to an unfinished output.

    Args:
        folder: folder of the journal, which exists.

    Attributes:
        texts: responses to each prompt so far, in the order of the rows.

    Raises:
        DataError: the journal cannot be read or written, or is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.texts: list[list[str]] = []
        path = folder / RESPONSES
        with _disk_errors_as_data_errors(path):
            self._file = path.open("a+b")
            self._file.seek(0)
            *lines, incomplete_line = self._file.read().split(b"\n")
            # If the last call was killed while it was writing, the file ends with part of a line.
            # Otherwise this part is empty.
            self._file.truncate(self._file.tell() - len(incomplete_line))
        for number, line in enumerate(lines, start=1):
            try:
                self.texts += json.loads(line)
            except ValueError as error:
                raise DataError(
                    f"{path} line {number}",
                    got=str(error),
                    expected="the texts of a batch",
                    fix=f"Delete {folder} to begin anew.",
                ) from error

    def add(self, texts: list[list[str]]) -> None:
        """Add the responses to each prompt of a batch; they are on disk when this returns."""
        with _disk_errors_as_data_errors(self.folder):
            self._file.write(f"{json.dumps(texts)}\n".encode())
            self._file.flush()
            os.fsync(self._file.fileno())
        self.texts += texts

    def close(self) -> None:
        """Close the file, which stays on disk."""
        self._file.close()


@contextmanager
def open_journal(output: Path, config: Config) -> Iterator[ResponseJournal]:
    """Context manager: open the journal of an output, locked against other processes.

    Args:
        output: the file that will have all responses in the end.
        config: the resolved configuration.

    Raises:
        DataError: the journal was begun with other settings, or cannot be read or written.
        CheckpointError: another process writes to the output.
    """
    folder = output.with_name(f"{output.name}.part")
    # Computed before the lock is taken, because checksums of large files take long.
    settings = _settings_with_model(config)
    with run_lock(folder, _OUTPUT):
        _keep_or_compare_settings(folder, config, settings)
        with closing(ResponseJournal(folder)) as journal:
            if journal.texts:
                print(
                    f"{folder}: {len(journal.texts)} prompts have their responses; the others follow.",
                    flush=True,
                )
            yield journal


def _keep_or_compare_settings(folder: Path, config: Config, settings: RunSettings) -> None:
    """Write the settings of a new journal, or compare them with the settings it was begun with.

    Args:
        folder: folder of the journal.
        config: the resolved configuration, which is written.
        settings: the keys of `config` and digests of the files that it names, which are compared.

    Raises:
        DataError: the journal was begun with other values of keys that responses depend on, or with
            other files; or its settings cannot be read.
    """
    file = folder / CONFIGURATION
    # None for a new journal, or if the file cannot be read.
    settings_before = RunSettings.read(file, config.task)
    changes = []
    if settings_before is not None:
        # A change begins with the key, or ends with `CONTENT` if it is that of a file.
        for change in settings_before.changes(settings):
            if change.startswith(_RESPONSE_KEYS) or change.endswith(CONTENT):
                changes.append(change)
    elif (folder / RESPONSES).exists():
        changes.append(f"{file}: it cannot be read")
    if changes:
        advice = f"Give the settings that it was begun with, or delete {folder} to begin anew."
        raise DataError(
            _OUTPUT,
            got=f"{folder}, which was begun with other settings",
            expected="the same",
            fix="\n  ".join([f"{advice} What differs:", *changes]),
        )
    if settings_before is None:
        text = show(config) + settings.digest_lines()
        with written_aside(file, where=_OUTPUT) as draft:
            draft.write_text(text, encoding="utf-8", errors="backslashreplace")


def _answer_rest(
    config: Config, tokenizer: Any, rows: RLHFDataset, journal: ResponseJournal
) -> None:
    """Generate responses to the rows that have none yet, and add them to the journal."""
    rollout = config.actor_rollout_ref.rollout
    num_before = len(journal.texts)
    loader = create_dataloader(
        rows,
        config.data,
        batch_size=config.data.val_batch_size or AT_A_TIME,
        sampler=range(num_before, len(rows)),
        drop_last=False,
    )
    with (
        frozen_workers(config, tokenizer, Role.ActorRollout) as (policy,),
        Progress(len(rows), initial=num_before, description="prompts") as progress,
    ):
        for columns in watched(loader, "a batch of prompts"):
            prompts = DataProto.from_single_dict(columns)
            # Seeds depend on the uids, so the responses are those of an uninterrupted call.
            assign_row_uids(prompts, rows, len(journal.texts))
            prompts.meta_info["global_steps"] = 0
            prompts.meta_info["do_sample"] = rollout.do_sample
            responses = generate_responses(policy, config, prompts, rollout.n)
            journal.add(texts_of(tokenizer, responses, rollout.n))
            num_tokens = responses.batch["response_mask"].sum(-1).float().mean().item()
            progress.update(len(journal.texts), {"tokens a response": f"{num_tokens:.0f}"})


def _write_output(output: Path, tables: Sequence[RowTable], texts: list[list[str]]) -> None:
    """Write the rows of some tables with their responses as the column `responses`.

    A column of that name in the tables is replaced.
    """
    try:
        table = pa.concat_tables(
            [table.to_arrow() for table in tables], promote_options="permissive"
        )
    except pa.ArrowException as error:
        raise DataError(
            "data.val_files",
            got=str(error),
            expected="rows that one Parquet file can hold",
            fix="Give the files columns of one type each, or respond to one file at a time.",
        ) from error
    table = table.drop_columns([name for name in table.column_names if name == "responses"])
    table = table.append_column("responses", pa.array(texts, pa.list_(pa.string())))
    with written_aside(output, where=_OUTPUT) as draft:
        pq.write_table(table, draft)


@contextmanager
def _disk_errors_as_data_errors(path: Path) -> Iterator[None]:
    """Context manager: turn an OSError into a DataError about `path`."""
    try:
        yield
    except OSError as error:
        raise DataError(
            _OUTPUT,
            got=f"{path} ({error.strerror or error})",
            expected="a place that can be written",
            fix="Free some space, or change the permissions; the same call goes on.",
        ) from error


def _settings_with_model(config: Config) -> RunSettings:
    """Settings of a configuration, including a digest that changes with the model's files.

    It is a digest of their names, sizes and times, because reading a model would take too long.
    """
    settings = RunSettings.of(config)
    folder = Path(config.actor_rollout_ref.model.path).expanduser()
    versions = []
    for file in sorted(folder.glob("*")):
        if file.is_file():
            status = file.stat()
            versions.append((file.name, status.st_size, status.st_mtime_ns))
    digest = sha256(repr(versions).encode()).hexdigest()
    return replace(settings, files=settings.files | {str(folder): digest})


# Grading of a file


def score_file(
    config: Config,
    path: str,
    response_key: str = "responses",
    reward_model_key: str = "reward_model",
) -> Grades:
    """Grade the responses in the rows of a file as in validation, without a model.

    Args:
        config: the resolved configuration, with the reward manager and score function;
            `data.reward_fn_key` names the column of the data source.
        path: a parquet, json or jsonl file.
        response_key: column with the responses of a row, a text or a list of texts.
        reward_model_key: column with the `ground_truth`.

    Returns:
        The metrics of validation, and for each data source `test_score/SOURCE`: the mean over rows
        of the mean score of a row.

    Raises:
        ConfigError: the reward manager needs a model or a batch of tokens.
        DataError: the file cannot be read, or lacks a column, or a value is not what its column
            must have.
        RewardError: too many responses could not be graded.
    """
    source_key = config.data.reward_fn_key
    table = _responses_table(config, path, (source_key, response_key, reward_model_key))
    with closing(load_reward_manager(config, None)) as manager:
        # The key that asks for more than the text of a response; "" if none does.
        refused_key = ""
        if config.reward_model.enable:
            refused_key = "reward_model.enable"
        # A manager that overrides `shaped` reads more of a response than its text.
        elif getattr(type(manager), "shaped", None) is not SampleManager.shaped:
            refused_key = "reward_model.reward_manager"
        if refused_key:
            raise ConfigError(
                refused_key,
                got="a grader that reads tokens",
                expected="one that grades a text",
                fix="Name a score function: custom_reward_function.path.",
            )
        samples, row_numbers = _samples_of(table, source_key, response_key, reward_model_key)
        if manager.reads_rows:
            for sample, row_number in zip(samples.rows, row_numbers, strict=True):
                sample["extra_info"] = {**sample["extra_info"], ROW: table[row_number]}
        outcomes = manager.grade_all(samples)

    graded_rows = []
    for sample, row_number, outcome in zip(samples.rows, row_numbers, outcomes, strict=True):
        graded_rows.append(
            {
                **outcome.extra,
                "data_source": sample["data_source"],
                "uid": row_number,
                "score": outcome.score,
            }
        )
    grades = Grades.of(graded_rows)

    # Short names for the mean score of each data source.
    metrics = {}
    intervals = {}
    for name, value in grades.metrics.items():
        # "val-core/SOURCE/reward/mean@N"
        source, separator, _ = name.partition("/")[2].rpartition("/reward/mean@")
        if separator:
            metrics[f"test_score/{source}"] = value
            intervals[f"test_score/{source}"] = grades.intervals[name]
    return Grades(metrics | grades.metrics, intervals | grades.intervals, graded_rows)


def _responses_table(config: Config, path: str, columns: Sequence[str]) -> RowTable:
    """Read the file of a path, and check that it is a single one with the given columns."""
    file, *further_files = resolve_files(path, config.data.cache_dir, where="responses")
    table = read_table(file)
    if further_files:
        raise DataError(
            str(path),
            got=f"{1 + len(further_files)} files",
            expected="one",
            fix="Grade them one by one.",
        )
    missing_columns = [column for column in columns if column not in table.columns]
    if missing_columns:
        raise DataError(
            str(path),
            got=f"the columns {', '.join(table.columns)}",
            expected=f"{' and '.join(map(repr, missing_columns))} among them",
            fix="The columns are named by data.reward_fn_key, --response-key and "
            "--reward-model-key.",
        )
    return table


def _samples_of(
    table: RowTable, source: str, responses: str, truths: str
) -> tuple[Samples, list[int]]:
    """Read the responses in the rows of a file.

    Args:
        table: the rows.
        source, responses, truths: names of the columns.

    Returns:
        A sample for each response, and the row number of each.
    """
    samples = []
    places = []
    row_numbers = []
    for row_number in range(len(table)):
        row = table[row_number]
        place = f"{table.path} row {row_number}"
        texts = row[responses]
        if isinstance(texts, str):
            texts = [texts]
        is_list = isinstance(texts, list) and len(texts) > 0
        if not is_list or not all(isinstance(text, str) for text in texts):
            raise DataError(
                f"{place}, column {responses!r}",
                got=shortened(row[responses]),
                expected="a text, or a list of texts",
            )
        truth = ground_truth(row[truths], place, truths)

        for text in texts:
            samples.append(
                {
                    "data_source": row[source],
                    "ground_truth": truth,
                    "solution_str": text,
                    "extra_info": row.get("extra_info") or {},
                }
            )
            places.append(place)
            row_numbers.append(row_number)
    # Without a tokenizer the numbers of tokens are unknown: they are 0, and so is T.
    lengths = torch.zeros(len(samples), dtype=torch.int64)
    return Samples(samples, lengths, 0, places), row_numbers
