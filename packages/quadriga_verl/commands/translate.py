# SPDX-License-Identifier: Apache-2.0
"""Translation of a command line of verl: `translate(entry, words, version)`.

words ──compose──> verl's tree of keys ──Line.translate_key, key by key──> our keys, notices, refusals
                                       ──FINISH, whole line────>       ──read_settings──> Config
"""

from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

from quadriga.config.loader import read_settings
from quadriga.errors import ConfigError, MachineError
from quadriga_verl.commands.entries import CONFIG_FILES, MEGATRON_ENGINES, TREES, Entry
from quadriga_verl.commands.hydra import (
    MISSING,
    VERSIONS,
    Tree,
    Word,
    parse_plain,
    parse_word,
    read_config,
    verl_defaults,
)
from quadriga_verl.commands.line import Line
from quadriga_verl.commands.meaning import FINISH
from quadriga_verl.commands.programs import translate_merger
from quadriga_verl.commands.rules import rules_of
from quadriga_verl.commands.verl_keys import VerlKeys, is_among, is_number

GROUPS = ("engine", "model", "optim")
"""Groups of configuration files that a word without a dot, such as `engine=megatron`, chooses from."""

_FLAGS = {  # path and name of a configuration file
    "--config-path": "path",
    "-cp": "path",
    "--config-name": "name",
    "-cn": "name",
    "--config-dir": "path",
}
_SWEEP = ("-m", "--multirun")


def translate(entry: Entry, words: Sequence[str], version: str = VERSIONS[-1]) -> Line:
    """Translate the arguments of a program of verl.

    Args:
        entry: the program.
        words: its arguments.
        version: the version of verl whose defaults hold.

    Returns:
        The line. If `Line.refused` is not empty, the translation is not complete and `Line.config`
        is None. No problem is raised.
    """
    if entry.refused:
        problem = ConfigError(entry.name, fix=entry.refused)
        return Line(entry, version, VerlKeys(entry), refused=[problem])
    if entry.run == "export":
        line = Line(entry, version, VerlKeys(entry))
        line.options["argv"], problems, line.notices = translate_merger(words)
    else:
        line = compose(entry, words, version)
        _translate_keys(line)
        if line.stop_reason:
            # One key makes the whole run impossible: problems of other keys would only distract.
            problem = ConfigError(entry.name, fix=line.stop_reason)
            return Line(entry, version, VerlKeys(entry), refused=[problem])
        if not line.refused:
            _note_redundant_keys(line, words)
        problems = _read_settings(line)
    for problem in problems:
        if isinstance(problem, MachineError):
            line.machine.append(problem)
        else:
            line.refused.append(problem)
    if line.refused:
        line.config = None
    return line


def _read_settings(line: Line) -> list[ConfigError]:
    """Read the translated keys as the line's configuration, and collect its notices.

    Returns:
        The problems of the configuration.
    """
    if line.entry.notice:
        line.notices.append(f"{line.entry.name}: {line.entry.notice}")
    line.notices += [
        f"{', '.join(keys)}: {sentence}" for sentence, keys in line.ineffective_keys.items()
    ]
    # Problems of a key also name the key of verl that it was set from, if the names differ.
    places = {}
    for key, source in line.sources.items():
        if source not in (key, ""):
            places[key] = f"verl's {source}"
    is_training = line.entry.run == "train"
    line.config, problems, notices = read_settings(
        line.settings, places, task=line.entry.task, for_training=is_training
    )
    # Leave out notices that verl's defaults alone cause. `_notices_of_defaults` translates a line
    # without keys of the user, whose notices must not be left out.
    usual_notices = frozenset[str]()
    if line.keys.from_user:
        usual_notices = _notices_of_defaults(line.entry, line.version)
    line.notices += [notice for notice in notices if notice not in usual_notices]
    return problems


def _note_redundant_keys(line: Line, words: Sequence[str]) -> None:
    """Report keys of the user without which the translation would be the same.

    Usually another key of the line overrides them: `rollout.n=2` beside an older name of the key, or
    the alpha of an adapter that is 0, which means the default.

    Args:
        line: the line, with all keys translated.
        words: its arguments.
    """
    # A key that was reported, or from which something was set, is not redundant. For the others the
    # line is translated again without the key.
    reported_keys = {key for keys in line.ineffective_keys.values() for key in keys}
    effective_keys = set(line.sources.values())
    for key in sorted(line.keys.from_user - reported_keys - effective_keys):
        if not line.keys.is_changed(key) or line.is_only_checked(key):
            continue
        line_without = compose(line.entry, words, line.version)
        line_without.keys.unset(key)
        _translate_keys(line_without)
        if (line_without.settings, line_without.options) == (line.settings, line.options):
            line.note("It changes nothing beside the other keys of this command line.", key)


@cache
def _notices_of_defaults(entry: Entry, version: str) -> frozenset[str]:
    """Notices that verl's defaults alone cause. A command line does not ask for these."""
    return frozenset(translate(entry, (), version).notices)


def _translate_keys(line: Line) -> None:
    """Translate each key of the tree, and then what the keys mean together."""
    line.rule_names = line.entry.rule_names
    for key in ("engine.group", "engine.strategy", "actor_rollout_ref.actor.strategy"):
        if str(line.get(key)) in MEGATRON_ENGINES:
            line.rule_names = ("megatron", *line.entry.rule_names)
    for key in list(line.keys.tree.values):
        _translate_key(line, key)
    line.current_key = ""
    # Rows of the kind "unlike" are notices about keys whose effect differs from verl's on purpose, if
    # other keys have the values in `rule.argument`.
    for rule in rules_of(line.rule_names):
        if rule.becomes == "unlike":
            conditions = rule.argument.items()
            if all(is_among(line.get(key), values) for key, values in conditions):
                line.note(rule.sentence, rule.key)
    for function in FINISH.get(line.entry.rule_names[0], ()):
        function(line)


def _translate_key(line: Line, key: str) -> None:
    """Translate a key of the tree by its row in rules.tsv."""
    line.current_key = key
    try:
        value = line.keys.tree.resolve(key)
    except ConfigError as problem:
        line.refused.append(problem)
        return
    if isinstance(value, str) and is_number(line.keys.default.get(key)):
        # YAML reads `1e-5` as text.
        value = parse_plain(value)
    # A value that is not set, or the name of one of verl's classes, has no counterpart.
    if value == MISSING or key.endswith("_target_"):
        return
    try:
        line.translate_key(key, value)
    except (TypeError, ValueError) as error:
        # The function that rules.tsv names for this key needs a number, for example, and got a list.
        expected = "a value of the kind that verl has there"
        line.refuse(expected, f"It cannot be translated: {error}.")


def compose(entry: Entry, words: Sequence[str], version: str) -> Line:
    """Fill the keys of a line in Hydra's order: the defaults, the configuration file, then each word.

    Args:
        entry: the program.
        words: its arguments.
        version: the version of verl whose defaults hold.

    Returns:
        A line whose keys are not translated yet. Words that cannot be read are in `Line.refused`, a
        missing configuration file in `Line.machine`.
    """
    problems = []
    flags, parsed_words = _parse_words(words, problems)
    path_of_name = str(flags.get("name") or "").removesuffix(".yaml")
    name = path_of_name.rpartition("/")[2]
    # The defaults of verl's own configuration files are known. Any other file is the user's, read
    # below.
    tree = CONFIG_FILES.get(name, entry.tree)
    for word in parsed_words:
        # `model_engine=megatron` selects defaults of its own, the tree `ppo_megatron`.
        if word.key in ("model_engine", "engine") and f"{entry.tree}_{word.value}" in TREES:
            tree = f"{entry.tree}_{word.value}"
    # Some programs have defaults beside those of their tree.
    default = verl_defaults(tree, version) | verl_defaults(entry.name, version)
    line = Line(entry, version, VerlKeys(entry, Tree(default), default))
    if name and name not in CONFIG_FILES:
        file = Path(str(flags.get("path") or ".")).expanduser() / f"{path_of_name}.yaml"
        _read_file(line, file, problems)
    for word in parsed_words:
        _apply_word(line, word, problems)
    line.refused += problems
    return line


def _apply_word(line: Line, word: Word, problems: list[ConfigError]) -> None:
    """Apply a word of the command line to the tree, and note which keys are the user's.

    Args:
        line: the line.
        word: the word.
        problems: list to which a problem is added if the word removes a key that does not exist.
    """
    key = word.key
    tree = line.keys.tree
    chooses_file = key in GROUPS and isinstance(word.value, str) and tree.keys_below(key)
    if "@" in key or chooses_file:
        # The word chooses a file, `SECTION=FILE` or `GROUP@SECTION=FILE`. Files of verl are not read:
        # the name of the file is stored as `SECTION.group`, which rules.tsv translates.
        key = (key.partition("@")[2] or key) + ".group"
    if word.sign == "~":
        if key not in tree.values and not tree.keys_below(key):
            problems.append(
                ConfigError(f"~{key}", got="nothing to leave out", expected="a key that there is")
            )
        tree.drop(key)
        return

    # A section may replace a value, or a value a section. Keys that no longer exist are then removed
    # from `from_user`.
    keys_before = {key, *tree.keys_below(key)}
    tree.put(key, word.value)
    line.keys.from_user.update(tree.keys_below(key))
    if key in tree.values:
        line.keys.from_user.add(key)
    line.keys.from_user -= keys_before - tree.values.keys()
    if word.sign:
        line.keys.new.update(line.keys.from_user & {key, *tree.keys_below(key)})


def _read_file(line: Line, file: Path, problems: list[ConfigError]) -> None:
    """Apply a user's configuration file to the tree; a missing file is a problem of the machine."""
    if not file.is_file():
        problem = MachineError(
            "--config-name",
            got=f"'{file}'",
            expected="a file that exists",
            fix="Check --config-path. Without the file, the words are read over the program's defaults.",
        )
        line.machine.append(problem)
        return
    base = {name: verl_defaults(tree, line.version) for name, tree in CONFIG_FILES.items()}
    base[""] = line.keys.default
    for key, value in read_config(file, base, problems).values.items():
        # The user's file may include files of verl, whose values the tree has already. Their keys do not
        # count as the user's.
        if line.keys.tree.values.get(key, MISSING) != value:
            line.keys.tree.put(key, value)
            line.keys.from_user.add(key)
            line.keys.new.add(key)


def _parse_words(
    words: Iterable[str], problems: list[ConfigError]
) -> tuple[dict[str, str], list[Word]]:
    """Parse the words of a command line.

    Args:
        words: the words. Those that set keys of Hydra itself (`hydra.NAME=VALUE`) are ignored.
        problems: list to which words are added that cannot be parsed.

    Returns:
        Values of Hydra's options, by the names in `_FLAGS`; and the words that set keys.
    """
    flags = {}
    parsed_words = []
    remaining_words = iter(words)
    for word in remaining_words:
        option, has_value, value = word.partition("=")
        if option in _FLAGS:
            flags[_FLAGS[option]] = value if has_value else next(remaining_words, "")
        elif word in _SWEEP:
            problems.append(
                ConfigError(
                    word,
                    got="a sweep",
                    expected="one value for each key",
                    fix="Start a run for each choice: sweeps are not run.",
                )
            )
        elif word.strip() and not word.startswith("hydra"):
            try:
                parsed_words.append(parse_word(word))
            except ConfigError as problem:
                problems.append(problem)
    return flags, parsed_words
