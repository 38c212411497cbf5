# SPDX-License-Identifier: Apache-2.0
"""From messages to token ids: the prompt once, and then for each turn of a tool or partner what it adds.

What the model wrote is never rendered: a template may drop its thoughts, and a tokenizer may split its text another
way. A turn's own tokens are found by rendering a conversation of a stand-in answer and the new messages:

    <user>x<end>\\n<assistant>STAND-IN<end>\\n<tool>42<end>\\n<assistant>
                                     └───────────── added ─────────────┘

If the model has written the closing token itself, as it mostly does, that one is left out of what is added.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from quadriga.errors import RolloutError

_STAND_IN = "quadrigastandin"
_FIX_TEMPLATE = "Set actor_rollout_ref.model.custom_chat_template to one that has"


class TurnEncoder:
    """Renders and tokenizes prompts and turns.

    Args:
        tokenizer: with a chat template.
        template_kwargs: of `data.apply_chat_template_kwargs`.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any]) -> None:
        self.tokenizer = tokenizer
        self.template_kwargs = {key: value for key, value in template_kwargs.items() if key != "add_generation_prompt"}
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        texts = {str(token) for token in added if token.special} | set(tokenizer.all_special_tokens)
        self._special = sorted((text for text in texts if len(text) > 1), key=len, reverse=True)
        self._closing = frozenset(tokenizer.all_special_ids)
        self._is_probed: set[str] = set()

    def prompt(self, messages: Sequence[Mapping[str, Any]], schemas: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a prompt that offers tools.

        Args:
            messages: of the prompt.
            schemas: of the tools.

        Raises:
            RolloutError: the prompt as rendered does not name every tool, so the model could not know of it.
        """
        text = self._render(messages, schemas)
        missing = [name for one in schemas if (name := one["function"]["name"]) not in text]
        if missing:
            raise RolloutError(
                f"chat template of {self.tokenizer.name_or_path or 'the tokenizer'}",
                got=f"a prompt that does not name the tools {', '.join(missing)}",
                expected="one that writes `tools` into the prompt",
                fix=f"{_FIX_TEMPLATE} them, or describe the tools in a system message of the data.",
            )
        return self._encode(text)

    def following(self, messages: Sequence[Mapping[str, Any]], written: Sequence[int]) -> list[int]:
        """Token ids that stand between what the model wrote and what it writes next.

        Args:
            messages: of tools or a partner, in the order of their turn.
            written: the model's last turn.

        Raises:
            RolloutError: the template leaves messages of this role out, or refuses them.
        """
        for role in dict.fromkeys(message["role"] for message in messages):
            self._require_role(role)
        text, is_closed_apart = self._added(messages)
        ids = self._encode(text)
        if ids and written and (written[-1] == ids[0] or (is_closed_apart and {written[-1], ids[0]} <= self._closing)):
            return ids[1:]
        return ids

    def plain(self, text: str) -> str:
        """The text with every special token broken in two, so that no tool can forge a turn."""
        for token in self._special:
            if token in text:
                text = text.replace(token, f"{token[0]} {token[1:]}")
        return text

    def text(self, token_ids: Sequence[int], *, with_special: bool) -> str:
        """What tokens say."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=not with_special))

    def _added(self, messages: Sequence[Mapping[str, Any]]) -> tuple[str, bool]:
        """The text after the stand-in, and whether an answer is closed by a token that belongs to it.

        Tools are not given here: some templates write them beside the last message, and the prompt has them.
        """
        start = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _STAND_IN}]
        try:
            rendered = self._render([*start, *messages])
        except RolloutError:
            # Some templates take a tool's answer only after an assistant's call, whose name they repeat.
            if messages[0]["role"] != "tool":
                raise
            return self._added_after_call(start[0], messages), False
        closed = self._render(start, is_open=False).rpartition(_STAND_IN)[2]
        return rendered.rpartition(_STAND_IN)[2], bool(closed.strip())

    def _added_after_call(self, first: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> str:
        calls = [
            {
                "id": message["tool_call_id"],
                "type": "function",
                "function": {"name": message["name"], "arguments": {_STAND_IN: _STAND_IN}},
            }
            for message in messages
        ]
        rendered = self._render([first, {"role": "assistant", "content": "", "tool_calls": calls}, *messages])
        after = rendered.rpartition(_STAND_IN)[2]
        # Behind the stand-in stands the rest of the call; what follows it begins with a special token.
        places = [place for token in self._special if (place := after.find(token)) >= 0]
        return after[min(places, default=0) :]

    def _require_role(self, role: str) -> None:
        """A template that knows the role writes what a message of it says."""
        if role in self._is_probed:
            return
        probe = "quadrigaprobe"
        message = {"role": role, "content": probe, "name": "probe", "tool_call_id": "call00000"}
        if role != "tool":
            message = {"role": role, "content": probe}
        text, _ = self._added([message])
        if probe not in text:
            raise RolloutError(
                f"chat template of {self.tokenizer.name_or_path or 'the tokenizer'}",
                got=f"messages of the role {role}, which it leaves out",
                expected="a template that writes them",
                fix=f"{_FIX_TEMPLATE} this role.",
            )
        self._is_probed.add(role)

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        schemas: Sequence[Mapping[str, Any]] = (),
        *,
        is_open: bool = True,
    ) -> str:
        options = {"tools": list(schemas) or None, "add_generation_prompt": is_open, **self.template_kwargs}
        try:
            return str(self.tokenizer.apply_chat_template(list(messages), tokenize=False, **options))
        except Exception as error:
            # A template is a program of the model's author: it may raise what it likes about messages that it dislikes.
            roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
            raise RolloutError(
                f"chat template of {self.tokenizer.name_or_path or 'the tokenizer'}",
                got=f"{type(error).__name__}: {error}",
                expected=f"a template that takes messages of {roles}",
                fix=f"{_FIX_TEMPLATE} these roles.",
            ) from error

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, return_attention_mask=False)["input_ids"])
