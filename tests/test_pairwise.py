"""Every pair is there, in few cases, and what is drawn at random can be drawn again."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.pairwise import FULL, LONG_READS, SEED, at_length, covering, daily, thinned


@pytest.mark.parametrize("sizes", [(3, 3, 3, 3), (8, 6, 2, 2), (2, 7, 4), (5, 1, 3), (4, 4)])
@pytest.mark.parametrize("strength", [1, 2])
def test_every_combination_occurs(sizes: tuple[int, ...], strength: int) -> None:
    axes = [[f"{place}{value}" for value in range(size)] for place, size in enumerate(sizes)]
    cases = covering(*axes, strength=strength)
    for group in itertools.combinations(range(len(axes)), strength):
        found = {tuple(case[i] for i in group) for case in cases}
        assert found == set(itertools.product(*(axes[i] for i in group)))
    assert cases == covering(*axes, strength=strength)


def test_there_are_few_cases() -> None:
    assert len(covering(range(3), range(3), range(3), range(3))) <= 14  # of 81; 9 would be the fewest
    assert len(covering(range(8), range(6), range(2), range(2))) <= 52  # of 192; 48 would be
    assert len(covering(range(8), range(6), strength=1)) == 8


@pytest.fixture(autouse=True)
def _no_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FULL, raising=False)


def test_values_need_no_hash_no_order_and_no_equality() -> None:
    tensor = torch.ones(2)  # two of them compare to a tensor
    cases = thinned([{}, {"softcap": 2.0}], [None, tensor], ["a", "b"], count=9)
    assert len(cases) == 8
    assert sum(case[0] == {"softcap": 2.0} and case[1] is tensor for case in cases) == 2


def test_what_is_drawn_changes_with_the_seed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    axes = range(10), range(10), range(10)
    monkeypatch.setenv(SEED, "7")
    first = thinned(*axes, count=20)
    assert first == thinned(*axes, count=20)
    monkeypatch.setenv(SEED, "8")
    other = thinned(*axes, count=20)
    assert first[:-20] == other[:-20]
    assert set(first[-20:]) != set(other[-20:])


def test_thinned_has_both_and_nothing_twice() -> None:
    cases = thinned(range(4), range(4), range(4), count=10)
    assert cases[:-10] == covering(range(4), range(4), range(4))
    assert len(set(cases)) == len(cases)
    assert len(thinned(range(2), range(2), count=10)) == 4


def test_the_product_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FULL, "1")
    assert len(thinned(range(4), range(5), range(6), count=1)) == 4 * 5 * 6


def test_an_axis_without_values_is_refused() -> None:
    with pytest.raises(ValueError, match="values"):
        covering([1], [])
    with pytest.raises(ValueError, match="covering 2 of 1"):
        covering([1])


def test_all_values_have_their_day(monkeypatch: pytest.MonkeyPatch) -> None:
    found = set()
    for day in range(100, 104):
        monkeypatch.setenv(SEED, str(day))
        assert len(daily(range(7), 2)) == 2
        assert daily(range(7), 2) == daily(range(7), 2)
        found |= {*daily(range(7), 2)}
    assert found == {*range(7)}
    assert daily("ab", 3) == ["a", "b"]
    monkeypatch.setenv(FULL, "1")
    assert daily(range(7), 2) == [*range(7)]


def test_each_day_one_long_prompt_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    for day in (100, 101):
        monkeypatch.setenv(SEED, str(day))
        read += filter(at_length, LONG_READS)
    assert sorted(read) == sorted(LONG_READS)
