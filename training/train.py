"""Train the embedded model with longreach's own kernels: one command, seeded, by a curriculum of lengths.

    python -m training.train .scratch/corpus OUT
    python -m training.train .scratch/corpus OUT --seconds 500                                     # pauses
    python -m training.train .scratch/corpus OUT2 --resume OUT/state                               # goes on

OUT receives log.jsonl, the state to resume from (OUT/state, renewed at every score) and, in its place at the end, the
exported model (OUT/model). The scores are of fixed fresh prompts: the tasks, two longer lengths, and held-out phrasings
in unseen text.
"""

import argparse
import dataclasses
import json
import math
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from transformers import SmolLM3ForCausalLM

from training import data, model, state
from training import tokenizer as bpe
from training.data import Batch, Batches, Job
from training.recall.documents import TASKS
from training.recall.samples import Spec
from training.schedule import STAGES, Schedule
from training.trainer import Trainer

Write = Callable[..., None]

LOG_EVERY = 50
STEPS = 40000
SEED = 2  # of those that were trained, the one whose weights answer most prompts of the recall seed 23
SCORES = 8  # looks at the fixed prompts in the whole training, of two seconds each
NEEDLES = ("single", "many", "multikey", "uuid")
COMPOUND = ("multivalue", "multiquery", "chain", "count", "first", "last", "copy", "frequent")


def fixed_jobs(tokens: int, lengths: tuple[int, ...]) -> dict[str, list[Job]]:
    """The prompts of the score, by cell: 64 of every task at the shortest of `lengths` (or a batch, if that is more),
    of needles at every length, and of most tasks with held-out phrasings in unseen text.
    """
    cells: dict[str, list[Job]] = {}

    def add(name: str, length: int, tasks: tuple[str, ...], *, unseen: bool = False) -> None:
        batches = max(1, 64 * length // tokens)
        cells[name] = [
            Job(
                f"score {name} {i}",
                length,
                Spec(
                    length,
                    tasks[i % len(tasks)],
                    depth=random.Random(i).random(),
                    phrasing="held_out" if unseen else "mixed",
                ),
                unseen,
            )
            for i in range(max(batches, len(tasks)))
        ]

    for task in TASKS:
        add(task, lengths[0], (task,))
    for length in lengths[1:]:
        add(f"needles/{length}", length, NEEDLES)
    add(f"held_out/{lengths[0]}", lengths[0], ("single", "many", "multikey"), unseen=True)
    for task in COMPOUND:
        add(f"held_out {task}", lengths[0], (task,), unseen=True)
    return cells


def scores(trainer: Trainer, cells: dict[str, list[Batch]]) -> dict[str, float]:
    """The share of questions answered exactly, by cell."""
    shares = {}
    for name, batches in cells.items():
        right = torch.cat([trainer.answered(batch) for batch in batches])
        shares[name] = round(right.float().mean().item(), 4)
    return shares


class Run:
    """A training run: the trainer, where it is, and what it logs."""

    def __init__(
        self,
        trainer: Trainer,
        schedule: Schedule,
        cells: dict[str, list[Batch]],
        write: Write,
        state_directory: Path | None = None,
    ) -> None:
        self.trainer, self.schedule, self.cells, self.write = trainer, schedule, cells, write
        self.state_directory = state_directory

    def until(self, batches: Iterator[Batch], out_of_time: Callable[[], bool]) -> bool:
        """Train until the end or until `out_of_time`; returns whether it is the end."""
        every = max(LOG_EVERY, math.ceil(self.schedule.steps / SCORES))
        tokens = 0
        while not self.schedule.done:
            batch, rate = next(batches), self.schedule.rate()
            length = batch.ids.shape[1]
            results = self.trainer.step(batch, rate)
            tokens += batch.ids.numel()
            if self.schedule.step % LOG_EVERY == 0:
                values = {name: round(value.item(), 4) for name, value in results.items()}
                if not math.isfinite(values["answer"]):
                    raise RuntimeError(f"the loss is {values['answer']} at step {self.schedule.step}: lower the rates")
                self.schedule.observe(length, values["lead"])
                self.write(step=self.schedule.step, length=length, tokens=tokens, rate=round(rate, 6), **values)
            if self.schedule.advance():
                self.write(event="stage", step=self.schedule.step, stage=self.schedule.number)
            if self.schedule.remembered:
                self.trainer.optimizer.remember()
            if self.schedule.done and self.trainer.optimizer.remembered > 1:
                self.score()  # of the last weights, to compare with the mean
                self.trainer.optimizer.settle()
            if self.schedule.step % every == 0 or self.schedule.done:
                self.score()
                self.save()
            if out_of_time():
                return self.schedule.done
        return True

    def save(self) -> None:
        """Write the state to resume from."""
        if self.state_directory is not None:
            state.save(self.state_directory, self.trainer.optimizer, self.schedule)

    def score(self) -> None:
        """Look at the fixed prompts."""
        found = scores(self.trainer, self.cells)
        self.write(event="score", step=self.schedule.step, mean=round(sum(found.values()) / len(found), 4), **found)


def logger(path: Path) -> Write:
    """A function that appends one line of JSON to `path` and prints it, with the seconds since now."""
    started = time.monotonic()

    def write(**entry: object) -> None:
        line = json.dumps({"seconds": round(time.monotonic() - started, 1), **entry})
        print(line, flush=True)
        with path.open("a") as file:
            file.write(line + "\n")

    return write


def main() -> None:
    """Parse the command line, train, export."""
    parser = argparse.ArgumentParser(description="train the embedded model")
    parser.add_argument("corpus", type=Path, help="directory that training.corpus wrote")
    parser.add_argument("out", type=Path, help="where the log and the exported model or the state go")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seconds", type=float, default=math.inf, help="pause after this long")
    parser.add_argument("--resume", type=Path, help="a state to go on from")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--tokens", type=int, default=65536, help="tokens a step")
    parser.add_argument("--workers", type=int, default=15, help="processes that make batches")
    parser.add_argument("--pairs", type=int, default=5, help="pairs of layers")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--mlp", type=int, default=640, help="width of the feed-forward layers")
    parser.add_argument("--longest", type=int, default=32768, help="leave out the stages with longer prompts than this")
    parser.add_argument("--no-compile", action="store_true", help="run the layers eagerly")
    parser.add_argument("--no-graphs", action="store_true", help="on a GPU, launch a step's kernels one by one")
    options = parser.parse_args()
    started = time.monotonic()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # every core makes batches already

    options.out.mkdir(parents=True, exist_ok=True)
    write = logger(options.out / "log.jsonl")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    stages = tuple(stage for stage in STAGES if max(stage.mix) <= options.longest)
    if not stages:
        parser.error(f"--longest {options.longest} leaves no stage")
    schedule = Schedule(options.steps, options.seed, stages)
    net = model.create(options.seed, pairs=options.pairs, hidden=options.hidden, mlp=options.mlp)
    graphed = device.type == "cuda" and not options.no_graphs
    trainer = Trainer(net, device, compiled=not options.no_compile, graphed=graphed)
    if options.resume:
        state.load(options.resume, trainer.optimizer, schedule)

    source = Batches(options.corpus, options.tokens)
    lengths = tuple(sorted({length for stage in stages for length in stage.mix} - {512})) or (512,)
    jobs = fixed_jobs(options.tokens, lengths)
    flat = iter(data.loader(source, [job for cell in jobs.values() for job in cell], options.workers))
    cells = {name: [next(flat) for _ in cell] for name, cell in jobs.items()}
    write(
        event="start",
        step=schedule.step,
        steps=schedule.steps,
        seed=options.seed,
        parameters=sum(p.numel() for p in net.parameters()),
        torch=torch.__version__,
        device=torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        attention=trainer.backend,
        stages=[dataclasses.asdict(stage) for stage in stages],
    )
    run = Run(trainer, schedule, cells, write, options.out / "state")
    batches = iter(data.loader(source, schedule.jobs(), options.workers))
    finished = run.until(batches, lambda: time.monotonic() - started > options.seconds)
    write(event="end" if finished else "pause", step=schedule.step)
    if finished:
        export(trainer, options)
        shutil.rmtree(options.out / "state")
    else:
        run.save()


def export(trainer: Trainer, options: argparse.Namespace) -> None:
    """Write OUT/model: the weights, the tokenizer and the chat template."""
    net = model.create(options.seed, pairs=options.pairs, hidden=options.hidden, mlp=options.mlp)
    masters = zip(trainer.optimizer.names, trainer.optimizer.masters, strict=True)
    missing, unexpected = net.load_state_dict(dict(masters), strict=False)
    assert missing in ([], ["lm_head.weight"])  # tied to the embedding
    assert not unexpected
    assert isinstance(net, SmolLM3ForCausalLM)
    model.export(net, options.out / "model")
    bpe.save(bpe.load(options.corpus / "tokenizer"), options.out / "model", model.MAX_LENGTH)


if __name__ == "__main__":
    main()
