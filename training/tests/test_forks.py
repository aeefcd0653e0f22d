"""Where values of a document that begin alike part: what training weighs as much as finding a value."""

from __future__ import annotations

import random

import pytest

from training.recall.items import Item, Query
from training.recall.samples import Forks, Spec
from training.tests.recall_samplers import sampler


@pytest.mark.parametrize(
    ("value", "parts"),
    [("4711", [False, True, True, False]), ("47", [False, True]), ("8", [False]), ("12", [False, False])],
)
def test_forks_are_where_values_that_begin_alike_part(value: str, parts: list[bool]) -> None:
    codec = sampler().codec
    answers = ("4711", "4719", "8", "silver", "12, 47")
    items = [Item((), (Query("", (), (), answer, listed="," in answer),)) for answer in answers]
    assert Forks(codec, items).after(codec.encode(value).tolist())[1:] == parts


def test_a_sample_marks_the_forks_of_its_answers() -> None:
    spec = Spec(2048, items=40, questions=30, family="chains")
    sample, codec = sampler().draw(random.Random(3), spec), sampler().codec
    forks = 0
    for question in sample.questions:
        others = {other.answer for other in sample.questions}
        digits = [(at, codec.decode(sample.ids[at : at + 1])) for at in range(question.start, question.end - 1)]
        digits = digits[digits[0][1].isspace() :]
        said = ""
        for at, piece in digits:
            elsewhere = [o for o in others if said and o.startswith(said) and not o[len(said) :].startswith(piece)]
            forks += bool(elsewhere)
            assert not elsewhere or sample.fork[at], (question.answer, said)
            said += piece
    assert forks > 5
    assert not (sample.fork & ~sample.target).any()
    assert not (sample.fork & sample.lead).any()
