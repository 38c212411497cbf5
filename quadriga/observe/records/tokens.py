# SPDX-License-Identifier: Apache-2.0
"""Token texts as bytes, and texts from token ids.

A token of a byte-level tokenizer may be a part of a character, so its text is bytes. The bytes of
consecutive tokens are joined before they are decoded.
"""

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""Stands for a space in tokens of SentencePiece."""


def _byte_level_alphabet() -> dict[str, int]:
    """Map the characters in the vocabulary of a byte-level tokenizer to bytes.

    A printable character of Latin-1 stands for the byte of the same number. The other bytes, in
    order, have the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    other_bytes = [byte for byte in range(256) if chr(byte) not in alphabet]
    for number, byte in enumerate(other_bytes):
        alphabet[chr(0x100 + number)] = byte
    return alphabet


_ALPHABET = _byte_level_alphabet()


def token_bytes(tokenizer: Any) -> tuple[list[bytes], set[int]]:
    """Bytes of each token of a tokenizer.

    Args:
        tokenizer: a tokenizer of transformers, or one of the user.

    Returns:
        The bytes of each token, in the order of token ids; and the ids of special tokens.
    """
    size = len(tokenizer)
    added_tokens = getattr(tokenizer, "added_tokens_decoder", {})
    special_ids = {number for number, token in added_tokens.items() if token.special}
    special_ids |= set(tokenizer.all_special_ids)
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    if decoder is None:
        # A tokenizer of the user, whose tokens may be in any form.
        return [tokenizer.decode([number]).encode() for number in range(size)], special_ids
    # The state of a decoder `Sequence` has a list of decoders. Another decoder is its own state.
    state = json.loads(decoder.__getstate__())
    decoders = {part["type"] for part in state.get("decoders", [state])}
    texts = []
    for number, token in enumerate(tokenizer.convert_ids_to_tokens(range(size))):
        if token is None:
            # An id in the vocabulary's range without a token.
            texts.append(b"")
        elif number in added_tokens:
            texts.append(added_tokens[number].content.encode())
        else:
            texts.append(_bytes_of(token, decoders))
    return texts, special_ids


def _bytes_of(token: str, decoders: set[str]) -> bytes:
    """Bytes of a token, from its form in the vocabulary.

    Args:
        token: the token in the vocabulary.
        decoders: types of the tokenizer's decoders.
    """
    if "ByteLevel" in decoders:
        if all(character in _ALPHABET for character in token):
            return bytes(_ALPHABET[character] for character in token)
        # An added token, which is in the vocabulary as plain text.
        return token.encode()
    # A byte that SentencePiece has no other token for, such as "<0x0A>".
    match = _BYTE_TOKEN.fullmatch(token)
    if match and "ByteFallback" in decoders:
        return bytes([int(match[1], 16)])
    if "WordPiece" in decoders:
        # "##" marks a token that continues a word. Any other token begins a word, after a space.
        is_inner = token.startswith("##")
        return token.removeprefix("##").encode() if is_inner else f" {token}".encode()
    return token.replace(_SPACE, " ").encode()


class TokenTable:
    """Token texts of a record.

    Args:
        texts: bytes by token id.
        special_ids: ids of special tokens.
    """

    def __init__(self, texts: Sequence[bytes], special_ids: Iterable[int]) -> None:
        self.texts = list(texts)
        self.special_ids = frozenset(special_ids)

    @classmethod
    def read(cls, path: Path) -> "TokenTable":
        """Read the table from a file that `write` wrote."""
        table = pq.read_table(path)
        is_special = table.column("is_special").to_numpy()
        return cls(table.column("bytes").to_pylist(), np.flatnonzero(is_special).tolist())

    def write(self, path: Path) -> None:
        """Write the table: `id`, `bytes` and `is_special` of each token."""
        ids = np.arange(len(self.texts), dtype=np.int32)
        table = pa.table(
            {
                "id": ids,
                "bytes": pa.array(self.texts, pa.binary()),
                "is_special": np.isin(ids, list(self.special_ids)),
            }
        )
        pq.write_table(table, path, compression="zstd")

    def decode(self, ids: Iterable[int], *, skips_special: bool = False) -> str:
        """Text of a sequence of tokens.

        Args:
            ids: token ids. An id outside the table is shown as `<|ID|>`.
            skips_special: whether to leave out special tokens.
        """
        parts = []
        for number in ids:
            if skips_special and number in self.special_ids:
                continue
            is_known = 0 <= number < len(self.texts)
            parts.append(self.texts[number] if is_known else b"<|%d|>" % number)
        return b"".join(parts).decode(errors="replace")
