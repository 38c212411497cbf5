# SPDX-License-Identifier: Apache-2.0
"""Checkpoint of a role, written and read by all of its ranks.

    actor/
      config.json, generation_config.json, files of tokenizer and image processor     `model`
      adapter_config.json, adapter_model.safetensors: PEFT's files of an adapter      `model`
      model/         distributed checkpoint: float32 weights, names of transformers   `model`
      optimizer/     distributed checkpoint: moments and step counts                  `optimizer`
      huggingface/   safetensors of the full model, and the small files above         `hf_model`

All ranks write the folders of distributed checkpoints; the first rank writes everything else. When
all ranks have written `model`, it assembles `huggingface` from the files, with no more than one
shard in memory. For a model with an adapter, `model` is the adapter alone. For `huggingface`, the
adapter is merged into the frozen weights, which are first written to a temporary folder.
"""

import shutil
from functools import partial
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from quadriga.config.actor import HF_FOLDER
from quadriga.config.adapter import ADAPTER_CONFIG, AdapterShape, is_adapter, read_adapter
from quadriga.engines.checkpoint import StateWriter, explain_write_errors, load_state
from quadriga.engines.fsdp.engine import ALL_KINDS, FSDPEngine
from quadriga.errors import CheckpointError
from quadriga.models.adapter_files import MergedFiles, write_factors
from quadriga.models.lora import adapter_of, write_adapter_config
from quadriga.models.vision import copy_processor
from quadriga.models.weight_files import MODEL, DistributedFiles, open_weights, write_safetensors
from quadriga.models.weight_names import ConvertedFiles

OPTIMIZER = "optimizer"
FROZEN = "frozen"


class RoleCheckpoint:
    """Writes and reads the checkpoint of a role. All ranks of the role make the same calls.

    Args:
        engine: engine of the role.
        tokenizer: tokenizer to save with the model.
    """

    def __init__(self, engine: FSDPEngine, tokenizer: PreTrainedTokenizerBase) -> None:
        self.engine = engine
        self.model = engine.model
        self.tokenizer = tokenizer
        self.writer = StateWriter(engine.world)

    def start(self, folder: Path, contents: frozenset[str]) -> None:
        """Copy the engine's state, and start to write the copy in the background.

        The small files are written before this returns. `writer.is_written` reports the end.

        Args:
            folder: folder of the role.
            contents: any of `model`, `optimizer` and `hf_model`.

        Raises:
            CheckpointError: this checkpoint or the previous one cannot be written.
        """
        config = self.model.config
        parts = self._parts(contents)
        with self.engine.awake(*ALL_KINDS):
            # Each part of the state gets a folder. The other files are made when all are complete.
            states = {folder / part: self.engine.state(frozenset({part})) for part in sorted(parts)}
            self.writer.start(states, partial(_write_derived_files, folder, contents, self.model))
        if not self.engine.world.is_first:
            return
        # Not in the background thread, because a tokenizer must not be saved while it is in use.
        with explain_write_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            for part, target in ((MODEL, folder), ("hf_model", folder / HF_FOLDER)):
                if part not in contents:
                    continue
                target.mkdir(exist_ok=True)
                config.save_pretrained(target)
                # Not with save_pretrained, which refuses the values of some models on the hub.
                # Classifiers have no generation_config.
                generation = getattr(self.model, "generation_config", None)
                if generation is not None:
                    generation.to_json_file(target / "generation_config.json")
                self.tokenizer.save_pretrained(target)
                copy_processor(config, target)
            if MODEL in contents and adapter_of(self.model):
                write_adapter_config(self.model, folder)

    def sizes(self, contents: frozenset[str]) -> dict[str, int]:
        """Predict the bytes that `start` writes for each tensor.

        Args:
            contents: as for `start`.

        Returns:
            Bytes of all ranks together, by `FOLDER/NAME` of the tensor.
        """
        sizes = {}
        with self.engine.awake(*ALL_KINDS):
            for part in self._parts(contents):
                for name, tensor in self.engine.state(frozenset({part})).items():
                    # A DTensor has the size of the full tensor, of which each rank has a shard.
                    num_bytes = tensor.numel() * tensor.element_size()
                    sizes[f"{part}/{name}"] = num_bytes
                    # `huggingface` is written from the other parts.
                    if "hf_model" in contents and part != OPTIMIZER:
                        sizes[f"{HF_FOLDER}/{name}"] = num_bytes
        return sizes

    def _parts(self, contents: frozenset[str]) -> frozenset[str]:
        """Parts of the engine's state that are written for `contents`, some only temporarily."""
        parts = contents & {MODEL, OPTIMIZER}
        # The Hugging Face folder is assembled from these parts, with the adapter merged.
        if "hf_model" in contents:
            parts |= {MODEL, FROZEN} if adapter_of(self.model) else {MODEL}
        return parts

    def load(self, folder: Path, contents: frozenset[str]) -> None:
        """Load `model`, `optimizer` or both into the engine, from a checkpoint of any layout.

        Args:
            folder: folder of the role.
            contents: the parts to load; `hf_model` is ignored.

        Raises:
            CheckpointError: a part is missing, or belongs to another model or optimizer.
        """
        parts = contents & {MODEL, OPTIMIZER}
        if MODEL in parts:
            # Rank and scale of an adapter must be the same, and its tensors do not show the scale.
            saved = read_adapter(folder) if is_adapter(folder) else None
            saved_kind = _kind_of_weights(saved)
            kind = _kind_of_weights(adapter_of(self.model))
            if saved_kind != kind:
                raise CheckpointError(
                    str(folder / ADAPTER_CONFIG if saved else folder),
                    got=saved_kind,
                    expected=f"{kind}, as actor_rollout_ref.model says",
                    fix="Resume with the lora_rank and lora_alpha of the run that wrote it.",
                )
        with self.engine.awake(*ALL_KINDS):
            for part in sorted(parts):
                load_state(folder / part, self.engine.state(frozenset({part})), self.engine.world)
            self.engine.apply_loaded_state(parts)


def _kind_of_weights(adapter: AdapterShape | None) -> str:
    """Describe what `model` of a checkpoint holds: all weights or an adapter, with its scale."""
    if adapter is None:
        return "all weights"
    return f"an adapter of rank {adapter.rank} and scale {adapter.scale:g}"


def _write_derived_files(folder: Path, contents: frozenset[str], model: PreTrainedModel) -> None:
    """Write PEFT's adapter file and `huggingface`, from the complete distributed checkpoint.

    The first rank calls this in its background thread. Folders that were written only for
    `huggingface` are removed.

    Args:
        folder: folder of the role.
        contents: see `RoleCheckpoint.start`.
        model: the model, of which names and adapter are read, but no weights.
    """
    adapter = adapter_of(model)
    if adapter and MODEL in contents:
        with explain_write_errors(folder):
            files = open_weights(folder / MODEL)
            write_factors(folder, {name: files.read(name) for name in files.shapes})
    if "hf_model" not in contents:
        return
    with explain_write_errors(folder / HF_FOLDER):
        weights = open_weights(folder / MODEL)
        # Merge the adapter, so that users can load the model without PEFT.
        if adapter:
            # Names in this folder have a prefix, as in "frozen.lm_head.weight".
            frozen = DistributedFiles(folder / FROZEN, prefix=f"{FROZEN}.")
            weights = MergedFiles(frozen, weights, adapter.scale, folder)
        (folder / HF_FOLDER).mkdir(exist_ok=True)
        write_safetensors(folder / HF_FOLDER, ConvertedFiles(weights, model, to_files=True))
        if adapter:
            shutil.rmtree(folder / FROZEN)
    # `model` was written only to be converted.
    if MODEL not in contents:
        shutil.rmtree(folder / MODEL)
