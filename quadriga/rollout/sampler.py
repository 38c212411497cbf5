# SPDX-License-Identifier: Apache-2.0
"""From logits to tokens, and when to stop.

A token is drawn by halving: the vocabulary is cut in two, a uniform number decides for one half by what each weighs,
and so on, first among blocks of the vocabulary, then in the block. That reads the logits four times and sorts nothing.
Each decision has a number of its own: logits that differ by 1e-5 then choose another token in 3 of 1e5 draws. A single
number, cut by the cumulative distribution, would meet a boundary of some token a hundred times as often. The numbers
of a sequence come from a counter-based generator with the sequence's own seed, so neighbours in the batch, their number
and their order change nothing.

Legend: R rows, V vocabulary, C tokens of a block.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from quadriga.errors import RolloutError
from quadriga.rollout.interface import Sampling, SamplingParams

_BLOCK = 256
NUM_DRAWS = 24  # numbers for a token: one for each halving, so enough for 2**24 tokens
_FIRST_TOP = (
    512  # tokens that a search for top-p sorts at first; the search widens where they are too few
)
_SLACK = 8  # tokens before the longest stop string: a decoder may treat the first tokens of a sequence in another way


class Draws:
    """The uniform numbers of one sequence, token by token."""

    def __init__(self, seed: int) -> None:
        self._generator = np.random.Generator(np.random.Philox(key=seed))

    def next(self) -> np.ndarray:
        """[NUM_DRAWS] float64 in [0, 1), for the next token."""
        return self._generator.random(NUM_DRAWS)


@dataclass(frozen=True)
class SamplingRules:
    """The sampling parameters of all rows as columns; a column that would change no row is None.

    `temperature`, `top_p`, `min_p` are [R, 1] float32, `top_k` [R, 1] int64, `is_greedy` [R] bool.
    """

    temperature: torch.Tensor | None
    top_p: torch.Tensor | None
    top_k: torch.Tensor | None
    min_p: torch.Tensor | None
    is_greedy: torch.Tensor | None
    all_greedy: bool

    @property
    def has_no_filters(self) -> bool:
        """Whether a token may be any."""
        return self.top_p is None and self.top_k is None and self.min_p is None

    @classmethod
    def from_params(
        cls, params: Sequence[SamplingParams], device: torch.device | str = "cpu"
    ) -> "SamplingRules":
        """The rules of rows in the order of `params`."""

        def column(values: list[float], neutral: float) -> torch.Tensor | None:
            if all(value == neutral for value in values):
                return None
            return torch.tensor(values, device=device)[:, None]

        greedy = [one.is_greedy for one in params]
        drawn = [one for one in params if not one.is_greedy]
        filters = drawn and params  # greedy rows need none, and theirs are neutral
        return cls(
            temperature=column(
                [1.0 if one.is_greedy else float(one.temperature) for one in params], 1.0
            ),
            top_p=column([1.0 if one.is_greedy else float(one.top_p) for one in filters], 1.0),
            top_k=column([0 if one.is_greedy else max(one.top_k, 0) for one in filters], 0),
            min_p=column([0.0 if one.is_greedy else float(one.min_p) for one in filters], 0.0),
            is_greedy=torch.tensor(greedy, device=device) if any(greedy) else None,
            all_greedy=not drawn,
        )


def sample(
    logits: torch.Tensor, rules: SamplingRules, uniforms: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One token for each row.

    Args:
        logits: [R, V] float32; overwritten.
        rules: of the rows.
        uniforms: [R, NUM_DRAWS] float64 in [0, 1).

    Returns:
        tokens [R] int64, their log-probabilities [R] float32 before top-k, top-p and min-p, and after them. Greedy rows
        take the likeliest token, the lowest id among equals, and the second number is 0: nothing else could come.
    """
    likeliest = logits.argmax(-1) if rules.is_greedy is not None else None
    if rules.temperature is not None:
        logits.div_(rules.temperature)
    decided = likeliest if rules.all_greedy else None  # nothing is left to draw
    highest = (
        logits.amax(-1, keepdim=True) if decided is None else logits.gather(1, decided[:, None])
    )
    odds = logits.sub_(highest).exp_()
    threshold = _threshold(odds, rules)
    kept = odds if threshold is None else odds.masked_fill(odds < threshold, 0.0)
    sums = _block_sums(odds)
    total = sums.sum(-1)
    kept_sums = sums if kept is odds else _block_sums(kept)
    if decided is None:
        tokens = _draw(kept, kept_sums, uniforms)
        if likeliest is not None and rules.is_greedy is not None:
            tokens = torch.where(rules.is_greedy, likeliest, tokens)
    else:
        tokens = decided
    chosen = odds.gather(1, tokens[:, None])[:, 0].double()
    log_probs = (chosen / total).log().float()
    drawn = log_probs if kept is odds else (chosen / kept_sums.sum(-1)).log().float()
    if rules.is_greedy is not None:
        drawn = torch.where(rules.is_greedy, torch.zeros_like(drawn), drawn)
    return tokens, log_probs, drawn


def _block_sums(odds: torch.Tensor) -> torch.Tensor:
    """[R, V] -> [R, ceil(V / C)] float64"""
    whole = odds.shape[1] - odds.shape[1] % _BLOCK
    sums = odds[:, :whole].unflatten(1, (-1, _BLOCK)).sum(-1) if whole else odds[:, :0]
    if whole < odds.shape[1]:
        sums = torch.cat((sums, odds[:, whole:].sum(-1, keepdim=True)), 1)
    return sums.double()


def _draw(odds: torch.Tensor, sums: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The tokens [R] that `uniforms` [R, NUM_DRAWS] choose by `odds` [R, V], whose blocks weigh `sums`."""
    block, num_used = _descend(sums, uniforms)
    columns = block * _BLOCK + torch.arange(_BLOCK, device=odds.device)
    inside = odds.gather(1, columns.clamp(max=odds.shape[1] - 1)).double()
    inside.masked_fill_(columns >= odds.shape[1], 0.0)
    offset, _ = _descend(inside, uniforms[:, num_used:])
    tokens = (block * _BLOCK + offset)[:, 0]
    return tokens.clamp_(max=odds.shape[1] - 1)  # beyond it only where the odds are not numbers


def _descend(masses: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Choose entries [R, 1] of `masses` [R, X] by halving, never empty ones; and how many numbers that took.

    A number below 1 times a sum, rounded, stays below the sum, so a half that weighs nothing is not taken.
    """
    depth = (masses.shape[1] - 1).bit_length()
    level = torch.nn.functional.pad(masses, (0, 2**depth - masses.shape[1]))
    takes_upper = []
    for step in range(depth - 1, -1, -1):
        lower, upper = level.chunk(2, 1)
        level = lower + upper
        takes_upper.append(uniforms[:, step : step + 1] * level >= lower)
    entry = torch.zeros((masses.shape[0], 1), dtype=torch.int64, device=masses.device)
    for is_upper in reversed(takes_upper):
        entry = entry + is_upper.gather(1, entry) * is_upper.shape[1]
    return entry, depth


def _threshold(odds: torch.Tensor, rules: SamplingRules) -> torch.Tensor | None:
    """The odds [R, 1] below which top-k, then top-p among the rest, or min-p drop a token; None if none can be dropped.

    The largest entry of `odds` [R, V] is 1. Tokens as likely as the last one kept stay.
    """
    if rules.top_k is None and rules.top_p is None:
        return rules.min_p
    num_tokens = odds.shape[1]
    top_k = None if rules.top_k is None else rules.top_k.clamp(max=num_tokens)
    size = (
        _FIRST_TOP
        if top_k is None
        else max(int(top_k.max()), _FIRST_TOP if rules.top_p is not None else 1)
    )
    ranked = odds.topk(min(size, num_tokens)).values
    threshold = torch.zeros_like(ranked[:, :1])
    if top_k is not None:
        threshold = torch.where(top_k > 0, ranked.gather(1, (top_k - 1).clamp(min=0)), threshold)
    if rules.top_p is not None:
        mass = odds.double() if top_k is None else odds.masked_fill(odds < threshold, 0.0).double()
        wanted = mass.sum(-1, keepdim=True) * rules.top_p
        while True:
            reached = ranked.double().cumsum(-1)
            is_enough = (reached[:, -1:] >= wanted) | (rules.top_p >= 1)
            if ranked.shape[1] == num_tokens or bool(is_enough.all()):
                break
            ranked = odds.topk(min(8 * ranked.shape[1], num_tokens)).values
        last = torch.searchsorted(reached, wanted).clamp_(max=ranked.shape[1] - 1)
        nucleus = torch.where(rules.top_p >= 1, torch.zeros_like(threshold), ranked.gather(1, last))
        threshold = torch.maximum(threshold, nucleus)
    return threshold if rules.min_p is None else torch.maximum(threshold, rules.min_p)


class StopStrings:
    """Finds stop strings at the end of a response that grows token by token.
    `strings`: any of them ends the response.
    `tokenizer`: decodes; a token stands for one byte at least."""

    def __init__(self, strings: Sequence[str], tokenizer: Any) -> None:
        self.strings, self.tokenizer = tuple(strings), tokenizer
        self.num_tokens = max((len(string.encode()) for string in strings), default=0) + _SLACK

    def is_reached(self, token_ids: Sequence[int]) -> bool:
        """Whether one of the strings stands at the end of the response, in its last tokens."""
        if not self.strings:
            return False
        tail = self.tokenizer.decode(list(token_ids[-self.num_tokens :]), skip_special_tokens=False)
        return any(string in tail for string in self.strings)

    def length(self, token_ids: Sequence[int]) -> int | None:
        """Tokens up to and with the one that completes the first of the strings; None if there is none."""
        if not self.strings:
            return None
        ends = range(1, len(token_ids) + 1)
        return next((end for end in ends if self.is_reached(token_ids[:end])), None)


def require_tokenizer(name: str, sampling: Sampling, tokenizer: Any) -> None:
    """Refuse stop strings where no tokenizer is there to decode tokens."""
    if tokenizer is None and any(params.stop for params in sampling):
        got, fix = (
            "stop strings, without a tokenizer",
            "Make the engine with tokenizer=, or use stop_token_ids.",
        )
        raise RolloutError(
            f"{name}.generate",
            got=got,
            expected="an engine that can decode what it generates",
            fix=fix,
        )
