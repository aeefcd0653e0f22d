"""Which prompts of the grammar are measured: cells of task, length, depth, phrasing and text around the facts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, cast

from longreach.bench.recall import suite
from longreach.bench.recall.sampler import SLACK, Prompt
from longreach.bench.recall.suite import depths_of

from training.recall.codec import Codec
from training.recall.documents import TASKS
from training.recall.facts import Phrasing
from training.recall.filler import GENERATED_MIX, UNSEEN_MIX, Filler
from training.recall.samples import Sample, Spec
from training.recall.tasks import Sampler
from training.recall.vocabulary import Lexicon

MIXES = {"seen": GENERATED_MIX, "unseen": UNSEEN_MIX}
PHRASINGS = ("plain", "mixed", "held_out")


@dataclass(frozen=True)
class Plan(suite.Plan):
    """What to measure: a plan of `longreach bench recall` over the tasks of the grammar. `phrasing` is that of the
    statements and questions, `filler` the text around them.

    Raises:
        ValueError: an unknown task, phrasing or filler, or a number that is too small.
    """

    tasks: tuple[str, ...] = TASKS
    phrasing: str = "plain"
    filler: str = "seen"

    known: ClassVar[tuple[str, ...]] = TASKS

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("phrasing", (self.phrasing,), PHRASINGS)
        self.check("filler", (self.filler,), tuple(MIXES))


def some_tasks(text: str | None) -> tuple[str, ...]:
    """Task names with commas between them; None for all of them."""
    return TASKS if text is None else tuple(name for name in text.split(",") if name)


def sampler_of(codec: Codec, plan: Plan) -> Sampler:
    """The sampler of a plan's text."""
    tokens = max(40_000, 2 * max(plan.lengths))
    return Sampler(codec, Filler.build(codec, MIXES[plan.filler], tokens, plan.seed), Lexicon())


def samples(sampler: Sampler, plan: Plan, task: str, length: int) -> Iterator[tuple[Sample, float]]:
    """The samples of one task and length, each with its depth: the same for the same plan, whatever else was drawn."""
    depths = depths_of(plan)
    forms = ("chat", "bare", "cue") if sampler.codec.chats else ("bare", "cue")
    for i in range(plan.count):
        rng = random.Random(f"{plan.seed} {task} {length} {plan.phrasing} {plan.filler} {i}")
        depth = depths[i % len(depths)]
        form = forms[i % len(forms)]
        spec = Spec(length, task, form=form, depth=depth, phrasing=cast("Phrasing", plan.phrasing))
        yield sampler.draw(rng, spec), depth


def prompts(sampler: Sampler, plan: Plan, task: str, length: int) -> Iterator[Prompt]:
    """The prompts of one task and length as text."""
    codec = sampler.codec
    for sample, depth in samples(sampler, plan, task, length):
        asked = sample.questions[0]
        text, query = codec.decode(sample.ids[len(codec.bos) : asked.start]), asked.query
        yield Prompt(task, length, depth, text, query.answer, asked.end - asked.start + SLACK, query.unordered)
