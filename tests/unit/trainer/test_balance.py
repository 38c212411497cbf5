# SPDX-License-Identifier: Apache-2.0
"""Rows dealt to data-parallel ranks."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quadriga.config import ActorConfig
from quadriga.models.flops import model_cost
from quadriga.protocol import DataProto
from quadriga.trainer.balance import (
    Balance,
    Row,
    SequenceCost,
    balance,
    cost_of_share,
    order_for_ranks,
)
from tests.vision_folder import tiny_model

COST = SequenceCost()

LENGTHS = st.integers(1, 4000)
PROMPTS = st.lists(
    st.tuples(LENGTHS, st.lists(LENGTHS, min_size=1, max_size=5)), min_size=1, max_size=12
)
SINGLES = st.lists(st.builds(COST.row, st.uuids(), LENGTHS, LENGTHS), min_size=1, max_size=40)
RANKS, SIZES = st.integers(1, 7), st.integers(1, 30)


def rows_of(prompts: Sequence[tuple[int, list[int]]]) -> list[Row]:
    """Rows of prompts with several answers each."""
    return [
        COST.row(name, prompt, answer)
        for name, (prompt, answers) in enumerate(prompts)
        for answer in answers
    ]


def chunks(order: Sequence[int], num_ranks: int) -> list[list[int]]:
    """What each rank gets when a batch in this order is cut by `DataProto.chunk`."""
    data = DataProto.from_dict(non_tensors={"row": list(order)})
    return [list(part.non_tensor_batch["row"]) for part in data.chunk(num_ranks)]


def shares_of(result: Balance, num_rows: int, num_ranks: int, size: int) -> list[list[list[int]]]:
    """For each mini-batch the rows of each rank."""
    parts = chunks(result.order, num_ranks)
    return [
        [[row for row in part if start <= row < start + size] for part in parts]
        for start in range(0, num_rows, size)
    ]


@given(PROMPTS, RANKS, SIZES)
def test_every_row_goes_to_one_rank(prompts, num_ranks: int, size: int) -> None:
    """Every row once; of each mini-batch every rank has as many rows as any other, or one more; always the same."""
    rows = rows_of(prompts)
    result = balance(rows, num_ranks, size)
    assert sorted(result.order) == list(range(len(rows)))
    for hands in shares_of(result, len(rows), num_ranks, size):
        assert max(map(len, hands)) - min(map(len, hands)) <= 1
    assert balance(rows, num_ranks, size) == result


@given(SINGLES, RANKS, SIZES)
def test_shares_differ_by_one_row_at_most(rows: list[Row], num_ranks: int, size: int) -> None:
    """In each mini-batch the longest share exceeds the shortest by no more than the costliest row (and the little that
    a swap must gain): the bound of dealing costly rows first. Says nothing of rows that share prompts."""
    for hands in shares_of(balance(rows, num_ranks, size), len(rows), num_ranks, size):
        costs = [cost_of_share(rows, share) for share in hands]
        costliest = max(cost_of_share(rows, [row]) for share in hands for row in share)
        assert max(costs) - min(costs) <= costliest + 2e-3 * max(costs)


@given(PROMPTS, RANKS, SIZES)
def test_numbers_are_those_of_the_order(prompts, num_ranks: int, size: int) -> None:
    """The imbalance told is what the chunks of the order have, and that of the rows as they came is theirs."""
    rows = rows_of(prompts)
    result = balance(rows, num_ranks, size)

    def imbalance(told: Balance) -> float:
        costs = [
            [cost_of_share(rows, share) for share in hands]
            for hands in shares_of(told, len(rows), num_ranks, size)
        ]
        return sum(max(step) for step in costs) * num_ranks / sum(map(sum, costs))

    assert result.imbalance == pytest.approx(imbalance(result))
    assert result.imbalance_before == pytest.approx(
        imbalance(Balance(list(range(len(rows))), 0, 0))
    )


def test_samples_of_a_prompt_stay_together_where_that_costs_nothing() -> None:
    """Four prompts with four equal answers each on two ranks: two prompts for each."""
    rows = rows_of([(100, [10] * 4)] * 4)
    parts = chunks(balance(rows, 2, len(rows)).order, 2)
    assert [len({rows[row].prompt for row in part}) for part in parts] == [2, 2]


def test_samples_are_parted_where_one_rank_would_wait() -> None:
    """One prompt with long answers and one with short ones: both ranks get of both."""
    rows = rows_of([(10, [1000] * 4), (10, [10] * 4)])
    result = balance(rows, 2, len(rows))
    assert result.imbalance_before > 1.9
    assert result.imbalance < 1.02


def test_mini_batches_are_balanced_one_by_one() -> None:
    """Long rows in the first mini-batch, short ones in the second: an even sum over both would not be enough."""
    rows = [
        COST.row(number, 10, length)
        for number, length in enumerate([800, 900, 700, 600, 8, 9, 7, 6])
    ]
    result = balance(rows, 2, 4)
    for hands in shares_of(result, len(rows), 2, 4):
        costs = [cost_of_share(rows, share) for share in hands]
        assert max(costs) / min(costs) < 1.05


def test_more_ranks_than_rows() -> None:
    """Three rows on four ranks: the last has none."""
    rows = rows_of([(5, [1, 2, 3])])
    assert [len(part) for part in chunks(balance(rows, 4, 8).order, 4)] == [1, 1, 1, 0]


def test_one_rank_keeps_the_order() -> None:
    rows = rows_of([(7, [3, 1, 2]), (2, [9])])
    assert balance(rows, 1, 2) == Balance([0, 1, 2, 3], 1.0, 1.0)


def test_rows_are_dealt_by_the_cost_of_the_model() -> None:
    """Equal sums of tokens are unequal work where attention counts: what is even then depends on the model."""
    lengths = [3000, 1500, 500, 2000, 2000, 1000]
    rows, by_length = (
        [
            SequenceCost(attention_tokens).row(number, 10, length)
            for number, length in enumerate(lengths)
        ]
        for attention_tokens in (500, 1e9)
    )
    by_cost, by_tokens = balance(rows, 2, 6), balance(by_length, 2, 6)
    assert {frozenset(part) for part in chunks(by_cost.order, 2)} != {
        frozenset(part) for part in chunks(by_tokens.order, 2)
    }
    longest = [
        max(cost_of_share(rows, part) for part in chunks(dealt.order, 2))
        for dealt in (by_cost, by_tokens)
    ]
    assert longest[0] < 0.95 * longest[1]


def test_the_head_counts_for_responses_only() -> None:
    """Two rows of the same length: the one with the longer response costs more where there is a head."""
    plain, with_head = (
        [
            cost_of_share([SequenceCost(head=head).row(0, *lengths)], [0])
            for lengths in ((100, 10), (10, 100))
        ]
        for head in (0.0, 0.5)
    )
    assert plain[0] == pytest.approx(plain[1])
    assert with_head[1] - with_head[0] == pytest.approx(0.5 * 90)


@pytest.fixture
def batch() -> DataProto:
    """Prompts of 1 and 3 tokens with three responses each, whose lengths are 1 to 6."""
    lengths = torch.tensor([[1, 6], [1, 5], [1, 4], [3, 1], [3, 2], [3, 3]])
    columns = torch.arange(9)
    attention = ((columns < 3) & (columns >= 3 - lengths[:, :1])) | (
        (columns >= 3) & (columns < 3 + lengths[:, 1:])
    )
    return DataProto.from_dict(
        {
            "attention_mask": attention.long(),
            "responses": torch.zeros(6, 6).long(),
            "row": torch.arange(6),
        },
        {"uid": ["p"] * 3 + ["q"] * 3},
    )


def test_one_rank_leaves_the_batch_as_it_is(batch: DataProto) -> None:
    assert order_for_ranks(batch, 1, 3, ActorConfig(), COST) == {}
    assert batch.batch["row_index"].tolist() == list(range(6))


def test_rows_are_arranged_and_found_again(batch: DataProto) -> None:
    metrics = order_for_ranks(batch, 2, 3, ActorConfig(ppo_mini_batch_size=2), COST)
    assert metrics["balance/imbalance"] < metrics["balance/imbalance_before"]
    assert torch.equal(batch.batch["row"], batch.batch["row_index"])
    assert batch.batch["row"].tolist() != list(range(6))
    lengths = [int(part.batch["attention_mask"].sum()) for part in batch.chunk(2)]
    assert abs(lengths[0] - lengths[1]) <= 3


def test_each_mini_batch_is_shared_evenly(batch: DataProto) -> None:
    """Of the three rows of a prompt, each a mini-batch of its own, both ranks have some."""
    order_for_ranks(batch, 2, 3, ActorConfig(ppo_mini_batch_size=1), COST)
    assert [sum(row < 3 for row in part.batch["row"].tolist()) for part in batch.chunk(2)] == [2, 1]


def test_a_shuffled_batch_is_shared_as_one(batch: DataProto) -> None:
    """What its mini-batches will be is drawn later: the samples of a prompt stay together, or all are spread alike."""
    shuffled, whole = batch.select(), batch.select()
    first = order_for_ranks(shuffled, 2, 3, ActorConfig(ppo_mini_batch_size=1, shuffle=True), COST)
    assert first == order_for_ranks(whole, 2, 3, ActorConfig(ppo_mini_batch_size=2), COST)
    assert torch.equal(shuffled.batch["row"], whole.batch["row"])


def test_prompts_count_for_each_row_where_they_are_not_shared(batch: DataProto) -> None:
    before = [
        order_for_ranks(batch.select(), 2, 3, ActorConfig(use_prefix_sharing=is_shared), COST)
        for is_shared in (True, False)
    ]
    assert before[0]["balance/imbalance_before"] != before[1]["balance/imbalance_before"]


PATCHES = st.integers(1, 30).map(lambda merged: 2 * merged)
GRIDS = st.lists(st.tuples(st.integers(1, 4), PATCHES, PATCHES).map(list), max_size=3)
VISION = model_cost(tiny_model())


@given(st.lists(st.tuples(st.integers(0, 20), GRIDS), min_size=1, max_size=20), st.integers(2, 5))
def test_the_encoder_counts_with_the_attention_inside_an_image(
    rows: list[tuple[int, list[list[int]]]], num_ranks: int
) -> None:
    """The work of all ranks, in operations of decoder and encoder together, differs by no more than the costliest row,
    and the metric is that of these operations."""
    mask = torch.tensor(
        [[column < 5 + length for column in range(25)] + [1] * 5 for length, _ in rows]
    ).long()
    grids = [{"image_grid_thw": torch.tensor(found)} if found else {} for _, found in rows]
    columns = {"attention_mask": mask, "responses": torch.zeros(len(rows), 5).long()}
    names = {"uid": [*map(str, range(len(rows)))], "multi_modal_inputs": grids}
    batch = DataProto.from_dict(columns, names)
    cost = SequenceCost(VISION.attention_tokens, VISION.head_cost, VISION.image_cost)
    told = order_for_ranks(batch, num_ranks, 1, ActorConfig(ppo_mini_batch_size=len(rows)), cost)

    def flops(part: DataProto) -> list[float]:
        encoder, lengths = VISION.vision_encoder, part.batch["attention_mask"].sum(-1).tolist()
        images = [one.get("image_grid_thw") for one in part.non_tensor_batch["multi_modal_inputs"]]
        assert encoder is not None
        return [
            VISION.update_flops(length, 5, length**2)
            + (0 if image is None else encoder.update_flops(image))
            for length, image in zip(lengths, images, strict=True)
        ]

    work = [flops(part) for part in batch.chunk(num_ranks)]
    sums = [*map(sum, work)]
    assert max(sums) - min(sums) <= max(map(max, filter(None, work))) + 2e-3 * max(sums)
    assert told["balance/imbalance"] == pytest.approx(max(sums) * num_ranks / sum(sums))


def test_images_and_videos_are_shared_evenly() -> None:
    """Prompts of equal lengths and images of as many patches, of which one attends to all others in the large one: it
    is encoded by one rank, and the two small ones by the other."""
    sizes = [[1, 16, 16], [1, 4, 32], [2, 4, 16], [1, 2, 2]]
    grids = [{"image_grid_thw": torch.tensor([size])} for size in sizes[:2]]
    grids += [{"video_grid_thw": torch.tensor([size])} for size in sizes[2:]]
    batch = DataProto.from_dict(
        {
            "attention_mask": torch.ones(4, 30, dtype=torch.int64),
            "responses": torch.zeros(4, 10, dtype=torch.int64),
        },
        {"uid": list("abcd"), "multi_modal_inputs": grids},
    )
    told = order_for_ranks(
        batch, 2, 1, ActorConfig(ppo_mini_batch_size=4), SequenceCost(images=VISION.image_cost)
    )
    assert [[*map("abcd".index, part.non_tensor_batch["uid"])] for part in batch.chunk(2)] == [
        [0, 3],
        [1, 2],
    ]
    assert 1.0 < told["balance/imbalance"] < 1.2 < told["balance/imbalance_before"]
