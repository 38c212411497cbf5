# SPDX-License-Identifier: Apache-2.0
"""What the data sets of prompts, conversations and pairs share: files, a chat template, and a state to resume from."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from quadriga.data.files import FileNames, RowTable, read_table, resolve_files
from quadriga.data.tokenizing import ChatEncoder, check_tokenizer
from quadriga.errors import DataError

_LISTED = 20


def tell_bad_rows(key: str, errors: Sequence[DataError]) -> None:
    """Print how many rows are left out, and what is wrong with the first of them."""
    listed = [f"\n  {error}" for error in errors[:_LISTED]]
    if rest := errors[_LISTED:]:
        listed.append(f"\n  and {len(rest)} more: {', '.join(error.where for error in rest)}")
    print(
        f"{key}: {len(errors)} bad rows are left out (data.on_bad_row=skip):{''.join(listed)}",
        flush=True,
    )


class FileDataset(Dataset, ABC):
    """Rows of parquet, json and jsonl files, read when the data set is made.
    `data_files`: a path, a glob, a URL, or a list of these.
    `tokenizer`: renders and tokenizes; gets a pad token if it has none.
    `config`: the section `data`.
    `is_train`: decides whether errors name `data.train_files` or `data.val_files`.
    Raises DataError: a file that is missing, empty or damaged, or a tokenizer without a chat template."""

    def __init__(
        self,
        data_files: FileNames,
        tokenizer: PreTrainedTokenizerBase,
        config: Any,
        *,
        is_train: bool,
    ) -> None:
        self.config, self.tokenizer = config, tokenizer
        self._key = "data.train_files" if is_train else "data.val_files"
        self.encoder = ChatEncoder(tokenizer, config.apply_chat_template_kwargs)
        has_template = "chat_template" in self.encoder.template_kwargs
        check_tokenizer(tokenizer, tokenizer.name_or_path, has_template=has_template)
        self.bad_rows: list[DataError] = []
        """What is wrong with the rows that are left out by `data.on_bad_row=skip`."""
        listed = [data_files] if isinstance(data_files, str | Path) else list(data_files) or [""]
        entries = [resolve_files(one, config.cache_dir, where=self._key) for one in listed]
        # The entry of each file, for a mixture of entries.
        self._entries = [number for number, files in enumerate(entries) for _ in files]
        skipped = self.bad_rows if config.on_bad_row == "skip" else None
        self._tables = [self.read(file, skipped) for files in entries for file in files]

    def read(self, file: Path, bad_lines: list[DataError] | None) -> RowTable:
        """The rows of a file; what is wrong with lines of JSON is added to a list, or raised where there is none."""
        return read_table(file, self.config.cache_dir, bad_lines, self.config.chat_columns)

    @abstractmethod
    def __len__(self) -> int:
        """Number of rows."""

    @property
    @abstractmethod
    def digest(self) -> str:
        """Hash of what the rows are made from, in their order."""

    def state_dict(self) -> dict[str, Any]:
        """Which rows this data set stands for; a loader keeps it with its position."""
        return {"num_rows": len(self), "rows": self.digest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Refuse (DataError) to resume at a position in other rows than these: the order would be another."""
        if state != self.state_dict():
            got = f"{len(self)} rows that are not the {state['num_rows']} rows of the checkpoint"
            expected = "the data that the run began with, read by the same settings"
            anew = "another trainer.experiment_name, and actor_rollout_ref.model.path=RUN/global_step_N"
            fix = f"Restore the files and data settings. Or begin a new run on these rows from the weights: {anew}."
            raise DataError(self._key, got=got, expected=expected, fix=fix)
