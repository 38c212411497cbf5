# SPDX-License-Identifier: Apache-2.0
"""From a command line of verl's to our configuration, with notices and refusals: each leaf by its row in rules.tsv."""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from quadriga.config import Config
from quadriga.config.keys import leaf_of
from quadriga.config.loader import read_settings
from quadriga.config.root import spelled
from quadriga.config.yaml_text import as_text
from quadriga.errors import ConfigError, MachineError
from quadriga_verl.commands import meaning, programs
from quadriga_verl.commands.hydra import (
    MISSING,
    VERSIONS,
    Tree,
    defaults,
    known_keys,
    parse_word,
    plain,
    read_config,
)
from quadriga_verl.commands.meaning import FINISH, has_critic
from quadriga_verl.commands.programs import (
    CONFIG_FILES,
    MEGATRON_ENGINES,
    TREES,
    Entry,
    is_number,
    merger,
)

SECTIONS = {
    "<engine>": r"(actor_rollout_ref\.actor|actor_rollout_ref\.ref|critic(?:\.model)?|reward_model(?:\.model)?)",
    "<role>": r"(actor_rollout_ref\.(?:actor|ref|rollout|model)|actor_rollout_ref|critic|reward_model|reward)",
    "<rollout>": r"(actor_rollout_ref\.rollout)",
    "<model>": r"((?:actor_rollout_ref|critic)\.model)",
}
"""What the names in angle brackets stand for in the patterns of rules.tsv."""
_FLAGS = {
    "--config-path": "path",
    "-cp": "path",
    "--config-name": "name",
    "-cn": "name",
    "--config-dir": "path",
}
_UNSET = "Is a variable of the script unset? For the default leave the key out."
_SWEEP = ("-m", "--multirun")
WORDS = ("after_each_epoch",)  # words that stand where verl's default is a number
GROUPS = (
    "engine",
    "model",
    "optim",
)  # groups of configuration files that a word without a dot chooses from


class Rule(NamedTuple):
    """One row of rules.tsv."""

    pattern: re.Pattern[str]
    becomes: str  # ">", "@", "any", "note", "given" or "values"
    argument: Any
    sentence: str


@cache
def _rules(rules: str) -> tuple[Rule, ...]:
    found = []
    for line in Path(__file__).with_name("rules.tsv").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        trees, pattern, becomes, sentence = line.split("\t")
        if trees != "*" and not {*rules.split(",")} & {*trees.split(",")}:
            continue
        text = re.escape(pattern).replace(r"\*", "(.*)")
        for name, alternatives in SECTIONS.items():
            text = text.replace(re.escape(name), alternatives)
        kind, _, argument = becomes.partition(" ")
        values = json.loads(becomes) if becomes[0] == "[" else argument
        found.append(
            Rule(re.compile(text), "values" if becomes[0] == "[" else kind, values, sentence)
        )
    return tuple(found)


@cache
def _rule(rules: str, task: str, key: str) -> tuple[Rule, tuple[str, ...]] | None:
    """The row that holds for a key, and what its stars and names in angle brackets are in it."""
    is_ours = leaf_of(key, task) is not None
    for rule in _rules(rules):
        # What says of a pattern that it has no place here means the others.
        if (
            rule.becomes != "unlike"
            and not (is_ours and rule.becomes in ("any", "values"))
            and (match := rule.pattern.fullmatch(key))
        ):
            return rule, match.groups()
    return None


@dataclass
class Line:
    """One command line of verl's: its tree, and what has become of it so far; at the end, what it means here."""

    entry: Entry
    version: str
    tree: Tree = field(default_factory=Tree)
    default: dict[str, Any] = field(
        default_factory=dict
    )  # verl's default leaves of this version, of the entry
    given: set[str] = field(
        default_factory=set
    )  # leaves that the command line or a user's file sets
    ours: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(
        default_factory=dict
    )  # our key -> verl's key that it was set from
    noted: dict[str, list[str]] = field(
        default_factory=dict
    )  # why keys are taken without effect -> these keys
    config: Config | None = None  # None where keys are refused
    notices: list[str] = field(default_factory=list)
    refused: list[ConfigError] = field(default_factory=list)
    machine: list[ConfigError] = field(default_factory=list)
    """What only this machine lacks: files, models, packages, devices."""
    options: dict[str, Any] = field(
        default_factory=dict
    )  # arguments of what is run that are no keys
    rules: str = ""  # whose rows hold: the entry's, and before them, where it trains there, those of Megatron-core
    stopped: str = ""  # why the whole line cannot be taken, whatever else is in it
    written: str = ""  # the key that is being translated, as the user wrote it
    sentence: str = ""  # what its row says

    def get(self, key: str, otherwise: Any = None) -> Any:
        """What stands under a key of verl's with references filled in; `otherwise` where nothing or null does."""
        try:
            value = self.tree.resolved(key)
        except (KeyError, ConfigError):
            # A reference that cannot be filled in is said where its own key is translated.
            return otherwise
        return otherwise if value is None or value == MISSING else value

    def is_changed(self, key: str) -> bool:
        """Whether the user gave the key another value than verl's default."""
        return key in self.given and not _same(self.get(key), self._default_of(key))

    def _default_of(self, key: str) -> Any:
        """verl's default of a key, of this version or of the nearest that has it."""
        if key in self.default:
            return Tree(self.tree.values | {key: self.default[key]}).resolved(key)
        if key in known_keys():
            for tree in (self.entry.tree, "ppo_megatron"):
                for version in reversed(VERSIONS):
                    if key in (leaves := defaults(tree, version)):
                        return Tree(self.tree.values | {key: leaves[key]}).resolved(key)
        return None

    def set(self, key: str, value: Any) -> None:
        """Gives our key a value; what the user wrote goes before defaults, and two of it must agree."""
        key = spelled(key, self.entry.task)
        source, before = self.written, self.sources.get(key)
        if value == {}:
            return
        if key.startswith("critic.") and self.entry.task == "rl" and not has_critic(self):
            self.note("No critic is trained: algorithm.adv_estimator takes no values.")
            return
        if value == "" and source in self.given and self._default_of(source) != "":
            self.refuse("a value", _UNSET)
            return
        if before is not None and before in self.given:
            if source in self.given and not _same(self.ours[key], value):
                got = f"{as_text(self.ours[key], key)} by {before} and {as_text(value, key)} by {source}"
                self.refused.append(
                    ConfigError(key, got=got, expected="one value", fix="Leave one of the two out.")
                )
            return
        leaf = leaf_of(key, self.entry.task)
        if is_number(value) and leaf is not None and leaf.is_text and "number" not in leaf.kind:
            value = str(value)
        # verl's null for what has no null here: the default of both.
        if (
            value is not None
            or leaf is None
            or leaf.kind.endswith("null")
            or self._default_of(source) is not None
        ):
            self.ours[key], self.sources[key] = value, source

    def note(self, sentence: str) -> None:
        """Says why the key that is being translated is taken without effect, if the user changed it."""
        if self.is_changed(self.written):
            self.noted.setdefault(sentence, []).append(self.written)

    def refuse(self, expected: str, fix: str) -> None:
        """Says that the value of the key that is being translated cannot be taken."""
        got = as_text(self.get(self.written), self.written)
        self.refused.append(ConfigError(self.written, got=got, expected=expected, fix=fix))

    def stop(self, sentence: str) -> None:
        """Says why the line as a whole cannot be taken; the first reason is told alone."""
        self.stopped = self.stopped or sentence

    def take(self, key: str, value: Any) -> None:
        """Translates one leaf, in verl's spelling or in one that a row has sent it to."""
        found = _rule(self.rules, self.entry.task, key)
        if found is None:
            self.take_ours(key, value)
            return
        rule, parts = found
        self.sentence = rule.sentence
        match rule.becomes:
            case ">":
                target = iter(parts)
                self.take(re.sub(r"\*|<\w+>", lambda _: next(target), rule.argument), value)
            case "@" if (
                isinstance(value, str)
                and value not in WORDS
                and is_number(self._default_of(self.written))
                and not ((leaf := leaf_of(key, self.entry.task)) and leaf.is_text)
            ):
                self.refuse("a number", _UNSET if value == "" else rule.sentence.strip("-"))
            case "@":
                (vars(programs) | vars(meaning))[rule.argument](self, key, value)
            case "given":
                if self.written in self.given:
                    self.take_ours(key, value)
            case "any" | "note":
                self.note(rule.sentence)
            case "stop":
                if not _among(value, json.loads(rule.argument)):
                    self.stop(rule.sentence)
            case _:
                if self.is_changed(self.written) and not _among(value, rule.argument):
                    known = [as_text(one) for one in rule.argument if one not in (None, "", [], {})]
                    self.refuse(known[0] if known else "the key left out", rule.sentence)

    def take_ours(self, key: str, value: Any) -> None:
        """Takes a key that is one of ours as it is; refuses one that nobody knows."""
        key = spelled(key, self.entry.task)
        section, _, name = key.rpartition(".")
        if leaf_of(key, self.entry.task) is not None:
            self.set(key, value)
        elif section == "data" and key not in known_keys() and self.get("data.custom_cls.path"):
            self.set(f"data.custom_cls.options.{name}", value)
        elif key in known_keys() and not self.is_changed(self.written):
            return  # verl's own default
        elif self.written in self.given and not (
            value in ({}, None) and any(k.startswith(key) for k in known_keys())
        ):
            fix = "Leave it out; what your own file reads from it has no place here."
            got = "a key that neither verl nor Quadriga has"
            if any(known.startswith(f"{key}.") for known in known_keys()):
                got, fix = (
                    f"{as_text(value)}, for a section",
                    f"Set keys below it: {key}.NAME=VALUE.",
                )
            elif key in known_keys():
                got, fix = (
                    "a key of verl's without a place here",
                    f"{self.entry.name} does not need it: leave it out.",
                )
            self.refused.append(ConfigError(self.written, got=got, fix=fix))


def _among(value: Any, accepted: Sequence[Any]) -> bool:
    return any(_same(value, one) for one in accepted)


def _same(one: Any, other: Any) -> bool:
    """Whether two values are equal; 1 is not True."""
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def translate(entry: Entry, words: Sequence[str], version: str = VERSIONS[-1]) -> Line:
    """Translates the words of one command line; nothing is raised, all that is wrong is in the result."""
    if entry.refused:
        return Line(entry, version, refused=[ConfigError(entry.name, fix=entry.refused)])
    if entry.run == "export":
        line = Line(entry, version)
        line.options["argv"], problems, line.notices = merger(words)
    else:
        line = compose(entry, words, version)
        _take_all(line)
        if line.stopped:
            return Line(entry, version, refused=[ConfigError(entry.name, fix=line.stopped)])
        line.notices = [f"{', '.join(keys)}: {sentence}" for sentence, keys in line.noted.items()]
        places = {
            key: f"verl's {source}"
            for key, source in line.sources.items()
            if source not in (key, "")
        }
        config, problems, told = read_settings(
            line.ours, places, task=entry.task, for_training=entry.run == "train"
        )
        plain = _told_of_defaults(entry, version) if line.given else frozenset()
        line.notices += [one for one in told if one not in plain]
        line.config = config
    for problem in problems:
        (line.machine if isinstance(problem, MachineError) else line.refused).append(problem)
    if line.refused:
        line.config = None
    return line


def _take_all(line: Line) -> None:
    """Translates each leaf, and then what the line as a whole means."""
    engines = [
        line.get(key)
        for key in ("engine.group", "engine.strategy", "actor_rollout_ref.actor.strategy")
    ]
    line.rules = (
        f"megatron,{line.entry.rules}"
        if MEGATRON_ENGINES & {*map(str, engines)}
        else line.entry.rules
    )
    for key in list(line.tree.values):
        line.written = key
        try:
            value = line.tree.resolved(key)
        except ConfigError as problem:
            line.refused.append(problem)
            continue
        if isinstance(value, str) and is_number(line.default.get(key)):
            value = plain(value)
        if value != MISSING and not key.endswith("_target_"):
            try:
                line.take(key, value)
            except (
                TypeError,
                ValueError,
            ) as error:  # a list or text where the row's function reads a number, or so
                line.refuse(
                    "a value of the kind that verl has there", f"It cannot be translated: {error}."
                )
    for rule in _rules(line.rules):
        if rule.becomes == "unlike":
            line.written = rule.pattern.pattern.replace("\\", "")
            if all(
                _among(line.get(key), values) for key, values in json.loads(rule.argument).items()
            ):
                line.note(rule.sentence)
    for function in FINISH.get(line.entry.rules.partition(",")[0], ()):
        function(line)


@cache
def _told_of_defaults(entry: Entry, version: str) -> frozenset[str]:
    """Notices that verl's defaults alone lead to: they are nothing that a command line asks for."""
    return frozenset(translate(entry, (), version).notices)


def compose(entry: Entry, words: Sequence[str], version: str) -> Line:
    """verl's tree with the words applied to it, in Hydra's order: the file, the groups, then key by key."""
    problems: list[ConfigError] = []
    flags, settings = _flags(words, problems)
    read = []
    for argument in settings:
        try:
            read.append(parse_word(argument))
        except ConfigError as problem:
            problems.append(problem)
    chosen = [word.value for word in read if word.key in ("model_engine", "engine")]
    name = str(flags.get("name") or "").removesuffix(".yaml").rpartition("/")[2]
    tree_name = CONFIG_FILES.get(name, entry.tree)
    tree_name = next(
        (one for engine in chosen if (one := f"{entry.tree}_{engine}") in TREES), tree_name
    )
    default = defaults(tree_name, version) | defaults(entry.name, version)
    line = Line(entry, version, default=default)
    for key, value in default.items():
        line.tree.put(key, value)
    if name and name not in CONFIG_FILES:
        _read_file(
            line, Path(str(flags.get("path") or ".")).expanduser() / f"{name}.yaml", problems
        )
    for sign, key, value in read:
        if "@" in key or (key in GROUPS and isinstance(value, str) and line.tree.below(key)):
            # A file of a group takes the place of a section.
            key = (key.partition("@")[2] or key) + ".group"
        if sign == "~":
            if key not in line.tree.values and not line.tree.below(key):
                problems.append(
                    ConfigError(
                        f"~{key}", got="nothing to leave out", expected="a key that there is"
                    )
                )
            line.tree.drop(key)
            continue
        before = set(line.tree.below(key)) | {key}
        line.tree.put(key, value)
        line.given |= {one for one in line.tree.values if one == key or one.startswith(f"{key}.")}
        line.given -= before - line.tree.values.keys()
    line.refused += problems
    return line


def _read_file(line: Line, file: Path, problems: list[ConfigError]) -> None:
    """Applies a user's configuration file; one that is not there is this machine's matter."""
    if not file.is_file():
        expected, fix = "a file that exists", "The rest is read over the program's own defaults."
        line.machine.append(
            MachineError("--config-name", got=f"'{file}'", expected=expected, fix=fix)
        )
        return
    base = {name: defaults(tree, line.version) for name, tree in CONFIG_FILES.items()} | {
        "": line.default
    }
    own = read_config(file, base, problems)
    for key, value in own.values.items():
        if line.tree.values.get(key, MISSING) != value:
            line.tree.put(key, value)
            line.given.add(key)


def _flags(words: Iterable[str], problems: list[ConfigError]) -> tuple[dict[str, str], list[str]]:
    """Hydra's own options, and the words that set keys."""
    flags: dict[str, str] = {}
    settings: list[str] = []
    rest = iter(words)
    for word in rest:
        option, has_value, value = word.partition("=")
        if option in _FLAGS:
            flags[_FLAGS[option]] = value if has_value else next(rest, "")
        elif word in _SWEEP:
            fix = "Start a run for each choice: sweeps are not run."
            problems.append(
                ConfigError(word, got="a sweep", expected="one value for each key", fix=fix)
            )
        elif word.strip() and not word.startswith("hydra"):
            settings.append(word)
    return flags, settings
