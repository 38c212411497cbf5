# SPDX-License-Identifier: Apache-2.0
"""verl's data set with its hooks, and verl's helpers for data, models and files.

Shapes: B sequences, P prompt positions, T frames.
"""

import copy
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import datasets
import numpy as np
import torch
from omegaconf import OmegaConf
from pydantic import ValidationError
from torch import Tensor
from torch.utils.data import Dataset

from quadriga.config import DataConfig
from quadriga.data import loading, padding
from quadriga.data.files import drop_null_fields
from quadriga.data.media import refuse_media, with_parts
from quadriga.data.pictures import as_list, read_picture
from quadriga.data.prompt_lengths import NO_CONTEXT, PromptContext
from quadriga.data.rl_dataset import prompt_columns, require_short_prompt, set_aside
from quadriga.data.tokenizing import ChatEncoder, as_messages, load_tokenizer
from quadriga.data.videos import FrameRules, open_video
from quadriga.data.vision import as_vision, load_processor, read_media
from quadriga.errors import ConfigError, DataError, did_you_mean
from quadriga.user_file import accepted_arguments

_VERLS_DEFAULTS = {"max_prompt_length": 1024, "filter_overlong_prompts": True}
"""Defaults of verl's data set that differ from those of the section `data`."""
_KEYS_WITHOUT_EFFECT = {
    *("use_shm", "serialize_dataset", "return_raw_input_ids", "chat_template_func"),
    *("need_tools_kwargs", "filter_prompts", "image_patch_size"),
}
"""Keys that verl's class reads, and that have no effect here."""
Row: TypeAlias = dict[str, Any]
"""Values of a row by column."""
_READERS = {".parquet": "parquet", ".json": "json", ".jsonl": "json"}
"""Names for `datasets.load_dataset`, by the ending of the file."""


class RLHFDataset(Dataset):
    """verl's data set of prompts, with hooks that subclasses may override.

        _read_files_and_tokenize()             makes `self.dataframe` from `self.data_files`
        maybe_filter_out_long_prompts(rows)    returns the rows that are kept
        _build_messages(row)                   returns the chat of a row
        __getitem__(item)                      returns a row with `raw_prompt` and its tokens

    If an overridden `__getitem__` changes only `raw_prompt`, the new chat is tokenized afterwards.

    Args:
        data_files: file or files, as for `quadriga.data.RLHFDataset`.
        tokenizer: renders and tokenizes prompts.
        config: the section `data`; or a dictionary or DictConfig of its keys, whose defaults are
            then those of verl's class.
        processor: processor of a vision-language model. None: prompts are text.
        max_samples: largest number of rows to use; -1: all.
        context: tools that count as part of a prompt when its length is measured.
        ignored: arguments of other versions of verl.
    """

    def __init__(
        self,
        data_files: Any,
        tokenizer: Any,
        config: Any,
        processor: Any = None,
        max_samples: int = -1,
        context: PromptContext = NO_CONTEXT,
        **ignored: Any,
    ) -> None:
        # Attributes with verl's names, which subclasses read.
        files = [data_files] if isinstance(data_files, str | Path) else list(data_files)
        self.data_files = [str(file) for file in files]
        self.original_data_files = copy.deepcopy(files)
        self.tokenizer = tokenizer
        self.processor = processor
        self.config = config
        is_users_class = type(self) is not RLHFDataset
        config = self._section = data_section(config, may_have_own_keys=is_users_class)
        self.max_samples = max_samples
        self.prompt_key = config.prompt_key
        self.image_key = config.image_key or "images"
        self.video_key = config.video_key or "videos"
        self.max_prompt_length = config.max_prompt_length
        self.truncation = config.truncation
        self.filter_overlong_prompts = config.filter_overlong_prompts
        self.shuffle = config.shuffle
        self.seed = config.seed
        self.apply_chat_template_kwargs = dict(config.apply_chat_template_kwargs)
        self.return_raw_chat = True
        self.cache_dir = config.cache_dir

        self._vision = as_vision(processor)
        self._context = context
        self._encoder = ChatEncoder(tokenizer, self.apply_chat_template_kwargs)
        self._download()
        self._read_files_and_tokenize()

    def _download(self, use_origin_parquet: bool = False) -> None:
        """verl's hook for downloads. Here files must be local, and nothing is downloaded.

        Args:
            use_origin_parquet: whether to set `data_files` to the original paths again.

        Raises:
            DataError: a path is one of HDFS.
        """
        files = self.original_data_files if use_origin_parquet else self.data_files
        self.data_files = [copy_to_local(str(file)) for file in files]

    def _read_files_and_tokenize(self) -> None:
        """Read the files, choose `max_samples` rows, and drop those whose prompt is too long."""
        tables = []
        for file in self.data_files:
            ending = Path(file).suffix
            if ending not in _READERS:
                raise DataError(file, got=f"the ending {ending!r}", expected=", ".join(_READERS))
            tables.append(datasets.load_dataset(_READERS[ending], data_files=file, split="train"))
        rows = datasets.concatenate_datasets(tables)
        if 0 < self.max_samples < len(rows):
            chosen_rows = np.arange(len(rows))
            if self.shuffle:
                generator = np.random.default_rng(self.seed)
                chosen_rows = generator.choice(len(rows), size=self.max_samples, replace=False)
            rows = rows.select(chosen_rows[: self.max_samples].tolist())
        self.dataframe = self.maybe_filter_out_long_prompts(rows)

    def maybe_filter_out_long_prompts(self, dataframe: Any = None) -> Any:
        """Drop rows whose prompt is too long, if `data.filter_overlong_prompts` is set.

        The length of a prompt includes its tools, but not its images.

        Args:
            dataframe: the rows. None: `self.dataframe`.

        Returns:
            The rows that are kept.

        Raises:
            DataError: all prompts are too long.
        """
        rows = self.dataframe if dataframe is None else dataframe
        if not self.filter_overlong_prompts:
            return rows
        texts = []
        for number, row in enumerate(rows):
            where = f"row {number} of {type(self).__name__}"
            tools = self._context.tools_of(row)
            chat = self._chat_of_row(dict(row))
            texts.append(self._encoder.render(chat, where=where, tools=tools))
        lengths = np.array([len(ids) for ids in self._encoder.encode(texts)])
        require_short_prompt(lengths.tolist(), self.max_prompt_length, where=type(self).__name__)
        return rows.select(np.flatnonzero(lengths <= self.max_prompt_length).tolist())

    def _build_messages(self, example: Row, key: str | None = None) -> Any:
        """Return the chat of a row: its column `key`, by default `data.prompt_key`."""
        name = key or self.prompt_key
        return as_messages(example[name], where=f"column {name!r}")

    def _chat_of_row(self, row: Row) -> list[Row]:
        """Chat of a row by `_build_messages`, which a subclass may override.

        Null fields of the messages are removed from `row` itself.
        """
        # In a table, each message has the fields of all messages; those that it lacks are null.
        drop_null_fields(row, [self.prompt_key])
        # An override may take the row alone.
        arguments = accepted_arguments(self._build_messages, {"key": self.prompt_key})
        return list(self._build_messages(row, **arguments))

    def __len__(self) -> int:
        return len(self.dataframe)

    def __getitem__(self, item: int) -> Row:
        """Return the columns of a row, with `raw_prompt` and its tokens.

        `index`, `tools_kwargs` and `interaction_kwargs` are copied from the row's `extra_info`. If
        `data.return_full_prompt` is set, `full_prompts` is the rendered text.
        """
        return self._add_tokens(self._row_without_tokens(item), item)

    def _row_without_tokens(self, item: int) -> Row:
        """Columns of a row with `raw_prompt`, but without tokens."""
        row = dict(self.dataframe[item])
        messages = self._chat_of_row(row)
        row.pop(self.prompt_key, None)
        # Columns with names that the training loop uses move into `extra_info`.
        row = set_aside(row)
        extra_info = row.get("extra_info") or {}
        return {
            **row,
            "extra_info": extra_info,
            "raw_prompt": messages,
            "index": extra_info.get("index", 0),
            "tools_kwargs": extra_info.get("tools_kwargs") or {},
            "interaction_kwargs": extra_info.get("interaction_kwargs") or {},
        }

    def __getitems__(self, items: Sequence[int]) -> list[Row]:
        """Return the rows of a batch, which have tokens even if an overridden `__getitem__` makes none."""
        rows = [self[item] for item in items]
        if type(self).__getitem__ is not RLHFDataset.__getitem__:
            rows = [self._update_tokens(row, item) for row, item in zip(rows, items, strict=True)]
        return rows

    def _update_tokens(self, row: Row, item: int) -> Row:
        """Tokenize a row if a subclass returned it without tokens, or changed `raw_prompt` only.

        Args:
            row: the row that the subclass's `__getitem__` has returned.
            item: number of the row.

        Returns:
            The row with tokens of its `raw_prompt`, or with the tokens that the subclass made.
        """
        if "input_ids" in row and "raw_prompt" in row:
            # Compare with the row that this class makes.
            original = RLHFDataset.__getitem__(self, item)
            is_chat_changed = row["raw_prompt"] != original["raw_prompt"]
            if is_chat_changed and torch.equal(row["input_ids"], original["input_ids"]):
                # Drop the columns that tokenizing adds, and restore those that it removes.
                raw_row = self._row_without_tokens(item)
                token_columns = original.keys() - raw_row.keys()
                row = {name: value for name, value in row.items() if name not in token_columns}
                for name in (self.image_key, self.video_key):
                    row[name] = raw_row.get(name)
        return self._add_tokens(row, item)

    def _add_tokens(self, row: Row, item: int) -> Row:
        """Add the columns of a tokenized prompt to a row, unless it has tokens.

        Args:
            row: the row. Its images and videos are removed from it.
            item: number of the row, for errors.

        Returns:
            The row with tokens, and `raw_prompt` with a part for each image and video.

        Raises:
            DataError: the row has images or videos, but the model is a text model.
        """
        where = f"row {item} of {type(self).__name__}"
        images = as_list(row.pop(self.image_key, None))
        videos = as_list(row.pop(self.video_key, None))
        if "input_ids" in row:
            # A subclass has tokenized it.
            return row
        messages = as_messages(list(row["raw_prompt"]), where=where)
        pictures = []
        clips = []
        if self._vision is None:
            refuse_media(messages, {"image": images, "video": videos}, self._section, where=where)
        else:
            messages, *media = with_parts(messages, images, videos, where=where)
            pictures, clips = read_media(
                media, self._vision, self._section, folder=Path.cwd(), where=where
            )
        text = self._encoder.render(messages, where=where)
        columns = prompt_columns(
            text, pictures, clips, self._encoder, self._vision, self._section, where=where
        )
        if self._section.return_full_prompt:
            columns["full_prompts"] = text
        return {**row, "raw_prompt": messages, **columns}


class TooLongError(DataError, NotImplementedError, AssertionError):
    """A sequence is too long, or the way to cut it is unknown. Code for verl may catch it, too."""


class DatasetClassError(ConfigError, TypeError):
    """The class of `data.custom_cls` cannot be used. Code for verl may catch it, too."""


def data_section(config: Any, *, may_have_own_keys: bool = True) -> DataConfig:
    """Make the section `data` from a dictionary or DictConfig of its keys.

    Args:
        config: the keys as verl's code passes them; or the section, which is returned unchanged.
        may_have_own_keys: whether unknown keys are ignored, because a user's class may read them.

    Raises:
        ConfigError: a key is unknown, or a value is wrong.
    """
    if isinstance(config, DataConfig):
        return config
    tree = OmegaConf.to_container(config, resolve=True) if OmegaConf.is_config(config) else config
    known = {key: value for key, value in tree.items() if key in DataConfig.model_fields}
    unknown_keys = tree.keys() - known.keys() - _KEYS_WITHOUT_EFFECT
    if unknown_keys and not may_have_own_keys:
        key = next(iter(unknown_keys))
        raise ConfigError(
            "RLHFDataset: config",
            got=f"{key!r}",
            expected="keys of the section data",
            fix=did_you_mean(key, DataConfig.model_fields),
        )
    try:
        return DataConfig(**{**_VERLS_DEFAULTS, **known})
    except ValidationError as error:
        raise ConfigError("RLHFDataset: config", got=str(error)) from error


def create_rl_dataset(data_paths: Any, data_config: Any, *args: Any, **kwargs: Any) -> Dataset:
    """Call `quadriga.data.create_rl_dataset`. `data_config` may be a dictionary or DictConfig.

    Raises:
        DatasetClassError: a key is wrong, or the class of `data.custom_cls` cannot be used.
    """
    try:
        return loading.create_rl_dataset(data_paths, data_section(data_config), *args, **kwargs)
    except ConfigError as error:
        raise DatasetClassError(error.where, error.got, error.expected, error.fix) from error


def postprocess_data(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Call `quadriga.data.padding.postprocess_data`.

    Raises:
        TooLongError: a sequence is too long, or the way to cut it is unknown.
    """
    try:
        return padding.postprocess_data(*args, **kwargs)
    except DataError as error:
        raise TooLongError(error.where, error.got, error.expected, error.fix) from error


def tokenize_and_postprocess_data(
    prompt: str, tokenizer: Any, **options: Any
) -> tuple[Tensor, Tensor]:
    """Tokenize a rendered prompt.

    Args:
        prompt: the text.
        tokenizer: the tokenizer.
        options: as for `postprocess_data`.

    Returns:
        Token ids and mask, [1, max_length] each.
    """
    encoded = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    return postprocess_data(encoded["input_ids"], encoded["attention_mask"], **options)


# ---- images and videos --------------------------------------------------------------------------


def process_image(image: Any) -> Any:
    """Read an image as a PIL image in RGB."""
    return read_picture(image, folder=Path.cwd(), where="process_image").copy()


def process_video(
    video: Any,
    nframes: int | None = None,
    fps: float | None = None,
    fps_min_frames: int = 4,
    fps_max_frames: int = 768,
) -> Tensor:
    """Sample frames of a video, resized for patches of 14 pixels.

    Args:
        video: a path, a list of images, or {"video": ...}. The dictionary may also have `nframes`,
            `fps`, `min_frames`, `max_frames`, `min_pixels` and `max_pixels`, which take precedence.
        nframes: number of frames. None: it depends on `fps` and the length of the video.
        fps: frames to sample per second of the video; 2 by default.
        fps_min_frames: least number of frames, if `nframes` is None.
        fps_max_frames: largest number of frames, if `nframes` is None.

    Returns:
        Frames [T, 3, H, W], uint8.
    """
    settings = dict(video) if isinstance(video, dict) else {"video": video}
    # If it is set, `nframes` is both the least and the largest number of frames.
    num_frames = settings.pop("nframes", nframes)
    options = {
        "fps": settings.pop("fps", fps) or 2.0,
        "min_frames": settings.pop("min_frames", num_frames or fps_min_frames),
        "max_frames": settings.pop("max_frames", num_frames or fps_max_frames),
    }
    for name in ("min_pixels", "max_pixels"):
        if name in settings:
            options[name] = settings.pop(name)
    where = "process_video"
    source = open_video(settings.get("video"), folder=Path.cwd(), where=where)
    # 14 pixels are the patch size of Qwen2.5-VL.
    frames = FrameRules.of({}, "qwen2_5_vl", options).read(source, where=where).frames
    assert frames is not None
    return frames


def get_rope_index(
    processor: Any,
    input_ids: Tensor,
    image_grid_thw: Tensor | None = None,
    video_grid_thw: Tensor | None = None,
    second_per_grid_ts: Tensor | None = None,
    attention_mask: Tensor | None = None,
) -> Tensor:
    """Rotary positions of a prompt along time, height and width.

    Args:
        processor: processor of a vision-language model.
        input_ids: token ids, [P].
        image_grid_thw: patches of each image along the three dimensions, [images, 3].
        video_grid_thw: patches of each video, [videos, 3].
        second_per_grid_ts: seconds per step along time of each video, [videos].
        attention_mask: [P]. None: no padding.

    Returns:
        Positions [3, P], 1 on padding.

    Raises:
        DataError: there is no such processor.
    """
    vision = as_vision(processor)
    if vision is None:
        raise DataError(
            "get_rope_index", got="no processor", expected="that of a vision-language model"
        )
    if attention_mask is None:
        attention_mask = torch.ones_like(input_ids)
    is_valid = attention_mask.bool()
    positions = torch.ones(3, len(input_ids), dtype=input_ids.dtype)
    valid_positions, *_ = vision.get_rope_index(
        input_ids[is_valid].tolist(), image_grid_thw, video_grid_thw, second_per_grid_ts
    )
    positions[:, is_valid] = valid_positions.to(positions.dtype)
    return positions


# ---- models and files ---------------------------------------------------------------------------


def hf_tokenizer(
    name_or_path: str, correct_pad_token: bool = True, correct_gemma2: bool = True, **kwargs: Any
) -> Any:
    """Load a tokenizer, which always gets a pad token; see `load_tokenizer`.

    Arguments that `load_tokenizer` does not have are ignored.
    """
    return load_tokenizer(name_or_path, **accepted_arguments(load_tokenizer, kwargs))


def hf_processor(name_or_path: str, **kwargs: Any) -> Any:
    """Load the processor of a vision-language model. Return None for a text-only model."""
    return load_processor(name_or_path, **accepted_arguments(load_processor, kwargs))


def copy_to_local(src: str, cache_dir: str | None = None, *options: Any, **named: Any) -> str:
    """Return a local path, or the name of a model, unchanged. The other arguments are ignored.

    Raises:
        DataError: it is a path of HDFS, which verl would download.
    """
    path = str(src)
    if path.startswith("hdfs://"):
        raise DataError(
            path, got="a path of HDFS", expected="a local path", fix="Copy it: hdfs dfs -get."
        )
    return path


def makedirs(name: str, mode: int = 0o777, exist_ok: bool = True, **kwargs: Any) -> None:
    """Make a local folder."""
    os.makedirs(copy_to_local(name), mode, exist_ok)


def copy_path(src: str, dst: str, **kwargs: Any) -> str:
    """Copy a local file or folder, and return the path of the copy."""
    copy_any = shutil.copytree if Path(copy_to_local(src)).is_dir() else shutil.copy
    return str(copy_any(src, copy_to_local(dst)))
