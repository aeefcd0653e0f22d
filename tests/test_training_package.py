"""The embedded model's training still runs, in miniature; its own tests are those of `make test-training`."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path

import torch
from longreach.bench.recall.sampler import TASKS as PLAIN_TASKS
from longreach.config import EMBEDDED_MODEL

from training import model
from training.data import collate
from training.recall.codec import Codec
from training.recall.documents import TASKS
from training.recall.filler import Filler
from training.recall.samples import Spec
from training.recall.tasks import Sampler
from training.recall.vocabulary import Lexicon
from training.trainer import Trainer

TRAINING = Path(__file__).resolve().parents[1] / "training"


def test_the_grammar_draws_each_task_and_one_step_learns_from_them() -> None:
    torch.set_num_threads(1)
    codec = Codec.load(EMBEDDED_MODEL)
    sampler = Sampler(codec, Filler.build(codec, {"story": 1.0}, 4_000, seed=3), Lexicon())
    samples = [sampler.draw(random.Random(task), Spec(640, task)) for task in TASKS]
    for sample in samples:
        [question] = sample.questions
        assert codec.decode(sample.ids[question.start : question.end - 1]).strip() == question.answer
    batch = collate(samples[:2])
    trainer = Trainer(model.create(3, pairs=1, hidden=64, mlp=96, window=32), torch.device("cpu"), compiled=False)
    first, second = (trainer.step(batch, 3e-3)["answer"].item() for _ in range(2))
    assert second < first


def test_the_plain_tasks_are_tasks_of_the_grammar() -> None:
    assert set(PLAIN_TASKS) <= set(TASKS)


def test_the_weights_are_the_frozen_ones() -> None:
    digest, name = (TRAINING / "weights.sha256").read_text().split()
    path = TRAINING.parent / name
    assert path == EMBEDDED_MODEL / "model.safetensors"
    assert hashlib.sha256(path.read_bytes()).hexdigest() == digest
    measured = json.loads((TRAINING / "results" / "recall-plain.json").read_text())["environment"]["weights"]
    assert digest.startswith(measured)
