# SPDX-License-Identifier: Apache-2.0
"""The rollout cache (`actor_rollout_ref.rollout.skip`) stores responses in files and reuses them.

    DUMP_DIR/
      5_0.answers           step 5, prompts 0 and on
      5_0_greedy.answers    greedy responses to the same prompts, for estimators that need them
      5_16.answers          a second batch of prompts in the step (algorithm.filter_groups)

`cache` reuses the responses of the same step to the same prompts. `repeat` uses prompts and responses
of the first step in the folder in every step. Files hold no rewards, so reward functions can be
tried without generating again. Validation always generates.

A file records how its responses were generated: prompts, sampling, model. A run with other values
refuses the file, because the log-probabilities would be wrong.
"""

import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quadriga.config import Config
from quadriga.data.files import written_aside
from quadriga.errors import DataError, ProtocolError
from quadriga.observe.metrics import Metric, reduce_metrics
from quadriga.protocol import DataProto
from quadriga.protocol.memory import images_key
from quadriga.protocol.times import TIMES
from quadriga.trainer.responses import drop_prompt_only, repeat_prompts
from quadriga.trainer.rollout_rows import ROLLOUT_ID, forget_times, rollout_numbers
from quadriga.workers.base import MODEL_OBJECTS

_NAME = re.compile(r"(\d+)_(\d+)(_greedy)?\.answers")
_ROLLOUT = "actor_rollout_ref.rollout"
# Keys of the rollout that must be the same as when the file was written.
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "stop")
# Keys of `meta_info` in a file.
_OBJECTS = "answer_objects"  # names of the object columns that the rollout has made
_FACTS = "facts"  # configuration with which the responses were generated
_PROMPTS = "prompts"  # digest of the prompts


class RolloutCache:
    """Callable that reads the responses to a batch from a file, or generates them and writes it.

    Args:
        generate: generates responses, as `generate_responses` does.
        config: the resolved configuration.
    """

    def __init__(self, generate: Callable[[DataProto, int], DataProto], config: Config) -> None:
        self.generate = generate
        self.config = config
        skip = config.actor_rollout_ref.rollout.skip
        self.directory = Path(skip.dump_dir).expanduser()
        self.is_repeated = skip.action == "repeat"

    def __call__(self, prompts: DataProto, num_samples: int) -> DataProto:
        """Respond to prompts.

        Args:
            prompts: a batch of prompts.
            num_samples: responses per prompt.

        Returns:
            The rows that `generate` returns. Those from a file have no times, neither as a column
            nor as metrics, and the metric `rollout/replayed` is 1.

        Raises:
            DataError: the responses in the file were generated with other settings or to other
                prompts, or the file cannot be read or written.
        """
        path = self._path_of(prompts)
        rollout = self.config.actor_rollout_ref.rollout
        # Configuration keys whose values must be the same as when the file was written.
        facts = {
            f"{_ROLLOUT}.n": num_samples,
            "data.train_batch_size": len(prompts),
            "data.max_prompt_length": prompts.batch["input_ids"].shape[1],
            "data.max_response_length": self.config.data.max_response_length,
            "actor_rollout_ref.model.path": self.config.actor_rollout_ref.model.path,
        }
        actor = self.config.actor_rollout_ref.actor
        if actor.echo_coeff:
            # The stored responses mark the tokens of these roles.
            facts["actor_rollout_ref.actor.echo_roles"] = sorted(actor.echo_roles)
        for name in _SAMPLING:
            facts[f"{_ROLLOUT}.{name}"] = getattr(rollout, name)
        if path.is_file():
            return self._replay(path, prompts, num_samples, facts)
        rows = self.generate(prompts, num_samples)
        self._write(path, prompts, rows, facts)
        return rows

    def _path_of(self, prompts: DataProto) -> Path:
        """File of the responses to a batch of prompts; with `repeat` the first one in the folder."""
        suffix = "" if prompts.meta_info.get("do_sample", True) else "_greedy"
        step = int(prompts.meta_info["global_steps"])
        # Uids are STEP-NUMBER, see `assign_uids`.
        first_prompt = int(prompts.non_tensor_batch["uid"][0].rpartition("-")[2])
        if self.is_repeated:
            stored_batches = []
            for path in self.directory.glob("*.answers"):
                match = _NAME.fullmatch(path.name)
                if match and (match[3] or "") == suffix:
                    stored_batches.append((int(match[1]), int(match[2])))
            # If there is none yet, this batch becomes the first one.
            step, first_prompt = min(stored_batches, default=(step, first_prompt))
        return self.directory / f"{step}_{first_prompt}{suffix}.answers"

    def _replay(
        self, path: Path, prompts: DataProto, num_samples: int, facts: dict[str, Any]
    ) -> DataProto:
        """Read the responses of a file, and make the rows that the rollout would have returned.

        Args:
            path: the file.
            prompts: prompts of this step.
            num_samples: responses per prompt.
            facts: values that configuration keys must have had when the file was written.

        Raises:
            DataError: the responses were generated with other settings or to other prompts, or the
                file cannot be read.
        """
        cached = self._read(path)
        cached_facts = cached.meta_info[_FACTS]
        differing = [name for name in facts if cached_facts.get(name) != facts[name]]
        if differing:
            got = ", ".join(f"{name}={cached_facts.get(name)}" for name in differing)
            expected = ", ".join(f"{name}={facts[name]}" for name in differing)
            raise self._refusal(path, f"responses with {got}", expected)
        if not self.is_repeated and cached.meta_info[_PROMPTS] != _digest(prompts):
            raise self._refusal(
                path,
                "responses to other prompts",
                f"responses to those of step {prompts.meta_info['global_steps']}",
            )

        # Each row of the responses gets the columns of its prompt in this step.
        rows = drop_prompt_only(repeat_prompts(prompts, num_samples))
        rows = rows.select_idxs(rollout_numbers(cached))
        names = cached.meta_info[_OBJECTS]
        if self.is_repeated:
            # Every step repeats the file's prompts, so their columns replace those of the step.
            names = list(cached.non_tensor_batch)
        for name in names:
            # Rows keep the ids that this step has given them.
            if name not in ("uid", ROLLOUT_ID):
                rows.non_tensor_batch[name] = cached.non_tensor_batch[name]
        rows.union(DataProto(cached.batch))
        if TIMES in rows.batch.keys():
            forget_times(rows)
        metrics = {name: Metric(value) for name, value in cached.meta_info["metrics"].items()}
        rows.meta_info["metrics"] = {**metrics, "rollout/replayed": Metric(1.0)}
        return rows

    def _read(self, path: Path) -> DataProto:
        """Load a file of this cache.

        Raises:
            DataError: the file cannot be read, or was not written by a rollout cache.
        """
        expected = "responses that a run has written"
        try:
            cached = DataProto.load_from_disk(path)
        except (OSError, ProtocolError) as error:
            raise self._refusal(path, str(error).rstrip("."), expected) from error
        if not {_FACTS, _PROMPTS, _OBJECTS, "metrics"} <= cached.meta_info.keys():
            raise self._refusal(path, "a DataProto of another kind", expected)
        return cached

    def _write(
        self, path: Path, prompts: DataProto, rows: DataProto, facts: dict[str, Any]
    ) -> None:
        """Write the responses to a batch, without the tensors of its prompts, to a file."""
        prompt_columns = drop_prompt_only(prompts)
        names_of_prompts = prompt_columns.batch.keys()
        cached = rows.select([name for name in rows.batch.keys() if name not in names_of_prompts])
        # Rewards are not stored: responses from a file are graded again.
        cached.non_tensor_batch.pop("reward_outcome", None)

        # Object columns that the rollout has made, or may have changed: conversations may add images
        # to the inputs of the model.
        response_objects = []
        for name in cached.non_tensor_batch:
            if name in MODEL_OBJECTS or name not in prompt_columns.non_tensor_batch:
                response_objects.append(name)
        metrics = {}
        for name, value in reduce_metrics(rows.meta_info.get("metrics", {})).items():
            if not name.startswith("timing_s/"):
                metrics[name] = value

        cached.meta_info = {
            _FACTS: facts,
            _PROMPTS: _digest(prompts),
            _OBJECTS: response_objects,
            "metrics": metrics,
        }
        with written_aside(path, where=f"{_ROLLOUT}.skip.dump_dir") as draft:
            cached.save_to_disk(draft)

    def _refusal(self, path: Path, got: str, expected: str) -> DataError:
        """The error for a file that cannot be used."""
        return DataError(
            str(path),
            got=got,
            expected=expected,
            fix=f"Set {_ROLLOUT}.skip.dump_dir to another folder, delete this file, "
            f"or turn {_ROLLOUT}.skip off.",
        )


def _digest(prompts: DataProto) -> str:
    """Hash of the tokens and images of all prompts."""
    digest = hashlib.blake2b(digest_size=16)
    for name in ("input_ids", "attention_mask"):
        digest.update(prompts.batch[name].cpu().contiguous().numpy().tobytes())
    for inputs in prompts.non_tensor_batch.get("multi_modal_inputs", ()):
        digest.update(images_key(inputs).encode())
    return digest.hexdigest()
