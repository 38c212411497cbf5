# SPDX-License-Identifier: Apache-2.0
"""The served policy: its name, tokenizer and limits, which calls need."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from threading import Lock
from typing import Any

from quadriga.config import Config
from quadriga.rollout.agent_loop.conversation import TurnEncoder
from quadriga.rollout.agent_loop.parsers import PARSERS, Parser
from quadriga.rollout.sequences import sampling_of


@dataclass(frozen=True)
class ServedPolicy:
    """Properties of the served policy.

    Attributes:
        name: name of the model in calls.
        encoder: renders and tokenizes messages.
        max_model_len: most tokens of prompt and response together.
        vocabulary_size: number of token ids, counted from 0.
        defaults: sampling parameters of calls that do not set them.
        parser: finds tool calls in a response.
        processor: `quadriga.data.VisionProcessor` of a vision-language model. None: a text model.
        lock: held while a thread uses the tokenizer, which is not thread-safe.
    """

    name: str
    encoder: TurnEncoder
    max_model_len: int
    vocabulary_size: int
    defaults: Mapping[str, Any]
    parser: Parser
    processor: Any
    lock: Lock

    @classmethod
    def of(
        cls,
        config: Config,
        tokenizer: Any,
        *,
        vocabulary_size: int,
        positions: int | None,
        processor: Any = None,
    ) -> "ServedPolicy":
        """Make the properties of a configured policy.

        Args:
            config: the resolved configuration.
            tokenizer: tokenizer of the policy. It is copied, because training uses it at the same
                time.
            vocabulary_size: rows of the model's embedding.
            positions: largest number of tokens that the model can take; None: any number.
            processor: as the attribute.
        """
        rollout = config.actor_rollout_ref.rollout
        data = config.data
        limit = rollout.max_model_len or data.max_prompt_length + data.max_response_length
        template_kwargs = data.apply_chat_template_kwargs
        return cls(
            name=rollout.serve.model_name or str(config.actor_rollout_ref.model.path),
            encoder=TurnEncoder(deepcopy(tokenizer), template_kwargs, vocabulary_size),
            # The model itself may take fewer tokens than the configuration allows.
            max_model_len=min(limit, positions or limit),
            vocabulary_size=vocabulary_size,
            defaults=sampling_of({}, rollout, max_tokens=limit),
            parser=PARSERS[rollout.multi_turn.format],
            processor=processor,
            lock=Lock(),
        )
