# SPDX-License-Identifier: Apache-2.0
"""Base class of data sets of files: reads them, checks the tokenizer, has a state to resume from."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from quadriga.data.files import FileNames, RowTable, read_table, resolve_files
from quadriga.data.tokenizing import ChatEncoder, check_tokenizer
from quadriga.errors import DataError

_MAX_LISTED = 20
"""Bad rows whose errors are printed in full; of further rows only the places are listed."""


def print_bad_rows(key: str, errors: Sequence[DataError]) -> None:
    """Print how many rows are left out, and the errors of the first `_MAX_LISTED` ones.

    Args:
        key: configuration key of the files.
        errors: the error of each bad row.
    """
    message = f"{key}: {len(errors)} bad rows are left out (data.on_bad_row=skip):"
    for error in errors[:_MAX_LISTED]:
        message += f"\n  {error}"
    unlisted = errors[_MAX_LISTED:]
    if unlisted:
        places = ", ".join(error.where for error in unlisted)
        message += f"\n  and {len(unlisted)} more: {places}"
    print(message, flush=True)


class FileDataset(Dataset, ABC):
    """Rows of parquet, json and jsonl files. The files are read when the data set is made.

    Args:
        data_files: a path, a glob, a URL, or a list of these.
        tokenizer: renders and tokenizes; gets a pad token if it has none.
        config: the section `data`.
        is_train: whether errors name `data.train_files`, otherwise `data.val_files`.

    Raises:
        DataError: a file is missing, empty or damaged, or the tokenizer has no chat template.
    """

    def __init__(
        self,
        data_files: FileNames,
        tokenizer: PreTrainedTokenizerBase,
        config: Any,
        *,
        is_train: bool,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self._key = "data.train_files" if is_train else "data.val_files"

        self.encoder = ChatEncoder(tokenizer, config.apply_chat_template_kwargs)
        has_template = "chat_template" in self.encoder.template_kwargs
        # A wrong tokenizer is reported before the files are read, which may take long.
        check_tokenizer(tokenizer, tokenizer.name_or_path, has_template=has_template)

        self.bad_rows: list[DataError] = []
        """Errors of the rows that are left out by `data.on_bad_row=skip`."""
        # None: the first bad line raises its error.
        bad_lines = self.bad_rows if config.on_bad_row == "skip" else None
        self._tables: list[RowTable] = []
        # For each table, the number of its entry in `data_files`. One entry may be several files,
        # and a mixture draws from entries.
        self._entries: list[int] = []
        if isinstance(data_files, str | Path):
            data_files = [data_files]
        # An empty list becomes one empty name, for which `resolve_files` raises an error.
        names = list(data_files) or [""]
        # All names are resolved before the first file is read, which may take long: a wrong name is
        # reported early.
        files_by_entry = [resolve_files(name, config.cache_dir, where=self._key) for name in names]
        for number, files in enumerate(files_by_entry):
            for file in files:
                self._tables.append(self.read(file, bad_lines))
                self._entries.append(number)

    def read(self, file: Path, bad_lines: list[DataError] | None) -> RowTable:
        """Read the rows of a file.

        Args:
            file: a local file.
            bad_lines: gets an error for each bad line of JSON. None: the first error is raised.

        Returns:
            The rows of the file without the bad lines.

        Raises:
            DataError: the file is damaged or has no rows.
        """
        return read_table(file, self.config.cache_dir, bad_lines, self.config.chat_columns)

    @abstractmethod
    def __len__(self) -> int:
        """Number of rows."""

    @property
    @abstractmethod
    def digest(self) -> str:
        """Hash of the rows' content and order."""

    def state_dict(self) -> dict[str, Any]:
        """Number and hash of the rows. A loader saves both beside its position among the rows."""
        return {"num_rows": len(self), "rows": self.digest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Check that the rows are those that a checkpoint was written with.

        With other rows, the position in the checkpoint would lead to a wrong row.

        Args:
            state: what `state_dict` returned when the checkpoint was written.

        Raises:
            DataError: the rows or their order differ.
        """
        if state != self.state_dict():
            raise DataError(
                self._key,
                got=f"{len(self)} rows that are not the {state['num_rows']} rows of the checkpoint",
                expected="the data that the run began with, read with the same settings",
                fix=(
                    "Restore the files and data settings. Or begin a new run on these rows from the"
                    " saved weights: set another trainer.experiment_name, and"
                    " actor_rollout_ref.model.path=RUN/global_step_N."
                ),
            )
