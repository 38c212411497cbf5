# SPDX-License-Identifier: Apache-2.0
"""Counts the tokens of texts without tokenizing any word twice.

A byte-level BPE tokenizer splits a text into words by a regular expression and tokenizes each word
alone. So a text may be cut between two characters that cannot be in one match of the expression,
and the pieces have as many tokens as the text:

    tokens("f(a b):  c") = tokens("f") + tokens("(a") + tokens(" b") + tokens("): ") + tokens(" c")

A piece has at least one token, and at most one for each of its bytes. Often these bounds, and the
counts of pieces seen before, already show whether a text is over a limit. Only if they do not are
further pieces tokenized. `cuts` finds out from the tokenizer's description where texts may be cut;
if it cannot, whole texts are tokenized.
"""

import json
import re
from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from transformers import PreTrainedTokenizerBase

MAX_PIECES = 1 << 20
"""Pieces whose counts are remembered."""
_MAX_LENGTH = 48
"""Most bytes of a remembered piece; longer ones seldom occur again."""
# Where a text may be cut, given two consecutive bytes. Both bits may be set.
_BETWEEN = 1  # between the two bytes
_BEFORE = 2  # before the first of them

# The expression that is built into the pre-tokenizer ByteLevel.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Syntax of the expressions that are understood here: a character class such as `[^\s\p{L}]`, a group
# of words whatever their case such as `(?i:'s|'t)`, an alternative, and a part of one.
_CLASS = r"\[(?:\\.|[^\]\\])+\]"
_GROUP = r"\(\?i:[A-Za-z']+(?:\|[A-Za-z']+)*\)"
_ALTERNATIVE = re.compile(rf"(?:{_CLASS}|{_GROUP}|\\.|\((?!\?i:)[^()]*\)|[^|()\[\]\\])+")
_PART = re.compile(rf"({_CLASS}|{_GROUP}|\\[pP]\{{\w+\}}|\\[rnsS]|[\w' /])([?*+]|\{{[\d,]+\}})?\+?")
_ALL_BUT_LAST_SPACE = r"\s+(?!\S)"
_SPACE_RUN = r"\s+"
_SPACES = (_ALL_BUT_LAST_SPACE, _SPACE_RUN, r"\s*[\r\n]+", r"\s*[\r\n]")
"""Alternatives that match white space alone."""
_ASCII_OF_PROPERTY = {
    "L": "A-Za-z",
    "Lu": "A-Z",
    "Ll": "a-z",
    "N": "0-9",
    "Nd": "0-9",
    "S": "$+<=>^`|~",
    "P": r"!-#%-*,-/:;?@[-\]_{}",
}
"""ASCII characters with a property of Unicode, written as in a character class."""
_ASCII_OF_PROPERTY |= dict.fromkeys(("Lt", "Lm", "Lo", "Nl", "No", "M", "Mn", "Mc", "Me"), "")
_VISIBLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_ALPHABET = {*map(chr, _VISIBLE), *map(chr, range(0x100, 0x200 - len(_VISIBLE)))}
"""The 256 characters that byte-level tokenizers use for bytes: visible Latin-1 for itself, and
characters from U+0100 on for the other bytes."""
_WHITE = b"\t\n\v\f\r "
_SPACE = 0x20
# The separator of texts, and characters that are white space to Python's `re` but not to Unicode.
_ODD = (0, 0x1C, 0x1D, 0x1E, 0x1F)


class TokenCounter:
    """Counts tokens of texts, which contain their special tokens.

    Args:
        tokenizer: a tokenizer of transformers.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._known: dict[bytes, int] = {}
        self.cuts: np.ndarray | None = None
        if self._backend is not None:
            self.cuts = cuts(json.loads(self._backend.to_str()))
        if self.cuts is not None:
            tokens = self._backend.get_added_tokens_decoder().values()
            added = [token.content.encode() for token in tokens]
            # The longest comes first, because a token may begin with another one.
            added.sort(key=len, reverse=True)
            self._added = re.compile(b"|".join(map(re.escape, added)))
            self._begins_added = np.isin(np.arange(256), [token[0] for token in added])
            self._backend.no_truncation()
            self._backend.no_padding()

    def bounds(self, texts: Sequence[str], limit: int | None) -> np.ndarray:
        """Lower and upper bounds of the number of tokens of each text.

        Args:
            texts: rendered texts.
            limit: a number of tokens. The bounds of a text are on one side of it: both at most
                `limit`, or both above. None: the bounds are equal, and so exact.

        Returns:
            int64 [texts, 2].
        """
        bounds = np.zeros((len(texts), 2), dtype=np.int64)
        if self.cuts is None:
            encodings = self._tokenizer(
                list(texts), add_special_tokens=False, return_attention_mask=False
            )
            counts = [len(ids) for ids in encodings["input_ids"]]
            bounds[:] = np.array(counts, dtype=np.int64)[:, None]
            return bounds
        if len(self._known) > MAX_PIECES:  # common words soon come back
            self._known.clear()
        encoded = [text.encode() for text in texts]
        bounds[:, 1] = [_most_tokens(text) for text in encoded]
        # Texts of few bytes are surely within the limit.
        is_open = bounds[:, 1] > (-1 if limit is None else limit)
        if is_open.any():
            open_texts = [encoded[number] for number in np.flatnonzero(is_open).tolist()]
            bounds[is_open] = self._bounds_by_pieces(open_texts, limit)
        return bounds

    def _bounds_by_pieces(self, texts: list[bytes], limit: int | None) -> np.ndarray:
        """Find the bounds of texts by their pieces.

        Args:
            texts: texts in UTF-8 whose numbers of bytes are over the limit.
            limit: as for `bounds`.

        Returns:
            int64 [texts, 2], as for `bounds`.
        """
        # One array for all texts, separated by zero bytes, so that numpy does the work.
        together = b"\0".join(texts)
        # The position after each text, which is that of its separator.
        ends = np.cumsum([len(text) + 1 for text in texts]) - 1
        starts = self._piece_starts(together, ends)
        owners = np.searchsorted(ends, starts)  # number of the text that each piece belongs to
        # A separator is a piece of its own, which is not counted.
        is_counted = starts != ends[owners]
        num_pieces = np.bincount(owners[is_counted], minlength=len(texts))
        bounds = np.stack([num_pieces, [_most_tokens(text) for text in texts]], axis=1)
        if limit is not None:
            # Texts with more pieces are surely over the limit: their pieces need not be looked up.
            is_counted &= (num_pieces <= limit)[owners]
        owners = owners[is_counted]
        codes, pieces = _distinct_pieces(together, starts, is_counted)
        known_counts = map(self._known.get, pieces, repeat(0))
        # Tokens of each distinct piece; 0 if not known.
        counts = np.array([*known_counts], dtype=np.int64)
        most = counts.copy()
        unknown = np.flatnonzero(counts == 0)
        most[unknown] = [_most_tokens(pieces[number]) for number in unknown.tolist()]

        def sums(values: np.ndarray) -> np.ndarray:
            """Add up the values of a text's pieces, int64 [texts].

            Args:
                values: a value for each distinct piece.
            """
            return np.bincount(owners, values[codes], minlength=len(texts)).astype(np.int64)

        # The counts of known pieces narrow the bounds of the texts whose pieces were looked up.
        is_open = np.bincount(owners, minlength=len(texts)) > 0
        by_counts = np.stack([sums(np.maximum(counts, 1)), sums(most)], axis=1)
        bounds[is_open] = by_counts[is_open]
        least_tokens, most_tokens = bounds.T
        if limit is None:
            is_open &= least_tokens < most_tokens
        else:
            is_open &= (least_tokens <= limit) & (most_tokens > limit)

        # The texts whose bounds do not decide yet get exact counts: tokenize their unknown pieces.
        is_needed = np.zeros(len(pieces), dtype=bool)
        is_needed[codes[is_open[owners]]] = True
        needed = np.flatnonzero(is_needed & (counts == 0))
        counts[needed] = self._tokenize([pieces[number] for number in needed.tolist()])
        bounds[is_open] = sums(counts)[is_open, None]
        return bounds

    def _tokenize(self, pieces: list[bytes]) -> list[int]:
        """Count the tokens of pieces, and remember the counts of short ones."""
        texts = [piece.decode() for piece in pieces]
        encodings = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        counts = [*map(len, encodings)]
        for piece, count in zip(pieces, counts, strict=True):
            if len(piece) <= _MAX_LENGTH:
                self._known[piece] = count
        return counts

    def _piece_starts(self, together: bytes, ends: np.ndarray) -> np.ndarray:
        """Find the positions where pieces begin. Each separator is a piece of its own.

        Args:
            together: the texts, separated by zero bytes.
            ends: the position after each text, [texts].

        Returns:
            Ascending positions, [pieces].
        """
        assert self.cuts is not None
        characters = np.frombuffer(together, dtype=np.uint8)
        byte_pairs = characters[:-1].astype(np.uint16) << 8 | characters[1:]
        marks = self.cuts[byte_pairs]
        # One entry for each position, and one for the end.
        is_start = np.zeros(len(characters) + 1, dtype=bool)
        is_start[1:-1] = marks & _BETWEEN
        is_start[:-2] |= marks >= _BEFORE
        # The tokenizer finds special tokens before it applies the expression.
        for start in np.flatnonzero(self._begins_added[characters]).tolist():
            token = self._added.match(together, start)
            if token:
                is_start[start + 1 : token.end()] = False
                # So a space before one ends the white space there, and no word takes it.
                is_start[start - 1 : start] &= together[start - 1 : start] != b" "
        # A piece begins with each text, and with the separator after it.
        is_start[0] = True
        is_start[ends] = True
        is_start[ends[:-1] + 1] = True
        return np.flatnonzero(is_start[:-1])


def _distinct_pieces(
    together: bytes, starts: np.ndarray, is_counted: np.ndarray
) -> tuple[np.ndarray, list[bytes]]:
    """List the distinct pieces among those that are counted.

    Args:
        together: the texts.
        starts: positions where pieces begin.
        is_counted: which pieces are counted.

    Returns:
        For each counted piece its number among the distinct ones; and the distinct pieces.
    """
    offsets = np.append(starts, len(together)).astype(np.int32)
    # An Arrow array over the bytes themselves: only the distinct pieces are copied.
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(together)]
    pieces = pa.Array.from_buffers(pa.binary(), len(starts), buffers)
    encoded = pieces.filter(pa.array(is_counted)).dictionary_encode()
    return encoded.indices.to_numpy(), encoded.dictionary.to_pylist()


def _most_tokens(text: bytes) -> int:
    """Upper bound of the tokens of a text: its bytes, after the tokenizer has applied NFC."""
    # NFC makes a text at most three times as long, and leaves ASCII as it is.
    return len(text) if text.isascii() else 3 * len(text)


def cuts(description: Mapping[str, Any]) -> np.ndarray | None:
    """Find the places where a tokenizer tokenizes the text on each side independently.

    Args:
        description: the tokenizer as in tokenizer.json.

    Returns:
        Table of `_BETWEEN` and `_BEFORE` for all pairs of bytes, at `256 * first + second`, uint8
        [65536]. None: texts must not be cut.
    """
    alternatives = _alternatives(_pattern(description))
    texts = {tuple(part.text for part in parts) for parts in alternatives}
    # These two alternatives split white space before its last space. A text may be cut there, before
    # a space that a word follows, if the conditions below hold too.
    if not texts >= {(_ALL_BUT_LAST_SPACE,), (_SPACE_RUN,)}:
        return None
    # A match must have a space only as its first character, unless it is white space alone.
    for first, *later_parts in alternatives:
        if any(part.takes[_SPACE] for part in later_parts):
            return None
        if first.takes[_SPACE] and first.is_repeated and first.text not in _SPACES:
            return None
    table = np.zeros((256, 256), dtype=np.uint8)
    is_word = np.zeros(256, dtype=bool)
    is_word[0x21:0x7F] = True
    # First bytes in UTF-8 of characters beyond ASCII that are surely no white space.
    is_word[0xC3:0xE0] = True
    is_word[0xE4:0xF5] = True
    table[_SPACE, is_word] = _BEFORE
    # Between two ASCII characters texts are cut unless a match may hold them together. White space
    # stays with what follows: `\s+(?!\S)` looks ahead.
    is_cut = ~_held_together(alternatives)
    is_cut[[*_WHITE]] = False
    table[:128, :128] |= is_cut.astype(np.uint8) * _BETWEEN
    return table.reshape(-1)


def _pattern(description: Mapping[str, Any]) -> str:
    """Find the regular expression that splits texts into words.

    Args:
        description: the tokenizer as in tokenizer.json.

    Returns:
        The expression; empty if the tokenizer does anything else that depends on the context.
    """
    model = description["model"]
    if model.get("type") != "BPE" or model.get("dropout"):
        return ""
    # NFC composes no ASCII character with the one before it, so cuts before ASCII stay right.
    normalizer = description.get("normalizer") or {"type": "NFC"}
    steps = normalizer.get("normalizers", [normalizer])
    if any(step["type"] != "NFC" for step in steps):
        return ""
    # With a token for each byte, no text has an unknown token.
    if not model["vocab"].keys() >= _ALPHABET:
        return ""
    for token in description.get("added_tokens", ()):
        content = token["content"]
        is_composed = token["normalized"] and not content.isascii()
        takes_space = token["lstrip"] or token["rstrip"] or re.search(r"\s", content)
        if is_composed or takes_space or token["single_word"]:
            return ""
    pre_tokenizer = description.get("pre_tokenizer") or {"type": None}
    *splits, last = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    if last["type"] != "ByteLevel" or last["add_prefix_space"]:
        return ""
    # Exactly one step may split the text: a `Split`, or the one built into `ByteLevel`.
    if len(splits) + last["use_regex"] != 1:
        return ""
    if not splits:
        return _GPT2
    (split,) = splits
    if split["type"] != "Split" or split["behavior"] != "Isolated" or split["invert"]:
        return ""
    return split["pattern"].get("Regex", "")


class _RegexPart(NamedTuple):
    """A part of a regular expression: one character, a class or a group, with its quantifier.

    Attributes:
        text: the part as it is written.
        takes: whether it may match each ASCII character, bool [128]; all true if not known.
        is_free: whether any of these characters is a match for it by itself.
        is_optional: whether it may match nothing.
        is_repeated: whether it may match several characters.
    """

    text: str
    takes: np.ndarray
    is_free: bool = False
    is_optional: bool = False
    is_repeated: bool = True

    @classmethod
    def of(cls, text: str) -> "_RegexPart":
        """Describe a part by its text; whatever is not understood may match anything."""
        if text in _SPACES:
            return cls(text, np.isin(np.arange(128), [*_WHITE]), is_free=text == _SPACE_RUN)
        match = _PART.fullmatch(text)
        base, quantifier = match.groups(default="") if match else ("", "")
        is_optional = quantifier[:1] in ("*", "?") or quantifier.startswith("{0")
        is_repeated = quantifier[:1] in ("*", "+", "{")
        is_free = not re.match(r"\{([2-9]|\d\d)", quantifier)
        # A group of words is taken for a class of their letters, in any order and number.
        if base.startswith("("):
            letters = base[4:-1].replace("|", "")
            base = f"[{letters}{letters.swapcase()}]"
            is_free = False
            is_repeated = True
        properties = {*re.findall(r"\\p\{(\w+)\}", base)}
        has_other_syntax = re.search(r"\\P|&&|\[:|-\\|\}-", base)
        if base == "" or has_other_syntax or not properties <= _ASCII_OF_PROPERTY.keys():
            return cls(text, np.ones(128, dtype=bool))
        plain = re.sub(r"\\p\{(\w+)\}", lambda name: _ASCII_OF_PROPERTY[name[1]], base)
        # A class must not be empty, so a character is added that is not asked for below.
        plain = f"{plain[:-1]}\uffff]" if base.startswith("[") else f"[{plain}\uffff]"
        pattern = re.compile(plain)
        takes = np.array([pattern.match(chr(code)) is not None for code in range(128)])
        return cls(text, takes, is_free, is_optional, is_repeated)


def _alternatives(pattern: str) -> list[list[_RegexPart]]:
    """Split a regular expression into its alternatives, and each of them into parts.

    Returns:
        The parts of each alternative; empty if the expression has other syntax.
    """
    texts = _ALTERNATIVE.findall(pattern)
    if "|".join(texts) != pattern:
        return []
    alternatives = []
    for text in texts:
        part_texts = [match[0] for match in _PART.finditer(text)]
        if text in _SPACES:
            part_texts = [text]
        elif "".join(part_texts) != text:
            part_texts = [""]  # one part, which may match anything
        alternatives.append([*map(_RegexPart.of, part_texts)])
    return alternatives


def _held_together(alternatives: list[list[_RegexPart]]) -> np.ndarray:
    """Find the pairs of ASCII characters that may be neighbours in one match, bool [128, 128].

    A character that no alternative is sure to match alone may be in a longer stretch between
    matches, so it counts as held together with all others.
    """
    is_held = np.zeros((128, 128), dtype=bool)
    is_matched = np.zeros(128, dtype=bool)
    is_matched[[*_ODD]] = True
    for parts in alternatives:
        for number, part in enumerate(parts):
            # Any later part may follow directly, since those between may be optional. A repeated
            # part may also follow itself.
            following = parts[number if part.is_repeated else number + 1 :]
            if following:
                follows = np.any([other.takes for other in following], axis=0)
                is_held |= np.outer(part.takes, follows)
            if part.is_free and all(other.is_optional for other in parts if other is not part):
                is_matched |= part.takes
    for code in [*_ODD, *np.flatnonzero(~is_matched)]:
        is_held[code] = True
        is_held[:, code] = True
    return is_held
