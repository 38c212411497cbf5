# SPDX-License-Identifier: Apache-2.0
"""Canned responses: a rollout without a model, for tests of rewards, data and training loops.

    ScriptedEngine(["yes", "no"], tokenizer=tokenizer)              in turn, whatever is asked
    ScriptedEngine({"2 + 2": ["4", "five"]}, tokenizer=tokenizer)   by what the prompt contains, in turn
    ScriptedEngine(lambda prompt_ids: prompt_ids[-3:])              computed
    ScriptedEngine("responses.jsonl", tokenizer=tokenizer)            lines {"prompt": ..., "response": ...}

A response is a text or a list of token ids. A text is encoded and followed by the tokenizer's end-of-text token; token
ids are taken as they are. Every log-probability is 0.0: a canned response is certain. Of several processes each begins
with the first response.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch

from quadriga.errors import ConfigError, RolloutError
from quadriga.rollout.interface import BatchImages, Completion, Prompts, RolloutEngine, Sampling
from quadriga.rollout.sampler import StopStrings, require_tokenizer
from quadriga.rollout.setup import EngineSetup
from quadriga.weight_sync.fingerprint import fingerprint

CannedResponse: TypeAlias = str | Sequence[int]
Script: TypeAlias = (
    Mapping[str, CannedResponse | Sequence[CannedResponse]]
    | Sequence[CannedResponse]
    | str
    | Path
    | Callable[[list[int]], CannedResponse]
)


class ScriptedEngine(RolloutEngine):
    """Gives canned responses. Several responses to one prompt are given in turn. Images are not looked at.
    `responses`: a list; a mapping from a part of the prompt's text to a response or a list of them, of which the
        longest part found counts; a function of the prompt's token ids; or the path of a JSONL file, each line with
        `response` and, in all lines or in none, `prompt`.
    `tokenizer`: needed wherever a text is given.
    Raises RolloutError: the file cannot be read, a text comes without a tokenizer, or nothing fits a prompt."""

    name = "scripted"
    takes_images = True

    def __init__(self, responses: Script, *, tokenizer: Any = None) -> None:
        super().__init__()
        script = _read(Path(responses)) if isinstance(responses, str | Path) else responses
        self.tokenizer = tokenizer
        self.function = script if callable(script) else None
        self.by_prompt: dict[str, list[CannedResponse]] = {}
        if isinstance(script, Mapping):
            for part, given in cast(Mapping[str, Any], script).items():
                # One response is a text or token ids; else there are several.
                is_one = isinstance(given, str) or (len(given) > 0 and isinstance(given[0], int))
                self.by_prompt[str(part)] = [given] if is_one else list(given)
        elif self.function is None:
            self.by_prompt = {"": list(script)}
        if self.function is None and not any(self.by_prompt.values()):
            raise RolloutError("scripted", got="no responses", expected="at least one")
        self._given: Counter[str] = Counter()

    @classmethod
    def from_config(cls, setup: EngineSetup) -> "ScriptedEngine":
        options = dict(setup.options)
        responses = options.pop("responses_file", None)
        if responses is None or options:
            where = "actor_rollout_ref.rollout.engine_kwargs"
            expected = "responses_file and nothing else, with rollout.name=scripted"
            fix = "Set +actor_rollout_ref.rollout.engine_kwargs.responses_file=responses.jsonl."
            raise ConfigError(
                where, got=f"{setup.rollout.engine_kwargs}", expected=expected, fix=fix
            )
        engine = cls(responses, tokenizer=setup.tokenizer)
        engine.description = f"scripted, responses from {responses}"
        return engine

    def generate_batch(
        self, prompts: Prompts, sampling: Sampling, images: BatchImages = None
    ) -> list[Completion]:
        self._require_ready(prompts, sampling, images)
        require_tokenizer(self.name, sampling, self.tokenizer)
        completions = []
        for prompt, params in zip(prompts, sampling, strict=True):
            response = self.function(list(prompt)) if self.function else self._choose(list(prompt))
            if isinstance(response, str):
                tokenizer = self._require_tokenizer()
                end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
                response = [*tokenizer.encode(response, add_special_tokens=False), *end]
            if not (token_ids := [int(token) for token in response]):
                raise RolloutError(
                    "scripted", got="a response without a token", expected="at least one token"
                )
            length = StopStrings(params.stop, self.tokenizer).length(token_ids) or len(token_ids)
            reason = "stop" if length <= params.max_tokens else "length"
            token_ids = token_ids[: min(length, params.max_tokens)]
            certain = [0.0] * len(token_ids)
            completions.append(
                Completion(token_ids, certain, reason, self.weight_version, list(certain))
            )
        return completions

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Takes the version; there is nothing that weights would change."""
        self.weight_version = -1
        self._arrived = fingerprint(
            weights
        )  # a stream may hold its sender until it is read to the end
        self.weight_version = version

    def _choose(self, prompt: list[int]) -> CannedResponse:
        part = ""
        if list(self.by_prompt) != [""]:
            text = self._require_tokenizer().decode(prompt)
            if not (found := [part for part in self.by_prompt if part in text]):
                expected = f"one that contains one of {len(self.by_prompt)} scripted parts"
                fix = 'Add a line for it, or one with the empty prompt "" that fits all.'
                raise RolloutError(
                    "scripted", got=f"the prompt {text[-200:]!r}", expected=expected, fix=fix
                )
            part = max(found, key=len)
        responses = self.by_prompt[part]
        self._given[part] += 1
        return responses[(self._given[part] - 1) % len(responses)]

    def _require_tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise RolloutError(
                "scripted", got="texts without a tokenizer", fix="Pass tokenizer=, or token ids."
            )
        return self.tokenizer


def _read(path: Path) -> dict[str, list[CannedResponse]]:
    """The responses of a JSONL file by prompt; without prompts all of them stand under the empty one."""
    script: dict[str, list[CannedResponse]] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        fix = "Set actor_rollout_ref.rollout.engine_kwargs.responses_file."
        raise RolloutError(
            f"scripted {path}", got=str(error), expected="a JSONL file of responses", fix=fix
        ) from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            script.setdefault(row.get("prompt", ""), []).append(row["response"])
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            where = f"scripted {path}, line {number}"
            expected = '{"prompt": text, "response": text or token ids}, the prompt being optional'
            raise RolloutError(
                where, got=f"{type(error).__name__}: {error}", expected=expected
            ) from error
    return script
