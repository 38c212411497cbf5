# SPDX-License-Identifier: Apache-2.0
"""Prepare the data of a task: train.parquet and val.parquet."""

from pathlib import Path

from quadriga.errors import DataError
from quadriga_recipes import largest_number, reasoning_gym
from quadriga_recipes.published import SOURCES, published_rows
from quadriga_recipes.rows import write_rows

DATA_NAMES = ("largest", *SOURCES, f"{reasoning_gym.PREFIX}TASK")


def prepare_data(
    name: str,
    output_dir: Path,
    *,
    num_train: int | None = None,
    num_val: int | None = None,
    seed: int = 0,
    source: str | None = None,
) -> dict[str, Path]:
    """Write train.parquet and val.parquet into `output_dir`.

    Args:
        name: "largest", "reasoning_gym:TASK", or a published data set: a key of `SOURCES`.
        output_dir: folder, created if it does not exist.
        num_train: number of training rows. None: the task's default, or all of a published data
            set.
        num_val: number of validation rows; None as for `num_train`.
        seed: seed of the training rows; of published data also of the validation rows. Generated
            validation rows do not depend on it.
        source: local file or folder of a published data set; None: the Hugging Face hub.

    Returns:
        The files by split, "train" and "val".

    Raises:
        DataError: the name is unknown, the task does not take an option, or data cannot be read or
            written.
    """
    for option, count in (("--num-train", num_train), ("--num-val", num_val)):
        if count is not None and count < 1:
            raise DataError(f"prepare data {name}", got=f"{option} {count}", expected="at least 1")
    if name in SOURCES:
        data_source = SOURCES[name].data_source
        ability = SOURCES[name].ability
        train, val = published_rows(
            name, num_train=num_train, num_val=num_val, seed=seed, source=source
        )
    elif source is not None:
        raise DataError(
            f"prepare data {name}",
            got=f"--source {source}",
            expected="no source",
            fix="Omit --source: the rows are generated.",
        )
    elif name == "largest":
        data_source = largest_number.DATA_SOURCE
        ability = largest_number.ABILITY
        train, val = largest_number.draw_problems(
            num_train=num_train or largest_number.DEFAULT_NUM_TRAIN,
            num_val=num_val or largest_number.DEFAULT_NUM_VAL,
            seed=seed,
        )
    elif name.startswith(reasoning_gym.PREFIX):
        task = name.removeprefix(reasoning_gym.PREFIX)
        data_source = f"reasoning_gym/{task}"
        ability = reasoning_gym.ABILITY
        train, val = reasoning_gym.generate_problems(
            task,
            num_train=num_train or reasoning_gym.DEFAULT_NUM_TRAIN,
            num_val=num_val or reasoning_gym.DEFAULT_NUM_VAL,
            seed=seed,
        )
    else:
        raise DataError("prepare data", got=repr(name), expected=f"one of {', '.join(DATA_NAMES)}")

    files = {}
    for split, rows in {"train": train, "val": val}.items():
        files[split] = write_rows(
            rows,
            Path(output_dir).expanduser() / f"{split}.parquet",
            data_source=data_source,
            ability=ability,
            split=split,
        )
    return files
