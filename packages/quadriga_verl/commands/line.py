# SPDX-License-Identifier: Apache-2.0
"""A command line of verl while it is translated.

`translate.py` fills `Line.keys` with verl's keys and calls `Line.translate_key` for each of them, which
does what the key's row in rules.tsv says. It and the functions that rows name write the result by
`Line.set`, and report by `Line.note` (the key has no effect) and `Line.refuse` (its value is impossible).
"""

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

_NUMBER_WORDS = ("after_each_epoch",)
"""Text that is allowed for keys whose default in verl is a number."""
_UNSET_ADVICE = "Is a variable of the script unset? For the default leave the key out."


@dataclass
class Line:
    """A command line of verl: its keys, and the translation so far.

    Attributes:
        entry: the program.
        version: the version of verl.
        keys: verl's keys, with the values of the user.
        settings: the translation, by key of the configuration.
        sources: by key of `settings`, the key of verl that it was set from; "": several keys, or none.
        ineffective_keys: verl's keys without effect, by the reason.
        comments: by key of `settings`, the reason why its value differs from that in verl.
        config: the configuration of `settings`. None if something is refused, and for the program
            `model_merger`, which has only `options`.
        notices: sentences for the user.
        refused: problems with the line.
        machine: problems with this machine: files, models, packages or devices that it lacks.
        options: arguments, which are not keys, of the command that runs.
        rule_names: the rows of rules.tsv for any of these names apply. They are those of the
            program, after "megatron" if the line trains with Megatron.
        stop_reason: why the whole line is refused; "" if it is not.
        current_key: verl's key that is being translated, as the user wrote it. "": all keys are
            translated, and `note` and `refuse` need their argument `key`.
        sentence: sentence of the row of `current_key`.
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
    rule_names: tuple[str, ...] = ()
    stop_reason: str = ""
    current_key: str = ""
    sentence: str = ""

    def get(self, key: str, otherwise: Any = None) -> Any:
        """Value of a key of verl, or `otherwise` if the key is missing, null or not yet set."""
        return self.keys.get(key, otherwise)

    @property
    def is_users_key(self) -> bool:
        """Whether the user has set the key that is being translated."""
        return self.current_key in self.keys.from_user

    # ---- the translation ----

    def set(self, key: str, value: Any, source: str | None = None) -> None:
        """Set a key of the configuration.

        A value of the user takes precedence over verl's defaults; two different values of the user
        are refused. Nothing is set for an empty section, for a critic that is not trained, for an
        empty text of the user (refused), and for null if that is verl's default but not allowed
        here.

        Args:
            key: the key of the configuration.
            value: its value.
            source: verl's key that it is set from. None: `current_key`.
        """
        key = spell_key(key, self.entry.task)
        if source is None:
            source = self.current_key
        is_users = source in self.keys.from_user
        if value == {}:
            return

        # Values that cannot be taken over. Usually an empty text is a shell variable without value.
        if key.startswith("critic.") and self.entry.task == "rl" and not has_critic(self):
            self.note("No critic is trained: algorithm.adv_estimator takes no values.", source)
            return
        if value == "" and is_users and self.keys.default_of(source) != "":
            self.refuse("a value", _UNSET_ADVICE, source)
            return

        # Several keys of verl may mean one key here.
        earlier_source = self.sources.get(key)
        if earlier_source in self.keys.from_user:
            if is_users and not is_same(self.settings[key], value):
                earlier_value = as_text(self.settings[key], key)
                self.refused.append(
                    ConfigError(
                        key,
                        got=f"{earlier_value} by {earlier_source} and {as_text(value, key)} by {source}",
                        expected="one value",
                        fix="Leave one of the two out.",
                    )
                )
            return

        leaf = leaf_of(key, self.entry.task)
        # Hydra reads text such as `2024` as a number. `leaf.kind` describes the values of a key, such as
        # "text" or "a number or null".
        if is_number(value) and leaf is not None and leaf.is_text and "number" not in leaf.kind:
            value = str(value)
        is_null_allowed = leaf is None or leaf.kind.endswith("null")
        # If null is verl's default but not allowed here, the key keeps Quadriga's default.
        if value is not None or is_null_allowed or self.keys.default_of(source) is not None:
            self.settings[key] = value
            self.sources[key] = source

    def note(self, reason: str = "", key: str | None = None) -> None:
        """Report why a key has no effect, if the user changed it.

        Args:
            reason: a sentence; by default `sentence`.
            key: verl's key. None: `current_key`.
        """
        if key is None:
            key = self.current_key
        if self.keys.is_changed(key):
            self.ineffective_keys.setdefault(reason or self.sentence, []).append(key)

    def refuse(self, expected: str, fix: str = "", key: str | None = None) -> None:
        """Report that the value of a key is impossible.

        Args:
            expected: the possible values.
            fix: advice; by default `sentence`.
            key: verl's key. None: `current_key`.
        """
        if key is None:
            key = self.current_key
        problem = ConfigError(
            key, got=as_text(self.get(key), key), expected=expected, fix=fix or self.sentence
        )
        self.refused.append(problem)

    # ---- keys by their rows ----

    def translate_key(self, key: str, value: Any) -> None:
        """Translate `current_key` by its row in rules.tsv, whose head explains the kinds of rows.

        Args:
            key: `current_key`, or the new name that a row has given it.
            value: its value.
        """
        rule = find_rule(self.rule_names, self.entry.task, key)
        if rule is None:
            self.take_over(key, value)
            return
        self.sentence = rule.sentence
        if rule.becomes == ">":
            # The new name may have a row of its own.
            self.translate_key(rule.argument, value)
        elif rule.becomes == "@":
            self._call_function(rule, key, value)
        elif rule.becomes == "given":
            if self.is_users_key:
                self.take_over(key, value)
        elif rule.becomes in ("any", "note"):
            self.note()
        elif rule.becomes == "stop":
            # Only the first reason is reported.
            if not self.stop_reason and not is_among(value, rule.argument):
                self.stop_reason = rule.sentence
        elif self.keys.is_changed(self.current_key) and not is_among(value, rule.argument):
            # The row lists the accepted values, of which the message names the first. An empty one means
            # that the key may be left out.
            named_values = [item for item in rule.argument if item not in (None, "", [], {})]
            self.refuse(as_text(named_values[0]) if named_values else "the key left out")

    def is_only_checked(self, key: str) -> bool:
        """Whether a key sets nothing: its row in rules.tsv only lists the values that are accepted."""
        rule = find_rule(self.rule_names, self.entry.task, key)
        while rule is not None and rule.becomes == ">":
            rule = find_rule(self.rule_names, self.entry.task, rule.argument)
        return rule is not None and rule.becomes in ("values", "stop")

    def _call_function(self, rule: Rule, key: str, value: Any) -> None:
        """Call the function of a row. Refuse text if verl's default of the key is a number."""
        is_text = isinstance(value, str) and value not in _NUMBER_WORDS
        if is_text and is_number(self.keys.default_of(self.current_key)):
            leaf = leaf_of(key, self.entry.task)
            # Some keys of ours take text where verl's default is a number.
            if leaf is None or not leaf.is_text:
                self.refuse("a number", _UNSET_ADVICE if value == "" else "")
                return
        FUNCTIONS[rule.argument](self, key, value)

    def take_over(self, key: str, value: Any) -> None:
        """Set a key that exists here under the same name.

        A key that exists only in verl is refused if the user has changed it, and ignored otherwise. A key
        of the user that exists nowhere is refused, unless a data set of the user may read it.
        """
        key = spell_key(key, self.entry.task)
        section, _, name = key.rpartition(".")
        is_verls = key in known_keys()
        if leaf_of(key, self.entry.task) is not None:
            self.set(key, value)
        elif section == "data" and not is_verls and self.get("data.custom_cls.path"):
            # A user's data set reads keys of its own.
            self.set(f"data.custom_cls.options.{name}", value)
        elif self.is_users_key and (not is_verls or self.keys.is_changed(self.current_key)):
            self._refuse_unknown(key, value)

    def _refuse_unknown(self, key: str, value: Any) -> None:
        """Refuse a key of the user that does not exist here, with advice.

        A new key (`VerlKeys.new`) that verl does not have either is only noted, since verl accepts
        it too. An empty section is ignored.
        """
        names = sorted(known_keys())
        is_verls = key in known_keys()
        if value in ({}, None) and any(name.startswith(key) for name in names):
            # The user left a section of verl empty.
            return
        # The key may be misspelled, or lack its section.
        similar_names = get_close_matches(key, names, n=2, cutoff=0.85)
        similar_names += [name for name in names if name.endswith(f".{key}")]
        advice = ""
        if similar_names:
            advice = f"Did you mean {' or '.join(list(dict.fromkeys(similar_names))[:2])}?"
        if not is_verls and self.current_key in self.keys.new:
            self.note(f"Neither verl nor Quadriga reads it. {advice}".strip())
            return
        got = "a key that neither verl nor Quadriga has"
        fix = advice or (
            "Leave it out. Keys for your own data set need data.custom_cls; those for a reward "
            "function are custom_reward_function.reward_kwargs.NAME."
        )
        if any(name.startswith(f"{key}.") for name in names):
            got = f"{as_text(value)}, for a section"
            fix = f"Set keys below it: {key}.NAME=VALUE."
        elif is_verls:
            got = "a key of verl's without a place here"
            fix = f"Leave it out: {self.entry.name} does not need it."
        self.refused.append(ConfigError(self.current_key, got=got, fix=fix))


def has_critic(line: Line) -> bool:
    """Whether verl builds a critic for a command line."""
    return bool(line.get("critic.enable", line.get("algorithm.adv_estimator") == "gae"))
