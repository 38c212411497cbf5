# SPDX-License-Identifier: Apache-2.0
"""Make the bodies of answers from completions.

Log-probabilities in an answer are of the distribution from which the tokens were sampled, after
temperature and filters.
"""

import json
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any
from uuid import uuid4

from quadriga.rollout.interface import Completion
from quadriga.rollout.third_party import has_filters
from quadriga.serve.errors import CallError, JsonObject
from quadriga.serve.policy import ServedPolicy
from quadriga.serve.requests import Call


def sampled_log_probs(call: Call, completion: Completion) -> list[float] | None:
    """Log-probability of each token under the distribution from which it was sampled.

    Third-party engines may report log-probabilities only under the unfiltered distribution, which
    training needs, and NaN where they do not know them.

    Args:
        call: the call.
        completion: completion of the call.

    Returns:
        A value for each token. None: the engine does not report them, but the call does not ask for
        them.

    Raises:
        CallError: the call asks for log-probabilities that the engine does not report.
    """
    log_probs = completion.sampling_log_probs or completion.log_probs
    # A greedy choice has the probability 1.
    if call.sampling.is_greedy:
        return [0.0] * len(completion.token_ids)
    # Without filters, both distributions are the same.
    is_known = bool(completion.sampling_log_probs) or not has_filters(call.sampling)
    if is_known and all(map(math.isfinite, log_probs)):
        return list(log_probs)
    if not call.with_log_probs:
        return None
    raise CallError(
        "logprobs",
        got="none from the engine, or NaN",
        expected="one for each token",
        fix="Leave out logprobs, or the filters and the temperature: with them, some engines report none.",
        status=501,
    )


def generate_body(
    call: Call, completion: Completion, log_probs: Sequence[float] | None
) -> JsonObject:
    """Make the answer of `/inference/v1/generate`.

    Args:
        call: the call.
        completion: completion of the call.
        log_probs: log-probability of each token; None: not known.
    """
    choice: JsonObject = {
        "index": 0,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "logprobs": None,
        "weight_versions": completion.token_versions,
    }
    if call.with_log_probs and log_probs is not None:
        pairs = zip(completion.token_ids, log_probs, strict=True)
        content = [{"token": f"token_id:{token}", "logprob": value} for token, value in pairs]
        choice["logprobs"] = {"content": content}
    return {"request_id": f"generate-{uuid4().hex}", "choices": [choice]}


def chat_body(
    call: Call, completion: Completion, log_probs: Sequence[float] | None, policy: ServedPolicy
) -> JsonObject:
    """Make the answer of `/v1/chat/completions`.

    Args:
        call: the call.
        completion: completion of the call.
        log_probs: log-probability of each token; None: not known.
        policy: the served policy.
    """
    # The tokenizer serves one thread at a time.
    with policy.lock:
        text = policy.encoder.decode(completion.token_ids, with_special=call.keeps_special)
        if completion.finish_reason == "stop":
            # The tokens include the stop string that ended the response, but the text must not. The
            # engine does not report which one it was, so the text is cut at the first of any.
            for stop in call.sampling.stop:
                text = text.partition(stop)[0]
        message = _assistant_message(call, completion, text, policy)
        entries = None
        if call.with_log_probs and log_probs is not None:
            entries = _log_prob_entries(call, completion.token_ids, log_probs, policy)
    reason: str = completion.finish_reason
    if "tool_calls" in message and reason == "stop":
        reason = "tool_calls"
    choice: JsonObject = {
        "index": 0,
        "message": message,
        "logprobs": None if entries is None else {"content": entries},
        "finish_reason": reason,
    }
    num_prompt_tokens = len(call.prompt)
    num_tokens = len(completion.token_ids)
    body: JsonObject = {
        "id": f"chatcmpl-{uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": policy.name,
        "choices": [choice],
        "usage": {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_tokens,
            "total_tokens": num_prompt_tokens + num_tokens,
        },
    }
    if call.with_token_ids:
        choice["token_ids"] = completion.token_ids
        choice["weight_versions"] = completion.token_versions
        body["prompt_token_ids"] = call.prompt
    return body


def chat_events(body: JsonObject, *, has_usage: bool) -> Iterator[str]:
    """Convert a finished answer to server-sent events: first the role, then the content, then the end.

    Args:
        body: answer of `/v1/chat/completions`, as `chat_body` makes it.
        has_usage: whether to add an event with the numbers of tokens.

    Yields:
        The events, each as the text to send.
    """
    choice = dict(body["choices"][0])
    message = choice.pop("message")
    reason = choice.pop("finish_reason")

    def format_event(*choices: JsonObject, **fields: Any) -> str:
        """Format a chunk of the answer."""
        chunk = {name: body[name] for name in ("id", "created", "model")}
        chunk |= {"object": "chat.completion.chunk", "choices": choices, **fields}
        return f"data: {json.dumps(chunk)}\n\n"

    # The role, and the token ids of the prompt if the call asks for token ids.
    delta = {"role": "assistant", "content": ""}
    prompt = {name: body[name] for name in ("prompt_token_ids",) if name in body}
    yield format_event({"index": 0, "delta": delta, "finish_reason": None}, **prompt)

    # The whole message, then the finish reason.
    delta = {"content": message["content"]}
    if "tool_calls" in message:
        calls = enumerate(message["tool_calls"])
        delta["tool_calls"] = [{"index": index, **call} for index, call in calls]
    yield format_event({**choice, "delta": delta, "finish_reason": None})
    yield format_event({"index": 0, "delta": {}, "finish_reason": reason})
    if has_usage:
        yield format_event(usage=body["usage"])
    yield "data: [DONE]\n\n"


def _assistant_message(
    call: Call, completion: Completion, text: str, policy: ServedPolicy
) -> JsonObject:
    """Make the message of the assistant.

    If the call offers tools, and all tool calls in the completion can be read, the message has
    `tool_calls`, and `content` is the text before them.

    Args:
        call: the call.
        completion: completion of the call.
        text: text of the completion.
        policy: the served policy.
    """
    message: JsonObject = {"role": "assistant", "content": text}
    if not call.schemas:
        return message
    text_with_special = policy.encoder.decode(completion.token_ids, with_special=True)
    calls = policy.parser(text_with_special, call.schemas)
    if not calls or any(tool_call.problem for tool_call in calls):
        return message
    # In formats without this tag, special tokens begin a call. `text` does not have them, so the end of
    # the text before the call is not known, and the content is null.
    content, has_tag, _ = text.partition("<tool_call>")
    message["content"] = (content.strip() if has_tag else "") or None
    message["tool_calls"] = [
        {
            "id": f"call_{uuid4().hex[:24]}",
            "type": "function",
            "function": {"name": tool_call.name, "arguments": json.dumps(tool_call.arguments)},
        }
        for tool_call in calls
    ]
    return message


def _log_prob_entries(
    call: Call, token_ids: Sequence[int], log_probs: Sequence[float], policy: ServedPolicy
) -> list[JsonObject]:
    """Make the entries of tokens with their log-probabilities, as in OpenAI's API.

    Args:
        call: the call.
        token_ids: tokens of the completion.
        log_probs: log-probability of each token.
        policy: the served policy.
    """
    entries = []
    for token, log_prob in zip(token_ids, log_probs, strict=True):
        text = policy.encoder.decode([token], with_special=True)
        entry = {
            "token": f"token_id:{token}" if call.names_tokens_by_id else text,
            "logprob": log_prob,
            "bytes": list(text.encode()),
            "top_logprobs": [],
        }
        entries.append(entry)
    return entries
