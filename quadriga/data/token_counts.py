# SPDX-License-Identifier: Apache-2.0
"""How many tokens texts have, without making the tokens of a word again that was seen before.

A byte-level BPE tokenizer cuts a text into words by a regular expression and makes tokens of each word alone. Between
two characters that no match of the expression holds together a text may be cut:

    tokens("f(a b):  c") = tokens("f") + tokens("(a") + tokens(" b") + tokens("): ") + tokens(" c")

A piece has at least one token, and at most one for each of its bytes. Only where that, and what is known of pieces that
were seen, leaves open on which side of a limit a text is are further pieces tokenized. `cuts` reads from the
tokenizer's own description where it may cut; where it does not know, all texts are tokenized.
"""

import json
import re
from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from transformers import PreTrainedTokenizerBase

MAX_PIECES, _MAX_LENGTH = 1 << 20, 48
"""Pieces in a table; bytes of one, for longer ones seldom come again."""
_BETWEEN, _BEFORE = 1, 2
"""Two bytes in a row: a text may be cut between them, or in front of both."""

# The expression that is built into the pre-tokenizer ByteLevel.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CLASS, _GROUP = r"\[(?:\\.|[^\]\\])+\]", r"\(\?i:[A-Za-z']+(?:\|[A-Za-z']+)*\)"
_ALTERNATIVE = re.compile(rf"(?:{_CLASS}|{_GROUP}|\\.|\((?!\?i:)[^()]*\)|[^|()\[\]\\])+")
_PART = re.compile(rf"({_CLASS}|{_GROUP}|\\[pP]\{{\w+\}}|\\[rnsS]|[\w' /])([?*+]|\{{[\d,]+\}})?\+?")
_SPACES = (r"\s+(?!\S)", r"\s+", r"\s*[\r\n]+", r"\s*[\r\n]")
_OF_ASCII = {"L": "A-Za-z", "Lu": "A-Z", "Ll": "a-z", "N": "0-9", "Nd": "0-9", "S": "$+<=>^`|~"}
_OF_ASCII |= {"P": r"!-#%-*,-/:;?@[-\]_{}"} | dict.fromkeys(
    ("Lt", "Lm", "Lo", "Nl", "No", "M", "Mn", "Mc", "Me"), ""
)
"""What a property of Unicode is in ASCII."""
_SEEN = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_ALPHABET = {*map(chr, _SEEN), *map(chr, range(0x100, 0x200 - len(_SEEN)))}
"""Of byte-level tokenizers: Latin-1 where it can be seen, and for the other bytes the next characters."""
_WHITE, _SPACE = b"\t\n\v\f\r ", 0x20
_ODD = (0, 0x1C, 0x1D, 0x1E, 0x1F)
"""What lies between texts, and what is white space to Python and not to Unicode."""


class TokenCounter:
    """Counts tokens of texts.
    `tokenizer`: of transformers; its texts bring their special tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer, self._backend = tokenizer, getattr(tokenizer, "backend_tokenizer", None)
        self._known = dict[bytes, int]()
        self.cuts = None if self._backend is None else cuts(json.loads(self._backend.to_str()))
        if self.cuts is not None:
            added = [
                one.content.encode() for one in self._backend.get_added_tokens_decoder().values()
            ]
            added.sort(key=len, reverse=True)
            self._added = re.compile(b"|".join(re.escape(one) for one in added))
            self._begins_added = np.isin(np.arange(256), [one[0] for one in added])
            self._backend.no_truncation()
            self._backend.no_padding()

    def bounds(self, texts: Sequence[str], limit: int | None) -> np.ndarray:
        """At least and at most so many tokens has each text, int64 [texts, 2].
        They are equal, or both at most `limit`, or both above it; with None they are equal."""
        found = np.zeros((len(texts), 2), dtype=np.int64)
        if self.cuts is None:
            ids = self._tokenizer(
                list(texts), add_special_tokens=False, return_attention_mask=False
            )["input_ids"]
            found[:] = np.array([len(one) for one in ids], dtype=np.int64)[:, None]
            return found
        if len(self._known) > MAX_PIECES:  # common words are back at once
            self._known.clear()
        encoded = [text.encode() for text in texts]
        found[:, 1] = [*map(_most, encoded)]
        is_open = found[:, 1] > (-1 if limit is None else limit)
        if is_open.any():
            some = [text for text, is_one in zip(encoded, is_open, strict=True) if is_one]
            found[is_open] = self._counted(some, found[is_open], limit)
        return found

    def _counted(self, texts: list[bytes], found: np.ndarray, limit: int | None) -> np.ndarray:
        """The bounds of texts that those by their bytes, `found`, do not settle."""
        together, ends = b"\0".join(texts), np.cumsum([len(text) + 1 for text in texts]) - 1
        places = self._places(together, ends)
        owners = np.searchsorted(ends, places)
        is_piece = places != ends[owners]
        found[:, 0] = np.bincount(owners[is_piece], minlength=len(texts))
        if limit is not None:
            is_piece &= (found[:, 0] <= limit)[owners]
        buffers = [
            None,
            pa.py_buffer(np.append(places, len(together)).astype(np.int32)),
            pa.py_buffer(together),
        ]
        pieces = (
            pa.Array.from_buffers(pa.binary(), len(places), buffers)
            .filter(pa.array(is_piece))
            .dictionary_encode()
        )
        codes, words, owners = (
            pieces.indices.to_numpy(),
            pieces.dictionary.to_pylist(),
            owners[is_piece],
        )
        counts = np.array([*map(self._known.get, words, repeat(0))], dtype=np.int64)
        most, new = counts.copy(), np.flatnonzero(counts == 0)
        most[new] = [_most(words[number]) for number in new.tolist()]

        def sums(values: np.ndarray) -> np.ndarray:
            return np.bincount(owners, values[codes], minlength=len(texts)).astype(np.int64)

        is_open = np.bincount(owners, minlength=len(texts)) > 0
        found[is_open] = np.stack([sums(np.maximum(counts, 1)), sums(most)], axis=1)[is_open]
        is_open &= (
            found[:, 0] < found[:, 1]
            if limit is None
            else (found[:, 0] <= limit) & (found[:, 1] > limit)
        )
        is_asked = np.zeros(len(words), dtype=bool)
        is_asked[codes[is_open[owners]]] = True
        asked = np.flatnonzero(is_asked & (counts == 0))
        unseen = [words[number] for number in asked.tolist()]
        encodings = self._backend.encode_batch_fast(
            [one.decode() for one in unseen], add_special_tokens=False
        )
        counts[asked] = [*map(len, encodings)]
        seen = zip(unseen, counts[asked].tolist(), strict=True)
        self._known |= {one: count for one, count in seen if len(one) <= _MAX_LENGTH}
        found[is_open] = sums(counts)[is_open, None]
        return found

    def _places(self, together: bytes, ends: np.ndarray) -> np.ndarray:
        """Where pieces begin in texts with a byte between them, which is a piece of its own."""
        assert self.cuts is not None
        characters = np.frombuffer(together, dtype=np.uint8)
        marks = self.cuts[characters[:-1].astype(np.uint16) << 8 | characters[1:]]
        is_cut = np.zeros(len(characters) + 1, dtype=bool)
        is_cut[1:-1] = marks & _BETWEEN
        is_cut[:-2] |= marks >= _BEFORE
        for start in np.flatnonzero(self._begins_added[characters]).tolist():
            if token := self._added.match(together, start):
                # Nothing of white space in front of it belongs to it.
                is_cut[start + 1 : token.end()] = False
                is_cut[start - 1 : start] &= together[start - 1 : start] != b" "
        is_cut[ends] = is_cut[0] = True
        is_cut[ends[:-1] + 1] = True
        return np.flatnonzero(is_cut[:-1])


def _most(text: bytes) -> int:
    """At most so many bytes has a text when it is composed: up to three times as many as its parts."""
    return len(text) if text.isascii() else 3 * len(text)


def cuts(description: Mapping[str, Any]) -> np.ndarray | None:
    """Where a tokenizer that is described as in tokenizer.json tokenizes what is on each side alone, uint8 [65536]:
    `_BETWEEN` and `_BEFORE` at `256 * first + second` of two bytes. None: all texts have to be tokenized."""
    alternatives = _alternatives(_pattern(description))
    # White space but its last space is taken, and that one where nothing else does.
    if not {(one,) for one in _SPACES[:2]} <= {
        tuple(part.text for part in parts) for parts in alternatives
    }:
        return None
    # A match that holds a space has one, at its beginning, or is white space alone.
    if any(part.takes[_SPACE] for _, *others in alternatives for part in others):
        return None
    if any(
        one.takes[_SPACE] and one.is_repeated and one.text not in _SPACES
        for one, *_ in alternatives
    ):
        return None
    table, word = np.zeros((256, 256), dtype=np.uint8), np.zeros(256, dtype=bool)
    # Of the characters beyond ASCII those that are surely no white space.
    word[0x21:0x7F] = word[0xC3:0xE0] = word[0xE4:0xF5] = True
    table[_SPACE, word] = _BEFORE
    is_cut = ~_held_together(alternatives)
    is_cut[[*_WHITE]] = False
    table[:128, :128] |= is_cut.astype(np.uint8) * _BETWEEN
    return table.reshape(-1)


def _pattern(description: Mapping[str, Any]) -> str:
    """The regular expression that cuts a text into words; empty where there are several, or something else is done."""
    model, normalizer = description["model"], description.get("normalizer") or {"type": "NFC"}
    # Nothing in ASCII composes with what is in front of it.
    normalizers = {one["type"] for one in normalizer.get("normalizers", [normalizer])}
    if model.get("type") != "BPE" or model.get("dropout") or normalizers - {"NFC"}:
        return ""
    # Byte-level: of each byte there is a token.
    if not model["vocab"].keys() >= _ALPHABET:
        return ""
    for token in description.get("added_tokens", ()):
        content = token["content"]
        is_composed = token["normalized"] and not content.isascii()
        if (
            is_composed
            or re.search(r"\s", content)
            or token["lstrip"]
            or token["rstrip"]
            or token["single_word"]
        ):
            return ""
    last = description.get("pre_tokenizer") or {"type": None}
    *splits, last = last.get("pretokenizers", [last])
    if (
        last["type"] != "ByteLevel"
        or last["add_prefix_space"]
        or len(splits) + last["use_regex"] != 1
    ):
        return ""
    if not splits:
        return _GPT2
    is_plain = (
        splits[0]["type"] == "Split"
        and splits[0]["behavior"] == "Isolated"
        and not splits[0]["invert"]
    )
    return splits[0]["pattern"].get("Regex", "") if is_plain else ""


class _Part(NamedTuple):
    """A part of a regular expression: which characters of ASCII it may take, bool [128], all where that is not known.
    `is_free`: it matches each of them alone."""

    text: str
    takes: np.ndarray
    is_free: bool = False
    is_optional: bool = False
    is_repeated: bool = True

    @classmethod
    def of(cls, text: str) -> "_Part":
        if text in _SPACES:  # white space alone is one part
            return cls(text, np.isin(np.arange(128), [*_WHITE]), is_free=text == _SPACES[1])
        what = _PART.fullmatch(text)
        base, times = (what[1], what[2] or "") if what else ("", "")
        is_free, is_repeated = not re.match(r"\{([2-9]|\d\d)", times), times[:1] in ("*", "+", "{")
        if base.startswith("("):  # as if its letters came in any order
            letters = base[4:-1].replace("|", "")
            base, is_free, is_repeated = f"[{letters}{letters.swapcase()}]", False, True
        names = re.findall(r"\\p\{(\w+)\}", base)
        if base == "" or re.search(r"\\P|&&|\[:|-\\|\}-", base) or not {*names} <= _OF_ASCII.keys():
            return cls(text, np.ones(128, dtype=bool))
        plain = re.sub(r"\\p\{(\w+)\}", lambda name: _OF_ASCII[name[1]], base)
        # With a character beyond ASCII no class is empty.
        matches = re.compile(
            f"{plain[:-1]}\uffff]" if base.startswith("[") else f"[{plain}\uffff]"
        ).match
        takes = np.array([matches(chr(code)) is not None for code in range(128)])
        return cls(
            text, takes, is_free, times[:1] in ("*", "?") or times.startswith("{0"), is_repeated
        )


def _alternatives(pattern: str) -> list[list[_Part]]:
    """The parts of each alternative of a regular expression; empty where they are not known."""
    found = _ALTERNATIVE.findall(pattern)
    if "|".join(found) != pattern:
        return []
    parsed = [
        [one] if one in _SPACES else [part[0] for part in _PART.finditer(one)] for one in found
    ]
    whole = zip(parsed, found, strict=True)
    return [[*map(_Part.of, parts if "".join(parts) == one else [""])] for parts, one in whole]


def _held_together(alternatives: list[list[_Part]]) -> np.ndarray:
    """Which characters of ASCII a match may hold side by side, bool [128, 128]; what nothing matches stays together."""
    held, is_matched = np.zeros((128, 128), dtype=bool), np.zeros(128, dtype=bool)
    is_matched[[*_ODD]] = True
    for parts in alternatives:
        for number, part in enumerate(parts):
            further = [one.takes for one in parts[number + 1 - part.is_repeated :]]
            held |= np.outer(part.takes, np.any(further, axis=0))
            if part.is_free and all(other.is_optional for other in parts if other is not part):
                is_matched |= part.takes
    for odd in [*_ODD, *np.flatnonzero(~is_matched)]:
        held[odd] = held[:, odd] = True
    return held
