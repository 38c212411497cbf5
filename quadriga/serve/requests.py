# SPDX-License-Identifier: Apache-2.0
"""Read the bodies of calls: check them, and convert them to token ids and sampling parameters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quadriga.errors import RolloutError
from quadriga.rollout.interface import Images, SamplingParams
from quadriga.serve.errors import CallError, format_value
from quadriga.serve.fields import Fields
from quadriga.serve.messages import render_prompt
from quadriga.serve.policy import ServedPolicy

MAX_STOPS = 16
"""Largest number of stop strings of a call."""
LEAST_TEMPERATURE = 1e-4
MAX_TEMPERATURE = 2.0  # vLLM's, and OpenAI's
# Sampling parameters, and the kind of value that each needs.
_SAMPLING_KINDS = {
    "temperature": "a number",
    "top_p": "a number",
    "top_k": "an integer",
    "min_p": "a number",
    "ignore_eos": "true or false",
}
# Fields that are not supported, with their values without effect, by the advice; see `Fields.refuse`.
_UNSUPPORTED: dict[str, dict[str, list[Any]]] = {
    "Send the call again: each call of a prompt has a seed of its own.": {"n": [1], "best_of": [1]},
    "Leave it out: the policy samples from its own distribution.": {
        "use_beam_search": [False],
        "frequency_penalty": [0],
        "presence_penalty": [0],
        "repetition_penalty": [1],
        "logit_bias": [{}],
        "response_format": [{"type": "text"}],
        "structured_outputs": [{}],
        "min_tokens": [0],
        "bad_words": [[]],
        "allowed_token_ids": [[]],
    },
    "The policy decides whether it calls a tool.": {"tool_choice": ["auto", "none"]},
    "Send them as `tools`.": {"functions": [[]]},
    "An answer is a turn of the assistant, as the chat template opens it.": {
        "continue_final_message": [False],
        "add_generation_prompt": [True],
        "echo": [False],
    },
    "The policy writes text.": {"modalities": [["text"]]},
    "Shorten the prompt.": {"truncate_prompt_tokens": []},
    "The text ends before the stop string.": {"include_stop_str_in_output": [False]},
    "Only sampled tokens have log-probabilities.": {"prompt_logprobs": [0]},
    "Only the sampled token's log-probability is known.": {"top_logprobs": [0]},
    "Send the whole conversation: the server keeps none.": {
        "store": [False],
        "previous_response_id": [],
    },
    "Leave it out: the server has data.chat_template.": {"chat_template": []},
    "Leave it out: the server has data.apply_chat_template_kwargs.": {"chat_template_kwargs": [{}]},
    "Send images in the messages of /v1/chat/completions.": {
        "content_parts": [[]],
        "features": [{}],
    },
}


@dataclass(frozen=True)
class Call:
    """A checked call.

    Attributes:
        prompt: token ids. An image has a token for each of its embeddings.
        sampling: sampling parameters. The seed is the client's; without `has_seed` it is 0, and the
            server replaces it.
        has_seed: whether the client has set a seed.
        with_log_probs: whether the answer has log-probabilities.
        with_token_ids: whether the answer has token ids.
        names_tokens_by_id: whether entries of log-probabilities have the id of their token, such as
            "token_id:7", instead of its text.
        keeps_special: whether the text of the answer includes special tokens.
        schemas: JSON schemas of the arguments of tools, by name of the tool.
        is_streamed: whether the answer is sent as events.
        has_usage: whether the events of a streamed answer include the numbers of tokens.
        images: images of the prompt; None if there are none.
    """

    prompt: list[int]
    sampling: SamplingParams
    has_seed: bool
    with_log_probs: bool
    with_token_ids: bool = True
    names_tokens_by_id: bool = True
    keeps_special: bool = False
    schemas: Mapping[str, Mapping[str, Any]] | None = None
    is_streamed: bool = False
    has_usage: bool = False
    images: Images | None = None


def generate_call(body: Any, policy: ServedPolicy) -> Call:
    """Read a call of `/inference/v1/generate`.

    Raises:
        CallError: a field is wrong or not supported.
    """
    fields = Fields(body)
    _require_model(fields, policy)
    fields.refuse(_UNSUPPORTED | {"Stream /v1/chat/completions.": {"stream": [False]}})
    prompt = _read_token_ids(fields, "token_ids", policy)
    sampling = fields.section("sampling_params", {})
    sampling.refuse(_UNSUPPORTED)
    # In vLLM's API, this is the number of likeliest tokens to report beside the sampled one. The server
    # reports only the sampled one.
    num_log_probs = sampling.get("logprobs", "an integer", None)
    if num_log_probs not in (None, 0, 1):
        raise CallError(
            sampling.where("logprobs"),
            got=str(num_log_probs),
            expected="0 or 1",
            fix="Only the sampled token's log-probability is known.",
        )
    return Call(
        prompt,
        _read_sampling(sampling, ("max_tokens",), len(prompt), policy),
        has_seed=sampling.values.get("seed") is not None,
        with_log_probs=num_log_probs is not None,
    )


def chat_call(body: Any, policy: ServedPolicy) -> Call:
    """Read a call of `/v1/chat/completions`.

    Raises:
        CallError: a field is wrong or not supported, or the chat template refuses the messages.
    """
    fields = Fields(body)
    _require_model(fields, policy)
    fields.refuse(_UNSUPPORTED)
    prompt, schemas, images = render_prompt(fields, policy)
    with_token_ids = fields.get("return_token_ids", "true or false", False)
    options = fields.section("stream_options", {})
    return Call(
        prompt,
        _read_sampling(fields, ("max_completion_tokens", "max_tokens"), len(prompt), policy),
        has_seed=fields.values.get("seed") is not None,
        with_log_probs=fields.get("logprobs", "true or false", False),
        with_token_ids=with_token_ids,
        # The text of a token may not identify it, so clients that ask for token ids, to train on them,
        # get ids here too.
        names_tokens_by_id=fields.get(
            "return_tokens_as_token_ids", "true or false", with_token_ids
        ),
        keeps_special=not fields.get("skip_special_tokens", "true or false", True),
        schemas=schemas,
        is_streamed=fields.get("stream", "true or false", False),
        has_usage=options.get("include_usage", "true or false", False),
        images=images,
    )


def tokenize_call(body: Any, policy: ServedPolicy) -> list[int]:
    """Tokenize the messages or the prompt of a call of `/tokenize`.

    Args:
        body: the call, which has `messages` or the text `prompt`.
        policy: the served policy.

    Raises:
        CallError: a field is wrong.
    """
    fields = Fields(body)
    _require_model(fields, policy)
    if "messages" in fields.values:
        return render_prompt(fields, policy).token_ids
    text = fields.need("prompt", "a text")
    with_special = fields.get("add_special_tokens", "true or false", True)
    with policy.lock:
        return policy.encoder.tokenizer.encode(text, add_special_tokens=with_special)


def _read_token_ids(fields: Fields, name: str, policy: ServedPolicy) -> list[int]:
    """Read a field that is a list of token ids; empty if the field is missing.

    Args:
        fields: the fields of the call.
        name: name of the field.
        policy: the served policy.

    Raises:
        CallError: the field is no list, or an entry is no token id of the policy.
    """
    ids = fields.get(name, "a list", [])
    limit = policy.vocabulary_size
    for place, token in enumerate(ids):
        if type(token) is not int or not 0 <= token < limit:
            where = fields.where(f"{name}[{place}]")
            raise CallError(where, got=format_value(token), expected=f"an id in [0, {limit})")
    return ids


def _require_model(fields: Fields, policy: ServedPolicy) -> None:
    """Raise a CallError if a call names another model than the served one."""
    name = fields.get("model", "a text", policy.name)
    if name != policy.name:
        raise CallError(
            "model",
            got=format_value(name),
            expected=f"{policy.name!r}, the model that is served",
            status=404,
        )


def _read_sampling(
    fields: Fields, length_names: Sequence[str], prompt_length: int, policy: ServedPolicy
) -> SamplingParams:
    """Read the sampling parameters of a call.

    Args:
        fields: the object with the parameters.
        length_names: names of fields that limit the tokens of the response. The first that is set is
            used.
        prompt_length: number of tokens in the prompt.
        policy: the served policy, whose `defaults` are used for parameters that are not set.

    Returns:
        The parameters. `max_tokens` is lowered to what fits after the prompt, which is also the default.

    Raises:
        CallError: a field is wrong, or no response fits after the prompt.
    """
    max_room = policy.max_model_len - prompt_length
    if not prompt_length or max_room < 1:
        raise CallError(
            "the prompt",
            got=f"{prompt_length} tokens",
            expected=f"1 to {policy.max_model_len - 1}, one less than max_model_len",
        )
    settings = dict(policy.defaults)
    for name, kind in _SAMPLING_KINDS.items():
        settings[name] = fields.get(name, kind, settings[name])
    # 0 selects the likeliest token, and is always allowed. Only a temperature of the client is checked:
    # the configured one may be higher. Without one, the least one stands in for this check.
    temperature = fields.values.get("temperature") or LEAST_TEMPERATURE
    if not LEAST_TEMPERATURE <= temperature <= MAX_TEMPERATURE:
        raise CallError(
            fields.where("temperature"),
            got=format_value(temperature),
            expected=f"0, or {LEAST_TEMPERATURE:g} to {MAX_TEMPERATURE:g}",
        )
    # Clients may send a large number for "all tokens".
    settings["top_k"] = min(settings["top_k"], policy.vocabulary_size)
    lengths = [fields.get(name, "an integer") for name in length_names]
    max_tokens = next((length for length in lengths if length is not None), max_room)
    # A single stop string may be sent without a list.
    stops = fields.values.get("stop")
    if stops is not None:
        stops = [stops] if isinstance(stops, str) else stops
        fields.require("stop", stops, "a list")
        if len(stops) > MAX_STOPS:
            raise CallError("stop", got=f"{len(stops)} texts", expected=f"at most {MAX_STOPS}")
        for text in stops:
            fields.require("stop", text, "a text")
        settings["stop"] = tuple(stops)
    stop_ids = _read_token_ids(fields, "stop_token_ids", policy)
    seed = fields.get("seed", "an integer", 0)
    settings |= {
        "max_tokens": min(max_tokens, max_room),
        "stop_token_ids": (*settings["stop_token_ids"], *stop_ids),
        # Clients may send any integer, also a negative one.
        "seed": seed % 2**64,
    }
    try:
        return SamplingParams(**settings)
    except RolloutError as error:
        raise CallError(error.where, got=error.got, expected=error.expected) from error
