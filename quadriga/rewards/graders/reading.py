# SPDX-License-Identifier: Apache-2.0
"""Reads answers from text: decimal numbers, answers in tags, boxes.

Numbers may have signs, thousands separators and a currency sign. Every function takes time linear
in the length of the text: a model may write any text.
"""

import re
from decimal import MAX_EMAX, MAX_PREC, MIN_EMIN, Context, Decimal

# Arithmetic in this context is exact for any number that a response may hold.
_EXACT = Context(prec=MAX_PREC, Emax=MAX_EMAX, Emin=MIN_EMIN)

# A hyphen is a minus sign only if no word, digit or closing bracket precedes it: "3-5" ends in 5,
# not in -5.
_NUMBER = re.compile(
    r"""
    (?P<minus_before>(?<![\w.)\]])[-\u2212])?
    \$?
    (?P<digits>
        (?: [0-9]{1,3}(?:,[0-9]{3})+(?![0-9]) | [0-9]+ ) (?:\.[0-9]+)?
        | \.[0-9]+
    )
    """,
    re.VERBOSE,
)
# A number on its own may have separators anywhere ("12,34"), because it cannot be several numbers.
_LONE_NUMBER = re.compile(
    r"[\s*_`]*+(?P<minus_before>[-\u2212]?)\s*+\$?\s*+(?P<minus_after>[-\u2212]?)(?P<digits>[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)"
)

# A number between marks of Markdown: **18**, *18*, __18__, `18`.
_EMPHASIS = re.compile(
    r"(?<![\w*`])(?P<mark>\*{1,3}|_{1,3}|`{1,3})(?P<number>[-+\u2212]?\\?\$?[0-9][0-9,]*(?:\.[0-9]+)?(?:\\?%)?)\.?(?P=mark)(?![\w*`])"
)
_MARK_AS_TEXT = re.compile(r"\\text\{([^{}A-Za-z\\]*)\}")
_MIXED_NUMBER = re.compile(r"(?<![\w.,/}])([0-9]{1,9})[ \t]+([0-9]{1,9})/([0-9]{1,9})(?![\w/])")
_POINT_AT_THE_END = re.compile(r"(?<=[0-9])\.(?=\s*(?:\Z|[$}]))")

# An answer that is never closed matches up to the end of the text. Otherwise the expression would
# search the rest of the text once for each <answer>, in quadratic time.
_ANSWER = re.compile(r"<answer>(.*?)(</answer>|\Z)", re.DOTALL)


def find_numbers(text: str) -> list[Decimal]:
    """Find all decimal numbers in a text, in order."""
    return [
        _decimal(match["digits"], is_negative=bool(match["minus_before"]))
        for match in _NUMBER.finditer(text)
    ]


def leading_number(text: str) -> Decimal | None:
    """Read the number at the start of a text; None if there is none.

    Blanks, marks of Markdown, a sign and a currency sign may precede the digits.
    """
    match = _LONE_NUMBER.match(text)
    if match is None:
        return None
    return _decimal(
        match["digits"], is_negative=bool(match["minus_before"] or match["minus_after"])
    )


def true_number(ground_truth: object) -> Decimal:
    """Read a ground truth that is a number.

    Raises:
        ValueError: the ground truth is no number. Every answer would silently score 0.
    """
    number = leading_number(str(ground_truth))
    if number is None:
        raise ValueError(f"ground truth: got {ground_truth!r}, expected a number")
    return number


def plain_text(number: Decimal | None) -> str | None:
    """Write a number in a canonical form, so that 7.0 and 7.00 are one answer in a majority vote.

    None stands for no answer, and stays None.
    """
    if number is None:
        return None
    return "0" if number == 0 else format(number.normalize(_EXACT), "f")


def _decimal(digits: str, *, is_negative: bool) -> Decimal:
    """Convert matched digits, which may have thousands separators, to a number."""
    number = Decimal(digits.replace(",", ""))
    # `copy_negate` is exact, whereas `-number` rounds to the precision of the decimal context.
    return number.copy_negate() if is_negative else number


def plain_math(text: str) -> str:
    r"""Rewrite five forms of LaTeX and Markdown that libraries misread.

    `7 3/4` becomes `31/4`, `3.` becomes `3`, `11\text{:}30` becomes `11:30`, `\varnothing` becomes
    `\emptyset`, and `**18**` becomes `18`.
    """
    text = _EMPHASIS.sub(lambda match: match["number"], text)
    text = _MARK_AS_TEXT.sub(r"\1", text).replace("\\varnothing", "\\emptyset")
    # A mixed number, "7 3/4", has the groups 7, 3 and 4.
    text = _MIXED_NUMBER.sub(
        lambda match: f"{int(match[1]) * int(match[3]) + int(match[2])}/{int(match[3])}", text
    )
    return _POINT_AT_THE_END.sub("", text)


def last_answer(text: str) -> str | None:
    """Read the last closed `<answer>...</answer>`; None if there is none."""
    closed = [answer for answer, end in _ANSWER.findall(text) if end]
    return closed[-1] if closed else None


def last_box(text: str) -> str | None:
    """Read the last `\\boxed{...}`; None if there is none, or if it is never closed."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    begin = start + len("\\boxed{")
    depth = 1  # number of open braces
    for position in range(begin, len(text)):
        # A brace after a backslash is a character of the answer.
        if text[position] in "{}" and text[position - 1] != "\\":
            depth += 1 if text[position] == "{" else -1
            if depth == 0:
                return text[begin:position]
    return None
