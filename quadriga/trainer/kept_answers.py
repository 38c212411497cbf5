# SPDX-License-Identifier: Apache-2.0
"""Answers that are kept on disk and used again (`actor_rollout_ref.rollout.skip`), to work on what comes after them.

    DUMP_DIR/
      5_0.answers           step 5, prompts 0 and on
      5_0_greedy.answers    the greedy answers to the same prompts, where the estimator compares with them
      5_16.answers          the second batch of prompts of a step that takes several (algorithm.filter_groups)

`cache` takes from a file the answers of the same step to the same prompts. `repeat` takes prompts and answers of the
first step that was kept, in every step. Rewards are not kept: changing them is what kept answers are for. Validation
always generates.

A file knows what it answers: prompts, sampling, model. Where that is not what is asked, it is an error, for its
log-probabilities would be wrong.
"""

import hashlib
import re
from pathlib import Path
from typing import Any

from quadriga.config import Config
from quadriga.errors import DataError, ProtocolError
from quadriga.observe.metrics import Metric, reduce_metrics
from quadriga.protocol import DataProto
from quadriga.protocol.memory import images_key
from quadriga.trainer.answers import Answers, without_passing

_NAME = re.compile(r"(\d+)_(\d+)(_greedy)?\.answers")
_ROLLOUT = "actor_rollout_ref.rollout"
_OBJECTS, _FACTS, _PROMPTS = "answer_objects", "facts", "prompts"


class KeptAnswers:
    """See `Answers`: from a file where there is one, else from the rollout and then into a file.

    Args:
        answers: generates.
        config: of the run.
    """

    def __init__(self, answers: Answers, config: Config) -> None:
        self.answers, self.config = answers, config
        self.directory = Path(config.actor_rollout_ref.rollout.skip.dump_dir).expanduser()
        self.is_repeated = config.actor_rollout_ref.rollout.skip.action == "repeat"

    def __call__(self, prompts: DataProto, num_samples: int) -> DataProto:
        """See `Answers`; metrics of answers that were kept have no times, and `rollout/replayed` is 1.

        Raises:
            DataError: what was kept answers something else, cannot be read, or cannot be written.
        """
        path = self._path(prompts)
        facts = self._facts(prompts, num_samples)
        if not path.is_file():
            rows = self.answers(prompts, num_samples)
            self._keep(path, prompts, rows, facts)
            return rows
        kept = self._read(path)
        self._require_same(path, kept.meta_info[_FACTS], facts)
        if not self.is_repeated and kept.meta_info[_PROMPTS] != _digest(prompts):
            raise self._refusal(path, "answers to other prompts", f"answers to those of step {_step(prompts)}")
        return self._replayed(kept, prompts, num_samples)

    def _path(self, prompts: DataProto) -> Path:
        greedy = "" if prompts.meta_info.get("do_sample", True) else "_greedy"
        _, _, first = str(prompts.non_tensor_batch["uid"][0]).rpartition("-")
        if self.is_repeated:
            names = [match for path in self.directory.glob("*.answers") if (match := _NAME.fullmatch(path.name))]
            places = [(int(match[1]), int(match[2])) for match in names if (match[3] or "") == greedy]
            if places:
                step, number = min(places)
                return self.directory / f"{step}_{number}{greedy}.answers"
        return self.directory / f"{_step(prompts)}_{first}{greedy}.answers"

    def _facts(self, prompts: DataProto, num_samples: int) -> dict[str, Any]:
        """What must be the same, by the name that a user knows."""
        rollout = self.config.actor_rollout_ref.rollout
        sampling = {name: getattr(rollout, name) for name in ("temperature", "top_p", "top_k", "min_p", "stop")}
        return {
            f"{_ROLLOUT}.n": num_samples,
            "data.train_batch_size": len(prompts),
            "data.max_prompt_length": prompts.batch["input_ids"].shape[1],
            "data.max_response_length": self.config.data.max_response_length,
            "actor_rollout_ref.model.path": self.config.actor_rollout_ref.model.path,
            **{f"{_ROLLOUT}.{name}": value for name, value in sampling.items()},
        }

    def _require_same(self, path: Path, kept: dict[str, Any], facts: dict[str, Any]) -> None:
        differing = [name for name in facts if kept.get(name) != facts[name]]
        if differing:
            raise self._refusal(
                path,
                "answers with " + ", ".join(f"{name}={kept.get(name)}" for name in differing),
                ", ".join(f"{name}={facts[name]}" for name in differing),
            )

    def _refusal(self, path: Path, got: str, expected: str) -> DataError:
        return DataError(
            str(path),
            got=got,
            expected=expected,
            fix=f"Set {_ROLLOUT}.skip.dump_dir to another folder, delete this file, or turn {_ROLLOUT}.skip off.",
        )

    def _keep(self, path: Path, prompts: DataProto, rows: DataProto, facts: dict[str, Any]) -> None:
        asked = without_passing(prompts)
        tensors = [name for name in rows.batch.keys() if name not in asked.batch.keys()]
        # Grades, like everything that comes after an answer, are made anew.
        objects = [name for name in rows.non_tensor_batch if name != "reward_outcome"]
        metrics = reduce_metrics(rows.meta_info.get("metrics", {}))
        kept = DataProto.from_dict(
            {name: rows.batch[name] for name in tensors},
            {name: rows.non_tensor_batch[name] for name in objects},
            {
                _FACTS: facts,
                _PROMPTS: _digest(prompts),
                _OBJECTS: [name for name in objects if name not in asked.non_tensor_batch],
                "metrics": {name: value for name, value in metrics.items() if not name.startswith("timing_s/")},
            },
        )
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            kept.save_to_disk(path)
        except OSError as error:
            raise DataError(
                str(path),
                got=error.strerror or str(error),
                expected="room and permission to keep the answers of a step",
                fix=f"Free space, or set {_ROLLOUT}.skip.dump_dir to another folder.",
            ) from error

    def _read(self, path: Path) -> DataProto:
        try:
            kept = DataProto.load_from_disk(path)
        except (OSError, ProtocolError) as error:
            raise self._refusal(path, str(error).rstrip("."), "answers that a run has kept") from error
        if not {_FACTS, _PROMPTS, _OBJECTS, "metrics"} <= kept.meta_info.keys():
            raise self._refusal(path, "a DataProto of another kind", "answers that a run has kept")
        return kept

    def _replayed(self, kept: DataProto, prompts: DataProto, num_samples: int) -> DataProto:
        """The rows as the rollout would have given them."""
        rows = without_passing(prompts).repeat(num_samples)
        # Other prompts are answered than were asked: all that is known of them comes with them, but for their names.
        names = [name for name in kept.non_tensor_batch if name != "uid"]
        for name in names if self.is_repeated else kept.meta_info[_OBJECTS]:
            rows.non_tensor_batch[name] = kept.non_tensor_batch[name]
        rows.union(DataProto(kept.batch))
        told = {name: Metric(value) for name, value in kept.meta_info["metrics"].items()}
        rows.meta_info["metrics"] = {**told, "rollout/replayed": Metric(1.0)}
        return rows


def _step(prompts: DataProto) -> int:
    return int(prompts.meta_info["global_steps"])


def _digest(prompts: DataProto) -> str:
    """Of the tokens of all prompts, and their images."""
    digest = hashlib.blake2b(digest_size=16)
    for name in ("input_ids", "attention_mask"):
        digest.update(prompts.batch[name].cpu().contiguous().numpy().tobytes())
    for inputs in prompts.non_tensor_batch.get("multi_modal_inputs", ()):
        digest.update(images_key(inputs).encode())
    return digest.hexdigest()
