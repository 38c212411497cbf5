# SPDX-License-Identifier: Apache-2.0
"""What graders read from running text: decimal numbers (signs, thousands separators, currency), answers in tags, boxes.

In time that is linear in the text.
"""

import re
from decimal import MAX_EMAX, MAX_PREC, MIN_EMIN, Context, Decimal

_EXACT = Context(
    prec=MAX_PREC, Emax=MAX_EMAX, Emin=MIN_EMIN
)  # a response may be a number of a million digits

# A hyphen is a minus sign only where no word, digit or closing bracket stands before it: "3-5" ends in 5, not in -5.
_NUMBER = re.compile(
    r"""
    (?P<sign>(?<![\w.)\]])[-\u2212])?
    \$?
    (?P<digits>
        (?: [0-9]{1,3}(?:,[0-9]{3})+(?![0-9]) | [0-9]+ ) (?:\.[0-9]+)?
        | \.[0-9]+
    )
    """,
    re.VERBOSE,
)
# One number on its own may carry its separators anywhere ("12,34"), because nothing else can be meant.
_LONE_NUMBER = re.compile(
    r"[\s*_`]*+(?P<sign>[-\u2212]?)\s*+\$?\s*+(?P<minus>[-\u2212]?)(?P<digits>[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)"
)

# A number between marks of Markdown: **18**, *18*, __18__, `18`.
_EMPHASIS = re.compile(
    r"(?<![\w*`])(?P<mark>\*{1,3}|_{1,3}|`{1,3})(?P<number>[-+\u2212]?\\?\$?[0-9][0-9,]*(?:\.[0-9]+)?(?:\\?%)?)\.?(?P=mark)(?![\w*`])"
)
_MARK_AS_TEXT = re.compile(r"\\text\{([^{}A-Za-z\\]*)\}")
_MIXED_NUMBER = re.compile(r"(?<![\w.,/}])([0-9]{1,9})[ \t]+([0-9]{1,9})/([0-9]{1,9})(?![\w/])")
_POINT_AT_THE_END = re.compile(r"(?<=[0-9])\.(?=\s*(?:\Z|[$}]))")

# To the end of the text where nothing closes it, so that the next one is not tried in vain: time is linear.
_ANSWER = re.compile(r"<answer>(.*?)(</answer>|\Z)", re.DOTALL)


def find_numbers(text: str) -> list[Decimal]:
    """Every number of the text, in order."""
    return [
        _decimal(match["digits"], is_negative=bool(match["sign"]))
        for match in _NUMBER.finditer(text)
    ]


def leading_number(text: str) -> Decimal | None:
    """The number that the text starts with, blanks and a currency sign aside."""
    match = _LONE_NUMBER.match(text)
    return (
        _decimal(match["digits"], is_negative=bool(match["sign"] or match["minus"]))
        if match
        else None
    )


def true_number(ground_truth: object) -> Decimal:
    """The ground truth as a number; ValueError where it is none: each answer would silently get 0."""
    if (number := leading_number(str(ground_truth))) is None:
        raise ValueError(f"ground truth: got {ground_truth!r}, expected a number")
    return number


def plain_text(number: Decimal | None) -> str | None:
    """The one way to write a number, so that "7", "7.0" and "7.00" are the same vote."""
    if number is None:
        return None
    return "0" if number == 0 else format(number.normalize(_EXACT), "f")


def _decimal(digits: str, *, is_negative: bool) -> Decimal:
    number = Decimal(digits.replace(",", ""))
    return number.copy_negate() if is_negative else number


def plain_math(text: str) -> str:
    r"""LaTeX in which five things that readers of mathematics take amiss are written plainly.
    `7 3/4` becomes 31/4, `3.` 3, `11\text{:}30` 11:30, `\varnothing` `\emptyset`, and **18** 18."""
    text = _EMPHASIS.sub(lambda found: found["number"], text)
    text = _MARK_AS_TEXT.sub(r"\1", text).replace("\\varnothing", "\\emptyset")
    text = _MIXED_NUMBER.sub(
        lambda found: f"{int(found[1]) * int(found[3]) + int(found[2])}/{int(found[3])}", text
    )
    return _POINT_AT_THE_END.sub("", text)


def last_answer(text: str) -> str | None:
    """What stands in the last `<answer>...</answer>`; None where there is none, or it is never closed."""
    closed = [answer for answer, end in _ANSWER.findall(text) if end]
    return closed[-1] if closed else None


def last_box(text: str) -> str | None:
    """What stands in the last `\\boxed{...}`; None where there is none, or it is never closed."""
    start = text.rfind("\\boxed{")
    depth = 0
    for position in range(start + len("\\boxed"), len(text) if start >= 0 else 0):
        if text[position] in "{}" and text[position - 1] != "\\":
            depth += 1 if text[position] == "{" else -1
            if depth == 0:
                return text[start + len("\\boxed{") : position]
    return None
