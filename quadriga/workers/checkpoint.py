# SPDX-License-Identifier: Apache-2.0
"""A role's part of a checkpoint: what its ranks write and read.

    actor/
      config.json, generation_config.json, the tokenizer's files      with `model`; the processor's, where it sees
      model/         distributed checkpoint: float32 weights under the names that transformers' module gives them
      adapter_config.json, adapter_model.safetensors                  with `model`, of one with an adapter: PEFT's files
      optimizer/     distributed checkpoint: moments and step counts
      huggingface/   with `hf_model`: safetensors of the whole model, and the small files above

The folders are written by all ranks of the role, the rest by its first. `huggingface` is put together from the
files of `model`, tensor by tensor, after all have written theirs: no rank holds more of it than one shard. Of a
model with an adapter `model` is the adapter alone; for `huggingface` it is merged into the frozen weights, which are
written beside it for that long.
"""

import shutil
from functools import partial
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from quadriga.config.adapter import ADAPTER_CONFIG, AdapterShape, is_adapter, read_adapter
from quadriga.engines.checkpoint import StateWriter, explained, load_state
from quadriga.engines.fsdp.engine import ALL_KINDS, FSDPEngine
from quadriga.errors import CheckpointError
from quadriga.models.adapter_files import MergedFiles, write_factors
from quadriga.models.lora import adapter_of, write_adapter_config
from quadriga.models.vision import copy_processor
from quadriga.models.weight_files import MODEL, DistributedFiles, open_weights, write_safetensors
from quadriga.models.weight_names import ConvertedFiles

HF_FOLDER = "huggingface"  # where a role's part of a checkpoint has the model of `hf_model`
OPTIMIZER, FROZEN = "optimizer", "frozen"


class RoleCheckpoint:
    """Writes and reads one role's part. All ranks of the role call the same methods in turn."""

    def __init__(
        self, engine: FSDPEngine, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        self.engine, self.model, self.tokenizer = engine, model, tokenizer
        self.writer = StateWriter(engine.world)

    def start(self, folder: Path, contents: frozenset[str]) -> None:
        """Copy `contents` (of `model`, `optimizer` and `hf_model`) out of the engine, and begin to write it into the
        role's folder; `writer` knows when it is on disk.
        Raises CheckpointError: something cannot be written, now or in the last call."""
        adapter, config = adapter_of(self.model), self.model.config
        whole = {MODEL, FROZEN} if adapter else {MODEL}
        parts = contents & {MODEL, OPTIMIZER} | (whole if "hf_model" in contents else frozenset())
        with self.engine.awake(*ALL_KINDS):
            states = {folder / part: self.engine.state(frozenset({part})) for part in sorted(parts)}
            self.writer.start(states, partial(_complete, folder, contents, adapter, self.model))
        if not self.engine.world.is_first:
            return
        # The small files, here and not in the thread: a tokenizer must not be saved while it is used.
        with explained(folder):
            folder.mkdir(parents=True, exist_ok=True)
            for part, place in ((MODEL, folder), ("hf_model", folder / HF_FOLDER)):
                if part not in contents:
                    continue
                place.mkdir(exist_ok=True)
                config.save_pretrained(place)
                # Without the checks of save_pretrained, which refuses files that models on the hub come with.
                # A classifier has none.
                if (generation := getattr(self.model, "generation_config", None)) is not None:
                    generation.to_json_file(place / "generation_config.json")
                self.tokenizer.save_pretrained(place)
                copy_processor(config, place)
            if MODEL in contents and adapter:
                write_adapter_config(self.model, folder)

    def load(self, folder: Path, contents: frozenset[str]) -> None:
        """Read `model`, `optimizer` or both back into the engine, whatever layout has written them.
        Raises CheckpointError: the checkpoint has no such part, or is that of another model or optimizer."""
        parts = contents & {MODEL, OPTIMIZER}
        if MODEL in parts:
            # An adapter goes on as an adapter of the same rank and scale, which its tensors do not say.
            saved = read_adapter(folder) if is_adapter(folder) else None
            kinds = [
                f"an adapter of rank {one.rank} and scale {one.scale:g}" if one else "all weights"
                for one in (saved, adapter_of(self.model))
            ]
            if kinds[0] != kinds[1]:
                where, expected = (
                    folder / ADAPTER_CONFIG if saved else folder,
                    "as actor_rollout_ref.model says",
                )
                fix = "Resume with the lora_rank and lora_alpha of the run that wrote it."
                raise CheckpointError(
                    str(where), got=kinds[0], expected=f"{kinds[1]}, {expected}", fix=fix
                )
        with self.engine.awake(*ALL_KINDS):
            for part in sorted(parts):
                load_state(folder / part, self.engine.state(frozenset({part})), self.engine.world)
            self.engine.state_was_loaded(parts)


def _complete(
    folder: Path, contents: frozenset[str], adapter: AdapterShape | None, model: PreTrainedModel
) -> None:
    if adapter and MODEL in contents:
        with explained(folder):
            files = open_weights(folder / MODEL)
            write_factors(folder, {name: files.read(name) for name in files.shapes})
    if "hf_model" not in contents:
        return
    with explained(folder / HF_FOLDER):
        weights = open_weights(folder / MODEL)
        if adapter:
            frozen = DistributedFiles(folder / FROZEN, prefix=f"{FROZEN}.")
            weights = MergedFiles(frozen, weights, adapter.scale, folder)
        (folder / HF_FOLDER).mkdir(exist_ok=True)
        write_safetensors(folder / HF_FOLDER, ConvertedFiles(weights, model, to_files=True))
        if adapter:
            shutil.rmtree(folder / FROZEN)
    if MODEL not in contents:
        shutil.rmtree(folder / MODEL)
