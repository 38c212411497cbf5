# SPDX-License-Identifier: Apache-2.0
"""Loads the tokenizer and encodes prompts: from chat messages to text, and to token ids."""

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
"""Role orders whose first chat is rendered again to check that the template writes each message."""
_PROBE = " quadriga"
_RESERVED_KWARGS = (
    "tokenize",
    "return_tensors",
    "return_dict",
    "padding",
    "truncation",
    "max_length",
)
RoleOrder = tuple[tuple[tuple[str, str], ...], str, bool]
"""Pairs of roles that follow each other in a chat, its last role, and whether there are tools.

"" stands before the first role."""


def read_tokenizer(path: str | Path, **options: Any) -> PreTrainedTokenizerBase:
    """Load a tokenizer as it is; `load_tokenizer` also prepares it for training.

    Args:
        path: a folder or a name on the hub.
        options: further arguments of `AutoTokenizer.from_pretrained`.

    Returns:
        The tokenizer.
    """
    # The class is looked up in the package, which imports it here: torch comes with it, and counting tokens needs none.
    # Its annotation admits None, for installations without the package tokenizers, which transformers requires.
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, **options)
    return cast(PreTrainedTokenizerBase, tokenizer)


def load_tokenizer(
    path: str | Path, *, trust_remote_code: bool = False, chat_template: str | None = None
) -> PreTrainedTokenizerBase:
    """Load a tokenizer with a pad token and a chat template, which training needs.

    Args:
        path: a folder or a name on the hub.
        trust_remote_code: whether code in that folder may run.
        chat_template: Jinja, or a file with it. None: the tokenizer's own.

    Returns:
        The tokenizer.

    Raises:
        DataError: the tokenizer cannot be loaded, has neither pad nor end-of-sequence token, or has
            no chat template that writes the content of messages.
    """
    try:
        tokenizer = read_tokenizer(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise DataError(
            f"tokenizer {path}",
            got=str(error).strip().partition("\n")[0],
            expected="a folder or hub name with a tokenizer that transformers can load",
            fix="Check data.tokenizer and actor_rollout_ref.model.path.",
        ) from error
    if chat_template is not None:
        try:
            # Any template has a brace, and hardly any file name.
            if "{" not in chat_template:
                tokenizer.chat_template = Path(chat_template).expanduser().read_text("utf-8")
            else:
                tokenizer.chat_template = chat_template
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(
                _TEMPLATE,
                got=f"{chat_template!r} ({error})",
                expected="a chat template in Jinja, or a file with one",
                fix="Check the path.",
            ) from error
    check_tokenizer(tokenizer, str(path))
    return tokenizer


def check_tokenizer(
    tokenizer: PreTrainedTokenizerBase, name: str, *, has_template: bool = False
) -> None:
    """Refuse a tokenizer that training cannot work with. Give it a pad token if it has none.

    Args:
        tokenizer: changed in place.
        name: its name, for errors and notices.
        has_template: whether the caller brings a chat template, so that the tokenizer's own is not
            needed.

    Raises:
        DataError: as for `load_tokenizer`.
    """
    where = f"tokenizer {name}"
    if not tokenizer.get_vocab().keys() - tokenizer.get_added_vocab().keys():
        raise DataError(
            where,
            got="a vocabulary without a token, which transformers makes of a folder without one",
            expected="tokenizer.json, or the files of another kind of tokenizer",
            fix="Copy them there, or set data.tokenizer to a folder that has them.",
        )
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise DataError(
                where,
                got="neither a pad token nor an end-of-sequence token",
                expected="at least one of them",
                fix='Set "pad_token" in its tokenizer_config.json.',
            )
        # Padding is masked, so any token may pad.
        tokenizer.pad_token = tokenizer.eos_token
        print(
            f"{where}: it has no pad token; its end-of-sequence token {tokenizer.eos_token!r} is"
            " used for padding.",
            flush=True,
        )
    if has_template:
        return
    if not tokenizer.chat_template:
        raise DataError(
            where,
            got="no chat template",
            expected="one, to turn chat messages into text",
            fix=f"Set {_TEMPLATE}, or use the tokenizer of an instruct model.",
        )
    if _ignores_messages(tokenizer):
        template = shortened(tokenizer.chat_template)
        raise DataError(
            f"chat template of {where}",
            got=f"{template}, which writes the same whatever the messages say",
            expected="one that writes their content",
            fix=f"Correct it, or set {_TEMPLATE} to another one.",
        )


def _ignores_messages(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether messages with different words, as texts or parts, give the same text."""
    words = ("one", "two")
    as_parts = [[{"type": "text", "text": word}] for word in words]
    for contents in (words, as_parts):
        try:
            encoder = ChatEncoder(tokenizer, {})
            rendered = set()
            for content in contents:
                chat = [{"role": "user", "content": content}]
                # The words are compared in the text that the template makes, not in its source.
                rendered.add(encoder.written(chat, encoder.template_kwargs))
        except DataError:
            return False  # a template that refuses messages reads them
        if len(rendered) > 1:
            return False
    return True


def as_messages(prompt: Any, *, where: str, key: str = "prompt_key") -> Messages:
    """The chat messages of a prompt.

    Content parts that are all text become one text: templates of language models know no parts, and
    some would write them out as Python does.

    Args:
        prompt: a list of messages, a chat in JSON, or a string, which is one message of the user.
        where: file and row, for errors.
        key: key of the section `data` that names the column.

    Returns:
        The messages, without fields that are null.

    Raises:
        DataError: the prompt has another form.
    """
    prompt = chat_in_json(prompt) or prompt
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if not _is_chat(prompt):
        raise DataError(
            where,
            got=f"the {key.removesuffix('_key')} {shortened(prompt)}",
            expected='text, or a list of messages such as [{"role": "user", "content": "..."}]',
            fix=f"Correct the row, or set data.{key} to the column that holds the chat.",
        )
    messages = []
    for number, row_message in enumerate(prompt):
        message = without_nulls(row_message)
        content = message.get("content")
        is_call = content is None and message.get("tool_calls")
        # A message with nothing but tool calls may lack a content.
        if not isinstance(content, Sequence) and not is_call:
            raise DataError(
                f"{where}, message {number}",
                got=shortened(message),
                expected="a content that is text, or a list of parts",
                fix='Give it a text, "" if need be.',
            )
        if isinstance(content, list) and all(
            isinstance(part, Mapping) and part.get("type") == "text" for part in content
        ):
            message["content"] = "".join(str(part.get("text") or "") for part in content)
        messages.append(message)
    return messages


def _is_chat(value: Any) -> bool:
    """Whether a value is a list of messages with roles."""
    if not isinstance(value, Sequence) or not value:
        return False
    return all(
        isinstance(message, Mapping) and isinstance(message.get("role"), str) for message in value
    )


def chat_in_json(value: Any) -> Messages:
    """The messages in a text such as '[{"role": "user", "content": "Hi"}]'; else none."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return []
    try:
        # A prompt may be a text that merely begins with a bracket.
        chat = json.loads(value)
    except (ValueError, RecursionError):
        return []
    for message in chat:
        # A list in JSON may be any text, such as an exercise about lists.
        if not isinstance(message, dict) or "content" not in message:
            return []
        if not isinstance(message.get("role"), str):
            return []
    return chat


class ChatEncoder:
    """Renders and tokenizes prompts as the rollout will.

    Args:
        tokenizer: has a chat template, unless `template_kwargs` brings one as `chat_template`.
        template_kwargs: arguments of the chat template. By default a turn of the assistant is
            opened, or continued where the messages end with one.

    Raises:
        DataError: an argument is not for the template.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any]
    ) -> None:
        for key in _RESERVED_KWARGS:
            if key in template_kwargs:
                raise DataError(
                    f"data.apply_chat_template_kwargs.{key}",
                    got=repr(template_kwargs[key]),
                    expected="arguments for the template only",
                    fix="Remove it: keys of `data` set how prompts are tokenized, cut and padded.",
                )
        self.tokenizer = tokenizer
        self.template_kwargs = {"add_generation_prompt": True, **template_kwargs}
        ending_keys = {"add_generation_prompt", "continue_final_message"}
        self._may_continue = ending_keys.isdisjoint(template_kwargs)
        # The pair of each role order whose second message the template leaves out; None: it writes all messages.
        self._left_out: dict[RoleOrder, tuple[str, str] | None] = {}

    def render(
        self, messages: Messages, *, where: str, tools: Sequence[Any] | None = None, **options: Any
    ) -> str:
        """Render the text of a prompt.

        Args:
            messages: the chat.
            where: file and row, for errors.
            tools: schemas for the template.
            options: further arguments of the template; they replace those of `template_kwargs`.

        Returns:
            The text of the chat, and of the beginning of the assistant's next turn.

        Raises:
            DataError: the template refuses the messages, or leaves one of them out.
        """
        arguments = {**self.template_kwargs, **options}
        is_continued = self.continues(messages)
        if tools:
            # Agent loops ignore what `template_kwargs` say about the end of a prompt with tools.
            arguments["tools"] = list(tools)
            arguments["add_generation_prompt"] = options.get("add_generation_prompt", True)
            is_continued = ends_with_assistant(messages)
        if is_continued and "add_generation_prompt" not in options:
            arguments |= CONTINUING
        text = self.written(messages, arguments, where=where)
        self._require_all_written(messages, arguments, text, where)
        return text

    @property
    def num_orders(self) -> int:
        """Number of role orders that were checked so far."""
        return len(self._left_out)

    def continues(self, messages: Messages) -> bool:
        """Whether the model continues the last message."""
        return self._may_continue and ends_with_assistant(messages)

    def written(self, messages: Messages, options: Mapping[str, Any], *, where: str = "") -> str:
        """Render messages with these arguments of the chat template and no others.

        Args:
            messages: the chat.
            options: arguments of the chat template.
            where: file and row, for errors.

        Returns:
            The text.

        Raises:
            DataError: the template refuses the messages, or the text is not valid UTF-8.
        """
        try:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, **options)
        except Exception as error:
            # A template is a program of the model's author, and may raise any exception.
            raise DataError(
                where,
                got=f"messages that the chat template refuses ({type(error).__name__}: {error})",
                expected="messages in the form that the model was trained on",
                fix="Correct the row or the template, or change data.apply_chat_template_kwargs.",
            ) from error
        try:
            # Half of a surrogate pair would only fail later, in the tokenizer.
            str(text).encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start]
            text_before = error.object[: error.start][-40:]
            raise DataError(
                where,
                got=f"half of a character, {half!r}, behind {text_before!r}",
                expected="text that UTF-8 can hold",
                fix="Correct the row: its text was cut in two there.",
            ) from error
        # Without tokenization the result is a text; the annotation of transformers covers other cases too.
        return cast(str, text)

    def _require_all_written(
        self, messages: Messages, options: Mapping[str, Any], text: str, where: str
    ) -> None:
        """Raise a DataError if the template leaves out a message.

        The check renders changed chats, so it is made for the first chat of each role order only.
        """
        order = role_order(messages, has_tools=bool(options.get("tools")))
        if order not in self._left_out:
            # If nearly every chat has a new order, checking all of them would double the time that
            # the start takes.
            if len(self._left_out) >= MAX_ROLE_ORDERS:
                return
            self._left_out[order] = self._find_left_out(messages, options, text)
        missing_pair = self._left_out[order]
        if missing_pair is None:
            return
        # The pair may come from an earlier chat, but chats of one role order have the same pairs.
        number = _first_messages(messages)[missing_pair]
        missing_role = missing_pair[1]
        raise DataError(
            f"{where}, message {number}",
            got=f"the role {missing_role!r}, whose messages the chat template leaves out",
            expected="a role that the chat template writes",
            fix=f"Correct the row, or set {_TEMPLATE} to a template that writes them.",
        )

    def _find_left_out(
        self, messages: Messages, options: Mapping[str, Any], text: str
    ) -> tuple[str, str] | None:
        """The pair of roles whose second message does not appear in the text, or None."""
        for pair, number in _first_messages(messages).items():
            message = messages[number]
            content: Any = message.get("content") or ""
            # If a change of the message does not change the text, the template leaves it out.
            probed: Any = [*content, {"type": "text", "text": _PROBE}]
            if isinstance(content, str):
                probed = content + _PROBE
            changed = list(messages)
            changed[number] = {**message, "content": probed}
            try:
                is_written = self.written(changed, options) != text
                # Templates may drop the thoughts of an earlier turn, and text beside a tool call.
                if not is_written and message["role"] == "assistant":
                    shorter = [*messages[:number], *messages[number + 1 :]]
                    is_written = self.written(shorter, options) != text
            except DataError:
                continue  # a template that refuses a change has read the message
            if not is_written:
                return pair
        return None

    def encode(self, texts: list[str]) -> list[list[int]]:
        """The token ids of rendered texts. The template has written the special tokens already."""
        if not texts:
            return []  # transformers refuses an empty list
        encodings = self.tokenizer(texts, add_special_tokens=False, return_attention_mask=False)
        return encodings["input_ids"]

    @cached_property
    def counter(self) -> TokenCounter:
        """Counts the token ids of rendered texts."""
        return TokenCounter(self.tokenizer)

    def fingerprint(self) -> str:
        """Hash of everything that decides about the token ids of prompts."""
        tokenizer = self.tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is not None:
            tokenizer_facts: Any = backend.to_str()
        else:
            tokenizer_facts = [
                type(tokenizer).__qualname__,
                sorted(tokenizer.get_vocab().items()),
                tokenizer.special_tokens_map,
            ]
        # The tokenizer's own description does not include the template.
        template = self.template_kwargs.get("chat_template") or tokenizer.chat_template
        facts = {
            "rows": 3,  # raised when rows become messages in another way, or are refused for other reasons
            "transformers": transformers.__version__,
            "tokenizer": tokenizer_facts,
            "template": template,
            "kwargs": self.template_kwargs,
            # Some templates write the date into the prompt.
            "date": str(date.today()) if "strftime_now" in json.dumps(template) else "",
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True, default=repr).encode()).hexdigest()


def written_messages(num_orders: int) -> str:
    """Say which messages the chat template was seen to write, for the lines that a start prints.

    Args:
        num_orders: number of role orders in the data.
    """
    text = "the chat template writes every message"
    if num_orders >= MAX_ROLE_ORDERS:
        text += f" (tried with {MAX_ROLE_ORDERS} orders of roles)"
    return text


def role_order(messages: Messages, *, has_tools: bool) -> RoleOrder:
    """The key of chats that a chat template may treat alike.

    Args:
        messages: the chat.
        has_tools: whether the template gets tools.

    Returns:
        The pairs of roles that follow each other, the last role, and whether there are tools.
    """
    pairs = sorted(_first_messages(messages))
    return tuple(pairs), messages[-1]["role"], has_tools


def _first_messages(messages: Messages) -> dict[tuple[str, str], int]:
    """The first message that ends each pair of roles that follow each other, by number."""
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

    Args:
        token_ids: ids of a text.
        vocabulary_size: rows of the embedding. None: enough for each token.
        tokenizer: names the token in the error.
        where: file and row, for errors.

    Raises:
        DataError: an id is not below `vocabulary_size`.
    """
    if vocabulary_size is None or max(token_ids, default=0) < vocabulary_size:
        return
    token_id = max(token_ids)
    raise DataError(
        where,
        got=f"the token {tokenizer.convert_ids_to_tokens(token_id)!r} with the id {token_id}",
        expected=f"ids below {vocabulary_size}, the rows of the model's embedding",
        fix="Use the model's own tokenizer (data.tokenizer), or add rows with transformers.",
    )


def without_nulls(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields with a value. Parquet gives each struct the fields of all others, as nulls."""
    return {name: value for name, value in fields.items() if value is not None}


def shortened(value: Any) -> str:
    """The value as an error shows it, in at most 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
