"""What the ranks have logged becomes the value of the whole batch, and what it counts: a calculation by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from ddp_callbacks.lightning.logged_rows import Row, Sizes, join, plain


def row(value: float, samples: int, size: float, given: bool = False, weight: float | None = None) -> Row:
    counts = samples if weight is None else weight
    return Row("loss", 0, samples, 4, counts, size, given, torch.tensor(value))


NAN = float("nan")
CASES: dict[str, tuple[str, list[list[Row]], tuple[float, float]]] = {
    "by samples": ("mean", [[row(1.0, 3, 3)], [row(5.0, 1, 1)]], (2.0, 4)),
    "by weight": ("mean", [[row(1.0, 2, 2, weight=30)], [row(5.0, 2, 2, weight=10)]], (2.0, 4)),
    "a padding batch": ("mean", [[row(1.0, 4, 4)], [row(9.0, 0, 4)]], (1.0, 4)),
    "a mean over nothing": ("mean", [[row(1.0, 3, 3)], [row(NAN, 1, 1, weight=0)]], (1.0, 4)),
    "no rank counts": ("mean", [[row(1.0, 0, 4)], [row(3.0, 0, 4)]], (2.0, 8)),
    "len of the part": ("mean", [[row(1.0, 3, 3, True)], [row(5.0, 1, 1, True)]], (2.0, 4)),
    "tokens of the part": ("mean", [[row(1.0, 2, 30, True)], [row(5.0, 2, 10, True)]], (2.0, 40)),
    "a mask that leaves equally many": ("mean", [[row(1.0, 5, 2, True)], [row(5.0, 4, 2, True)]], (3.0, 4)),
    "a mask that leaves nothing of a part": ("mean", [[row(1.0, 2, 2, True)], [row(NAN, 2, 0, True)]], (1.0, 2)),
    "one constant": ("mean", [[row(1.0, 3, 7, True)], [row(5.0, 1, 7, True)]], (2.0, 7)),
    "always 1": ("mean", [[row(1.0, 3, 1, True)], [row(5.0, 1, 1, True)]], (2.0, 1)),
    "one of a rare class on a part of the ranks": (
        "mean",
        [[row(1.0, 2, 1, True)], [row(5.0, 1, 1, True)], []],
        (3.0, 2),
    ),
    "on one rank, for all": ("mean", [[], [row(5.0, 1, 1)]], (5.0, 4)),
    "for each sample of one rank": ("mean", [[], [row(5.0, 2, 2), row(7.0, 2, 2)]], (5.0, 2)),
    "sum": ("sum", [[row(1.0, 3, 3)], [row(5.0, 1, 1)]], (6.0, 4)),
    "max": ("max", [[row(1.0, 4, 4)], [row(9.0, 0, 4)]], (1.0, 4)),
    "min": ("min", [[row(1.0, 3, 3)], [row(5.0, 1, 1)]], (1.0, 4)),
}


@pytest.mark.parametrize("name", CASES)
def test_the_rows_of_all_ranks_become_the_value_of_the_whole_batch(name: str) -> None:
    """Logged values equal a calculation by hand."""
    operation, ranks, expected = CASES[name]
    sent = json.loads(json.dumps([plain(rows) for rows in ranks]))
    found, *_ = join([[Row(*each) for each in rows] for rows in sent], lambda _: operation, Sizes())
    assert (found.value, found.size) == pytest.approx(expected)


def test_batches_come_in_order_and_calls_in_one_batch_apart() -> None:
    def rows(*positions: int) -> list[Row]:
        return [Row("loss", at, 1, 2, 1.0, 1.0, False, float(at + 10 * n)) for n, at in enumerate(positions)]

    found: list[Any] = join([rows(0, 1, 1), rows(0, 1, 1, 2)], lambda _: "sum", Sizes())
    assert [joined.value for joined in found] == [0.0, 22.0, 42.0, 32.0]


def test_a_value_of_each_sample_counts_once_for_each_sample() -> None:
    """Values logged sample by sample have the mean of all."""
    known, each = Sizes(), [Row("loss", 0, 2, 3, 2.0, 1.0, True, value) for value in (1.0, 2.0)]
    found = join([each, [Row("loss", 0, 1, 3, 1.0, 1.0, True, 6.0)]], lambda _: "mean", known)
    assert sum(joined.value * joined.size for joined in found) / sum(joined.size for joined in found) == 3.0


def test_a_key_counts_by_its_sizes_in_each_batch_once_one_batch_shows_that_it_does() -> None:
    """A masked mean counts by what its mask leaves, in every batch."""

    def rows(*sizes: float) -> list[Row]:
        return [Row("loss", at, 4, 8, 4.0, size, True, size) for at, size in enumerate(sizes)]

    known = Sizes()
    (first,) = join([rows(8), rows(8)], lambda _: "mean", known)
    assert (known.by_size, first.value, first.missed["sizes"]) == (set(), 8.0, [64.0, 8.0])
    found = join([rows(9, 9), rows(9, 3)], lambda _: "mean", known)
    assert (known.by_size, [joined[1:3] for joined in found]) == ({"loss"}, [(9.0, 18), (7.5, 12)])


def test_a_constant_that_was_the_samples_of_parts_counts_those_batches_alike_too() -> None:
    def rows(samples: int) -> list[Row]:
        return [Row("loss", 0, samples, 2 * samples, samples, 32.0, True, 3.0)]

    known = Sizes()
    (first,) = join([rows(32)] * 2, lambda _: "mean", known)
    (last,) = join([rows(20)] * 2, lambda _: "mean", known)
    assert (first.size, first.missed["constant"]) == (64, [-96.0, -32.0])
    assert (last.size, known.way_of("loss")) == (32, "constant")


def test_small_counts_that_look_like_a_constant_or_the_samples_count_once_the_key_has_had_others() -> None:
    def rows(*each: tuple[int, float]) -> list[Row]:
        return [Row("rare", at, samples, 5, samples, size, True, samples) for at, (samples, size) in enumerate(each)]

    known = Sizes()
    first, second = join([rows((2, 2), (2, 1)), rows((3, 3), (3, 1))], lambda _: "mean", known)
    assert (first.value, second.value) == pytest.approx((2.6, 2.5))
    again = Sizes(known.by_size, json.loads(json.dumps(known.seen)))
    assert join([rows((2, 1)), rows((3, 1))], lambda _: "mean", again)[0].value == pytest.approx(2.5)
    (constant,) = join([rows((2, 1)), rows((3, 1))], lambda _: "mean", Sizes())
    assert constant.value == pytest.approx(2.6)


def test_a_constant_size_of_one_counts_batches_alike_whatever_is_left_of_the_last() -> None:
    def rows(*each: tuple[int, float]) -> list[Row]:
        return [Row("c", at, samples, None, samples, 1.0, True, value) for at, (samples, value) in enumerate(each)]

    found = join([rows((2, 1.0), (1, 4.0)), rows((2, 3.0), (1, 6.0))], lambda _: "mean", Sizes())
    assert [(joined.value, joined.size) for joined in found] == [(2.0, 1), (5.0, 1)]


def test_a_constant_size_of_one_that_an_optimizer_s_closure_logs_again_is_no_count() -> None:
    known = Sizes()

    def calls(samples: int, *values: float) -> list[Row]:
        return [Row("c", 0, samples, 5, samples, 1.0, True, value) for value in values]

    found = join([calls(3, 1.0, 2.0), calls(2, 6.0, 7.0)], lambda _: "mean", known)
    assert not known.by_size
    assert [joined.value for joined in found] == pytest.approx([3.0, 4.0])


def test_a_rank_without_a_sample_makes_no_difference_between_ranks() -> None:
    ranks = [[Row("a", -1, 1, None, n, 1.0, False, value)] for n, value in ((4.0, 2.0), (0.0, 9.0))]
    (found,) = join(ranks, lambda _: "mean", Sizes())
    assert (found.value, found.ends) == (2.0, (2.0, 2.0))
