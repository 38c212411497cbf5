# SPDX-License-Identifier: Apache-2.0
"""A command line of verl while it is translated.

`translate.py` fills `Line.keys` with verl's keys and calls `translate_key` for each of them. It follows the
key's row in rules.tsv, and so do the functions that rows name. They write the result by `set`, and
report by `note` (the key has no effect), `refuse` (its value is impossible) and `stop` (the whole
line is).
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from quadriga.config import Config
from quadriga.config.keys import leaf_of
from quadriga.config.root import spell_key
from quadriga.config.yaml_text import as_text
from quadriga.errors import ConfigError
from quadriga_verl.commands.entries import Entry
from quadriga_verl.commands.hydra import known_keys
from quadriga_verl.commands.rules import FUNCTIONS, Rule, find_rule
from quadriga_verl.commands.verl_keys import VerlKeys, is_among, is_number, is_same

WORDS = ("after_each_epoch",)
"""Text that is allowed for keys whose default in verl is a number."""
_UNSET = "Is a variable of the script unset? For the default leave the key out."


@dataclass
class Line:
    """A command line of verl: its keys, and the translation so far.

    Attributes:
        entry: the program.
        version: the version of verl.
        keys: verl's keys, with the values of the user.
        settings: the translation, by key of the configuration.
        sources: key of verl that a key in `settings` was set from.
        ineffective_keys: keys without effect, by the reason.
        comments: reason why a key in `settings` has another value than in verl, by key.
        config: the configuration of `settings`. None if something is refused.
        notices: sentences for the user.
        refused: problems with the line.
        machine: problems with this machine: files, models, packages or devices that it lacks.
        options: arguments, which are not keys, of the command that runs.
        rules: names of the rows that hold: those of the program, after "megatron" if it trains.
        stopped: reason why the whole line is refused; "" if it is not.
        current_key: key that is being translated, as the user wrote it.
        sentence: sentence of its row.
    """

    entry: Entry
    version: str
    keys: VerlKeys
    settings: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    ineffective_keys: dict[str, list[str]] = field(default_factory=dict)
    comments: dict[str, str] = field(default_factory=dict)
    config: Config | None = None
    notices: list[str] = field(default_factory=list)
    refused: list[ConfigError] = field(default_factory=list)
    machine: list[ConfigError] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    rules: str = ""
    stopped: str = ""
    current_key: str = ""
    sentence: str = ""

    def get(self, key: str, otherwise: Any = None) -> Any:
        """Value of a key of verl, or `otherwise` if the key is missing, null or not yet set."""
        return self.keys.get(key, otherwise)

    # ---- the translation ----

    def set(self, key: str, value: Any) -> None:
        """Set a key of the configuration.

        What the user wrote takes precedence over defaults; two different values of the user are
        refused.
        """
        key = spell_key(key, self.entry.task)
        source = self.current_key
        is_users = source in self.keys.from_user
        if value == {}:
            return

        # Values that cannot be taken over.
        if key.startswith("critic.") and self.entry.task == "rl" and not has_critic(self):
            self.note("No critic is trained: algorithm.adv_estimator takes no values.")
            return
        if value == "" and is_users and self.keys.default_of(source) != "":
            self.refuse("a value", _UNSET)
            return

        # Several keys of verl may mean one key here.
        earlier_source = self.sources.get(key)
        if earlier_source is not None and earlier_source in self.keys.from_user:
            if is_users and not is_same(self.settings[key], value):
                earlier_value = as_text(self.settings[key], key)
                got = f"{earlier_value} by {earlier_source} and {as_text(value, key)} by {source}"
                fix = "Leave one of the two out."
                self.refused.append(ConfigError(key, got=got, expected="one value", fix=fix))
            return

        leaf = leaf_of(key, self.entry.task)
        # Hydra reads text such as `2024` as a number.
        if is_number(value) and leaf is not None and leaf.is_text and "number" not in leaf.kind:
            value = str(value)
        is_null_allowed = leaf is None or leaf.kind.endswith("null")
        # If null is verl's own default and not allowed here, both have their defaults.
        if value is not None or is_null_allowed or self.keys.default_of(source) is not None:
            self.settings[key] = value
            self.sources[key] = source

    def note(self, sentence: str) -> None:
        """Report why the key that is being translated has no effect, if the user changed it."""
        if self.keys.is_changed(self.current_key):
            self.ineffective_keys.setdefault(sentence, []).append(self.current_key)

    def refuse(self, expected: str, fix: str) -> None:
        """Report that the value of the key that is being translated is impossible."""
        got = as_text(self.get(self.current_key), self.current_key)
        self.refused.append(ConfigError(self.current_key, got=got, expected=expected, fix=fix))

    def stop(self, sentence: str) -> None:
        """Refuse the whole line; only the first reason is reported."""
        self.stopped = self.stopped or sentence

    # ---- keys by their rows ----

    def translate_key(self, key: str, value: Any) -> None:
        """Translate a key.

        Args:
            key: as verl spells it, or as a row has renamed it.
            value: its value.
        """
        match = find_rule(self.rules, self.entry.task, key)
        if match is None:
            self.take_over(key, value)
            return
        rule, parts = match
        self.sentence = rule.sentence
        if rule.becomes == ">":
            # The new name may have a row of its own.
            self.translate_key(self._new_name(rule, parts), value)
        elif rule.becomes == "@":
            self._call_function(rule, key, value)
        elif rule.becomes == "given":
            if self.current_key in self.keys.from_user:
                self.take_over(key, value)
        elif rule.becomes in ("any", "note"):
            self.note(rule.sentence)
        elif rule.becomes == "stop":
            if not is_among(value, json.loads(rule.argument)):
                self.stop(rule.sentence)
        elif self.keys.is_changed(self.current_key) and not is_among(value, rule.argument):
            named_values = [
                as_text(item) for item in rule.argument if item not in (None, "", [], {})
            ]
            expected = named_values[0] if named_values else "the key left out"
            self.refuse(expected, rule.sentence)

    def is_only_checked(self, key: str) -> bool:
        """Whether a key is only compared with values that its row in rules.tsv allows."""
        match = find_rule(self.rules, self.entry.task, key)
        while match is not None and match[0].becomes == ">":
            match = find_rule(self.rules, self.entry.task, self._new_name(*match))
        return match is not None and match[0].becomes in ("values", "stop")

    @staticmethod
    def _new_name(rule: Rule, parts: Sequence[str]) -> str:
        """Name that a row gives to a key.

        Args:
            rule: the row.
            parts: the parts of the key that its placeholders stand for.
        """
        remaining_parts = iter(parts)
        return re.sub(r"\*|<\w+>", lambda _: next(remaining_parts), rule.argument)

    def _call_function(self, rule: Rule, key: str, value: Any) -> None:
        """Call the function of a row, unless the value is text in place of a number."""
        is_text = isinstance(value, str) and value not in WORDS
        if is_text and is_number(self.keys.default_of(self.current_key)):
            leaf = leaf_of(key, self.entry.task)
            # Some keys of ours take text where verl's default is a number.
            if leaf is None or not leaf.is_text:
                # Rows without a sentence have "-" in its place.
                fix = rule.sentence.strip("-")
                if value == "":
                    fix = _UNSET
                self.refuse("a number", fix)
                return
        FUNCTIONS[rule.argument](self, key, value)

    def take_over(self, key: str, value: Any) -> None:
        """Take over a key that exists here under the same name; refuse an unknown key."""
        key = spell_key(key, self.entry.task)
        section, _, name = key.rpartition(".")
        is_verls = key in known_keys()
        if leaf_of(key, self.entry.task) is not None:
            self.set(key, value)
        elif section == "data" and not is_verls and self.get("data.custom_cls.path"):
            # A user's data set reads keys of its own.
            self.set(f"data.custom_cls.options.{name}", value)
        elif is_verls and not self.keys.is_changed(self.current_key):
            # This is verl's own default.
            return
        elif self.current_key in self.keys.from_user:
            self._refuse_unknown(key, value)

    def _refuse_unknown(self, key: str, value: Any) -> None:
        """Report a key of the user that does not exist here."""
        if value in ({}, None) and any(known.startswith(key) for known in known_keys()):
            # The user left a section of verl empty.
            return
        got = "a key that neither verl nor Quadriga has"
        fix = (
            "Leave it out. Keys for your own data set need data.custom_cls; those for a reward "
            "function are custom_reward_function.reward_kwargs.NAME."
        )
        close_keys = _near_keys(key)
        if close_keys:
            fix = f"Did you mean {' or '.join(close_keys)}?"
        if key not in known_keys() and self.current_key in self.keys.new:
            self.note(f"Neither verl nor Quadriga reads it. {fix if close_keys else ''}".strip())
            return
        if any(known.startswith(f"{key}.") for known in known_keys()):
            got = f"{as_text(value)}, for a section"
            fix = f"Set keys below it: {key}.NAME=VALUE."
        elif key in known_keys():
            got = "a key of verl's without a place here"
            fix = f"{self.entry.name} does not need it: leave it out."
        self.refused.append(ConfigError(self.current_key, got=got, fix=fix))


def _near_keys(key: str) -> list[str]:
    """Up to two keys of verl that a misspelled key may mean, most likely first."""
    names = sorted(known_keys())
    same_name = [known for known in names if known.endswith(f".{key}")]
    close = get_close_matches(key, names, n=2, cutoff=0.85)
    return list(dict.fromkeys(close + same_name[:2]))[:2]


def has_critic(line: Line) -> bool:
    """Whether verl builds a critic for a command line."""
    return bool(line.get("critic.enable", line.get("algorithm.adv_estimator") == "gae"))
