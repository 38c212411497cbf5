# SPDX-License-Identifier: Apache-2.0
"""Which LaTeX is evaluated and which is not, by its text alone."""

import pytest

from quadriga.rewards.bounds import why_ungradable


@pytest.mark.parametrize(
    ("latex", "reason"),
    [
        (r"9^{9^{9^{9}}}", "digits"),
        ("9^9^9", "digits"),
        ("9**9**9", "digits"),
        (r"2^{10^9} \mod 7", "digits"),
        (r"10^{1,000,000,000}", "digits"),
        ("3^{1 000 000 000}", "digits"),
        ("1e999999999", "digits"),
        (r"\left(\frac{1}{2}\right)^{10^9}", "digits"),
        (r"|10|^{10^9}", "digits"),
        (r"\sqrt{2}^{10^9}", "digits"),
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}^{10^9}", "digits"),
        (r"\lfloor 10.5 \rfloor^{10^9}", "digits"),
        (r"\sum_{k=1}^{10^9} 3^k", "digits"),
        (r"\prod_{k=1}^{10^6} k", "digits"),
        (r"\binom{10^9}{500000000}", "digits"),
        (r"\Gamma(10^8)", "digits"),
        (r"\operatorname{eye}(10000)", "digits"),
        ("(10^7)!", "digits"),
        ("10!!", "digits"),
        ("]1, 9^{9^{9^9}}[", "digits"),
        (")9^{9^{9^9}}", "digits"),
        ("-" * 3000 + "1", "operators"),
        ("(" * 40 + "1" + ")" * 40, "nested"),
        (")" * 40 + "1", "nested"),
        ("|" * 60, "bars"),
        ("9" * 5000, "characters"),
    ],
)
def test_what_no_machine_evaluates_is_refused(latex, reason):
    assert reason in why_ungradable(latex)


@pytest.mark.parametrize(
    "latex",
    [
        "42",
        "1:00",
        "]1, 2[",
        r"\frac{1}{2004!}",
        "2^{2004}-1",
        r"2^{1000}\cdot 3^{1000}",
        "10^{100}",
        "x^{2023}",
        r"(x+1)^{2023}",
        r"\binom{2023}{1011}",
        r"\sum_{n=1}^{\infty} \frac{1}{n^{2023}}",
        r"e^{10^9}",
        r"x=\frac{-b\pm\sqrt{b^2-4ac}}{2a}",
        ",".join(map(str, range(400))),
    ],
)
def test_answers_as_people_write_them_are_evaluated(latex):
    assert why_ungradable(latex) == ""
