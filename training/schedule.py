"""The curriculum: which lengths, at which rate, for how many steps.

Short sequences do most of the work, and cost least. A longer length comes with a warm-up of its own (entering 4,096
tokens at 2e-3 made a probe with AdamW forget all it knew), and short ones stay in the mix. A stage ends before its
share of the steps is over once the first token of its longest answers is right often enough; what it leaves goes to the
next. Below all of it the rate falls in a straight line to almost nothing (Bergsma et al. 2025, "Straight to Zero"), and
twice more in short stages of mostly long prompts: what is wrong after the first descent is wrong in those. In the last
stage half of the documents are hard (there from the beginning they kept everything else from being learnt early, alone
they unlearnt passages). The mean of the weights where the last two descents end is right where only one of them is
(Izmailov et al. 2018, "Averaging weights leads to wider optima").
"""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from training.data import Job

WARM_UP = 300  # steps, at the start of every stage
GATE_AFTER = 1000  # steps of a stage before its gate is looked at
FLOOR = 0.01  # of the rate, at the end of a descent


@dataclass(frozen=True)
class Stage:
    """Lengths by share of the batches, learning rate (before it falls), the share of all steps at most, the share of
    first answer tokens that ends it before, the share of documents of chains alone, and that of hard ones
    (`training.recall.samples.Spec`).

    In last stages that are `anew` the rate falls again; they begin when only their shares of the steps are left.
    """

    mix: Mapping[int, float]
    rate: float
    share: float
    gate: float
    chains: float = 0.14
    anew: bool = False
    hard: float = 0.0


STAGES = (
    Stage({512: 1.0}, 8.5e-4, 0.072, 0.9, 0.4),
    Stage({512: 0.5, 4096: 0.5}, 8.5e-4, 0.225, 0.99, 0.3),
    Stage({512: 0.3, 4096: 0.44, 16384: 0.1, 32768: 0.16}, 8.5e-4, 1.0, 2.0, 0.28),
    Stage({512: 0.05, 4096: 0.3, 16384: 0.3, 32768: 0.35}, 3e-4, 0.108, 2.0, 0.2, anew=True),
    Stage({512: 0.05, 4096: 0.3, 16384: 0.3, 32768: 0.35}, 3e-4, 0.1, 2.0, 0.2, anew=True, hard=0.5),
)


class Schedule:
    """Where the training is: the stage, the steps in it and in all; `steps` is the total.

    `position` of a state that was saved takes it up there.
    """

    def __init__(self, steps: int, seed: int, stages: tuple[Stage, ...] = STAGES) -> None:
        self.steps, self.seed, self.stages = steps, seed, stages
        self.step = self.number = self.begun = 0
        self.gate_rate = 0.0  # of first answer tokens, at the stage's longest length, moving average
        self.ends = [steps]  # of the stage before those that are anew, and of each of these
        for stage in reversed(stages):
            if stage.anew:
                self.ends.insert(0, self.ends[0] - round(stage.share * steps))

    @property
    def position(self) -> dict[str, float]:
        """What `resume` needs."""
        return {"step": self.step, "number": self.number, "begun": self.begun, "gate_rate": self.gate_rate}

    def resume(self, position: Mapping[str, float]) -> None:
        """Go on from a saved `position`."""
        self.step, self.number, self.begun = (int(position[name]) for name in ("step", "number", "begun"))
        self.gate_rate = position["gate_rate"]

    @property
    def stage(self) -> Stage:
        return self.stages[self.number]

    @property
    def done(self) -> bool:
        return self.step >= self.steps

    @property
    def descent(self) -> int:
        """How many times the rate has begun to fall anew."""
        return sum(stage.anew for stage in self.stages[: self.number + 1])

    @property
    def remembered(self) -> bool:
        """Whether the weights after the last step belong to the mean: where a stage that is anew has ended."""
        return self.step in self.ends[1:]

    def rate(self) -> float:
        """The learning rate of the step to come."""
        inside = self.step - self.begun
        warm = min(1.0, (inside + 1) / WARM_UP)
        begin, end = (0, *self.ends)[self.descent :][:2]
        return self.stage.rate * warm * (FLOOR + (1 - FLOOR) * (end - self.step) / (end - begin))

    def advance(self) -> bool:
        """Count a step; returns whether a new stage begins with the next."""
        self.step += 1
        inside = self.step - self.begun
        if self.number + 1 == len(self.stages):
            return False
        if self.stages[self.number + 1].anew:
            over = self.step >= self.ends[self.descent]
        else:
            passed = inside >= GATE_AFTER and self.gate_rate >= self.stage.gate
            over = passed or inside >= self.stage.share * self.steps
        if not over:
            return False
        self.number, self.begun, self.gate_rate = self.number + 1, self.step, 0.0
        return True

    def observe(self, length: int, lead: float) -> None:
        """Note the share `lead` of first answer tokens that were right in a batch of `length`."""
        if length == max(self.stage.mix):
            self.gate_rate = lead if self.gate_rate == 0 else 0.8 * self.gate_rate + 0.2 * lead

    def jobs(self) -> Iterator[Job]:
        """The batches from the next step on; the stage is looked at when a job is handed out, some steps ahead."""
        step = self.step
        while True:
            seed = f"{self.seed} {step}"
            stage = self.stage
            length = random.Random(f"length {seed}").choices(list(stage.mix), list(stage.mix.values()))[0]
            yield Job(seed, length, chains=stage.chains, hard=stage.hard)
            step += 1
