# SPDX-License-Identifier: Apache-2.0
"""Creates the trainer's data sets, samplers and loaders, from this package or a user's classes.

The order of the rows depends on `data.seed` alone. The loader's state (`state_dict`,
`load_state_dict`) holds the position within an epoch and the state of the sampler's random
generator, so a resumed run sees the rows that it would have seen without interruption.
"""

import gc
import sys
import warnings
from collections.abc import Callable
from copy import deepcopy
from inspect import signature
from typing import Any

import torch
from torch.utils.data import Dataset, Sampler, SequentialSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler
from transformers import PreTrainedTokenizerBase

from quadriga.config import DataConfig
from quadriga.data.curriculum import MixtureSampler, PassSampler
from quadriga.data.file_dataset import FileDataset
from quadriga.data.files import FileNames
from quadriga.data.generated import DynamicGenDataset
from quadriga.data.padding import collate_fn
from quadriga.data.prompt_lengths import NO_CONTEXT, PromptContext
from quadriga.data.rl_dataset import RLHFDataset
from quadriga.data.streaming import StreamedDataset
from quadriga.data.tokenizing import ChatEncoder
from quadriga.data.vision import VisionProcessor
from quadriga.errors import ConfigError, DataError
from quadriga.user_file import accepted_arguments, import_file, member_of

LOADER_CONTEXT = "fork" if sys.platform == "linux" else "spawn"
"""Start method of the `data.dataloader_num_workers` processes, as `multiprocessing` names it.

A forked process inherits the data set, so the data set need not be picklable, its class may be one
that only this process has imported, and its rows are not copied. Nor is the user's script run
again, as spawn and forkserver do.

A fork of a process with threads is unsafe because a thread may hold a lock. That is acceptable
here: these processes only prepare rows, call nothing of Ray's, free no inherited objects
(`_begin_worker`), have torch's handler of SIGTERM, and end without running this process's exit
functions. On systems other than Linux, system libraries do not survive a fork."""
_INDEPENDENT_SAMPLERS = (MixtureSampler, RandomSampler, SequentialSampler)
"""Samplers whose choice of rows does not depend on the batches so far."""


class RowLoader(StatefulDataLoader):
    """A loader of batches that refuses a state if the data have changed since it was saved.

    If rows come without the inputs of a vision-language model
    (`data.return_multi_modal_inputs=false`), the loader adds these inputs to each batch."""

    def __iter__(self) -> Any:
        batches = super().__iter__()
        processor = getattr(self.dataset, "processor", None)
        if isinstance(processor, VisionProcessor):
            # Added in this process: worker processes would have to send it large pixel tensors.
            return map(processor.add_inputs, batches)
        return batches

    def lets_read_ahead(self) -> bool:
        """Whether a thread may fetch the next batch during a step.

        If it may, this call also prepares the data set for it: the data set gets a copy of the
        tokenizer.
        """
        rows = self.dataset
        tokenizer = getattr(rows, "tokenizer", None)
        if isinstance(rows, StreamedDataset):
            rows = rows.block
        # A user's code makes the rows, and may use the random generators of this process.
        if type(rows).__getitem__ is not RLHFDataset.__getitem__:
            return False
        # The next rows depend on the step.
        if type(self.sampler) not in _INDEPENDENT_SAMPLERS or hasattr(rows, "on_batch_end"):
            return False
        # A tokenizer in Python would compete with the step for the interpreter; worker processes
        # read ahead themselves.
        if getattr(tokenizer, "backend_tokenizer", None) is None or self.num_workers > 0:
            return False
        # Threads must not share a tokenizer: a call changes its settings for padding and truncation.
        rows.encoder = ChatEncoder(deepcopy(tokenizer), rows.config.apply_chat_template_kwargs)
        return True

    def state_dict(self) -> dict[str, Any]:
        """The position among the rows; for a `FileDataset`, also what identifies the rows."""
        state = super().state_dict()
        if isinstance(self.dataset, FileDataset):
            state = state | {"rows": self.dataset.state_dict()}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at a position.

        Raises:
            DataError: the rows differ from the rows that the state was saved with.
        """
        # A copy, because `pop` below must not change the caller's dictionary.
        state = dict(state_dict)
        rows = state.pop("rows", None)
        if rows is not None and isinstance(self.dataset, FileDataset):
            self.dataset.load_state_dict(rows)
        super().load_state_dict(state)


_UNCALLED_HOOKS = frozenset(
    {
        "_download",
        "_read_files_and_tokenize",
        "maybe_filter_out_long_prompts",
        "_build_messages",
        "process_vision_info",
        "resume_dataset_state",
        "split",
    }
)
"""Methods of verl's `RLHFDataset` that users override, and that the class here does not call."""


def create_rl_dataset(
    data_paths: FileNames,
    data_config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    processor: Any = None,
    is_train: bool = True,
    max_samples: int = -1,
    context: PromptContext = NO_CONTEXT,
) -> Dataset:
    """Create the data set of training or validation.

    It is a `RLHFDataset` by default, or of the class named by `data.custom_cls`. For training, it
    is a `DynamicGenDataset` with `data.datagen`, and a `StreamedDataset` with `data.streaming`.

    A class of your own derives from `torch.utils.data.Dataset` (or from `RLHFDataset`) and has
    `__init__(data_files, tokenizer, config, processor)`, with `is_train`, `max_samples` and
    `context` if it takes them, `__len__()`, and `__getitem__(item)`, which returns a row with the
    keys of `RLHFDataset.__getitem__`. It may have `on_batch_end(batch)`, which gets the `DataProto`
    of each training step after its update, in the trainer's process, and `state_dict()` and
    `load_state_dict(state)`, which are called when a checkpoint is saved and loaded. Settings that
    every class has to respect are arguments; all others are in `config`.

    Args:
        data_paths: a path, a glob, a URL, or a list of these.
        data_config: the section `data`.
        tokenizer: renders and tokenizes prompts.
        processor: processor of a vision-language model. None: prompts are text.
        is_train: whether the rows are for training, else for validation.
        max_samples: most rows to use; -1 for all.
        context: the tools that are rendered into prompts, and the size of the model's vocabulary.

    Returns:
        A data set whose items are rows.

    Raises:
        ConfigError: a user's class cannot be loaded, lacks a method, overrides one that is never
            called, or does not take the arguments.
        DataError: `max_samples` is set and the class does not take it, or the data are wrong.
    """
    custom = data_config.custom_cls
    custom_key = "data.custom_cls"
    # Generated and streamed rows are for training; validation then reads files as usual.
    cls: Any = RLHFDataset
    if is_train and data_config.datagen.path is not None:
        cls = DynamicGenDataset
    elif is_train and data_config.streaming is not None:
        cls = StreamedDataset
    elif custom.path is not None:
        assert custom.name is not None
        module = import_file(custom.path, custom_key)
        cls = member_of(module, custom.name, custom_key, base=Dataset)
        _check_hooks(cls, custom_key)
    # A user's class need not have these parameters: only arguments that it takes are passed.
    options = accepted_arguments(
        cls, {"is_train": is_train, "max_samples": max_samples, "context": context}
    )
    # Without this argument, the class would use more rows than the user asked for.
    if max_samples >= 0 and "max_samples" not in options:
        raise DataError(
            f"data.{'train' if is_train else 'val'}_max_samples",
            got=f"{max_samples}, which {cls.__name__} does not take",
            expected="-1 with this class",
            fix=f"Give {cls.__name__}.__init__ a parameter max_samples, or leave the key out.",
        )
    arguments = {
        "data_files": data_paths,
        "tokenizer": tokenizer,
        "config": data_config,
        "processor": processor,
        **options,
    }
    # Checked before the call, so that a TypeError raised inside `__init__` is not mistaken for
    # wrong parameters.
    try:
        signature(cls).bind(**arguments)
    except TypeError as error:
        raise ConfigError(
            custom_key,
            got=f"{cls.__name__}.__init__ ({error})",
            expected="parameters data_files, tokenizer, config and processor",
        ) from error
    return cls(**arguments)


def _check_hooks(cls: type, where: str) -> None:
    """Raise a ConfigError if a user's data set lacks a method, or has one that is never called.

    A method is never called if it belongs to verl's `RLHFDataset`, and the user's class derives
    from the class of this name in this package.

    Args:
        cls: the user's class.
        where: configuration key of the class, for errors.
    """
    methods = ("__len__", "__getitem__")
    # torch's base class has no `__len__`, and a `__getitem__` that only raises.
    missing_methods = [
        name for name in methods if getattr(cls, name, None) is getattr(Dataset, name, None)
    ]
    if missing_methods:
        raise ConfigError(
            where,
            got=f"{cls.__name__} without {' and '.join(missing_methods)}",
            expected=f"a class with {' and '.join(methods)}",
            fix="Let __len__ return the number of rows, and __getitem__(item) a row by its number.",
        )
    if not issubclass(cls, RLHFDataset):
        return
    # `RLHFDataset` has none of these methods, so any that exists is the user's.
    overridden_hooks = {name for name in _UNCALLED_HOOKS if hasattr(cls, name)}
    if overridden_hooks:
        raise ConfigError(
            where,
            got=f"{cls.__name__}, which overrides {', '.join(sorted(overridden_hooks))}",
            expected="methods that quadriga.data.RLHFDataset has",
            fix="Override __getitem__, or use verl.utils.dataset.RLHFDataset with QUADRIGA_VERL=1.",
        )


def create_rl_sampler(data_config: DataConfig, dataset: Dataset, is_train: bool = True) -> Sampler:
    """Create the sampler, which decides the order of the rows.

    Training rows come in the order of the user's own sampler, as a mixture (`data.mixture`), in a
    seeded shuffle that is new in each epoch, or in file order. Validation rows are in file order,
    or shuffled with `data.validation_shuffle`. Rows that are generated during a pass over the data
    (`data.datagen`) are drawn from the next pass on.

    A class of your own derives from `torch.utils.data.Sampler` and has `__init__(data_source,
    data_config)`, `__iter__()` and `__len__()`. It may have `update(batch)`, which gets the
    `DataProto` of each training step after its update and before the next batch is drawn. It may
    have `state_dict()` and `load_state_dict(state)`, after which `__iter__` continues from the
    state; without these methods a resumed run iterates from the start and skips the rows that were
    drawn before.

    Args:
        data_config: the section `data`.
        dataset: the rows.
        is_train: whether the rows are for training, else for validation.

    Returns:
        A sampler of row numbers.

    Raises:
        ConfigError: the user's class cannot be loaded.
        DataError: `data.dataloader_num_workers` is above 0 while the sampler has `update` or rows
            are generated; an entry of a mixture has no rows; or a data set to shuffle is empty.
    """
    num_workers = data_config.dataloader_num_workers
    if isinstance(dataset, DynamicGenDataset) and num_workers > 0:
        raise DataError(
            "data.dataloader_num_workers",
            got=str(num_workers),
            expected="0 with data.datagen",
            fix="Leave it at 0: worker processes would have copies without the generated rows.",
        )
    if is_train and data_config.sampler.class_path is not None:
        return _create_custom_sampler(data_config, dataset)
    # A stream shuffles its rows itself.
    if isinstance(dataset, StreamedDataset):
        return SequentialSampler(dataset)
    if is_train and data_config.mixture:
        return MixtureSampler(dataset, data_config)
    if is_train and isinstance(dataset, DynamicGenDataset):
        return PassSampler(dataset, data_config)
    is_shuffled = data_config.shuffle if is_train else data_config.validation_shuffle
    if is_shuffled:
        _require_rows(len(dataset), dataset, data_config)
        # The sampler has its own generator, so other draws of random numbers do not change the
        # order.
        return RandomSampler(dataset, generator=torch.Generator().manual_seed(data_config.seed))
    return SequentialSampler(dataset)


def _create_custom_sampler(data_config: DataConfig, dataset: Dataset) -> Sampler:
    """Create the user's sampler, the class that `data.sampler` names.

    Print a notice if the class has `update` but no `state_dict`.

    Raises:
        ConfigError: the class cannot be loaded.
        DataError: the class has `update`, and there are worker processes.
    """
    custom = data_config.sampler
    num_workers = data_config.dataloader_num_workers
    assert custom.class_path is not None
    assert custom.class_name is not None
    module = import_file(custom.class_path, "data.sampler")
    cls: type[Any] = member_of(module, custom.class_name, "data.sampler", base=Sampler)
    if hasattr(cls, "update") and num_workers > 0:
        raise DataError(
            "data.dataloader_num_workers",
            got=str(num_workers),
            expected=f"0 with {cls.__name__}, which learns from each batch",
            fix="Leave it at 0: worker processes would fetch rows before `update` is called.",
        )
    if hasattr(cls, "update") and not hasattr(cls, "state_dict"):
        print(
            f"data.sampler: {cls.__name__} has update() and no state_dict(): a resumed run draws"
            " other rows than one that was not interrupted.",
            flush=True,
        )
    return cls(data_source=dataset, data_config=data_config)


def _require_rows(num_rows: int, dataset: Dataset, config: DataConfig) -> None:
    """Raise a DataError if there are no rows.

    Args:
        num_rows: rows of an epoch, which may differ from the length of the data set.
        dataset: the data set, whose class the error names.
        config: the section `data`.
    """
    if num_rows > 0:
        return
    fix = "Check the files."
    # The data sets of this package raise their own error if all prompts are too long, so this
    # advice is only for a user's class.
    if config.custom_cls.path is not None:
        limit = f"data.max_prompt_length={config.max_prompt_length}"
        fix = f"Check the files. Raise {limit} if the class leaves longer prompts out."
    raise DataError(
        "data",
        got=f"a data set without rows ({type(dataset).__name__})",
        expected="at least one row",
        fix=fix,
    )


def _begin_worker(number: int) -> None:
    """Keep the garbage collector of a worker process from freeing inherited objects.

    Freeing an object of Ray's takes a lock. If a thread of Ray's held it during the fork, the
    worker process would wait for it forever.

    Args:
        number: number of the worker process, which torch passes; not used.
    """
    gc.freeze()


def create_dataloader(
    dataset: Dataset,
    config: DataConfig,
    *,
    batch_size: int | None,
    sampler: Sampler,
    drop_last: bool,
    collate: Callable[[list[dict[str, Any]]], dict[str, Any]] | None = None,
) -> RowLoader:
    """Create a loader whose position can be saved and restored.

    Args:
        dataset: the rows.
        config: the section `data`.
        batch_size: rows of a batch. None: one batch has the whole data set.
        sampler: decides the order of the rows.
        drop_last: whether an incomplete last batch is left out.
        collate: makes a batch out of rows. None: `collate_fn`.

    Returns:
        A loader of batches.

    Raises:
        DataError: the data set is empty, or with `drop_last` too small for one batch.
    """
    # An epoch of a mixture may repeat or omit rows, so its length may differ from the data set's.
    num_rows = len(sampler) if isinstance(sampler, MixtureSampler) else len(dataset)
    _require_rows(num_rows, dataset, config)
    size = num_rows if batch_size is None else batch_size
    if drop_last and size > num_rows:
        raise DataError(
            "data.train_batch_size",
            got=f"{size} prompts a batch from a data set of {num_rows}",
            expected=f"at most {num_rows}",
            fix="Lower it or add data: there are too few rows for one full batch.",
        )
    with warnings.catch_warnings():
        # torchdata calls a function that newer versions of torch keep only for torchdata.
        warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
        return RowLoader(
            dataset,
            batch_size=size,
            sampler=sampler,
            num_workers=config.dataloader_num_workers,
            multiprocessing_context=LOADER_CONTEXT if config.dataloader_num_workers > 0 else None,
            worker_init_fn=_begin_worker,
            collate_fn=collate or collate_fn,
            drop_last=drop_last,
            # Without this generator, each start of the loader would draw from torch's global one. A
            # resumed run starts the loader once more than an uninterrupted run, so its later random
            # numbers would differ.
            generator=torch.Generator().manual_seed(config.seed),
        )
