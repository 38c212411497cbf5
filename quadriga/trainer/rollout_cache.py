# SPDX-License-Identifier: Apache-2.0
"""The rollout cache (`actor_rollout_ref.rollout.skip`): responses in files, used again, to work on what follows them.

    DUMP_DIR/
      5_0.answers           step 5, prompts 0 and on
      5_0_greedy.answers    the greedy responses to the same prompts, where the estimator compares with them
      5_16.answers          the second batch of prompts of a step that takes several (algorithm.filter_groups)

`cache` takes from a file the responses of the same step to the same prompts. `repeat` takes prompts and responses of
the first step in the folder, in every step. Rewards are not in the files: changing them is what the cache is for.
Validation always generates.

A file has the facts of its generation: prompts, sampling, model. Where they are not those of the run, it is an error,
for its log-probabilities would be wrong.
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
from quadriga.trainer.responses import without_passing
from quadriga.workers.base import MODEL_OBJECTS

_NAME = re.compile(r"(\d+)_(\d+)(_greedy)?\.answers")
_ROLLOUT = "actor_rollout_ref.rollout"
_OBJECTS, _FACTS, _PROMPTS = "answer_objects", "facts", "prompts"


class RolloutCache:
    """Responses from a file where there is one, else from `generate` (as `generate_responses`), written to a file."""

    def __init__(self, generate: Callable[[DataProto, int], DataProto], config: Config) -> None:
        self.generate, self.config = generate, config
        self.directory = Path(config.actor_rollout_ref.rollout.skip.dump_dir).expanduser()
        self.is_repeated = config.actor_rollout_ref.rollout.skip.action == "repeat"

    def __call__(self, prompts: DataProto, num_samples: int) -> DataProto:
        """As `generate`; metrics of responses from a file have no times, and `rollout/replayed` is 1.
        Raises DataError: a file has responses to something else, cannot be read, or cannot be written."""
        greedy = "" if prompts.meta_info.get("do_sample", True) else "_greedy"
        step, first = (
            int(prompts.meta_info["global_steps"]),
            int(prompts.non_tensor_batch["uid"][0].rpartition("-")[2]),
        )
        if self.is_repeated:
            names = [
                match
                for path in self.directory.glob("*.answers")
                if (match := _NAME.fullmatch(path.name))
            ]
            places = [
                (int(match[1]), int(match[2])) for match in names if (match[3] or "") == greedy
            ]
            step, first = min(places, default=(step, first))
        path = self.directory / f"{step}_{first}{greedy}.answers"
        # What must be the same, by the name that a user knows.
        rollout = self.config.actor_rollout_ref.rollout
        sampling = {
            name: getattr(rollout, name)
            for name in ("temperature", "top_p", "top_k", "min_p", "stop")
        }
        facts = {
            f"{_ROLLOUT}.n": num_samples,
            "data.train_batch_size": len(prompts),
            "data.max_prompt_length": prompts.batch["input_ids"].shape[1],
            "data.max_response_length": self.config.data.max_response_length,
            "actor_rollout_ref.model.path": self.config.actor_rollout_ref.model.path,
            **{f"{_ROLLOUT}.{name}": value for name, value in sampling.items()},
        }
        if path.is_file():
            return self._replayed(path, prompts, num_samples, facts)
        rows = self.generate(prompts, num_samples)
        self._write(path, prompts, rows, facts)
        return rows

    def _replayed(
        self, path: Path, prompts: DataProto, num_samples: int, facts: dict[str, Any]
    ) -> DataProto:
        """The rows as the rollout would have given them."""
        try:
            cached = DataProto.load_from_disk(path)
        except (OSError, ProtocolError) as error:
            raise self._refusal(
                path, str(error).rstrip("."), "responses that a run has written"
            ) from error
        if not {_FACTS, _PROMPTS, _OBJECTS, "metrics"} <= cached.meta_info.keys():
            raise self._refusal(
                path, "a DataProto of another kind", "responses that a run has written"
            )
        found = cached.meta_info[_FACTS]
        differing = [name for name in facts if found.get(name) != facts[name]]
        if differing:
            got = ", ".join(f"{name}={found.get(name)}" for name in differing)
            raise self._refusal(
                path,
                f"responses with {got}",
                ", ".join(f"{name}={facts[name]}" for name in differing),
            )
        if not self.is_repeated and cached.meta_info[_PROMPTS] != _digest(prompts):
            expected = f"responses to those of step {prompts.meta_info['global_steps']}"
            raise self._refusal(path, "responses to other prompts", expected)
        rows = without_passing(prompts).repeat(num_samples)
        # A repeated step has prompts of its own: all that is known of them comes from the file, but for their names.
        names = [name for name in cached.non_tensor_batch if name != "uid"]
        for name in names if self.is_repeated else cached.meta_info[_OBJECTS]:
            rows.non_tensor_batch[name] = cached.non_tensor_batch[name]
        rows.union(DataProto(cached.batch))
        metrics = {name: Metric(value) for name, value in cached.meta_info["metrics"].items()}
        rows.meta_info["metrics"] = {**metrics, "rollout/replayed": Metric(1.0)}
        return rows

    def _write(
        self, path: Path, prompts: DataProto, rows: DataProto, facts: dict[str, Any]
    ) -> None:
        known = without_passing(prompts)
        # Grades, like everything that comes after a response, are made anew.
        objects = [name for name in rows.non_tensor_batch if name != "reward_outcome"]
        metrics = reduce_metrics(rows.meta_info.get("metrics", {}))
        cached = DataProto.from_dict(
            {
                name: rows.batch[name]
                for name in rows.batch.keys()
                if name not in known.batch.keys()
            },
            {name: rows.non_tensor_batch[name] for name in objects},
            {
                _FACTS: facts,
                _PROMPTS: _digest(prompts),
                # Conversations show more than their prompts.
                _OBJECTS: [
                    name
                    for name in objects
                    if name in MODEL_OBJECTS or name not in known.non_tensor_batch
                ],
                "metrics": {
                    name: value
                    for name, value in metrics.items()
                    if not name.startswith("timing_s/")
                },
            },
        )
        with written_aside(path, where=f"{_ROLLOUT}.skip.dump_dir") as draft:
            cached.save_to_disk(draft)

    def _refusal(self, path: Path, got: str, expected: str) -> DataError:
        fix = f"Set {_ROLLOUT}.skip.dump_dir to another folder, delete this file, or turn {_ROLLOUT}.skip off."
        return DataError(str(path), got=got, expected=expected, fix=fix)


def _digest(prompts: DataProto) -> str:
    """Of the tokens of all prompts, and their images."""
    digest = hashlib.blake2b(digest_size=16)
    for name in ("input_ids", "attention_mask"):
        digest.update(prompts.batch[name].cpu().contiguous().numpy().tobytes())
    for inputs in prompts.non_tensor_batch.get("multi_modal_inputs", ()):
        digest.update(images_key(inputs).encode())
    return digest.hexdigest()
