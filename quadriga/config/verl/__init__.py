# SPDX-License-Identifier: Apache-2.0
"""verl's keys that have no field here, each with the one sentence that its user needs."""

import re
from functools import cache

from quadriga.config.verl.rule import SECTIONS, Rule
from quadriga.config.verl.run_keys import DATA, REWARD, ROLLOUT, RUN
from quadriga.config.verl.training_keys import BATCHING, COMPUTE, LOSS, MODEL, OPTIMIZER, PARALLEL

__all__ = ["RULES", "Rule", "rule_for"]

RULES = (*PARALLEL, *BATCHING, *COMPUTE, *MODEL, *OPTIMIZER, *LOSS, *ROLLOUT, *REWARD, *DATA, *RUN)
"""The first rule whose pattern fits a key holds."""


@cache
def _compiled() -> tuple[tuple[re.Pattern[str], Rule], ...]:
    """The patterns as regular expressions; built on first use, for many command lines never need them."""
    compiled = []
    for rule in RULES:
        text = re.escape(rule.pattern).replace(r"\*", ".*")
        for name, alternatives in SECTIONS.items():
            text = text.replace(re.escape(name), alternatives)
        compiled.append((re.compile(text), rule))
    return tuple(compiled)


def rule_for(key: str) -> Rule | None:
    """The rule that a dotted key without a field falls under, if any."""
    return next((rule for pattern, rule in _compiled() if pattern.fullmatch(key)), None)
