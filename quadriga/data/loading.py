# SPDX-License-Identifier: Apache-2.0
"""Builds what the trainer iterates over: data set, sampler, loader; and what classes of a user's own must have.

The order of the rows depends on `data.seed` alone. The loader's state (`state_dict`, `load_state_dict`) holds the
position inside an epoch and the generator of the sampler: a resumed run sees the rows that the other would have seen.
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
from quadriga.user_file import import_file, member_of, taken

LOADER_CONTEXT = "fork" if sys.platform == "linux" else "spawn"
"""How `data.dataloader_num_workers` processes are started, by the name of `multiprocessing`'s context.

fork: they have the data set as it is, which may be a user's that cannot be pickled, or of a class that only this
process has imported; its rows are not copied; and the user's script is not run again, as spawn and forkserver do. What
makes a fork of a process with threads unsafe is a lock that a thread held: these processes prepare rows, call nothing
of Ray's, free nothing that they have inherited (`_begin_worker`), have torch's handler of SIGTERM, and end without
running this process's exit functions. Elsewhere than on Linux system libraries do not survive a fork."""
_SAMPLERS = (MixtureSampler, RandomSampler, SequentialSampler)


class RowLoader(StatefulDataLoader):
    """A loader that compares the data with those of its state before the sampler is wound forward in them.

    What a vision-language model takes of images is added here to batches without it
    (`data.return_multi_modal_inputs=false`)."""

    def __iter__(self) -> Any:
        processor = getattr(self.dataset, "processor", None)
        batches = super().__iter__()
        return (
            map(processor.add_inputs, batches)
            if isinstance(processor, VisionProcessor)
            else batches
        )

    def lets_read_ahead(self) -> bool:
        """Whether a thread may fetch a batch before the step is over; it gets a tokenizer of its own then.

        Nothing of a user's may run there, which may draw from generators of the process; nothing may learn from the
        step; and worker processes are ahead already."""
        rows, tokenizer = self.dataset, getattr(self.dataset, "tokenizer", None)
        rows = rows.block if isinstance(rows, StreamedDataset) else rows
        own = type(rows).__getitem__ is RLHFDataset.__getitem__ and type(self.sampler) in _SAMPLERS
        is_fast = getattr(tokenizer, "backend_tokenizer", None) is not None
        if not own or not is_fast or hasattr(rows, "on_batch_end") or self.num_workers > 0:
            return False
        # Two threads must not share one: how it pads and cuts is a state of it.
        rows.encoder = ChatEncoder(deepcopy(tokenizer), rows.config.apply_chat_template_kwargs)
        return True

    def state_dict(self) -> dict[str, Any]:
        """The position, and which rows it is a position in."""
        state = super().state_dict()
        return (
            state | {"rows": self.dataset.state_dict()}
            if isinstance(self.dataset, FileDataset)
            else state
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a position; DataError: it is one in other rows."""
        if "rows" in state_dict and isinstance(self.dataset, FileDataset):
            self.dataset.load_state_dict(state_dict["rows"])
        super().load_state_dict(
            {name: value for name, value in state_dict.items() if name != "rows"}
        )


_VERL_HOOKS = frozenset(
    {
        "_download",
        "_read_files_and_tokenize",
        "maybe_filter_out_long_prompts",
        "_build_messages",
        "process_vision_info",
    }
    | {"resume_dataset_state", "split"}
)
"""Methods of verl's `RLHFDataset` that its users override or call."""


def create_rl_dataset(
    data_paths: FileNames,
    data_config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    processor: Any = None,
    is_train: bool = True,
    max_samples: int = -1,
    context: PromptContext = NO_CONTEXT,
) -> Dataset:
    """`RLHFDataset`; of training with `data.datagen` `DynamicGenDataset`, with `data.streaming` `StreamedDataset`; or
    the class named by `data.custom_cls`.

    A class of your own derives from `torch.utils.data.Dataset` (or from `RLHFDataset`) and has `__init__(data_files,
    tokenizer, config, processor)`, with `is_train`, `max_samples` and `context` if it takes them, `__len__()`, and
    `__getitem__(item)`, which returns a row with the keys of `RLHFDataset.__getitem__`. It may have
    `on_batch_end(batch)`, which gets the `DataProto` of each training step after its update, in the trainer's process,
    and `state_dict()` and `load_state_dict(state)`, which are called with each checkpoint.

    `context`: the tools that prompts are measured with, and how many ids the model knows.
    Raises ConfigError: the class cannot be loaded.
    Raises DataError: it cannot honour `max_samples`, or the data are wrong."""
    custom, custom_key, cls = data_config.custom_cls, "data.custom_cls", RLHFDataset
    if is_train and data_config.datagen.path is not None:
        cls = DynamicGenDataset
    elif is_train and data_config.streaming is not None:
        cls = StreamedDataset
    elif custom.path is not None:
        assert custom.name is not None
        cls = member_of(import_file(custom.path, custom_key), custom.name, custom_key, base=Dataset)
        _check_hooks(cls, custom_key)
    own = taken(cls, {"is_train": is_train, "max_samples": max_samples, "context": context})
    if max_samples >= 0 and "max_samples" not in own:
        where, expected = f"data.{'train' if is_train else 'val'}_max_samples", "-1 with this class"
        fix = f"Give {cls.__name__}.__init__ a parameter max_samples, or leave the key out."
        raise DataError(
            where,
            got=f"{max_samples}, which {cls.__name__} does not take",
            expected=expected,
            fix=fix,
        )
    given = {
        "data_files": data_paths,
        "tokenizer": tokenizer,
        "config": data_config,
        "processor": processor,
        **own,
    }
    try:
        signature(cls).bind(**given)
    except TypeError as error:
        expected = "parameters data_files, tokenizer, config and processor"
        raise ConfigError(
            custom_key, got=f"{cls.__name__}.__init__ ({error})", expected=expected
        ) from error
    return cls(**given)


def _check_hooks(cls: type, where: str) -> None:
    """Refuse a class without rows, and what a subclass of `RLHFDataset` overrides of verl's class of that name, which
    is not called here."""
    methods = ("__len__", "__getitem__")
    if missing := [
        name for name in methods if getattr(cls, name, None) is getattr(Dataset, name, None)
    ]:
        got, expected = (
            f"{cls.__name__} without {' and '.join(missing)}",
            f"a class with {' and '.join(methods)}",
        )
        raise ConfigError(
            where, got=got, expected=expected, fix="Return rows by their number there."
        )
    if not issubclass(cls, RLHFDataset):
        return
    own = [one for one in cls.__mro__ if not one.__module__.startswith("quadriga.")]
    is_verls = any(one.__module__.startswith("quadriga.compat.") for one in cls.__mro__)
    if not is_verls and (
        found := sorted(_VERL_HOOKS & {name for one in own for name in vars(one)})
    ):
        got = f"{cls.__name__}, which overrides {', '.join(found)}"
        fix = "Override __getitem__; or derive from verl.utils.dataset.RLHFDataset, with QUADRIGA_VERL=1."
        raise ConfigError(
            where, got=got, expected="methods that quadriga.data.RLHFDataset has", fix=fix
        )


def create_rl_sampler(data_config: DataConfig, dataset: Dataset, is_train: bool = True) -> Sampler:
    """The order of the training rows: the user's own sampler, a mixture by `data.mixture`, a seeded shuffle, new in
    each epoch, or file order.

    Those of validation are in file order, or shuffled with `data.validation_shuffle`. Generated rows (`data.datagen`)
    are seen from the next pass on.

    A class of your own derives from `torch.utils.data.Sampler` and has `__init__(data_source, data_config)`,
    `__iter__()` and `__len__()`. It may have `update(batch)`, which gets the `DataProto` of each training step after
    its update and before the next batch is drawn; and `state_dict()` and `load_state_dict(state)`: with them `__iter__`
    goes on from the state, without them a resumed run iterates from the start and skips what was drawn.
    Raises ConfigError: the class cannot be loaded.
    Raises DataError: it has `update`, or rows are generated, and worker processes would fetch rows ahead of it."""
    custom, num_workers = data_config.sampler, data_config.dataloader_num_workers
    if isinstance(dataset, DynamicGenDataset) and num_workers > 0:
        where, expected = "data.dataloader_num_workers", "0 with data.datagen"
        fix = "Worker processes have copies of the data set, without the rows that are generated."
        raise DataError(where, got=str(num_workers), expected=expected, fix=fix)
    if is_train and custom.class_path is not None:
        assert custom.class_name is not None
        module = import_file(custom.class_path, "data.sampler")
        cls: type[Any] = member_of(module, custom.class_name, "data.sampler", base=Sampler)
        if hasattr(cls, "update") and num_workers > 0:
            where, got = "data.dataloader_num_workers", str(num_workers)
            fix = "Worker processes would fetch rows before the sampler has seen the batch before them."
            raise DataError(
                where,
                got=got,
                expected=f"0 with {cls.__name__}, which learns from each batch",
                fix=fix,
            )
        if hasattr(cls, "update") and not hasattr(cls, "state_dict"):
            told = "a resumed run draws other rows than one that was not interrupted"
            print(
                f"data.sampler: {cls.__name__} has update() and no state_dict(): {told}.",
                flush=True,
            )
        return cls(data_source=dataset, data_config=data_config)
    if isinstance(dataset, StreamedDataset):
        return SequentialSampler(dataset)
    if is_train and data_config.mixture:
        return MixtureSampler(dataset, data_config)
    if is_train and isinstance(dataset, DynamicGenDataset):
        return PassSampler(dataset, data_config)
    if data_config.shuffle if is_train else data_config.validation_shuffle:
        return RandomSampler(dataset, generator=torch.Generator().manual_seed(data_config.seed))
    return SequentialSampler(dataset)


def _begin_worker(number: int) -> None:
    """Leave alone what a forked process has inherited: freeing an object of Ray's takes a lock of Ray's threads."""
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
    """A loader whose position can be saved and restored.

    `batch_size=None` puts the whole data set into one batch; with `drop_last` an incomplete last batch is left out.
    `collate` makes a batch of rows, where `collate_fn` does not.
    Raises DataError: the data set is empty, or smaller than the only batch that would be kept."""
    # A sampler of a mixture draws more rows, or fewer, than there are.
    num_rows = len(sampler) if isinstance(sampler, MixtureSampler) else len(dataset)
    if num_rows == 0:
        raise DataError(
            "data",
            got="a data set without rows",
            expected="at least one row",
            fix="Check the files.",
        )
    size = num_rows if batch_size is None else batch_size
    if drop_last and size > num_rows:
        got = f"{size} prompts a batch from a data set of {num_rows}"
        fix = "Lower it, or add data: not one full batch could be made."
        raise DataError("data.train_batch_size", got=got, expected=f"at most {num_rows}", fix=fix)
    with warnings.catch_warnings():
        # torchdata calls a function that newer versions of torch only keep for its sake; the warning is of no use.
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
            # With a generator of its own, starting the loader leaves torch's global one alone: a resumed run starts it
            # once more than the run that was not interrupted.
            generator=torch.Generator().manual_seed(config.seed),
        )
