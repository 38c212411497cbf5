# SPDX-License-Identifier: Apache-2.0
"""verl's data set with its hooks, and the small helpers that data files import."""

import copy
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from quadriga.data.files import drop_null_fields
from quadriga.data.media import refuse_media, with_parts
from quadriga.data.padding import postprocess_data
from quadriga.data.pictures import as_list, read_picture
from quadriga.data.prompt_lengths import NO_CONTEXT, PromptContext
from quadriga.data.rl_dataset import prompt_columns, require_short_prompt, set_aside
from quadriga.data.tokenizing import ChatEncoder, as_messages, load_tokenizer
from quadriga.data.videos import FrameRules, open_video
from quadriga.data.vision import as_vision, load_processor, read_media
from quadriga.errors import DataError
from quadriga.user_file import taken

_READERS = {".parquet": "parquet", ".json": "json", ".jsonl": "json"}


class RLHFDataset(Dataset):
    """verl's data set of prompts: rows of `self.dataframe`, with the hooks that subclasses change.

        _read_files_and_tokenize()             makes `self.dataframe` of `self.data_files`
        maybe_filter_out_long_prompts(rows)    the rows that stay
        _build_messages(row)                   the chat of a row
        __getitem__(item)                      the row with `raw_prompt`; tokens are added to what it returns

    Arguments are those of `quadriga.data.RLHFDataset`."""

    def __init__(
        self,
        data_files: Any,
        tokenizer: Any,
        config: Any,
        processor: Any = None,
        max_samples: int = -1,
        context: PromptContext = NO_CONTEXT,
        **others: Any,
    ) -> None:
        files = [data_files] if isinstance(data_files, str | Path) else list(data_files)
        self.data_files, self.original_data_files = (
            [str(file) for file in files],
            copy.deepcopy(files),
        )
        self.tokenizer, self.processor, self.config, self.max_samples = (
            tokenizer,
            processor,
            config,
            max_samples,
        )
        self.prompt_key = config.prompt_key
        self.image_key, self.video_key = config.image_key or "images", config.video_key or "videos"
        self.max_prompt_length, self.truncation = config.max_prompt_length, config.truncation
        self.filter_overlong_prompts = config.filter_overlong_prompts
        self.shuffle, self.seed = config.shuffle, config.seed
        self.apply_chat_template_kwargs = dict(config.apply_chat_template_kwargs)
        self.return_raw_chat, self.cache_dir = True, config.cache_dir
        self._vision, self._context = as_vision(processor), context
        self._encoder = ChatEncoder(tokenizer, self.apply_chat_template_kwargs)
        self._download()
        self._read_files_and_tokenize()

    def _download(self, use_origin_parquet: bool = False) -> None:
        files = self.original_data_files if use_origin_parquet else self.data_files
        self.data_files = [copy_to_local(str(file)) for file in files]

    def _read_files_and_tokenize(self) -> None:
        tables = []
        for file in self.data_files:
            kind = _READERS.get(Path(file).suffix)
            if kind is None:
                raise DataError(
                    file, got=f"the ending {Path(file).suffix!r}", expected=", ".join(_READERS)
                )
            tables.append(datasets.load_dataset(kind, data_files=file, split="train"))
        rows = datasets.concatenate_datasets(tables)
        if 0 < self.max_samples < len(rows):
            order = np.arange(len(rows))
            if self.shuffle:
                order = np.random.default_rng(self.seed).choice(
                    len(rows), size=self.max_samples, replace=False
                )
            rows = rows.select(order[: self.max_samples].tolist())
        self.dataframe = self.maybe_filter_out_long_prompts(rows)

    def maybe_filter_out_long_prompts(self, dataframe: Any = None) -> Any:
        """The rows whose prompt is short enough; all rows without `data.filter_overlong_prompts`.

        The prompt is measured as text with its tools, without images.
        """
        rows = self.dataframe if dataframe is None else dataframe
        if not self.filter_overlong_prompts:
            return rows
        texts: list[str] = []
        for number, row in enumerate(rows):
            where, tools = f"row {number} of {type(self).__name__}", self._context.tools_of(row)
            texts.append(self._encoder.render(self._messages(dict(row)), where=where, tools=tools))
        lengths = [len(ids) for ids in self._encoder.encode(texts)]
        require_short_prompt(lengths, self.max_prompt_length, where=type(self).__name__)
        return rows.select(
            [number for number, length in enumerate(lengths) if length <= self.max_prompt_length]
        )

    def _build_messages(self, example: dict[str, Any], key: str | None = None) -> Any:
        return as_messages(
            example[key or self.prompt_key], where=f"column {key or self.prompt_key!r}"
        )

    def _messages(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        drop_null_fields(row, [self.prompt_key])
        return list(
            self._build_messages(row, **taken(self._build_messages, {"key": self.prompt_key}))
        )

    def __len__(self) -> int:
        return len(self.dataframe)

    def __getitem__(self, item: int) -> dict[str, Any]:
        """The row's columns, `raw_prompt`, and `index`, `tools_kwargs`, `interaction_kwargs` out of `extra_info`."""
        row = dict(self.dataframe[item])
        messages = self._messages(row)
        row.pop(self.prompt_key, None)
        row = set_aside(row)
        extra = row["extra_info"] = row.get("extra_info") or {}
        kwargs = {name: extra.get(name) or {} for name in ("tools_kwargs", "interaction_kwargs")}
        return {**row, "raw_prompt": messages, "index": extra.get("index", 0), **kwargs}

    def __getitems__(self, items: Sequence[int]) -> list[dict[str, Any]]:
        """The rows of a batch with what the rollout reads, made of each one's `raw_prompt` where it is not there."""
        return [
            self._with_tokens(self[item], f"row {item} of {type(self).__name__}") for item in items
        ]

    def _with_tokens(self, row: dict[str, Any], where: str) -> dict[str, Any]:
        images, videos = (as_list(row.pop(key, None)) for key in (self.image_key, self.video_key))
        if "input_ids" in row:
            return row
        messages, pictures, clips = as_messages(list(row["raw_prompt"]), where=where), [], []
        if self._vision is None:
            refuse_media(messages, {"image": images, "video": videos}, self.config, where=where)
        else:
            messages, *given = with_parts(messages, images, videos, where=where)
            pictures, clips = read_media(
                given, self._vision, self.config, folder=Path.cwd(), where=where
            )
        text, options = (
            self._encoder.render(messages, where=where),
            (self._encoder, self._vision, self.config),
        )
        return {
            **row,
            "raw_prompt": messages,
            **prompt_columns(text, pictures, clips, *options, where=where),
        }


def tokenize_and_postprocess_data(
    prompt: str, tokenizer: Any, **options: Any
) -> tuple[Tensor, Tensor]:
    """Token ids and mask of a rendered prompt, [1, max_length]; `options` are those of `postprocess_data`."""
    found = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    return postprocess_data(found["input_ids"], found["attention_mask"], **options)


def process_image(image: Any) -> Any:
    """A picture of PIL, in RGB."""
    return read_picture(image, folder=Path.cwd(), where="process_image").copy()


def process_video(
    video: Any,
    nframes: int | None = None,
    fps: float | None = None,
    fps_min_frames: int = 4,
    fps_max_frames: int = 768,
) -> Tensor:
    """The frames that are taken of a video, [T, 3, H, W] uint8, resized for patches of 14 pixels.
    `video`: a path, {"video": ...} or a list of images, with `nframes`, `fps`, `min_frames` and `max_frames` beside it.
    """
    told = dict(video) if isinstance(video, dict) else {"video": video}
    count = told.pop("nframes", nframes)
    least, most = (count, count) if count else (fps_min_frames, fps_max_frames)
    options = {
        "fps": told.pop("fps", fps) or 2.0,
        "min_frames": told.pop("min_frames", least),
        "max_frames": told.pop("max_frames", most),
    } | {name: told.pop(name) for name in ("min_pixels", "max_pixels") if name in told}
    rules, where = FrameRules.of({}, "qwen2_5_vl", options), "process_video"
    frames = rules.read(
        open_video(told.get("video"), folder=Path.cwd(), where=where), where=where
    ).frames
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
    """Positions [3, P] of the tokens [P] of a prompt along time, height and width; 1 on padding."""
    vision = as_vision(processor)
    if vision is None:
        raise DataError(
            "get_rope_index", got="no processor", expected="that of a vision-language model"
        )
    valid = torch.ones_like(input_ids).bool() if attention_mask is None else attention_mask.bool()
    positions = torch.ones(3, len(input_ids), dtype=input_ids.dtype)
    grids = (image_grid_thw, video_grid_thw, second_per_grid_ts)
    positions[:, valid] = vision.get_rope_index(input_ids[valid].tolist(), *grids)[0].to(
        positions.dtype
    )
    return positions


def hf_tokenizer(
    name_or_path: str, correct_pad_token: bool = True, correct_gemma2: bool = True, **kwargs: Any
) -> Any:
    """A tokenizer with a pad token."""
    return load_tokenizer(name_or_path, **taken(load_tokenizer, kwargs))


def hf_processor(name_or_path: str, **kwargs: Any) -> Any:
    """The processor of a vision-language model; None of a text-only model."""
    return load_processor(name_or_path, **taken(load_processor, kwargs))


def copy_to_local(src: str, cache_dir: str | None = None, *options: Any, **named: Any) -> str:
    """A folder, a file or a model's name as it is; DataError for storage that cannot be read."""
    if str(src).startswith("hdfs://"):
        raise DataError(
            str(src), got="a path of HDFS", expected="a local path", fix="Copy it: hdfs dfs -get."
        )
    return str(src)


def makedirs(name: str, mode: int = 0o777, exist_ok: bool = True, **kwargs: Any) -> None:
    """Make a local folder."""
    os.makedirs(copy_to_local(name), mode, exist_ok)


def copy_path(src: str, dst: str, **kwargs: Any) -> str:
    """Copy a local file or folder."""
    copy_one = shutil.copytree if Path(copy_to_local(src)).is_dir() else shutil.copy
    return str(copy_one(src, copy_to_local(dst)))
