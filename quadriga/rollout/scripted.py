# SPDX-License-Identifier: Apache-2.0
"""Canned responses: a rollout without a model, for tests of rewards, data and training loops.

    ScriptedEngine(["yes", "no"], tokenizer=tokenizer)              in turn, for any prompt
    ScriptedEngine({"2 + 2": ["4", "five"]}, tokenizer=tokenizer)   by a part of the prompt, in turn
    ScriptedEngine(lambda prompt_ids: prompt_ids[-3:])              computed
    ScriptedEngine("responses.jsonl", tokenizer=tokenizer)          {"prompt": ..., "response": ...}

A response is a text or a list of token ids. A text is encoded and followed by the tokenizer's
end-of-text token; token ids are taken as they are. Every log-probability is 0.0: a canned response
is certain. If there are several processes, each begins with the first response.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, cast

from quadriga.engine_traits.scripted import TRAITS
from quadriga.errors import ConfigError, RolloutError
from quadriga.rollout.interface import (
    BatchImages,
    Completion,
    FinishReason,
    Prompts,
    RolloutEngine,
    Sampling,
)
from quadriga.rollout.sampler import StopStrings, require_tokenizer
from quadriga.rollout.setup import EngineSetup
from quadriga.weight_sync.publish import NamedWeights

CannedResponse: TypeAlias = str | Sequence[int]
Script: TypeAlias = (
    Mapping[str, CannedResponse | Sequence[CannedResponse]]
    | Sequence[CannedResponse]
    | str
    | Path
    | Callable[[list[int]], CannedResponse]
)


class ScriptedEngine(RolloutEngine):
    """Engine with canned responses. Several responses to one prompt are used in turn.

    Images are ignored.

    Args:
        responses: a list of responses to any prompt; a mapping from a part of the prompt's text to
            a response or a list of responses (of several parts in the prompt, the longest counts);
            a function of the prompt's token ids; or the path of a JSONL file, each line with
            `response` and perhaps `prompt`, a part of the prompt's text.
        tokenizer: needed if responses or parts of prompts are texts.

    Raises:
        RolloutError: the file cannot be read, there is no response, or a text has no tokenizer.
    """

    name = "scripted"
    traits = TRAITS
    takes_images = True

    def __init__(self, responses: Script, *, tokenizer: Any = None) -> None:
        super().__init__()
        script = (
            _read_responses(Path(responses)) if isinstance(responses, str | Path) else responses
        )
        self.tokenizer = tokenizer
        self.function = script if callable(script) else None
        self.by_prompt: dict[str, list[CannedResponse]] = {}
        if isinstance(script, Mapping):
            for part, value in cast(Mapping[str, Any], script).items():
                # A single response is a text or a list of token ids.
                is_single = isinstance(value, str) or (len(value) > 0 and isinstance(value[0], int))
                self.by_prompt[str(part)] = [value] if is_single else list(value)
        elif self.function is None:
            # Responses to any prompt, because every text contains the empty part.
            self.by_prompt = {"": list(script)}
        if self.function is None and not any(self.by_prompt.values()):
            raise RolloutError("scripted", got="no responses", expected="at least one")
        self._num_used: Counter[str] = Counter()  # responses used so far, by part of the prompt

    @classmethod
    def from_config(cls, setup: EngineSetup) -> "ScriptedEngine":
        """Make the engine of `engine_kwargs.responses_file`.

        Raises:
            ConfigError: there is no file of responses, or another option.
        """
        options = dict(setup.options)
        responses = options.pop("responses_file", None)
        if responses is None or options:
            where = "actor_rollout_ref.rollout.engine_kwargs"
            raise ConfigError(
                where,
                got=f"{setup.rollout.engine_kwargs}",
                expected="responses_file and nothing else, with rollout.name=scripted",
                fix=f"Set +{where}.responses_file=responses.jsonl.",
            )
        engine = cls(responses, tokenizer=setup.tokenizer)
        engine.description = f"scripted, responses from {responses}"
        return engine

    def generate_batch(
        self, prompts: Prompts, sampling: Sampling, images: BatchImages = None
    ) -> list[Completion]:
        """Take the next canned response for each prompt, cut at stop strings and `max_tokens`.

        Args:
            prompts: token ids of each prompt.
            sampling: `max_tokens` and stop strings of each response; nothing is sampled.
            images: ignored.

        Returns:
            The responses, in order.

        Raises:
            RolloutError: no response fits a prompt, or a text has no tokenizer.
        """
        self._require_ready(prompts, sampling, images)
        require_tokenizer(self.name, sampling, self.tokenizer)
        completions = []
        for prompt, params in zip(prompts, sampling, strict=True):
            respond = self.function or self._next_response
            token_ids = self._token_ids(respond(list(prompt)))
            # The response ends with a stop string, or else with its last token. It is then cut at
            # `max_tokens`.
            length = StopStrings(params.stop, self.tokenizer).length(token_ids) or len(token_ids)
            reason: FinishReason = "stop" if length <= params.max_tokens else "length"
            token_ids = token_ids[: min(length, params.max_tokens)]
            log_probs = [0.0] * len(token_ids)
            completions.append(
                Completion(token_ids, log_probs, reason, self.weight_version, list(log_probs))
            )
            if self.count_ended is not None:
                self.count_ended(1)
        return completions

    def load_weights(self, weights: NamedWeights, version: int) -> None:
        """Take over the version. The weights are read, but do not change the responses.

        Args:
            weights: names and tensors of the weights.
            version: version of the weights.
        """
        self.note_arrival(weights, version)

    def _token_ids(self, response: CannedResponse) -> list[int]:
        """Tokens of a response. A text gets the end-of-text token.

        Raises:
            RolloutError: there is no token, or a text without a tokenizer.
        """
        if isinstance(response, str):
            tokenizer = self._require_tokenizer()
            response = list(tokenizer.encode(response, add_special_tokens=False))
            if tokenizer.eos_token_id is not None:
                response.append(tokenizer.eos_token_id)
        token_ids = [int(token) for token in response]
        if not token_ids:
            raise RolloutError("scripted", "a response without a token", "at least one token")
        return token_ids

    def _next_response(self, prompt: list[int]) -> CannedResponse:
        """Take the next response of the scripted part that the prompt's text contains.

        Raises:
            RolloutError: there is no response for the prompt, or no tokenizer to decode it.
        """
        part = ""
        # With only responses to any prompt, the prompt need not be decoded.
        if list(self.by_prompt) != [""]:
            text = self._require_tokenizer().decode(prompt)
            parts = [part for part in self.by_prompt if part in text]
            if not parts:
                raise RolloutError(
                    "scripted",
                    got=f"the prompt {text[-200:]!r}",
                    expected=f"a prompt that contains one of {len(self.by_prompt)} scripted parts",
                    fix='Add a response for this prompt, or one for the empty prompt "", which fits'
                    " all.",
                )
            # The longest part is the most specific one.
            part = max(parts, key=len)
        responses = self.by_prompt[part]
        response = responses[self._num_used[part] % len(responses)]
        self._num_used[part] += 1
        return response

    def _require_tokenizer(self) -> Any:
        """Return the tokenizer, or raise a RolloutError if there is none."""
        if self.tokenizer is None:
            fix = "Pass tokenizer=, or token ids."
            raise RolloutError("scripted", got="texts without a tokenizer", fix=fix)
        return self.tokenizer


def _read_responses(path: Path) -> dict[str, list[CannedResponse]]:
    """Read a JSONL file into responses by prompt. Lines without a prompt are under "".

    Raises:
        RolloutError: the file cannot be read, or a line is invalid.
    """
    script: dict[str, list[CannedResponse]] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise RolloutError(
            f"scripted {path}",
            got=str(error),
            expected="a JSONL file of responses",
            fix="Set actor_rollout_ref.rollout.engine_kwargs.responses_file.",
        ) from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            script.setdefault(row.get("prompt", ""), []).append(row["response"])
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise RolloutError(
                f"scripted {path}, line {number}",
                got=f"{type(error).__name__}: {error}",
                expected='{"prompt": text, "response": text or token ids}, prompt being optional',
            ) from error
    return script
