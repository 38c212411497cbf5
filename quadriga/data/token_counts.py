# SPDX-License-Identifier: Apache-2.0
"""Counts the tokens of texts without tokenizing any word twice.

A byte-level BPE tokenizer splits a text into words by a regular expression and tokenizes each word
alone. So a text may be cut between two characters that cannot be in one match of the expression,
and the pieces have as many tokens as the text:

    tokens("f(a b):  c") = tokens("f") + tokens("(a") + tokens(" b") + tokens("): ") + tokens(" c")

A piece has at least one token, and at most one for each of its bytes. Often these bounds, and the
counts of pieces seen before, already show whether a text is over a limit. Other pieces are
tokenized only if they do not. `find_cuts` finds out from the tokenizer's description where texts
may be cut. If it cannot, whole texts are tokenized.
"""

import json
import re
from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from transformers import PreTrainedTokenizerBase

MAX_REMEMBERED_PIECES = 1 << 20
"""Number of pieces whose counts are remembered. When there are more, all are forgotten."""
_MAX_REMEMBERED_BYTES = 48
"""Most bytes of a remembered piece; longer ones seldom occur again."""
# Bits that say where a text may be cut next to two consecutive bytes. Both may be set.
_BETWEEN = 1  # between the two bytes
_BEFORE = 2  # before the first of them

# The regular expression that is built into the pre-tokenizer `ByteLevel` of the tokenizers library.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Syntax of the expressions that are understood here: a character class such as `[^\s\p{L}]`, a
# group of words in upper or lower case such as `(?i:'s|'t)`, an alternative, and a part of an
# alternative.
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
_WHITE_SPACE = b"\t\n\v\f\r "
_SPACE = 0x20
# Characters at which texts are never cut: the separator of texts, and characters that are white space
# to Python's `re` but not to Unicode.
_ODD_CHARACTERS = (0, 0x1C, 0x1D, 0x1E, 0x1F)


class TokenCounter:
    """Counts tokens of rendered texts, in which special tokens are written out.

    Args:
        tokenizer: a tokenizer of transformers.

    Attributes:
        cut_table: where texts may be cut (`find_cuts`). None: whole texts are tokenized.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._count_by_piece: dict[bytes, int] = {}
        self.cut_table: np.ndarray | None = None
        if self._backend is not None:
            self.cut_table = find_cuts(json.loads(self._backend.to_str()))
        if self.cut_table is not None:
            # Where a special token may begin, by its first byte, and an expression that matches it.
            tokens = self._backend.get_added_tokens_decoder().values()
            added = [token.content.encode() for token in tokens]
            # The longest comes first, because a token may begin with another one.
            added.sort(key=len, reverse=True)
            self._special_tokens_pattern = re.compile(b"|".join(map(re.escape, added)))
            self._begins_special_token = np.isin(np.arange(256), [token[0] for token in added])
            # Truncation and padding would change the number of tokens of a piece.
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
        if self.cut_table is None:
            encodings = self._tokenizer(
                list(texts), add_special_tokens=False, return_attention_mask=False
            )
            counts = [len(ids) for ids in encodings["input_ids"]]
            bounds[:] = np.array(counts, dtype=np.int64)[:, None]
            return bounds
        if len(self._count_by_piece) > MAX_REMEMBERED_PIECES:
            # Common words are soon there again.
            self._count_by_piece.clear()
        encoded = [text.encode() for text in texts]
        bounds[:, 1] = [_max_num_tokens(text) for text in encoded]
        # Texts of few bytes are surely within the limit: 0 remains their lower bound.
        is_undecided = np.ones(len(texts), dtype=bool)
        if limit is not None:
            is_undecided = bounds[:, 1] > limit
        if is_undecided.any():
            undecided_texts = [encoded[number] for number in np.flatnonzero(is_undecided).tolist()]
            bounds[is_undecided] = self._bounds_from_pieces(undecided_texts, limit)
        return bounds

    def _bounds_from_pieces(self, texts: list[bytes], limit: int | None) -> np.ndarray:
        """Find the bounds of texts by their pieces.

        Args:
            texts: texts in UTF-8, which may have more tokens than the limit.
            limit: as for `bounds`.

        Returns:
            int64 [texts, 2], as for `bounds`.
        """
        # One array for all texts, separated by zero bytes, so that numpy does the work.
        together = b"\0".join(texts)
        # For each text, the position of the separator after it.
        ends = np.cumsum([len(text) + 1 for text in texts]) - 1
        starts = self._piece_starts(together, ends)
        # For each piece, the number of its text.
        owners = np.searchsorted(ends, starts)
        # Each separator is a piece too, which is not counted.
        is_counted = starts != ends[owners]

        # First bounds: at least one token for each piece, and at most one for each byte.
        num_pieces = np.bincount(owners[is_counted], minlength=len(texts))
        bounds = np.stack([num_pieces, [_max_num_tokens(text) for text in texts]], axis=1)
        if limit is not None:
            # A text with more pieces than `limit` is surely over it. Its first bounds say so, so its
            # pieces are left out from here on.
            is_counted &= (num_pieces <= limit)[owners]
        owners = owners[is_counted]
        # For each counted piece its position in `pieces`, which has each distinct piece once.
        codes, pieces = _distinct_pieces(together, starts, is_counted)

        # Look up the number of tokens of each distinct piece; 0 if not known.
        known_counts = map(self._count_by_piece.get, pieces, repeat(0))
        counts = np.array([*known_counts], dtype=np.int64)
        max_counts = counts.copy()
        unknown = np.flatnonzero(counts == 0)
        max_counts[unknown] = [_max_num_tokens(pieces[number]) for number in unknown.tolist()]

        def sum_by_text(values: np.ndarray) -> np.ndarray:
            """Add up the values of each text's pieces, int64 [texts].

            Args:
                values: a value for each distinct piece.
            """
            return np.bincount(owners, values[codes], minlength=len(texts)).astype(np.int64)

        # Second bounds, for the texts whose pieces were looked up: an unknown piece still has at
        # least one token, and at most one for each byte.
        is_undecided = np.bincount(owners, minlength=len(texts)) > 0
        narrower = np.stack([sum_by_text(np.maximum(counts, 1)), sum_by_text(max_counts)], axis=1)
        bounds[is_undecided] = narrower[is_undecided]
        lower, upper = bounds.T
        if limit is None:
            is_undecided &= lower < upper
        else:
            is_undecided &= (lower <= limit) & (upper > limit)

        # Texts that are still undecided get exact counts: tokenize the unknown pieces in them.
        is_needed = np.zeros(len(pieces), dtype=bool)
        is_needed[codes[is_undecided[owners]]] = True
        needed = np.flatnonzero(is_needed & (counts == 0))
        counts[needed] = self._count_tokens([pieces[number] for number in needed.tolist()])
        bounds[is_undecided] = sum_by_text(counts)[is_undecided, None]
        return bounds

    def _count_tokens(self, pieces: list[bytes]) -> list[int]:
        """Count the tokens of pieces, and remember the counts of short ones."""
        texts = [piece.decode() for piece in pieces]
        encodings = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        counts = [*map(len, encodings)]
        for piece, count in zip(pieces, counts, strict=True):
            if len(piece) <= _MAX_REMEMBERED_BYTES:
                self._count_by_piece[piece] = count
        return counts

    def _piece_starts(self, together: bytes, ends: np.ndarray) -> np.ndarray:
        """Find the positions where pieces begin. Each separator is a piece of its own.

        Args:
            together: the texts in UTF-8, separated by zero bytes.
            ends: the position after each text, [texts].

        Returns:
            Ascending positions, [pieces].
        """
        assert self.cut_table is not None
        characters = np.frombuffer(together, dtype=np.uint8)
        byte_pairs = characters[:-1].astype(np.uint16) << 8 | characters[1:]
        # `marks[i]` says whether to cut between the bytes `i` and `i + 1`, so that a piece starts at
        # `i + 1`, and whether to cut before the byte `i`, so that one starts at `i`.
        marks = self.cut_table[byte_pairs]
        # One entry for each position, and one for the end. `marks` has two entries fewer.
        is_start = np.zeros(len(characters) + 1, dtype=bool)
        is_start[1:-1] = marks & _BETWEEN
        is_start[:-2] |= marks >= _BEFORE
        # The tokenizer finds special tokens before it applies the expression, so they are not cut.
        for start in np.flatnonzero(self._begins_special_token[characters]).tolist():
            token = self._special_tokens_pattern.match(together, start)
            if token:
                is_start[start + 1 : token.end()] = False
                # A space before a special token belongs to the white space there, because no word
                # follows: do not cut before the space. Slices, because at `start` 0 there is none.
                is_start[start - 1 : start] &= together[start - 1 : start] != b" "
        # A piece begins with each text, and one with each separator.
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
        For each counted piece its position in the list of distinct pieces; and that list.
    """
    offsets = np.append(starts, len(together)).astype(np.int32)
    # An Arrow array that refers to the bytes of `together`: only the distinct pieces are copied.
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(together)]
    pieces = pa.Array.from_buffers(pa.binary(), len(starts), buffers)
    encoded = pieces.filter(pa.array(is_counted)).dictionary_encode()
    return encoded.indices.to_numpy(), encoded.dictionary.to_pylist()


def _max_num_tokens(text: bytes) -> int:
    """Upper bound of the number of tokens of a text: one for each byte that the tokenizer gets."""
    # The tokenizer may apply NFC first, which leaves ASCII unchanged and makes other texts at most
    # three times as long.
    return len(text) if text.isascii() else 3 * len(text)


def find_cuts(description: Mapping[str, Any]) -> np.ndarray | None:
    """Find the places where a tokenizer tokenizes the text on each side independently.

    Args:
        description: the tokenizer as in tokenizer.json.

    Returns:
        Table of `_BETWEEN` and `_BEFORE` for all pairs of bytes, at `256 * first + second`, uint8
        [65536]. None: texts must not be cut.
    """
    alternatives = _parse_alternatives(_splitting_pattern(description))
    texts = {tuple(part.text for part in parts) for parts in alternatives}
    # These two alternatives split a run of white space before its last space, if a word follows:
    # the space then belongs to the word. A text may be cut before that space if the conditions
    # below hold too.
    # They are also missing if the expression is empty or not understood.
    if not texts >= {(_ALL_BUT_LAST_SPACE,), (_SPACE_RUN,)}:
        return None
    # A match must have a space only as its first character, unless it is white space alone.
    for first, *later_parts in alternatives:
        if any(part.matches[_SPACE] for part in later_parts):
            return None
        if first.matches[_SPACE] and first.is_repeated and first.text not in _SPACES:
            return None
    table = np.zeros((256, 256), dtype=np.uint8)
    is_word = np.zeros(256, dtype=bool)
    is_word[0x21:0x7F] = True
    # First bytes in UTF-8 of characters beyond ASCII. Left out are first bytes of white space, such
    # as 0xC2 of U+00A0 and 0xE3 of U+3000.
    is_word[0xC3:0xE0] = True
    is_word[0xE4:0xF5] = True
    table[_SPACE, is_word] = _BEFORE
    # Texts are cut between two ASCII characters unless one match may have both. They are never cut
    # after white space, because `\s+(?!\S)` looks at what follows.
    is_cut = ~_held_together_pairs(alternatives)
    is_cut[[*_WHITE_SPACE]] = False
    table[:128, :128] |= is_cut.astype(np.uint8) * _BETWEEN
    return table.reshape(-1)


def _splitting_pattern(description: Mapping[str, Any]) -> str:
    """The regular expression by which a tokenizer splits texts into words.

    Args:
        description: the tokenizer as in tokenizer.json.

    Returns:
        The expression. It is empty if the tokenizer may do anything else in which a piece of text
        depends on its context: texts must not be cut then.
    """
    model = description["model"]
    if model.get("type") != "BPE" or model.get("dropout"):
        return ""
    # NFC never joins an ASCII character with the character before it, so it allows cuts before
    # ASCII. A tokenizer without a normalizer allows them too, and is treated like one with NFC.
    normalizer = description.get("normalizer") or {"type": "NFC"}
    steps = normalizer.get("normalizers", [normalizer])
    if any(step["type"] != "NFC" for step in steps):
        return ""
    # With a token for each byte there is no unknown token, which could stand for several
    # characters.
    if not model["vocab"].keys() >= _ALPHABET:
        return ""
    # A special token must not change how the text around it is tokenized.
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
        matches: for each ASCII character whether the part may match it, bool [128]; all true if
            that is not known.
        matches_alone: whether the part matches each of these characters on its own.
        is_optional: whether the part may match nothing.
        is_repeated: whether the part may match several characters.
    """

    text: str
    matches: np.ndarray
    matches_alone: bool = False
    is_optional: bool = False
    is_repeated: bool = True

    @classmethod
    def parse(cls, text: str) -> "_RegexPart":
        """Find out what a part matches. A part that is not understood may match anything."""
        if text in _SPACES:
            # Only `\s+` matches any single white space; the others need a line break, or depend on
            # what follows.
            return cls(
                text, np.isin(np.arange(128), [*_WHITE_SPACE]), matches_alone=text == _SPACE_RUN
            )

        match = _PART.fullmatch(text)
        base, quantifier = match.groups(default="") if match else ("", "")
        is_optional = quantifier[:1] in ("*", "?") or quantifier.startswith("{0")
        is_repeated = quantifier[:1] in ("*", "+", "{")
        # A quantifier such as `{2,3}` asks for more than one character.
        matches_alone = not re.match(r"\{([2-9]|\d\d)", quantifier)
        # A group of words, `(?i:...)`, is treated as a class of the letters in them, which may come
        # in any order and number.
        if base.startswith("("):
            letters = base[4:-1].replace("|", "")
            base = f"[{letters}{letters.swapcase()}]"
            matches_alone = False
            is_repeated = True

        properties = {*re.findall(r"\\p\{(\w+)\}", base)}
        has_other_syntax = re.search(r"\\P|&&|\[:|-\\|\}-", base)
        if base == "" or has_other_syntax or not properties <= _ASCII_OF_PROPERTY.keys():
            return cls(text, np.ones(128, dtype=bool))

        # Python's `re` knows no properties of Unicode, so their ASCII characters are listed.
        plain = re.sub(r"\\p\{(\w+)\}", lambda match: _ASCII_OF_PROPERTY[match[1]], base)
        # Properties without ASCII characters would leave a class empty, which is an error, so add a
        # character beyond ASCII.
        plain = f"{plain[:-1]}\uffff]" if base.startswith("[") else f"[{plain}\uffff]"
        pattern = re.compile(plain)
        matches = np.array([pattern.match(chr(code)) is not None for code in range(128)])
        return cls(text, matches, matches_alone, is_optional, is_repeated)


def _parse_alternatives(pattern: str) -> list[list[_RegexPart]]:
    """Split a regular expression into its alternatives, and each of them into parts.

    Returns:
        The parts of each alternative; empty if the expression is not understood.
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
            part_texts = [""]  # not understood: one part, which may match anything
        alternatives.append([*map(_RegexPart.parse, part_texts)])
    return alternatives


def _held_together_pairs(alternatives: list[list[_RegexPart]]) -> np.ndarray:
    """Find the pairs of ASCII characters that may be neighbours in one word, bool [128, 128].

    Text between two matches of the expression is a word too. A character that no alternative is
    sure to match on its own may be in such a word, so it counts as a neighbour of all others.
    """
    is_held = np.zeros((128, 128), dtype=bool)
    is_surely_matched = np.zeros(128, dtype=bool)
    for parts in alternatives:
        for number, part in enumerate(parts):
            # Assume that any later part may follow directly, because the parts between may be
            # optional. A repeated part may also follow itself.
            following = parts[number if part.is_repeated else number + 1 :]
            if following:
                follows = np.any([other.matches for other in following], axis=0)
                is_held |= np.outer(part.matches, follows)
            others_are_optional = all(other.is_optional for other in parts if other is not part)
            if part.matches_alone and others_are_optional:
                is_surely_matched |= part.matches
    for code in [*_ODD_CHARACTERS, *np.flatnonzero(~is_surely_matched)]:
        is_held[code] = True
        is_held[:, code] = True
    return is_held
