# SPDX-License-Identifier: Apache-2.0
"""From logits to tokens, and when to stop.

A token is drawn by halving: the vocabulary is cut in two, a uniform number decides for one half by
the probability mass of each, and so on, first among blocks of the vocabulary, then in the block.
This reads the logits four times and sorts nothing. Each decision uses a new number, so that small
errors of the logits rarely matter: logits that differ by 1e-5 choose another token in 3 of 1e5
draws. A single number, looked up in the cumulative distribution, would be near the boundary of some
token a hundred times as often.

The uniform numbers of a sequence come from a counter-based generator with the sequence's own seed.
So a response does not depend on the other sequences in the batch, their number or their order.

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

_BLOCK = 256  # C
# Uniform numbers for a token: one for each halving, so enough for 2**24 tokens.
NUM_DRAWS = 24
# Number of the likeliest tokens that top-p sorts at first. It sorts more if these are too few.
_NUM_SORTED = 512
# Tokens to decode before the longest stop string, because some tokenizers decode the first tokens
# of a text in another way than later ones.
_SLACK = 8
# Parameters without effect on the distribution. `max_tokens` is needed, but not read.
_NEUTRAL = SamplingParams(max_tokens=1)


class Draws:
    """Generator of the uniform numbers of one sequence, token by token.

    Args:
        seed: seed of the sequence.
    """

    def __init__(self, seed: int) -> None:
        self._generator = np.random.Generator(np.random.Philox(key=seed))

    def next(self) -> np.ndarray:
        """Uniform numbers for the next token, [NUM_DRAWS] float64 in [0, 1)."""
        return self._generator.random(NUM_DRAWS)


@dataclass(frozen=True)
class SamplingRules:
    """The sampling parameters of all rows, as columns. None stands for a column without effect.

    Attributes:
        temperature: [R, 1] float32.
        top_p: [R, 1] float32.
        top_k: [R, 1] int64; 0: all tokens.
        min_p: [R, 1] float32.
        is_greedy: [R] bool; None: no row is greedy.
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
        """Make the rules of a batch from the sampling parameters of its rows.

        Args:
            params: sampling parameters of each row.
            device: device of the columns.
        """

        def column(values: list[float], neutral: float) -> Tensor | None:
            """Make a column [R, 1]; None if every row has the neutral value."""
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
            all_greedy=bool(greedy) and all(greedy),
        )


def sample(logits: Tensor, rules: SamplingRules, uniforms: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sample a token for each row.

    Greedy rows take the likeliest token, the lowest id among equals.

    Args:
        logits: [R, V] float32; overwritten.
        rules: sampling parameters of the rows.
        uniforms: [R, NUM_DRAWS] float64 in [0, 1).

    Returns:
        Token ids [R] int64; log-probabilities of these tokens before top-k, top-p and min-p, [R]
        float32; and their log-probabilities after these filters, [R] float32. The latter are 0 for
        greedy rows, where no other token was possible.
    """
    likeliest = None if rules.is_greedy is None else logits.argmax(-1)
    if rules.temperature is not None:
        logits.div_(rules.temperature)
    # If all rows are greedy, looking up the logits of the likeliest tokens spares another pass.
    highest = (
        logits.gather(1, likeliest[:, None]) if rules.all_greedy else logits.amax(-1, keepdim=True)
    )
    # Probabilities relative to that of the likeliest token, so that `exp` cannot overflow.
    odds = logits.sub_(highest).exp_()
    sums = _block_sums(odds)

    # Odds and sums after top-k, top-p and min-p.
    filtered = odds
    filtered_sums = sums
    threshold = _threshold(odds, rules)
    if threshold is not None:
        filtered = odds.masked_fill(odds < threshold, 0.0)
        filtered_sums = _block_sums(filtered)

    if likeliest is not None and rules.all_greedy:
        tokens = likeliest
    else:
        tokens = _draw(filtered, filtered_sums, uniforms)
        if likeliest is not None and rules.is_greedy is not None:
            tokens = torch.where(rules.is_greedy, likeliest, tokens)

    token_odds = odds.gather(1, tokens[:, None])[:, 0].double()
    log_probs = (token_odds / sums.sum(-1)).log().float()
    sampling_log_probs = log_probs
    if threshold is not None:
        sampling_log_probs = (token_odds / filtered_sums.sum(-1)).log().float()
    if rules.is_greedy is not None:
        # A greedy token was certain, so its log-probability is 0.
        sampling_log_probs = sampling_log_probs.masked_fill(rules.is_greedy, 0.0)
    return tokens, log_probs, sampling_log_probs


def _block_sums(odds: Tensor) -> Tensor:
    """Sum of each block of the vocabulary: [R, V] -> [R, ceil(V / C)] float64."""
    # The last block may have fewer tokens than the others.
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
    """Draw a token for each row: first a block of the vocabulary, then a token in the block.

    Args:
        odds: [R, V], in proportion to the probabilities.
        sums: [R, ceil(V / C)], sum of each block of `odds`.
        uniforms: [R, NUM_DRAWS]; each halving uses one column.

    Returns:
        Token ids [R].
    """
    last_token = odds.shape[1] - 1
    block, num_used = _descend(sums, uniforms)
    # The last block may have fewer tokens. Its columns beyond the last token get no mass.
    columns = block * _BLOCK + torch.arange(_BLOCK, device=odds.device)
    block_odds = odds.gather(1, columns.clamp(max=last_token)).double()
    block_odds.masked_fill_(columns > last_token, 0.0)
    offset, _ = _descend(block_odds, uniforms[:, num_used:])
    tokens = (block * _BLOCK + offset)[:, 0]
    # The index exceeds the last token only if the odds are NaN.
    return tokens.clamp_(max=last_token)


def _descend(masses: Tensor, uniforms: Tensor) -> tuple[Tensor, int]:
    """Draw an entry of each row by halving, in proportion to its mass.

    The entries are the leaves of a binary tree, whose nodes have the sum of the masses below them.
    The draw goes from the root to a leaf. A node takes its upper half if the uniform number of its
    level times the node's sum reaches the sum of the lower half. An entry without mass is never
    drawn, because a number below 1 times a sum, rounded, stays below the sum.

    Args:
        masses: [R, X].
        uniforms: [R, at least log2 X].

    Returns:
        Indices of the entries [R, 1], and how many columns of `uniforms` were used.
    """
    # Padded to a power of two by entries without mass, so that every level has two equal halves.
    depth = (masses.shape[1] - 1).bit_length()
    level = torch.nn.functional.pad(masses, (0, 2**depth - masses.shape[1]))
    # From the leaves up to the root, for each level: whether each node would take its upper half.
    # Node i of a level with n nodes has the nodes i and i + n of the level below as halves.
    takes_upper = []
    for step in range(depth - 1, -1, -1):
        lower, upper = level.chunk(2, 1)
        level = lower + upper
        takes_upper.append(uniforms[:, step : step + 1] * level >= lower)
    # From the root down: node i goes on to node i or, for the upper half, to node i + n.
    entry = torch.zeros((masses.shape[0], 1), dtype=torch.int64, device=masses.device)
    for is_upper in reversed(takes_upper):
        entry = entry + is_upper.gather(1, entry) * is_upper.shape[1]
    return entry, depth


def _threshold(odds: Tensor, rules: SamplingRules) -> Tensor | None:
    """Odds below which top-k, top-p or min-p drop a token. Top-p counts what top-k has left.

    Tokens that are as likely as the last remaining one stay, too.

    Args:
        odds: [R, V]; the largest of each row is 1.
        rules: sampling parameters of the rows.

    Returns:
        [R, 1]; 0 for a row that keeps all tokens. None: no rule can drop a token.
    """
    if rules.top_k is None and rules.top_p is None:
        # The largest odds are 1, so min-p, a share of them, is the threshold itself.
        return rules.min_p
    num_tokens = odds.shape[1]
    top_k = None if rules.top_k is None else rules.top_k.clamp(max=num_tokens)
    # Sorting the whole vocabulary is slow, so take as few of the largest odds as suffice.
    num_ranked = 1 if rules.top_p is None else _NUM_SORTED
    if top_k is not None:
        num_ranked = max(int(top_k.max()), num_ranked)
    ranked = odds.topk(min(num_ranked, num_tokens)).values

    threshold = torch.zeros_like(ranked[:, :1])  # 0 keeps all tokens
    if top_k is not None:
        last = (top_k - 1).clamp(min=0)
        threshold = torch.where(top_k > 0, ranked.gather(1, last), threshold)
    if rules.top_p is not None:
        # Top-p is a share of the mass that top-k has left.
        remaining = odds if top_k is None else odds.masked_fill(odds < threshold, 0.0)
        nucleus_mass = remaining.double().sum(-1, keepdim=True) * rules.top_p
        is_off = rules.top_p >= 1  # rows without top-p
        while True:
            # In float64, because the sum of many small odds decides where the nucleus ends.
            cumulative = ranked.double().cumsum(-1)
            is_enough = (cumulative[:, -1:] >= nucleus_mass) | is_off
            if ranked.shape[1] == num_tokens or bool(is_enough.all()):
                break
            # A flat distribution has its nucleus in more than the largest odds so far.
            ranked = odds.topk(min(8 * ranked.shape[1], num_tokens)).values
        last = torch.searchsorted(cumulative, nucleus_mass).clamp_(max=ranked.shape[1] - 1)
        last_in_nucleus = ranked.gather(1, last).masked_fill(is_off, 0.0)
        threshold = torch.maximum(threshold, last_in_nucleus)
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
        # A string of n bytes has at most n tokens.
        longest = max((len(string.encode()) for string in strings), default=0)
        self.num_tokens = longest + _SLACK

    def is_reached(self, token_ids: Sequence[int]) -> bool:
        """Whether the end of the response contains one of the strings.

        Only the last `num_tokens` tokens are decoded, because this is called after each token.
        """
        if not self.strings:
            return False
        tail = self.tokenizer.decode(list(token_ids[-self.num_tokens :]), skip_special_tokens=False)
        return any(string in tail for string in self.strings)

    def length(self, token_ids: Sequence[int]) -> int | None:
        """Number of tokens including the one that completes a stop string; None: there is none."""
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
