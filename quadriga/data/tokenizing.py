# SPDX-License-Identifier: Apache-2.0
"""The tokenizer, and from a prompt to token ids: chat messages, text by the chat template, ids."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import date
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import transformers
from transformers import PreTrainedTokenizerBase

from quadriga.data.token_counts import TokenCounter
from quadriga.errors import DataError
from quadriga.protocol.chats import CONTINUING, ends_with_assistant

Messages = list[dict[str, Any]]
_TEMPLATE = "actor_rollout_ref.model.custom_chat_template"
MAX_ROLE_ORDERS = 256
"""Role orders of which a chat is rendered again to see that the template writes each message."""
_PROBE = " quadriga"
RoleOrder = tuple[tuple[tuple[str, str], ...], str, bool]
"""Pairs of roles that follow each other in a chat, its last role, and whether there are tools.

"" stands before the first role."""


def read_tokenizer(path: str | Path, **options: Any) -> PreTrainedTokenizerBase:
    """The tokenizer as transformers finds it; `load_tokenizer` also makes it fit for training."""
    # By its name in the package, which imports it here: torch comes with it, and counting tokens needs none.
    # Its annotation admits None, for installations without the package tokenizers, which transformers requires.
    return cast(
        PreTrainedTokenizerBase, transformers.AutoTokenizer.from_pretrained(path, **options)
    )


def load_tokenizer(
    path: str | Path, *, trust_remote_code: bool = False, chat_template: str | None = None
) -> PreTrainedTokenizerBase:
    """A tokenizer with what training needs: a pad token, and its chat template or `chat_template` (Jinja, or a file).
    Raises DataError: it cannot be loaded, or has neither pad nor end-of-sequence token, or no chat template that writes
    what messages say."""
    try:
        tokenizer = read_tokenizer(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        where, expected = (
            f"tokenizer {path}",
            "a folder or hub name with a tokenizer that transformers can load",
        )
        fix = "Check data.tokenizer and actor_rollout_ref.model.path."
        raise DataError(
            where, got=str(error).strip().partition("\n")[0], expected=expected, fix=fix
        ) from error
    if chat_template is not None:
        try:
            is_text = "{" in chat_template
            tokenizer.chat_template = (
                chat_template if is_text else Path(chat_template).expanduser().read_text("utf-8")
            )
        except (OSError, UnicodeDecodeError) as error:
            got, expected = (
                f"{chat_template!r} ({error})",
                "a chat template in Jinja, or a file with one",
            )
            raise DataError(_TEMPLATE, got=got, expected=expected, fix="Check the path.") from error
    check_tokenizer(tokenizer, str(path))
    return tokenizer


def check_tokenizer(
    tokenizer: PreTrainedTokenizerBase, name: str, *, has_template: bool = False
) -> None:
    """Give `tokenizer` a pad token if it has none, and refuse one that training cannot work with.
    Errors and notices call it `name`; with `has_template` a chat template comes from elsewhere."""
    if not tokenizer.get_vocab().keys() - tokenizer.get_added_vocab().keys():
        where = f"tokenizer {name}"
        got = (
            "a vocabulary without a token: what transformers makes of a folder without a tokenizer"
        )
        fix = "Copy them there, or set data.tokenizer to a folder that has them."
        raise DataError(
            where,
            got=got,
            expected="tokenizer.json, or the files of another kind of tokenizer",
            fix=fix,
        )
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            got = "neither a pad token nor an end-of-sequence token"
            fix = 'Set "pad_token" in its tokenizer_config.json.'
            raise DataError(f"tokenizer {name}", got=got, expected="at least one of them", fix=fix)
        tokenizer.pad_token = tokenizer.eos_token
        print(
            f"tokenizer {name}: it has no pad token; {tokenizer.eos_token!r}, the end of sequence, pads.",
            flush=True,
        )
    if not (has_template or tokenizer.chat_template):
        where, fix = (
            f"tokenizer {name}",
            f"Set {_TEMPLATE}, or use the tokenizer of an instruct model.",
        )
        raise DataError(
            where, got="no chat template", expected="one, to turn chat messages into text", fix=fix
        )
    if not has_template and _ignores_messages(tokenizer):
        got = (
            f"{shortened(tokenizer.chat_template)}, which writes the same whatever the messages say"
        )
        expected, fix = (
            "one that writes their content",
            f"Correct it, or set {_TEMPLATE} to another one.",
        )
        raise DataError(f"chat template of tokenizer {name}", got=got, expected=expected, fix=fix)


def _ignores_messages(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether two messages with other words, as texts and in parts, come out as one text."""
    for form in (str, lambda word: [{"type": "text", "text": word}]):
        chats = [[{"role": "user", "content": form(word)}] for word in ("one", "two")]
        try:
            encoder = ChatEncoder(tokenizer, {})
            if len({encoder.written(chat, encoder.template_kwargs) for chat in chats}) > 1:
                return False
        except DataError:
            return False  # what refuses messages reads them
    return True


def as_messages(prompt: Any, *, where: str, key: str = "prompt_key") -> Messages:
    """The chat messages of a prompt; a string is one message of the user or a chat in JSON, anything else a DataError.
    `data.key` names the column.

    Content parts that are all text become one text: templates of language models know no parts, and some would write
    them out as Python does."""
    prompt = chat_in_json(prompt) or prompt
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    roles = (
        [isinstance(one, Mapping) and one.get("role") for one in prompt]
        if isinstance(prompt, Sequence)
        else []
    )
    if not roles or not all(isinstance(role, str) for role in roles):
        expected = 'text, or a list of messages such as [{"role": "user", "content": "..."}]'
        fix = f"Correct the row, or set data.{key} to the column that holds the chat."
        raise DataError(
            where, got=f"the {key[:-4]} {shortened(prompt)}", expected=expected, fix=fix
        )
    # A column of a parquet file gives each message the keys of all; those without a value were never meant.
    messages = [
        {key: value for key, value in message.items() if value is not None} for message in prompt
    ]
    for number, message in enumerate(messages):
        parts = message.get("content")
        if not isinstance(parts, Sequence) and (parts is not None or not message.get("tool_calls")):
            got, expected = shortened(message), "a content that is text, or a list of parts"
            fix = 'Give it a text, "" if need be.'
            raise DataError(f"{where}, message {number}", got=got, expected=expected, fix=fix)
        if isinstance(parts, list) and all(
            isinstance(one, Mapping) and one.get("type") == "text" for one in parts
        ):
            message["content"] = "".join(str(one.get("text") or "") for one in parts)
    return messages


def chat_in_json(value: Any) -> Messages:
    """The messages of a text such as '[{"role": "user", "content": "Hi"}]'; none of any other value."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return []
    try:
        chat = json.loads(value)
    except (ValueError, RecursionError):
        return []
    is_chat = all(
        isinstance(one, dict) and isinstance(one.get("role"), str) and "content" in one
        for one in chat
    )
    return chat if is_chat else []


class ChatEncoder:
    """Renders and tokenizes prompts as the rollout will see them.
    `tokenizer`: has a chat template, unless `template_kwargs` brings one as `chat_template`.
    `template_kwargs`: arguments for the chat template. Unless they say otherwise a turn of the assistant is opened, or
    continued where the messages end with one."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any]
    ) -> None:
        for key in (
            "tokenize",
            "return_tensors",
            "return_dict",
            "padding",
            "truncation",
            "max_length",
        ):
            if key in template_kwargs:
                where, got = f"data.apply_chat_template_kwargs.{key}", repr(template_kwargs[key])
                fix = "Remove it: how prompts are tokenized, cut and padded is decided by the keys of `data`."
                raise DataError(where, got=got, expected="arguments for the template only", fix=fix)
        self.tokenizer = tokenizer
        self.template_kwargs = {"add_generation_prompt": True, **template_kwargs}
        self._may_continue = {"add_generation_prompt", "continue_final_message"}.isdisjoint(
            template_kwargs
        )
        # By role order the pair whose second message the template leaves out, None if it writes all.
        self._left_out: dict[RoleOrder, tuple[str, str] | None] = {}

    def render(
        self, messages: Messages, *, where: str, tools: Sequence[Any] | None = None, **options: Any
    ) -> str:
        """Render the text of a prompt.

        Args:
            messages: the chat.
            where: file and row, for errors.
            tools: schemas that the template is given.
            options: further arguments of the template; they replace those of `template_kwargs`.

        Raises:
            DataError: the template refuses the messages, or leaves one of them out.
        """
        complete = {**self.template_kwargs, **options}
        is_continued = self.continues(messages)
        if tools:
            # Agent loops render a prompt with tools so, whatever `template_kwargs` say of its end.
            complete |= {
                "tools": list(tools),
                "add_generation_prompt": options.get("add_generation_prompt", True),
            }
            is_continued = ends_with_assistant(messages)
        if is_continued and "add_generation_prompt" not in options:
            complete |= CONTINUING
        text = self.written(messages, complete, where=where)
        self._require_all_written(messages, complete, text, where)
        return text

    @property
    def num_orders(self) -> int:
        """Role orders that were checked so far."""
        return len(self._left_out)

    def continues(self, messages: Messages) -> bool:
        """Whether the model continues the last message."""
        return self._may_continue and ends_with_assistant(messages)

    def written(self, messages: Messages, options: Mapping[str, Any], *, where: str = "") -> str:
        """The text that the chat template makes of messages, with these arguments and no others."""
        try:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, **options)
        except Exception as error:
            # A template is a program of the model's author: it may raise what it likes about messages that it dislikes.
            got = f"messages that the chat template refuses ({type(error).__name__}: {error})"
            expected = "messages in the form that the model was trained on"
            fix = "Correct the row or the template, or change data.apply_chat_template_kwargs."
            raise DataError(where, got=got, expected=expected, fix=fix) from error
        try:
            str(text).encode()
        except UnicodeEncodeError as error:
            half, before = error.object[error.start], error.object[: error.start][-40:]
            got = f"half of a character, {half!r}, behind {before!r}"
            fix = "Correct the row: its text was cut in two there."
            raise DataError(where, got=got, expected="text that UTF-8 can hold", fix=fix) from error
        # One conversation that is not tokenized gives text; the annotation of transformers covers every other case too.
        return cast(str, text)

    def _require_all_written(
        self, messages: Messages, options: Mapping[str, Any], text: str, where: str
    ) -> None:
        """Raise a DataError if the template leaves out a message.

        One chat of each role order is rendered again.
        """
        order = role_order(messages, has_tools=bool(options.get("tools")))
        if order not in self._left_out:
            if len(self._left_out) >= MAX_ROLE_ORDERS:
                return
            self._left_out[order] = self._find_left_out(messages, options, text)
        if (missing_pair := self._left_out[order]) is None:
            return
        number = _first_messages(messages)[missing_pair]
        got = f"the role {missing_pair[1]!r}, whose messages the chat template leaves out"
        fix = f"Correct the row, or set {_TEMPLATE} to a template that writes them."
        raise DataError(
            f"{where}, message {number}",
            got=got,
            expected="a role that the chat template writes",
            fix=fix,
        )

    def _find_left_out(
        self, messages: Messages, options: Mapping[str, Any], text: str
    ) -> tuple[str, str] | None:
        """The pair of roles whose second message does not appear in the text, or None."""
        for pair, number in _first_messages(messages).items():
            message, before, after = messages[number], messages[:number], messages[number + 1 :]
            content: Any = message.get("content") or ""
            probed: Any = [*content, {"type": "text", "text": _PROBE}]
            if isinstance(content, str):
                probed = content + _PROBE
            changed = [*before, {**message, "content": probed}, *after]
            try:
                is_written = self.written(changed, options) != text
                # Templates may drop the thoughts of an earlier turn, and what stands beside a call.
                if not is_written and message["role"] == "assistant":
                    is_written = self.written([*before, *after], options) != text
            except DataError:
                continue  # a template that refuses a change has read the message
            if not is_written:
                return pair
        return None

    def encode(self, texts: list[str]) -> list[list[int]]:
        """The token ids of each rendered text; the template has already written the special tokens."""
        if not texts:
            return []  # which transformers refuses
        return self.tokenizer(texts, add_special_tokens=False, return_attention_mask=False)[
            "input_ids"
        ]

    @cached_property
    def counter(self) -> TokenCounter:
        """Counts the token ids of rendered texts."""
        return TokenCounter(self.tokenizer)

    def fingerprint(self) -> str:
        """Changes whenever the ids of some prompt could."""
        tokenizer, backend = self.tokenizer, getattr(self.tokenizer, "backend_tokenizer", None)
        template = self.template_kwargs.get("chat_template") or tokenizer.chat_template
        slow = [
            type(tokenizer).__qualname__,
            sorted(tokenizer.get_vocab().items()),
            tokenizer.special_tokens_map,
        ]
        facts = {
            "rows": 3,  # raised when rows become messages in another way, or are refused for other reasons
            "transformers": transformers.__version__,
            "tokenizer": slow if backend is None else backend.to_str(),
            "template": template,
            "kwargs": self.template_kwargs,
            # Some templates write the date into the prompt.
            "date": str(date.today()) if "strftime_now" in json.dumps(template) else "",
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True, default=repr).encode()).hexdigest()


def told_orders(num_orders: int) -> str:
    """How many role orders were looked at, for the lines that a start prints."""
    checked = (
        f"a chat of each (at most {MAX_ROLE_ORDERS}) was rendered again, and no message is left out"
    )
    return f"{num_orders} combinations of roles, tools and last role; {checked}"


def role_order(messages: Messages, *, has_tools: bool) -> RoleOrder:
    """What a chat template may treat alike: chats with the same order of roles."""
    return tuple(sorted(_first_messages(messages))), messages[-1]["role"], has_tools


def _first_messages(messages: Messages) -> dict[tuple[str, str], int]:
    """For each pair of roles that follow each other, the number of the message that ends it first."""
    roles = ["", *(message["role"] for message in messages)]
    numbers: dict[tuple[str, str], int] = {}
    for number, pair in enumerate(pairwise(roles)):
        numbers.setdefault(pair, number)
    return numbers


def require_embedded(
    token_ids: Sequence[int],
    vocabulary_size: int | None,
    tokenizer: PreTrainedTokenizerBase,
    *,
    where: str,
) -> None:
    """Raise a DataError if a token has no row in the model's embedding.

    `vocabulary_size`: rows of the embedding. None: enough for each token.
    """
    if vocabulary_size is None or max(token_ids, default=0) < vocabulary_size:
        return
    token_id = max(token_ids)
    got = f"the token {tokenizer.convert_ids_to_tokens(token_id)!r} with the id {token_id}"
    expected = f"ids below {vocabulary_size}, the rows of the model's embedding"
    fix = "Use the model's own tokenizer (data.tokenizer), or add rows to the embedding with transformers first."
    raise DataError(where, got=got, expected=expected, fix=fix)


def shortened(value: Any) -> str:
    """The value as an error shows it, in at most 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
