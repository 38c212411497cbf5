# SPDX-License-Identifier: Apache-2.0
"""Decides by the text of an expression in LaTeX whether it can be evaluated at reasonable cost.

A short text may stand for a number that no memory holds (9^{9^{9^9}}), or take a parser minutes
(((((...))))). So an upper bound of each number is computed as log10, through powers, factorials,
binomials, sums and products. A letter counts as 1. In a text with a sum or product sign a letter
may be an index, so it counts as the largest number of the text.
"""

import math
import re
from collections import deque

MAX_CHARS = 4000
MAX_NESTING = 12
MAX_OPERATORS = 120
MAX_BARS = 20
MAX_DIGITS = 20_000.0
# Bounds, which are log10 of numbers, are capped here, far beyond MAX_DIGITS, to stay finite.
# Exponents in 10**exponent are capped at 18 for the same reason.
_HUGE = 1e18

# Commands for opening and closing brackets, among them those of matrices; commands that only set
# the size of a bracket; and a pair of bars.
_OPENING = re.compile(r"\\(?:begin\{[^{}]*\}|[lc]floor|lceil|lbrace|langle|\{)")
_CLOSING = re.compile(r"\\(?:end\{[^{}]*\}|rfloor|rceil|rbrace|rangle|\})")
_SIZES = re.compile(r"\\(?:left|right|[bB]igg?[lrm]?)(?![A-Za-z])\.?")
_BETWEEN_BARS = re.compile(r"\|([^|]*)\|")
_IDENTITY = re.compile(r"\\operatorname\{eye\}")
_TOKEN = re.compile(
    r"(?:[0-9][0-9,]*\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|\\[A-Za-z]+|\\.|\S", re.DOTALL
)
_NUMBER = re.compile(r"[0-9]|\.[0-9]")
_SEPARATORS = frozenset(
    [*"+-=<>,;&", "\\pm", "\\mp", "\\\\", "\\neq", "\\ne", "\\le", "\\leq", "\\ge", "\\geq"]
)
_OPERATORS = _SEPARATORS - {",", ";", "&"} | {"*", "/", "^", "\\cdot", "\\times", "\\div"}


def why_ungradable(latex: str) -> str:
    """Say why an expression must not be evaluated.

    Args:
        latex: the expression.

    Returns:
        The reason; "" if the expression is within all bounds.
    """
    if len(latex) > MAX_CHARS:
        return f"it has more than {MAX_CHARS} characters"
    if latex.count("|") > MAX_BARS:
        return f"it has more than {MAX_BARS} bars"
    # Replace brackets of all kinds, and pairs of bars, by parentheses.
    text = _IDENTITY.sub(r"\\eye", _SIZES.sub("", latex.replace("**", "^")))
    text = _CLOSING.sub(")", _OPENING.sub("(", text))
    tokens = _TOKEN.findall(_BETWEEN_BARS.sub(r"(\1)", text))

    depth = 0
    deepest = 0
    lowest = 0  # negative if there are closing brackets without an opening one, as in "]1, 2["
    for token in tokens:
        if token in "([{":
            depth += 1
        elif token in ")]}":
            depth -= 1
        deepest = max(deepest, depth)
        lowest = min(lowest, depth)
    if deepest - lowest > MAX_NESTING:
        return f"its brackets are nested more than {MAX_NESTING} deep"
    if sum(token in _OPERATORS for token in tokens) > MAX_OPERATORS:
        return f"it has more than {MAX_OPERATORS} operators"

    # A closing bracket without an opening one would end the sum, and hide what follows.
    tokens = ["("] * -lowest + tokens
    # The log10 of a number is its number of digits.
    magnitude = _Magnitude(tokens)
    num_digits = magnitude.of_sum()
    if "\\sum" in tokens or "\\prod" in tokens:
        # An index may be as large as the largest number in the text, and a product may have as many
        # factors. `largest` is a log10, too.
        largest = min(magnitude.largest, 18.0)
        num_digits = _Magnitude(tokens, letter=largest).of_sum()
        if "\\prod" in tokens:
            num_digits *= 10**largest
    return f"it may have more than {MAX_DIGITS:,.0f} digits" if num_digits > MAX_DIGITS else ""


class _Magnitude:
    """Recursive-descent reader of tokens that computes upper bounds of numbers, as log10.

    Args:
        tokens: tokens of the expression. Each method removes the tokens that it reads from the
            left.
        letter: log10 of the largest number that a letter may stand for.

    Attributes:
        largest: the largest bound (log10) of a number so far.
    """

    def __init__(self, tokens: list[str], letter: float = 0.0) -> None:
        self._tokens = deque(tokens)
        self._letter = letter
        self.largest = 0.0

    def of_sum(self) -> float:
        """Bound the sum that ends at the next closing bracket or at the end of the text.

        Separators such as "=" and "," count as plus signs.
        """
        largest = 0.0  # bound of the largest term so far
        product = 0.0  # bound of the current term, a product of factors
        num_terms = 1
        while self._tokens:
            if self._tokens[0] in ")]}":
                self._tokens.popleft()
                break
            if self._tokens[0] in _SEPARATORS:
                self._tokens.popleft()
                product = 0.0
                num_terms += 1
                continue
            # In log10, a product is a sum of logarithms.
            product += self._of_factor()
            largest = max(largest, product)
        # The sum is at most `num_terms` times the largest term.
        return min(largest + math.log10(num_terms), _HUGE)

    def _of_factor(self) -> float:
        """Bound an atom together with the exponents, indices and factorials after it."""
        value = self._of_atom()
        while self._tokens and self._tokens[0] in ("^", "_", "!"):
            mark = self._tokens.popleft()
            if mark == "!":
                value = _factorial(value)
                continue
            # Skip the sign of an exponent: a negative one counts as a positive one.
            while self._tokens and self._tokens[0] in "+-":
                self._tokens.popleft()
            # An index, after "_", does not change the value.
            script = self._of_factor()
            if mark == "^":
                value *= 10 ** min(script, 18.0)
        value = min(value, _HUGE)
        self.largest = max(self.largest, value)
        return value

    def _of_atom(self) -> float:
        """Bound a number, a letter, an expression in brackets, or a command with its arguments."""
        token = self._tokens.popleft() if self._tokens else ""
        if token in ("(", "[", "{"):
            return self.of_sum()
        if _NUMBER.match(token):
            return _log10(token)
        if token in ("\\Gamma", "\\gamma"):
            return _factorial(self._of_factor())
        if token == "\\eye":
            # An identity matrix of n rows has n**2 elements, each of which counts as a digit.
            return 10 ** min(2 * self._of_factor(), 18.0)
        # A letter, or a sign such as "|", which counts as 1 (log10 is 0).
        if not token.startswith("\\"):
            return self._letter if token.isalpha() else 0.0
        # A command: bound the product of its arguments.
        groups = []
        while self._tokens and self._tokens[0] in ("{", "["):
            self._tokens.popleft()
            groups.append(self.of_sum())
        if token.endswith("binom") and len(groups) == 2:
            above, below = groups
            # A binomial coefficient of n and k is at most 2**n, and at most n**k.
            return min(10 ** min(above, 18.0), above * 10 ** min(below, 18.0))
        return sum(groups)


def _log10(number: str) -> float:
    """Upper bound of the absolute value of log10 of a decimal number.

    Args:
        number: the number, such as "1,000.5e7". It may have too many digits for a float.
    """
    mantissa, _, exponent = number.lower().replace(",", "").partition("e")
    # `float` would be infinite for more than 308 digits. Then the number of digits is the bound.
    value = float(mantissa) if len(mantissa) < 300 else 0.0
    size = abs(math.log10(value)) if value else float(len(mantissa))
    return min(size + abs(int(exponent or 0)), _HUGE)


def _factorial(log10: float) -> float:
    """Log10 of the factorial of a number.

    Args:
        log10: log10 of the number.
    """
    return math.lgamma(10 ** min(log10, 17.0) + 1) / math.log(10)
