"""Which prompts are measured: cells of task, length and depth, and the fresh prompts of each."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

from longreach.bench.recall.codec import Codec
from longreach.bench.recall.documents import TASKS
from longreach.bench.recall.facts import Phrasing
from longreach.bench.recall.filler import GENERATED_MIX, UNSEEN_MIX, Filler
from longreach.bench.recall.items import NOT_STATED, Query
from longreach.bench.recall.samples import Sample, Spec
from longreach.bench.recall.tasks import Sampler
from longreach.bench.recall.vocabulary import Lexicon

MIXES = {"seen": GENERATED_MIX, "unseen": UNSEEN_MIX}
PHRASINGS = ("plain", "mixed", "held_out")
_SLACK = 8  # tokens that an answer may run on for before it is cut off


@dataclass(frozen=True)
class Plan:
    """What to measure: `count` prompts for each task and length, spread evenly over `depths` depths from 0 to 1.

    Raises:
        ValueError: an unknown task, phrasing or filler, or a number that is too small.
    """

    tasks: tuple[str, ...] = TASKS
    lengths: tuple[int, ...] = (1024, 4096, 16384)
    depths: int = 5
    count: int = 20
    phrasing: str = "plain"
    filler: str = "seen"
    seed: int = 7

    def __post_init__(self) -> None:
        for name, given, known in (
            ("tasks", self.tasks, TASKS),
            ("phrasing", (self.phrasing,), PHRASINGS),
            ("filler", (self.filler,), tuple(MIXES)),
        ):
            if unknown := [value for value in given if value not in known]:
                raise ValueError(f"{name}: {', '.join(unknown)} is unknown; use {', '.join(known)}")
        if not self.tasks or not self.lengths or min(self.lengths) < 512:
            raise ValueError("lengths: name one or more, each of 512 tokens or more")
        if self.depths < 1 or self.count < 1:
            raise ValueError("depths and count must be 1 or more")


@dataclass(frozen=True)
class Prompt:
    """A prompt as text without its beginning-of-sequence token, and what is right; `depth` in [0, 1]."""

    task: str
    length: int
    depth: float
    text: str
    query: Query
    max_tokens: int

    def false_alarm(self, answer: str) -> bool:
        """Whether `answer` says that the text does not state what it does."""
        return self.query.answer != NOT_STATED and answer.strip() == NOT_STATED


def some_tasks(text: str | None) -> tuple[str, ...]:
    """Task names with commas between them; None for all of them."""
    return TASKS if text is None else tuple(name for name in text.split(",") if name)


def whole_numbers(name: str, text: str) -> tuple[int, ...]:
    """Numbers with commas between them.

    Raises:
        ValueError: naming the option `name`.
    """
    try:
        return tuple(int(number) for number in text.split(",") if number)
    except ValueError:
        raise ValueError(f"{name}: {text!r} is no list of numbers such as 1024,16384") from None


def depths_of(plan: Plan) -> tuple[float, ...]:
    """The depths of a plan: 0, 1 and those between them; 0.5 if there is one only."""
    return (0.5,) if plan.depths == 1 else tuple(i / (plan.depths - 1) for i in range(plan.depths))


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
        question = sample.questions[0]
        text = codec.decode(sample.ids[len(codec.bos) : question.start])
        yield Prompt(task, length, depth, text, question.query, question.end - question.start + _SLACK)
