# SPDX-License-Identifier: Apache-2.0
"""From logits to tokens, and when to stop.

A token is drawn by halving: the vocabulary is cut in two, a uniform number decides for one half by
the probability mass of each, and so on, first among blocks of the vocabulary, then in the block.
This reads the logits four times and sorts nothing. Each decision uses a new number, so that small
errors of the logits rarely matter: logits that differ by 1e-5 choose another token in 3 of 1e5
draws. A single number, looked up in the cumulative distribution, would be near the boundary of some
token a hundred times as often.

The numbers of a sequence come from a counter-based generator with the sequence's own seed. So other
sequences in the batch, their number and their order do not change it.

Legend: R rows, V vocabulary, C tokens of a block.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quadriga.errors import RolloutError
from quadriga.rollout.interface import Sampling, SamplingParams

_BLOCK = 256
# Numbers for a token: one for each halving, so enough for 2**24 tokens.
NUM_DRAWS = 24
# Tokens that a search for top-p sorts at first. It sorts more if they are too few.
_FIRST_TOP = 512
# Tokens decoded before the longest stop string: a decoder may treat the first tokens differently.
_SLACK = 8
# Parameters without effect on the distribution. `max_tokens` is not read.
_NEUTRAL = SamplingParams(max_tokens=1)


class Draws:
    """Generator of the uniform numbers of one sequence, token by token.

    Args:
        seed: seed of the sequence.
    """

    def __init__(self, seed: int) -> None:
        self._generator = np.random.Generator(np.random.Philox(key=seed))

    def next(self) -> np.ndarray:
        """[NUM_DRAWS] float64 in [0, 1), for the next token."""
        return self._generator.random(NUM_DRAWS)


@dataclass(frozen=True)
class SamplingRules:
    """The sampling parameters of all rows, as columns. None stands for a column without effect.

    Attributes:
        temperature: [R, 1] float32.
        top_p: [R, 1] float32.
        top_k: [R, 1] int64; 0: all tokens.
        min_p: [R, 1] float32.
        is_greedy: [R] bool.
        all_greedy: whether all rows are greedy.
    """

    temperature: Tensor | None
    top_p: Tensor | None
    top_k: Tensor | None
    min_p: Tensor | None
    is_greedy: Tensor | None
    all_greedy: bool

    @property
    def has_no_filters(self) -> bool:
        """Whether every token may be drawn."""
        return self.top_p is None and self.top_k is None and self.min_p is None

    @classmethod
    def from_params(
        cls, params: Sequence[SamplingParams], device: torch.device | str = "cpu"
    ) -> "SamplingRules":
        """The rules of a batch.

        Args:
            params: sampling parameters of each row.
            device: device of the columns.
        """

        def column(values: list[float], neutral: float) -> Tensor | None:
            if all(value == neutral for value in values):
                return None
            return torch.tensor(values, device=device)[:, None]

        greedy = [row.is_greedy for row in params]
        # Greedy rows need neither filters nor a temperature.
        rows = [_NEUTRAL if row.is_greedy else row for row in params]
        return cls(
            temperature=column([float(row.temperature) for row in rows], 1.0),
            top_p=column([float(row.top_p) for row in rows], 1.0),
            top_k=column([max(row.top_k, 0) for row in rows], 0),
            min_p=column([float(row.min_p) for row in rows], 0.0),
            is_greedy=torch.tensor(greedy, device=device) if any(greedy) else None,
            all_greedy=all(greedy),
        )


def sample(logits: Tensor, rules: SamplingRules, uniforms: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sample a token for each row.

    Greedy rows take the likeliest token, the lowest id among equals.

    Args:
        logits: [R, V] float32; overwritten.
        rules: sampling parameters of the rows.
        uniforms: [R, NUM_DRAWS] float64 in [0, 1).

    Returns:
        Token ids [R] int64; their log-probabilities [R] float32 before top-k, top-p and min-p; and
        those after these filters, which are 0 for greedy rows: no other token was possible.
    """
    likeliest = logits.argmax(-1) if rules.is_greedy is not None else None
    if rules.temperature is not None:
        logits.div_(rules.temperature)
    greedy_tokens = likeliest if rules.all_greedy else None
    # The likeliest tokens spare another pass over the logits.
    highest = (
        logits.amax(-1, keepdim=True)
        if greedy_tokens is None
        else logits.gather(1, greedy_tokens[:, None])
    )
    # Probabilities relative to the likeliest token's.
    odds = logits.sub_(highest).exp_()
    sums = _block_sums(odds)

    # Odds and sums after top-k, top-p and min-p.
    threshold = _threshold(odds, rules)
    filtered = odds
    filtered_sums = sums
    if threshold is not None:
        filtered = odds.masked_fill(odds < threshold, 0.0)
        filtered_sums = _block_sums(filtered)

    if greedy_tokens is None:
        tokens = _draw(filtered, filtered_sums, uniforms)
        if likeliest is not None and rules.is_greedy is not None:
            tokens = torch.where(rules.is_greedy, likeliest, tokens)
    else:
        tokens = greedy_tokens

    chosen = odds.gather(1, tokens[:, None])[:, 0].double()
    log_probs = (chosen / sums.sum(-1)).log().float()
    sampling_log_probs = log_probs
    if threshold is not None:
        sampling_log_probs = (chosen / filtered_sums.sum(-1)).log().float()
    if rules.is_greedy is not None:
        certain = torch.zeros_like(sampling_log_probs)
        sampling_log_probs = torch.where(rules.is_greedy, certain, sampling_log_probs)
    return tokens, log_probs, sampling_log_probs


def _block_sums(odds: Tensor) -> Tensor:
    """Sum of each block of the vocabulary: [R, V] -> [R, ceil(V / C)] float64."""
    num_tokens = odds.shape[1]
    num_full = num_tokens - num_tokens % _BLOCK  # tokens in full blocks
    sums = odds[:, :0]
    if num_full:
        sums = odds[:, :num_full].unflatten(1, (-1, _BLOCK)).sum(-1)
    if num_full < num_tokens:
        last_sum = odds[:, num_full:].sum(-1, keepdim=True)
        sums = torch.cat((sums, last_sum), 1)
    return sums.double()


def _draw(odds: Tensor, sums: Tensor, uniforms: Tensor) -> Tensor:
    """Draw tokens by halving.

    Args:
        odds: [R, V], in proportion to the probabilities.
        sums: [R, ceil(V / C)], sums of their blocks.
        uniforms: [R, NUM_DRAWS].

    Returns:
        Token ids [R].
    """
    last_token = odds.shape[1] - 1
    block, num_used = _descend(sums, uniforms)
    # The last block may have fewer tokens. Its columns beyond the last token get no mass.
    columns = block * _BLOCK + torch.arange(_BLOCK, device=odds.device)
    inside = odds.gather(1, columns.clamp(max=last_token)).double()
    inside.masked_fill_(columns > last_token, 0.0)
    offset, _ = _descend(inside, uniforms[:, num_used:])
    tokens = (block * _BLOCK + offset)[:, 0]
    # The index exceeds the last token only if the odds are NaN.
    return tokens.clamp_(max=last_token)


def _descend(masses: Tensor, uniforms: Tensor) -> tuple[Tensor, int]:
    """Choose an entry of each row by halving, never one without mass.

    A number below 1 times a sum, rounded, stays below the sum, so a half without mass is not taken.

    Args:
        masses: [R, X].
        uniforms: [R, at least log2 X].

    Returns:
        Indices of the entries [R, 1], and how many numbers of each row were used.
    """
    # Padded to a power of two by entries without mass, so that every level has two equal halves.
    depth = (masses.shape[1] - 1).bit_length()
    level = torch.nn.functional.pad(masses, (0, 2**depth - masses.shape[1]))
    # From the entries up to the total: whether each sum would choose its upper half.
    takes_upper = []
    for step in range(depth - 1, -1, -1):
        lower, upper = level.chunk(2, 1)
        level = lower + upper
        takes_upper.append(uniforms[:, step : step + 1] * level >= lower)
    # From the total down: follow the choices.
    entry = torch.zeros((masses.shape[0], 1), dtype=torch.int64, device=masses.device)
    for is_upper in reversed(takes_upper):
        entry = entry + is_upper.gather(1, entry) * is_upper.shape[1]
    return entry, depth


def _threshold(odds: Tensor, rules: SamplingRules) -> Tensor | None:
    """Odds below which a token is dropped: by top-k, then by top-p among those left, or by min-p.

    Tokens that are as likely as the last remaining one stay.

    Args:
        odds: [R, V]; the largest of each row is 1.
        rules: sampling parameters of the rows.

    Returns:
        [R, 1], or None if no token can be dropped.
    """
    if rules.top_k is None and rules.top_p is None:
        return rules.min_p
    num_tokens = odds.shape[1]
    top_k = None if rules.top_k is None else rules.top_k.clamp(max=num_tokens)
    # Sorting the whole vocabulary is slow, so take as few of the largest odds as suffice.
    size = 1 if rules.top_p is None else _FIRST_TOP
    if top_k is not None:
        size = max(int(top_k.max()), size)
    ranked = odds.topk(min(size, num_tokens)).values
    threshold = torch.zeros_like(ranked[:, :1])
    if top_k is not None:
        last = (top_k - 1).clamp(min=0)
        threshold = torch.where(top_k > 0, ranked.gather(1, last), threshold)
    # Top-p takes its share of what top-k has left.
    if rules.top_p is not None:
        mass = odds if top_k is None else odds.masked_fill(odds < threshold, 0.0)
        needed = mass.double().sum(-1, keepdim=True) * rules.top_p
        is_off = rules.top_p >= 1  # rows without top-p
        while True:
            # In float64: the sum of many small odds decides where the nucleus ends.
            reached = ranked.double().cumsum(-1)
            is_enough = (reached[:, -1:] >= needed) | is_off
            if ranked.shape[1] == num_tokens or bool(is_enough.all()):
                break
            # A flat distribution needs more than the largest ones so far.
            ranked = odds.topk(min(8 * ranked.shape[1], num_tokens)).values
        last = torch.searchsorted(reached, needed).clamp_(max=ranked.shape[1] - 1)
        nucleus = torch.where(is_off, torch.zeros_like(threshold), ranked.gather(1, last))
        threshold = torch.maximum(threshold, nucleus)
    return threshold if rules.min_p is None else torch.maximum(threshold, rules.min_p)


class StopStrings:
    """Finds stop strings at the end of a response that grows token by token.

    Args:
        strings: stop strings; any of them ends the response.
        tokenizer: decodes the response. A token stands for at least one byte.
    """

    def __init__(self, strings: Sequence[str], tokenizer: Any) -> None:
        self.strings = tuple(strings)
        self.tokenizer = tokenizer
        longest = max((len(string.encode()) for string in strings), default=0)
        self.num_tokens = longest + _SLACK

    def is_reached(self, token_ids: Sequence[int]) -> bool:
        """Whether the last tokens of the response contain one of the strings."""
        if not self.strings:
            return False
        tail = self.tokenizer.decode(list(token_ids[-self.num_tokens :]), skip_special_tokens=False)
        return any(string in tail for string in self.strings)

    def length(self, token_ids: Sequence[int]) -> int | None:
        """Number of tokens up to the one that completes the first stop string; None: no string."""
        if not self.strings:
            return None
        for end in range(1, len(token_ids) + 1):
            if self.is_reached(token_ids[:end]):
                return end
        return None


def require_tokenizer(name: str, sampling: Sampling, tokenizer: Any) -> None:
    """Refuse stop strings if there is no tokenizer to decode tokens.

    Args:
        name: name of the engine.
        sampling: sampling parameters of the requests.
        tokenizer: the engine's tokenizer, or None.

    Raises:
        RolloutError: a request has stop strings, and there is no tokenizer.
    """
    if tokenizer is None and any(params.stop for params in sampling):
        raise RolloutError(
            f"{name}.generate",
            got="stop strings, without a tokenizer",
            expected="an engine that can decode what it generates",
            fix="Make the engine with tokenizer=, or use stop_token_ids.",
        )
