# SPDX-License-Identifier: Apache-2.0
"""`data`: files, their conversion to tokens, and batch sizes."""

from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import NonNegativeInt, PositiveFloat, model_validator

from quadriga.config.base import Section, refuse
from quadriga.config.types import Count, MinusOneOrCount, Name, PathText, PathTexts


class FromFile(Section):
    """A class of your own: a Python file, and a name in it."""

    @model_validator(mode="after")
    def _require_both_or_neither(self) -> Self:
        """Refuse a file without a name, and a name without a file."""
        # The fields for the file and for the class. Subclasses call them differently.
        names = [name for name, _ in self if name != "options"]
        missing_names = [name for name in names if getattr(self, name) is None]
        if len(missing_names) == 1:
            raise refuse(
                f"both {' and '.join(names)}, or neither", "Name the file and the class in it."
            )
        return self


class CustomDatasetConfig(FromFile):
    """A data set class of your own, loaded from a file."""

    path: PathText | None = None
    """Python file that holds the class. null: `RLHFDataset`."""
    name: str | None = None
    """Name of the class in that file."""
    options: dict[str, Any] = {}
    """Open dictionary: keys of that class, which it reads as `config.NAME`, `config["NAME"]` or `config.get("NAME")`.
    On a command line `+data.NAME=VALUE` is one of them."""

    @model_validator(mode="after")
    def _refuse_unread_options(self) -> Self:
        """Refuse `options` without a class that reads them."""
        if self.options and self.path is None:
            raise refuse(
                "no keys of your own without data.custom_cls.path",
                "Name the class that reads them.",
            )
        return self


class DataGenConfig(FromFile):
    """A generator of your own, which makes rows between the batches of training."""

    path: PathText | None = None
    """Python file that holds the class, a subclass of `quadriga.data.AbstractDataGenerator`. null: none."""
    name: str | None = None
    """Name of the class in that file."""
    options: dict[str, Any] = {}
    """Open dictionary: `config.options` of that class."""


class SamplerConfig(FromFile):
    """A sampler class of your own (a curriculum, for example), loaded from a file."""

    class_path: PathText | None = None
    """Python file that holds the class; or pkg://quadriga.data.curriculum, which has `SuccessRateSampler`. null: a
    seeded shuffle, or file order without `data.shuffle`."""
    class_name: str | None = None
    """Name of the class in that file."""


class ImageSizeConfig(Section):
    """Size of an image before it is cut into patches, and number of frames of a video."""

    min_pixels: Count | None = None
    """Pixels, height times width, of an image or a frame, at least; smaller ones are made larger. null: as the model's
    own files say."""
    max_pixels: Count | None = None
    """Pixels of an image or a frame, at most; larger ones are made smaller, and take fewer tokens. null: as the model's
    own files say."""
    fps: PositiveFloat | None = None
    """Frames per second of video. null: as the model's files say, else 2."""
    min_frames: Count | None = None
    """Least number of frames of a video, if it has as many. null: as the model's files say, else 4."""
    max_frames: Count | None = None
    """Largest number of frames of a video. null: as the model's files say, else 768."""

    @model_validator(mode="after")
    def _refuse_minimum_above_maximum(self) -> Self:
        """Refuse a minimum above its maximum."""
        for unit in ("pixels", "frames"):
            minimum = getattr(self, f"min_{unit}")
            maximum = getattr(self, f"max_{unit}")
            if minimum is not None and maximum is not None and minimum > maximum:
                raise refuse(
                    f"min_{unit} of at most max_{unit}", "Exchange them, or leave one out."
                )
        return self


class DataConfig(Section):
    """Training and validation data."""

    train_files: PathTexts = ""
    """Training data: a path, a glob, a URL that fsspec opens, or a list of these (parquet, json, jsonl)."""
    val_files: PathTexts = ""
    """Validation data, in the forms of `data.train_files`. Empty: none."""
    mixture: list[PositiveFloat] = []
    """Shares of the entries of `data.train_files` among the rows that are drawn, one for each: `[0.7, 0.3]`. Empty:
    each row of all files is drawn once an epoch."""
    mixture_until: Literal["first", "all"] = "first"
    """End of an epoch of a mixture. first: an entry has no more rows; all: all rows were drawn, some of them again."""
    format: Literal["messages", "prompt_response"] = "messages"
    """SFT: format of rows. messages: a chat in one column; prompt_response: two columns, one turn each."""
    messages_key: Name = "messages"
    """SFT: column with the chat for `data.format=messages`; all turns of the assistant are learned."""
    tools_key: Name = "tools"
    """SFT: optional column with tools for the chat template."""
    prompt_key: Name = "prompt"
    """Column that holds the prompt, a list of chat messages (a supervised task: or text; `extra_info.question` is the
    entry of that name in a column of dictionaries, and so for the other columns)."""
    response_key: Name = "response"
    """SFT: column with the response, text, where `data.format=prompt_response`."""
    chosen_key: Name = "chosen"
    """Reward models: column with the better response of a pair, text."""
    rejected_key: Name = "rejected"
    """Reward models: column with the worse response of a pair, text."""
    image_key: Name | None = "images"
    """Column that holds the images of a prompt, for each `<image>` in it one: paths, or {"bytes": ...}. null: none."""
    video_key: Name | None = "videos"
    """Column that holds the videos of a prompt, for each `<video>` in it one: paths, {"bytes": ...}, lists of frames,
    or {"frames": ..., "fps": ...}. null: none, and `<video>` is text."""
    mm_processor_kwargs: ImageSizeConfig = ImageSizeConfig()
    reward_fn_key: Name = "data_source"
    """Column that names the data source of a row; it chooses the built-in grader."""
    max_prompt_length: Count = 512
    """Longest prompt, in tokens, tools included; shorter ones are padded on the left up to it."""
    max_response_length: Count = 512
    """Longest response, in tokens: generation stops there (max new tokens)."""
    max_length: Count = 1024
    """SFT and reward models: longest sequence, in tokens, prompt and response together."""
    train_batch_size: Count = 1024
    """Prompts of a training step (each with `rollout.n` responses). Supervised: rows of an optimizer step."""
    gen_batch_size: Count | None = None
    """Prompts that are generated for at a time with `algorithm.filter_groups`. null: as many as train_batch_size."""
    val_batch_size: Count | None = None
    """Rows of a validation batch. null: all rows at once (`quadriga generate --output`: 256)."""
    tokenizer: PathText | None = None
    """Path or hub name of the tokenizer. null: the model's own."""
    trust_remote_code: bool = False
    """Whether code that comes with the tokenizer may be run."""
    return_multi_modal_inputs: bool = True
    """Whether rows contain the model's inputs for images and videos. False: the trainer computes them when it reads a
    batch, so that worker processes of the loader send no patches."""
    return_raw_chat: bool = False
    """Whether rows contain the chat messages as `raw_prompt`."""
    return_full_prompt: bool = False
    """Whether rows contain the rendered text of the prompt as `full_prompts`."""
    apply_chat_template_kwargs: dict[str, Any] = {}
    """Open dictionary: arguments for the tokenizer's chat template, such as `enable_thinking: false`."""
    filter_overlong_prompts: bool = False
    """Whether prompts over `data.max_prompt_length` (supervised: `data.max_length`) are left out, and counted."""
    filter_overlong_prompts_workers: Count = 1
    """Processes that measure the prompts for that filter."""
    on_bad_row: Literal["error", "skip"] = "error"
    """Treatment of a row that cannot be used (no chat, an unknown role, broken JSON, a missing image ...). error: the
    run does not start; skip: the row is left out, counted and listed."""
    truncation: Literal["error", "left", "right", "middle"] = "error"
    """Treatment of a sequence that is too long. error: the run stops; others: the side to cut; middle: prompts only."""
    streaming: Count | None = None
    """Rows of training files that are read at a time, and shuffled among each other, without a pass over the files
    before; the run ends by trainer.total_training_steps. null: files are read and measured when a run starts."""
    shuffle: bool = True
    """Whether training rows are shuffled in each epoch, from `data.seed`."""
    validation_shuffle: bool = False
    """Whether validation prompts are shuffled, from `data.seed`."""
    seed: NonNegativeInt = 1
    """Seed of the order of the data and of the choice of rows."""
    train_max_samples: MinusOneOrCount = -1
    """Training rows to use at most, drawn with `data.seed` when shuffled (supervised: the first). -1: all."""
    val_max_samples: MinusOneOrCount = -1
    """Validation rows to use at most, drawn with `data.seed` when shuffled (supervised: the first). -1: all."""
    dataloader_num_workers: NonNegativeInt = 0
    """Processes that prepare rows. 0: the trainer's own."""
    cache_dir: PathText = "~/.cache/quadriga"
    """Directory for copies of remote files and for the results of the over-long filter."""
    custom_cls: CustomDatasetConfig = CustomDatasetConfig()
    datagen: DataGenConfig = DataGenConfig()
    sampler: SamplerConfig = SamplerConfig()

    @property
    def chat_columns(self) -> tuple[str, ...]:
        """Columns that hold chats or tool schemas in any task."""
        return (
            self.prompt_key,
            self.messages_key,
            self.tools_key,
            self.chosen_key,
            self.rejected_key,
        )

    @model_validator(mode="after")
    def _refuse_two_data_sets(self) -> Self:
        """Refuse two classes that would both make the training rows."""
        if self.custom_cls.path is not None and self.datagen.path is not None:
            raise refuse(
                "data.custom_cls or data.datagen",
                "A dataset class of your own may have on_batch_end(batch).",
            )
        return self

    @model_validator(mode="after")
    def _require_share_for_each_entry(self) -> Self:
        """Require a share of the mixture for each entry of `train_files`."""
        files = [self.train_files] if isinstance(self.train_files, str) else self.train_files
        if self.mixture and len(self.mixture) != len(files):
            raise refuse(
                f"data.mixture with a share for each entry of data.train_files, {len(files)}",
                "Name files with a common share by one glob.",
            )
        return self

    if not TYPE_CHECKING:
        # Hidden from type checkers, which would accept any attribute.
        def __getattr__(self, name: str) -> Any:
            """Read an option of the user's own data set class like a field.

            Raises:
                AttributeError: neither a field nor an option has this name.
            """
            # pydantic looks up attributes before the fields are set: `custom_cls` may be missing.
            options = self.__dict__["custom_cls"].options if "custom_cls" in self.__dict__ else {}
            if name.startswith("_") or name not in options:
                raise AttributeError(
                    f"data.{name}: got a key that does not exist. +data.{name}=VALUE adds a key of "
                    f"your own, config.get({name!r}, DEFAULT) reads an optional one."
                )
            return options[name]

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in self.custom_cls.options
