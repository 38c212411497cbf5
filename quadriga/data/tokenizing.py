# SPDX-License-Identifier: Apache-2.0
"""Loads the tokenizer, renders chat messages as text, and encodes the text as token ids."""

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
_TEMPLATE_KEY = "actor_rollout_ref.model.custom_chat_template"
MAX_ROLE_ORDERS = 256
"""Most role orders for which the template is checked to write each message."""
_PROBE = " quadriga"
"""Text that is added to a message to see whether the rendered chat changes."""
_RESERVED_KWARGS = (
    "tokenize",
    "return_tensors",
    "return_dict",
    "padding",
    "truncation",
    "max_length",
)
RoleOrder = tuple[tuple[tuple[str, str], ...], str, bool]
"""Sorted distinct pairs of consecutive roles in a chat, its last role, whether there are tools.

The first message counts as preceded by the role ""."""


def read_tokenizer(path: str | Path, **options: Any) -> PreTrainedTokenizerBase:
    """Load a tokenizer as it is; `load_tokenizer` also prepares it for training.

    Args:
        path: a folder or a name on the hub.
        options: further arguments of `AutoTokenizer.from_pretrained`.

    Returns:
        The tokenizer.
    """
    # Accessing the attribute imports the class, and torch with it. A `from` import at the top of the file would import
    # torch in processes that only count tokens, too.
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, **options)
    # Annotated as optional, for installations without the package tokenizers, which transformers requires.
    return cast(PreTrainedTokenizerBase, tokenizer)


def load_tokenizer(
    path: str | Path, *, trust_remote_code: bool = False, chat_template: str | None = None
) -> PreTrainedTokenizerBase:
    """Load a tokenizer with a pad token and a chat template, which training needs.

    Args:
        path: a folder or a name on the hub.
        trust_remote_code: whether code in that folder may run.
        chat_template: Jinja text, or the path of a file with it. None: the tokenizer's own
            template.

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
            # A template has braces, and a file name hardly ever has.
            if "{" not in chat_template:
                tokenizer.chat_template = Path(chat_template).expanduser().read_text("utf-8")
            else:
                tokenizer.chat_template = chat_template
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(
                _TEMPLATE_KEY,
                got=f"{chat_template!r} ({error})",
                expected="a chat template in Jinja, or a file with one",
                fix="Check the path.",
            ) from error
    check_tokenizer(tokenizer, str(path))
    return tokenizer


def check_tokenizer(
    tokenizer: PreTrainedTokenizerBase, name: str, *, has_template: bool = False
) -> None:
    """Raise an error for a tokenizer that training cannot use; add a pad token if it has none.

    Args:
        tokenizer: changed in place.
        name: name of the tokenizer, for errors and notices.
        has_template: whether the caller has a chat template of its own. Then the tokenizer needs
            none, and none is checked.

    Raises:
        DataError: as for `load_tokenizer`.
    """
    where = f"tokenizer {name}"
    # Tokens that were added to the vocabulary do not count: it may be empty without them.
    if not tokenizer.get_vocab().keys() - tokenizer.get_added_vocab().keys():
        raise DataError(
            where,
            got="an empty vocabulary, which transformers makes of a folder without tokenizer files",
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
        # Padding is masked, so any token can serve for it.
        tokenizer.pad_token = tokenizer.eos_token
        print(
            f"{where}: it has no pad token; its end-of-sequence token {tokenizer.eos_token!r} is"
            " used for padding.",
            flush=True,
        )
    if has_template:
        return
    # Without a template, prompts that are chats cannot be rendered.
    if not tokenizer.chat_template:
        raise DataError(
            where,
            got="no chat template",
            expected="a chat template, which turns messages into text",
            fix=f"Set {_TEMPLATE_KEY}, or use the tokenizer of an instruct model.",
        )
    if _ignores_messages(tokenizer):
        template = shortened(tokenizer.chat_template)
        raise DataError(
            f"chat template of {where}",
            got=f"{template}, which writes the same whatever the messages say",
            expected="a template that writes the content of messages",
            fix=f"Correct it, or set {_TEMPLATE_KEY} to another template.",
        )


def _ignores_messages(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the chat template renders the same text for messages with different content."""
    encoder = ChatEncoder(tokenizer, {})
    texts = ("one", "two")
    # Some templates read only texts, some only lists of parts.
    part_lists = [[{"type": "text", "text": text}] for text in texts]
    for contents in (texts, part_lists):
        rendered_texts = set()
        for content in contents:
            chat = [{"role": "user", "content": content}]
            try:
                rendered_texts.add(encoder.apply_template(chat, encoder.template_kwargs))
            except DataError:
                return False  # a template that refuses a message has read it
        if len(rendered_texts) > 1:
            return False
    return True


def as_messages(prompt: Any, *, where: str, key: str = "prompt_key") -> Messages:
    """Read the chat messages of a prompt.

    Content parts that are all text are joined into one text: many templates of text-only models
    know no parts, and would write the list as Python prints it.

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
    # Text that is no chat in JSON is a message of the user.
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if not _is_message_list(prompt):
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
        # A message that consists of tool calls needs no content.
        has_only_calls = content is None and message.get("tool_calls")
        if not isinstance(content, Sequence) and not has_only_calls:
            raise DataError(
                f"{where}, message {number}",
                got=shortened(message),
                expected="a content that is text, or a list of parts",
                fix='Give it a text, "" if need be.',
            )
        # Parts that are all text become one text, for templates that know no parts.
        if isinstance(content, list) and all(
            isinstance(part, Mapping) and part.get("type") == "text" for part in content
        ):
            message["content"] = "".join(str(part.get("text") or "") for part in content)
        messages.append(message)
    return messages


def _is_message_list(value: Any) -> bool:
    """Whether a value is a list of messages, each a dictionary with a role."""
    if not isinstance(value, Sequence) or not value:
        return False
    return all(
        isinstance(message, Mapping) and isinstance(message.get("role"), str) for message in value
    )


def chat_in_json(value: Any) -> Messages:
    """Parse a chat in JSON, such as '[{"role": "user", "content": "Hi"}]'.

    Returns:
        The messages; empty if the value is anything else, such as a text that begins with a
        bracket.
    """
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return []
    try:
        chat = json.loads(value)
    except (ValueError, RecursionError):
        return []
    # The text may be a list without being a chat, such as an exercise about lists.
    is_chat = _is_message_list(chat) and all("content" in message for message in chat)
    return chat if is_chat else []


class ChatEncoder:
    """Renders and tokenizes prompts, exactly as the rollout does.

    Args:
        tokenizer: has a chat template, unless `template_kwargs` brings one as `chat_template`.
        template_kwargs: arguments of the chat template. Unless they have `add_generation_prompt` or
            `continue_final_message`, the prompt ends by opening a turn of the assistant; if the
            messages end with such a turn, the model continues it.

    Raises:
        DataError: an argument is one of tokenization, not of the template.
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
        # A prompt whose last turn is continued opens no other one.
        opens_turn = not template_kwargs.get("continue_final_message", False)
        self.template_kwargs = {"add_generation_prompt": opens_turn, **template_kwargs}
        # The model continues a turn at the end, unless the user has set how prompts end.
        ending_keys = {"add_generation_prompt", "continue_final_message"}
        self._may_continue = ending_keys.isdisjoint(template_kwargs)
        # Results of checking the template, by the order of roles. None: the template writes all
        # messages. Otherwise it leaves one out: the role of the message before it, and its own.
        self._omitted_pairs: dict[RoleOrder, tuple[str, str] | None] = {}

    def render(
        self, messages: Messages, *, where: str, tools: Sequence[Any] | None = None, **options: Any
    ) -> str:
        """Render the text of a prompt with `template_kwargs`.

        Args:
            messages: the chat.
            where: file and row, for errors.
            tools: schemas for the template.
            options: further arguments of the template; they replace those of `template_kwargs`.

        Returns:
            The text of the chat. By default it ends with the beginning of the assistant's next
            turn, or with the assistant's last turn, left open to be continued.

        Raises:
            DataError: the template refuses the messages, or leaves one of them out.
        """
        arguments = {**self.template_kwargs, **options}
        if tools:
            # Only agent loops have tools. How their prompts end does not depend on
            # `template_kwargs`.
            arguments["tools"] = list(tools)
            arguments["add_generation_prompt"] = options.get("add_generation_prompt", True)
            arguments["continue_final_message"] = options.get("continue_final_message", False)
            is_continued = ends_with_assistant(messages)
        else:
            # False if `template_kwargs` say how the prompt ends.
            is_continued = self.continues(messages)
        # The last turn stays open, unless the caller says how the text is to end.
        if is_continued and "add_generation_prompt" not in options:
            arguments |= CONTINUING
        text = self.apply_template(messages, arguments, where=where)
        self._require_no_omission(messages, arguments, text, where)
        return text

    @property
    def num_role_orders(self) -> int:
        """Number of role orders for which the template has been checked."""
        return len(self._omitted_pairs)

    def continues(self, messages: Messages) -> bool:
        """Whether the messages end with a turn of the assistant that the model is to continue.

        False if `template_kwargs` say how the prompt ends.
        """
        return self._may_continue and ends_with_assistant(messages)

    def apply_template(
        self, messages: Messages, options: Mapping[str, Any], *, where: str = ""
    ) -> str:
        """Render messages with exactly these arguments of the chat template.

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
            # A template is a program, and may raise any exception.
            raise DataError(
                where,
                got=f"messages that the chat template refuses ({type(error).__name__}: {error})",
                expected="messages in the form that the model was trained on",
                fix="Correct the row or the template, or change data.apply_chat_template_kwargs.",
            ) from error
        try:
            # Half of a surrogate pair would raise later, in the tokenizer, where the row is not
            # known.
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
        # transformers annotates the union of what all arguments return; with `tokenize=False` it is a text.
        return cast(str, text)

    def _require_no_omission(
        self, messages: Messages, options: Mapping[str, Any], text: str, where: str
    ) -> None:
        """Raise a DataError if the template leaves out a message.

        The check renders several changed chats, so only the first chat of each role order is
        checked, and only for the first `MAX_ROLE_ORDERS` orders.

        Args:
            messages: the chat.
            options: arguments of the chat template.
            text: the rendered chat.
            where: file and row, for errors.
        """
        order = role_order(messages, has_tools=bool(options.get("tools")))
        if order not in self._omitted_pairs:
            # If nearly every chat had a new order, checking all would double the time of the start.
            if len(self._omitted_pairs) >= MAX_ROLE_ORDERS:
                return
            self._omitted_pairs[order] = self._find_omitted_pair(messages, options, text)
        omitted_pair = self._omitted_pairs[order]
        if omitted_pair is None:
            return
        # Chats of one role order have the same pairs, so this chat has the pair too.
        number = _first_message_of_pairs(messages)[omitted_pair]
        omitted_role = omitted_pair[1]
        raise DataError(
            f"{where}, message {number}",
            got=f"the role {omitted_role!r}, whose messages the chat template leaves out",
            expected="a role that the chat template writes",
            fix=f"Correct the row, or set {_TEMPLATE_KEY} to a template that writes them.",
        )

    def _find_omitted_pair(
        self, messages: Messages, options: Mapping[str, Any], text: str
    ) -> tuple[str, str] | None:
        """Find a message that the template leaves out, by its role and the role before it.

        The template writes a message if a change of the message changes the text of the chat.

        Args:
            messages: the chat.
            options: arguments of the chat template.
            text: the rendered chat.

        Returns:
            The role of the message before it, "" for the first message, and its own role. None: all
            messages are written.
        """
        for pair, number in _first_message_of_pairs(messages).items():
            message = messages[number]
            content: Any = message.get("content") or ""
            new_content: Any = [*content, {"type": "text", "text": _PROBE}]
            if isinstance(content, str):
                new_content = content + _PROBE
            changed_chat = list(messages)
            changed_chat[number] = {**message, "content": new_content}
            try:
                is_written = self.apply_template(changed_chat, options) != text
                # Templates may drop the reasoning of an earlier turn, and text beside a tool call,
                # but still write the rest of the turn. Then the chat without the turn has another
                # text.
                if not is_written and message["role"] == "assistant":
                    shorter = [*messages[:number], *messages[number + 1 :]]
                    is_written = self.apply_template(shorter, options) != text
            except DataError:
                continue  # a template that refuses the changed message has read it
            if not is_written:
                return pair
        return None

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Tokenize rendered texts, in which the template has written the special tokens."""
        if not texts:
            return []  # transformers refuses an empty list
        encodings = self.tokenizer(texts, add_special_tokens=False, return_attention_mask=False)
        return encodings["input_ids"]

    @cached_property
    def counter(self) -> TokenCounter:
        """Counter of the tokens of rendered texts. It remembers the counts of words."""
        return TokenCounter(self.tokenizer)

    def fingerprint(self) -> str:
        """Hash of everything here that determines the token ids of prompts, for keys of caches."""
        tokenizer = self.tokenizer
        # The part of a fast tokenizer that is written in Rust describes itself completely.
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is not None:
            tokenizer_facts: Any = backend.to_str()
        else:
            tokenizer_facts = [
                type(tokenizer).__qualname__,
                sorted(tokenizer.get_vocab().items()),
                tokenizer.special_tokens_map,
            ]
        # Neither form of `tokenizer_facts` has the chat template.
        template = self.template_kwargs.get("chat_template") or tokenizer.chat_template
        facts = {
            # Raise this number when this package reads or refuses rows in another way.
            "rows": 4,
            "transformers": transformers.__version__,
            "tokenizer": tokenizer_facts,
            "template": template,
            "kwargs": self.template_kwargs,
            # Some templates write the date into the prompt.
            "date": str(date.today()) if "strftime_now" in json.dumps(template) else "",
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True, default=repr).encode()).hexdigest()


def describe_template_check(num_orders: int) -> str:
    """Describe the check that the chat template has passed, for a notice at the start of a run.

    Args:
        num_orders: number of role orders in the data. From `MAX_ROLE_ORDERS` on, the text says that
            only so many were checked.
    """
    text = "the chat template writes every message"
    if num_orders >= MAX_ROLE_ORDERS:
        text += f" (tried with {MAX_ROLE_ORDERS} orders of roles)"
    return text


def role_order(messages: Messages, *, has_tools: bool) -> RoleOrder:
    """Summarize the roles of a chat. A chat template is taken to treat equal role orders alike.

    Args:
        messages: the chat.
        has_tools: whether the template gets tools.

    Returns:
        The sorted pairs of consecutive roles, the last role, and whether there are tools.
    """
    pairs = sorted(_first_message_of_pairs(messages))
    return tuple(pairs), messages[-1]["role"], has_tools


def _first_message_of_pairs(messages: Messages) -> dict[tuple[str, str], int]:
    """For each pair of consecutive roles, the number of the first message that is second in it.

    The first message of a chat counts as preceded by the role "".
    """
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
        vocabulary_size: rows of the embedding. None: it has a row for every token.
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
    """Copy the fields that are not None: Parquet gives each struct the fields of all structs."""
    return {name: value for name, value in fields.items() if value is not None}


def shortened(value: Any) -> str:
    """Represent a value in at most 80 characters, for an error."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
