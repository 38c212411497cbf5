# SPDX-License-Identifier: Apache-2.0
"""How many tokens texts have, without making the tokens of a word again that was seen before.

A byte-level BPE tokenizer cuts a text into words by a regular expression and makes tokens of each word alone. Where a
word that holds a space begins with it, and of several spaces only the last belongs to the word behind them, a text may
be cut in front of each space that a word follows, and

    tokens("a b  c") = tokens("a") + tokens(" b ") + tokens(" c")

so that a table of the pieces that were seen replaces the tokenizer; likewise behind a line break, where white space
that ends in one is a word. `Cuts.of` reads from the tokenizer's own description whether that holds; where it does not
know, all texts are tokenized.
"""

import json
import re
from collections.abc import Mapping, Sequence
from itertools import accumulate, repeat
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

_WORD = r"(?=[^\s\u180e{}])"
"""In front of what is no white space, neither by Python's notion of it nor by Unicode's, nor some characters."""
_SPACE = "\u0120"
"""A space in the alphabet of byte-level tokenizers."""
_LINE = re.compile(rf"\n{_WORD.format('')}")
_FIRST = "\0"
"""What pieces begin with that have no space in front of them."""
MAX_PIECES, _MAX_LENGTH, _TOGETHER = 1 << 20, 48, 64
"""Pieces in a table; characters of one, for longer ones seldom come again; pieces that are tokenized at once."""

# The expression that is built into the pre-tokenizer ByteLevel.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CLASS = r"\[(?:\\.|[^\]\\])+\]"
_GROUP = r"\(\?i:[^()\\\[\] ]+\)"
_ALTERNATIVE = re.compile(rf"(?:{_CLASS}|{_GROUP}|\\.|\((?!\?i:)[^()]*\)|[^|()\[\]\\])+")
_PART = re.compile(rf"({_CLASS}|{_GROUP}|\\[pP]\{{\w+\}}|\\[rnsS]|[\w' /])([?*+]|\{{[\d,]+\}})?\+?")
_LINES = r"\s*[\r\n]+"
_SPACES = (r"\s+(?!\S)", r"\s+", _LINES, r"\s*[\r\n]")


class TokenCounter:
    """Counts tokens of texts.

    Args:
        tokenizer: of transformers; its texts bring their special tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer, self._backend = tokenizer, getattr(tokenizer, "backend_tokenizer", None)
        self._known, self._long = dict[str, int](), list[str]()
        self.cuts = Cuts(False, False) if self._backend is None else Cuts.of(json.loads(self._backend.to_str()))
        if self.cuts.at_spaces:
            # The text ends in front of an added token, and with it white space that would end before its last space.
            added = {token.content[0] for token in self._backend.get_added_tokens_decoder().values()}
            self._cut = re.compile(" " + _WORD.format(re.escape("".join(added))))
            self._backend.no_truncation()
            self._backend.no_padding()

    def bounds(self, texts: Sequence[str], limit: int | None) -> np.ndarray:
        """At least and at most so many tokens has each text, int64 [texts, 2].

        They are equal, or both at most `limit`, or both above it; with None they are equal. A token has a byte at
        least, and a piece a token: only where that leaves it open are pieces tokenized that were not seen before.
        """
        found = np.zeros((len(texts), 2), dtype=np.int64)
        if not self.cuts.at_spaces or any(_FIRST in text for text in texts):
            ids = self._tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False)["input_ids"]
            found[:] = np.array([len(one) for one in ids])[:, None]
            return found
        if len(self._known) > MAX_PIECES:  # common words are back at once
            self._known.clear()
        open_texts: list[tuple[int, list[str]]] = []
        for number, text in enumerate(texts):
            found[number] = 0, _num_bytes(text)
            if limit is not None and found[number, 1] <= limit:
                continue
            marked = _LINE.sub(f"\n {_FIRST}", text) if self.cuts.behind_lines else text
            pieces = self._cut.split(_FIRST + marked, maxsplit=0 if limit is None else limit + 1)
            if limit is None or not self._settles(pieces, limit, found[number]):
                open_texts.append((number, pieces))
        self._learn({piece for _, pieces in open_texts for piece in pieces})
        for number, pieces in open_texts:
            found[number] = sum(map(self._known.__getitem__, pieces))
        while self._long:
            del self._known[self._long.pop()]
        return found

    def _settles(self, pieces: list[str], limit: int, bounds: np.ndarray) -> bool:
        """Whether what is known of the pieces of a text tells on which side of the limit it is; sets its bounds."""
        known = self._known
        least, most = len(pieces) - 1, int(bounds[1])  # the first may be empty
        if least <= limit:
            new = [piece for piece in pieces if piece not in known]
            most = sum(map(known.get, pieces, repeat(0)))
            least = most + len(new) - 1
            most += _num_bytes("".join(new)) + len(new)
        bounds[:] = least, most
        return least > limit or most <= limit

    def _learn(self, pieces: set[str]) -> None:
        """Add the numbers of tokens of pieces that are not known."""
        new = [piece for piece in pieces if piece not in self._known]
        self._long += [piece for piece in new if len(piece) > _MAX_LENGTH]
        alone = [piece for piece in new if piece.startswith(_FIRST)]
        encodings = self._backend.encode_batch([piece[1:] for piece in alone], add_special_tokens=False)
        self._known.update(zip(alone, map(len, encodings), strict=True))
        # Others are tokenized some at once, which takes less time.
        further = [piece for piece in new if not piece.startswith(_FIRST)]
        groups = [further[start : start + _TOGETHER] for start in range(0, len(further), _TOGETHER)]
        texts = ["".join(f" {piece}" for piece in group) for group in groups]
        for group, encoding in zip(groups, self._backend.encode_batch(texts, add_special_tokens=False), strict=True):
            borders = list(accumulate(1 + len(piece) for piece in group))
            counts, place = [0] * len(group), 0
            for _, end in encoding.offsets:
                while end > borders[place]:
                    place += 1
                counts[place] += 1
            self._known.update(zip(group, counts, strict=True))


def _num_bytes(text: str) -> int:
    """At most so many bytes has a text when it is composed: up to three times as many as its parts."""
    return len(text) if text.isascii() else 3 * len(text.encode())


class Cuts(NamedTuple):
    """Where a tokenizer tokenizes what is on each side alone: in front of a space that a word follows, and between a
    line break and a word."""

    at_spaces: bool
    behind_lines: bool

    @classmethod
    def of(cls, description: Mapping[str, Any]) -> "Cuts":
        """Those of a tokenizer that is described as in tokenizer.json."""
        parsed = _alternatives(_pattern(description))
        # White space but its last space is taken, and that one where nothing else does.
        if not {*_SPACES[:2]} <= {*map("".join, parsed)} or not _begins_at_space(parsed):
            return cls(False, False)
        return cls(True, _ends_at_line(parsed))


def _pattern(description: Mapping[str, Any]) -> str:
    """The regular expression that cuts a text into words; empty where there are several, or something else is done."""
    model, normalizer = description["model"], description.get("normalizer") or {"type": "NFC"}
    # Nothing composes with a space or a line break in front of it.
    normalizers = {one["type"] for one in normalizer.get("normalizers", [normalizer])}
    if model.get("type") != "BPE" or model.get("dropout") or _SPACE not in model["vocab"] or normalizers - {"NFC"}:
        return ""
    for token in description.get("added_tokens", ()):
        if re.search(r"\s", token["content"]) or token["lstrip"] or token["rstrip"] or token["single_word"]:
            return ""
    last = description.get("pre_tokenizer") or {"type": None}
    *splits, last = last.get("pretokenizers", [last])
    if last["type"] != "ByteLevel" or last["add_prefix_space"] or len(splits) + last["use_regex"] != 1:
        return ""
    split = (
        splits[0] if splits else {"type": "Split", "behavior": "Isolated", "invert": False, "pattern": {"Regex": _GPT2}}
    )
    is_plain = split["type"] == "Split" and split["behavior"] == "Isolated" and not split["invert"]
    return split["pattern"].get("Regex", "") if is_plain else ""


def _alternatives(pattern: str) -> list[list[str]]:
    """The parts of each alternative of a regular expression, with how often each may match; `.` where it is not known.

    White space alone, as in `_SPACES`, is one part.
    """
    found = _ALTERNATIVE.findall(pattern)
    if "|".join(found) != pattern:
        return [["."]]
    parsed = [[one] if one in _SPACES else [part[0] for part in _PART.finditer(one)] for one in found]
    return [parts if "".join(parts) == one else ["."] for parts, one in zip(parsed, found, strict=True)]


def _begins_at_space(alternatives: list[list[str]]) -> bool:
    """Whether a match that holds a space has one, at its beginning, or is white space alone."""
    for first, *others in alternatives:
        is_one = _PART.fullmatch(first) is not None and not re.search(r"[*+}]$", first)
        is_fine = is_one or first in _SPACES or not _matches(first, " ")
        if not is_fine or any(_matches(one, " ") for one in others):
            return False
    return True


def _ends_at_line(alternatives: list[list[str]]) -> bool:
    """Whether a match that holds a line break ends in one, and white space before a word does not."""
    whole = ["".join(parts) for parts in alternatives]
    if any(one in _SPACES for one in whole) and (_LINES not in whole or whole.index(_LINES) > whole.index(_SPACES[0])):
        return False
    ends = (parts[:-1] if parts[-1] == r"[\r\n]*" or parts[-1] in _SPACES else parts for parts in alternatives)
    return not any(_matches(part, "\n") for parts in ends for part in parts)


def _matches(part: str, character: str) -> bool:
    """Whether a part of a regular expression may match a space or a line break; True also where that is not known."""
    if part == "." or re.search(r"\\p\{[ZC]|\\P|&&|\[:", part):
        return True
    what = _PART.fullmatch(part)
    # Letters, marks, numbers, punctuation and symbols are neither.
    plain = re.sub(r"\\p\{\w+\}", "", what[1] if what else part)
    return plain not in ("", "[]") and re.match(plain, character) is not None
