# SPDX-License-Identifier: Apache-2.0
"""Recombines words of verl's command lines at random and checks how each line is translated.

    .venv/bin/python benchmarks/verl_lines.py FILE               # 10,000 lines
    .venv/bin/python benchmarks/verl_lines.py FILE --lines 500 --seed 3

FILE has a JSON object per published line: {"entry": PROGRAM, "args": [WORD, ...], "set": VERSION}.
Without an argument it is that of the tests. A line has words of one program and version, with
different keys.

Reported are, of the lines drawn:

    accepted    all words have a meaning together
    refused     each word is accepted alone, the line is not: with the reasons, most frequent first
    silent      accepted, but a word changes nothing, and neither a notice names its key nor does a
                row of rules.tsv list its value as one without effect

The exit status is 1 if under 95 % are accepted or a key is silent. An exception ends the check.
"""

import json
import random
import re
import sys
from argparse import ArgumentParser
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from quadriga.config.keys import leaf_of
from quadriga_verl.cli import version_of
from quadriga_verl.commands.entries import Entry, find_entry
from quadriga_verl.commands.line import is_same
from quadriga_verl.commands.rules import find_rule
from quadriga_verl.commands.translate import Line, translate

GOAL = 0.95
MAX_WORDS = 24
FILE = Path(__file__).parents[1] / "tests/unit/verl/scripts.jsonl"
CONFIRMS = frozenset(
    {
        "critic.enable",  # refused unless it agrees with the estimator
        "actor_rollout_ref.actor.profiler.all_ranks",  # read where the role's profiler is enabled
        "critic.profiler.all_ranks",
        "reward_model.profiler.all_ranks",
    }
)
"""Keys that may say what another word says already."""


def key_of(word: str) -> str:
    """Key of `key=value`, without Hydra's signs."""
    return word.lstrip("+~").partition("=")[0]


def draw_words(words: Sequence[str], draw: random.Random, max_words: int = MAX_WORDS) -> list[str]:
    """Draw words with different keys, none of which is a section of another one."""
    chosen: dict[str, str] = {}
    for word in draw.sample(words, min(len(words), draw.randint(2, max_words))):
        key = key_of(word)
        overlaps = any(
            key == other or key.startswith(f"{other}.") or other.startswith(f"{key}.")
            for other in chosen
        )
        if not overlaps:
            chosen[key] = word
    return list(chosen.values())


@cache
def is_accepted_alone(entry: Entry, word: str, version: str) -> bool:
    """Whether a line with this word alone is accepted."""
    return not translate(entry, [word], version).refused


def silent_keys(entry: Entry, words: Sequence[str], version: str) -> list[str]:
    """Keys of an accepted line that change nothing, and that no notice names.

    A key is accounted for if the configuration has its value under the same name, if one of our
    keys was set from it, if a notice names it, or if the line without it has another translation.
    """
    line = translate(entry, words, version)
    told = "\n".join(line.notices)
    silent = []
    for word in words:
        for key in keys_below(line, key_of(word)):
            is_accounted = _is_told(key, told) or _is_listed(line, key) or _is_taken(line, key)
            if (
                not is_accounted
                and line.keys.is_changed(key)
                and not _has_effect(line, word, words)
            ):
                silent.append(key)
    return silent


def _has_effect(line: Line, word: str, words: Sequence[str]) -> bool:
    """Whether a line has another translation without a word, or without others of its meaning."""
    twins = _twins(line, word, words)
    for left_out in ([], *([twin] for twin in twins), twins):
        others = [other for other in words if other != word and other not in left_out]
        without = translate(line.entry, others, line.version)
        with_word = translate(line.entry, [*others, word], line.version)
        if _outcome(without) != _outcome(with_word) or _is_taken(with_word, key_of(word)):
            return True
    return False


def _twins(line: Line, word: str, words: Sequence[str]) -> list[str]:
    """Words that may mean the same as a word."""
    alone = translate(line.entry, [word], line.version)
    our_keys = [key for key, source in alone.sources.items() if source == key_of(word)]
    sources = {line.sources.get(key) for key in our_keys}
    value = word.partition("=")[2]
    return [
        other
        for other in words
        if other != word and (key_of(other) in sources or other.partition("=")[2] == value)
    ]


def keys_below(line: Line, key: str) -> list[str]:
    """The key, or the keys of the user below it."""
    return [name for name in line.keys.from_user if name == key or name.startswith(f"{key}.")]


def _is_told(key: str, told: str) -> bool:
    return re.search(rf"(?<![\w.]){re.escape(key)}(?![\w])", told) is not None


def _is_listed(line: Line, key: str) -> bool:
    if key in CONFIRMS:
        return True
    # A row may give a key another name, which has a row of its own.
    rule = find_rule(line.rule_names, line.entry.task, key)
    while rule is not None and rule.becomes == ">":
        rule = find_rule(line.rule_names, line.entry.task, rule.argument)
    return rule is not None and rule.becomes in ("values", "stop")


def _is_taken(line: Line, key: str) -> bool:
    has_value = leaf_of(key, line.entry.task) and is_same(line.settings.get(key), line.get(key))
    return bool(has_value) or key in line.sources.values()


def _outcome(line: Line) -> tuple[dict[str, object], dict[str, object], list[str]]:
    return line.settings, line.options, line.notices


def read_pools(file: Path) -> dict[tuple[Entry, str], list[str]]:
    """Words of published lines, by program and version, without those of Hydra itself."""
    pools: dict[tuple[Entry, str], set[str]] = defaultdict(set)
    for text in file.read_text(encoding="utf-8").splitlines():
        published = json.loads(text)
        entry = find_entry(published["entry"])
        if not entry.refused and entry.run != "export":
            words = [word for word in published["args"] if re.match(r"\+*[A-Za-z_][\w.]*=", word)]
            pools[entry, version_of(published["set"])].update(words)
    return {place: sorted(words) for place, words in pools.items() if len(words) > 1}


def check_lines(
    pools: dict[tuple[Entry, str], list[str]], num_lines: int, seed: int
) -> tuple[int, Counter[str], Counter[str]]:
    """Check lines that are drawn from pools of words.

    Args:
        pools: words that may be combined, by program and version.
        num_lines: number of lines.
        seed: seed of the lines.

    Returns:
        The number of accepted lines, the reasons of refusals, and silent keys.
    """
    draw = random.Random(seed)
    places = list(pools)
    weights = [len(pools[place]) for place in places]
    num_accepted = 0
    reasons: Counter[str] = Counter()
    silent: Counter[str] = Counter()
    for _ in range(num_lines):
        entry, version = draw.choices(places, weights)[0]
        words = draw_words(pools[entry, version], draw)
        line = translate(entry, words, version)
        if line.refused:
            words = [word for word in words if is_accepted_alone(entry, word, version)]
            line = translate(entry, words, version)
        if line.refused:
            reasons[str(line.refused[0])] += 1
            continue
        num_accepted += 1
        for key in silent_keys(entry, words, version):
            silent[f"{key}, in {entry.name} {version} {' '.join(words)}"] += 1
    return num_accepted, reasons, silent


def main() -> int:
    """Check lines of a folder, and print what is wrong."""
    parser = ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", nargs="?", type=Path, default=FILE)
    parser.add_argument("--lines", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    pools = read_pools(options.file)
    num_accepted, reasons, silent = check_lines(pools, options.lines, options.seed)
    for reason, number in reasons.most_common():
        print(f"refused {number:5}  {reason}")
    for key, number in silent.most_common():
        print(f"silent  {number:5}  {key}")
    share = num_accepted / options.lines
    print(f"accepted {num_accepted} of {options.lines} ({share:.1%}), silent keys: {len(silent)}")
    return 0 if share >= GOAL and not silent else 1


if __name__ == "__main__":
    sys.exit(main())
