"""Samples are what they claim: the answer stands where it is said to, the target covers it exactly, held-out
phrasings stay held out.
"""

import random
import re

import numpy as np
import pytest
from training.facts import Drawer
from training.tasks import Sampler, Spec

from training import phrasings, tasks
from training import vocabulary as v
from training.data import LEAD_WEIGHT, collate
from training.tokenizer import ASSISTANT_ID, EOS_ID


@pytest.mark.parametrize("form", tasks.FORMS)
@pytest.mark.parametrize("held_out", [False, True])
def test_statement_stands_in_the_document_and_the_target_is_the_answer(
    samplers: dict[str, Sampler], form: str, held_out: bool
) -> None:
    sampler = samplers["held_out" if held_out else "seen"]
    rng = random.Random(form)
    for _ in range(40):
        sample = sampler.draw(rng, Spec(700, 4, 3, form=form, phrasing="held_out" if held_out else "mixed", absent=0.0))
        assert len(sample.ids) == len(sample.target) == 700
        for fact, start, end in sample.spans:
            assert sampler.codec.decode(sample.ids[start:end]).strip() == fact.statement.strip()
            assert fact.value in fact.statement
        marked = np.zeros(700, bool)
        placed = [fact for fact, _, _ in sample.spans]
        for question in sample.questions:
            assert question.fact in placed
            assert question.fact is not None
            assert question.answer == question.fact.value
            answer = sample.ids[question.start : question.end]
            assert answer[-1] == EOS_ID
            assert sampler.codec.decode(answer[:-1]).strip() == question.answer
            assert (sample.ids[question.start - 1] == ASSISTANT_ID) == (form == "chat")
            marked[question.start : question.end] = True
        assert (sample.target == marked).all()
        assert not (sample.lead & ~sample.target).any()


def test_every_question_follows_its_fact(samplers: dict[str, Sampler]) -> None:
    rng = random.Random(5)
    for _ in range(60):
        sample = samplers["seen"].draw(rng, tasks.training_spec(rng, 1500))
        ends = {id(fact): end for fact, _, end in sample.spans}
        for question in sample.questions:
            if question.fact is None:
                assert question.answer == phrasings.NOT_STATED
            else:
                assert ends[id(question.fact)] <= question.start


@pytest.mark.parametrize("depth", [0.0, 0.37, 1.0])
def test_depth_places_the_asked_fact(samplers: dict[str, Sampler], depth: float) -> None:
    rng = random.Random(2)
    for _ in range(20):
        sample = samplers["seen"].draw(rng, Spec(2000, 1, 1, form="bare", depth=depth, absent=0.0))
        start = next(start for fact, start, _ in sample.spans if fact is sample.questions[0].fact)
        assert start / 2000 == pytest.approx(depth, abs=0.12)


def test_keys_tell_facts_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where names are few, no key repeats another or is a part of it."""
    names = ("the red fox", "red fox", "fox", "Ada", "Ada Marsh", "the mill")
    monkeypatch.setattr(v, "key", lambda rng, lexicon: rng.choice(names))
    monkeypatch.setattr(v, "person", lambda rng: rng.choice(names))
    for seed in range(20):
        drawer = Drawer(random.Random(seed), v.Lexicon())
        keys = [fact.key.removeprefix("the ").lower() for fact in (drawer.fact() for _ in range(12)) if fact.key]
        assert len(keys) > 5
        assert not [(a, b) for i, a in enumerate(keys) for j, b in enumerate(keys) if i != j and f" {a} " in f" {b} "]


def _pattern(template: str) -> re.Pattern[str]:
    parts = re.split(r"{\w+}", template)
    return re.compile(".+?".join(map(re.escape, parts)))


def test_held_out_phrasings_never_occur_in_training(samplers: dict[str, Sampler]) -> None:
    """Each held-out template's fixed words, found in no statement or question that training draws."""
    held_out = [
        *phrasings.HELD_OUT_STATEMENTS,
        *phrasings.HELD_OUT_QUESTIONS,
        *phrasings.HELD_OUT_RECORDS,
        *phrasings.HELD_OUT_RECORD_QUESTIONS,
        *(s for family in phrasings.HELD_OUT_FAMILIES for s in (*family.statements, *family.questions)),
    ]
    patterns = [_pattern(template) for template in held_out]
    rng = random.Random(1)
    seen = []
    for _ in range(150):
        sample = samplers["seen"].draw(rng, tasks.training_spec(rng, 900))
        seen += [fact.statement for fact, _, _ in sample.spans] + [question.text for question in sample.questions]
    assert len(seen) > 500
    assert not [(p.pattern, text) for p in patterns for text in seen if p.fullmatch(text)]
    assert not set(v.RELATIONS) & set(v.HELD_OUT_RELATIONS)
    assert not set(phrasings.INSTRUCTIONS) & set(phrasings.HELD_OUT_INSTRUCTIONS)
    # The same search does find them where they are used.
    sample = samplers["held_out"].draw(rng, Spec(900, 8, 1, phrasing="held_out", absent=0.0))
    assert any(p.fullmatch(fact.statement) for p in patterns for fact, _, _ in sample.spans)
    assert any(p.fullmatch(sample.questions[0].text) for p in patterns)


def test_same_seed_same_samples(samplers: dict[str, Sampler]) -> None:
    first, second = (samplers["seen"].draw(random.Random(4), Spec(600, 3, 2)) for _ in range(2))
    assert (first.ids == second.ids).all()


def test_too_short_is_an_error(samplers: dict[str, Sampler]) -> None:
    with pytest.raises(ValueError, match="use 256 or more"):
        samplers["seen"].draw(random.Random(0), Spec(20, 1, 1))


def test_collate_points_at_the_position_before_each_answer_token(samplers: dict[str, Sampler]) -> None:
    rng = random.Random(6)
    samples = [samplers["seen"].draw(rng, Spec(512, 3, 2)) for _ in range(4)]
    batch = collate(samples)
    flat = batch.ids.reshape(-1)
    assert batch.ids.shape == (4, 512)
    assert (flat[batch.at + 1] == batch.token).all()
    assert sorted((batch.at + 1).tolist()) == np.flatnonzero(np.concatenate([s.target for s in samples])).tolist()
    assert int((batch.weight == LEAD_WEIGHT).sum()) == sum(int(s.lead.sum()) for s in samples)
    assert batch.questions == sum(len(s.questions) for s in samples) == int(batch.question.max()) + 1
