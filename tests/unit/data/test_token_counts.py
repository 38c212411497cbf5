# SPDX-License-Identifier: Apache-2.0
"""Counting by pieces gives what the tokenizer gives, for the expressions that models use; others are not cut."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from quadriga.data import token_counts
from quadriga.data.token_counts import TokenCounter

CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
END = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
PATTERNS = {
    "digits one by one": [rf"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{END}"],
    "digits in threes": [rf"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{END}"],
    "upper and lower": [
        rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{CONTRACTION}?|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{CONTRACTION}?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "built in": [],
    "a letter and a point": [
        r"\p{L}+[.,]?|\p{N}{2}|[^\s\p{L}\p{N}]|\s+(?!\S)|\s+"
    ],  # a single digit is in no match
    "words alone": [r" ?\p{L}+|\s+(?!\S)|\s+"],
}
WORDS = [
    "the",
    "and",
    "what",
    "is",
    "2",
    "+",
    "37",
    "isn't",
    "WE'LL",
    "éa",
    "e\u0301",
    "\u0301x",
    "一二",
    "def",
    "f(x):",
]
WORDS += [
    "\n",
    "\t",
    "\u00a0",
    "\u2028",
    "<|end|>",
    "<|end",
    "d|>",
    "<",
    "\x1c",
    "\0",
    "...",
    "'s'",
    "x.y",
    "a1b",
    "🙂",
]
CORPUS = [
    "the the and what is what is the 2 + 37 isn't 一二 def f(x):\n    return x and the 123 4567"
] * 3


def build(patterns: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not patterns)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, level])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=340, initial_alphabet=alphabet, special_tokens=["<|end|>"]
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def wrapped(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


TOKENIZERS = {name: build(patterns) for name, patterns in PATTERNS.items()}
COUNTERS = {name: TokenCounter(wrapped(tokenizer)) for name, tokenizer in TOKENIZERS.items()}
TEXTS = st.lists(st.sampled_from([*WORDS, "", " "]) | st.text(max_size=3), max_size=12)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(
    texts=st.lists(st.tuples(TEXTS, st.sampled_from([" ", ""])), max_size=4),
    limit=st.integers(0, 40) | st.none(),
)
@settings(max_examples=150, deadline=None)
def test_a_text_has_as_many_tokens_as_its_pieces(name: str, texts: list, limit: int | None):
    counter = COUNTERS[name]
    written = [between.join(words) for words, between in texts]
    expected = np.array(
        [len(TOKENIZERS[name].encode(text, add_special_tokens=False).ids) for text in written]
    )
    least, most = counter.bounds(written, limit).T
    assert (least <= expected).all() and (expected <= most).all()
    if limit is None:
        assert (least == most).all()
    else:
        assert ((least == most) | (most <= limit) | (least > limit)).all()


def test_texts_are_cut_where_that_is_the_same():
    pairs = [
        b"a.",
        b".a",
        b"a ",
        b"a1",
        b"1a",
        b"12",
        b"aB",
        b"a'",
        b"'l",
        b". ",
        b"..",
        b"a\n",
        b".\n",
    ]
    found = {
        name: [one.decode() for one in pairs if counter.cut_table[256 * one[0] + one[1]]]
        for name, counter in COUNTERS.items()
    }
    assert found["digits one by one"] == ["a.", "a ", "a1", "1a", "12", "a'", ". ", "a\n"]
    assert found["digits in threes"] == ["a.", "a ", "a1", "1a", "a'", ". ", "a\n"]
    # That of upper and lower takes contractions with the word before them.
    assert found["upper and lower"] == ["a.", "a ", "a1", "1a", "aB", ". ", "a\n"]
    # In the built-in one "'l" begins a contraction.
    assert found["built in"] == ["a.", ".a", "a ", "a1", "1a", "a'", ". ", "a\n", ".\n"]
    assert found["a letter and a point"] == [".a", "a ", "a'", "'l", ". ", "..", "a\n", ".\n"]
    assert found["words alone"] == ["a ", "a\n"]


def test_what_is_known_is_not_tokenized_again(monkeypatch: pytest.MonkeyPatch):
    tokenizer = TOKENIZERS["digits one by one"]
    counter = TokenCounter(wrapped(tokenizer))
    texts = ["what is the the\nwhat", "the what", f"the {'x' * 60}", "the \0 what"]
    expected = [len(tokenizer.encode(text).ids) for text in texts]
    for _ in range(2):
        assert counter.bounds(texts[:3], None)[:, 0].tolist() == expected[:3]
        assert set(counter._count_by_piece) == {
            b"what",
            b" is",
            b" the",
            b"\nwhat",
            b"the",
            b" what",
        }
    assert counter.bounds(texts, None)[:, 0].tolist() == expected
    monkeypatch.setattr(token_counts, "MAX_REMEMBERED_PIECES", 1)
    assert counter.bounds(["what"], None).tolist() == [[1, 1]]
    assert set(counter._count_by_piece) == {b"what"}


def test_few_bytes_and_many_words_need_no_tokenizer():
    counter = TokenCounter(wrapped(TOKENIZERS["digits one by one"]))
    assert counter.bounds(["what", "é", "a b c d e f g h"], 6).tolist() == [[0, 4], [0, 6], [8, 15]]
    assert not counter._count_by_piece
    # What is known of one of them is enough for the other.
    assert counter.bounds(["the the the the"], 4).tolist() == [[4, 4]]
    assert counter.bounds(["the the the the and"], 11).tolist() == [[5, 8]]
    assert set(counter._count_by_piece) == {b"the", b" the"}


@pytest.mark.parametrize(
    "change",
    [
        lambda one: setattr(one, "normalizer", normalizers.NFKC()),
        lambda one: setattr(
            one,
            "pre_tokenizer",
            pre_tokenizers.Sequence(
                [pre_tokenizers.Digits(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
            ),
        ),
        lambda one: setattr(one, "normalizer", normalizers.Prepend("_")),
        lambda one: one.add_tokens([AddedToken("two words")]),
        lambda one: one.add_tokens([AddedToken("<x>", lstrip=True)]),
        lambda one: one.add_tokens([AddedToken("word", single_word=True)]),
        lambda one: setattr(one, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)),
        lambda one: setattr(one, "pre_tokenizer", pre_tokenizers.Metaspace()),
        lambda one: setattr(one, "model", models.BPE(dropout=0.1)),
        lambda one: setattr(one, "model", models.WordLevel({"a": 0}, unk_token="a")),
        lambda one: setattr(
            one, "model", models.BPE({"a": 0, "\u0120": 1}, [])
        ),  # other bytes have no token
        lambda one: one.add_tokens([AddedToken("<é>", normalized=True)]),
        *(
            lambda one, pattern=pattern: setattr(
                one,
                "pre_tokenizer",
                pre_tokenizers.Sequence(
                    [
                        pre_tokenizers.Split(Regex(pattern), "isolated"),
                        pre_tokenizers.ByteLevel(False, use_regex=False),
                    ]
                ),
            )
            for pattern in (
                r"\p{L}+ ?|\s+",  # a space at the end of a word
                r"[\p{L} ]+|\s+",
                r"[^\n]+|\s+",
                r".+|\s+",
                r"\p{L}+\s?|\s+",
                r"\p{L}+(?= )|\s+",
                r"(?:\p{L}+ )+|\s+",
                r"\p{L}+\b|\s+",
                r"\p{L}+[!-\x7f]|\s+|[ -/]\p{N}+[ -/]",
                r" ?\p{L}+",  # two words that are none may stay together
            )
        ),
    ],
)
def test_where_a_word_may_hold_a_space_the_tokenizer_counts(change):
    tokenizer = build([])
    change(tokenizer)
    counter = TokenCounter(wrapped(tokenizer))
    assert counter.cut_table is None
    assert (
        counter.bounds(["a a"], 1)[0].tolist()
        == [len(tokenizer.encode("a a", add_special_tokens=False).ids)] * 2
    )
