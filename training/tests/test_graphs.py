"""Steps replayed as CUDA graphs: what fills a batch up changes nothing, and a replay is the step itself."""

import dataclasses
from pathlib import Path

import pytest
import torch

from training import model
from training.compare import random_batch
from training.data import Batch, Batches, Job
from training.graphs import EAGER, padded
from training.trainer import Trainer, failed

SMALL = {"pairs": 1, "hidden": 128, "heads": 2, "mlp": 96, "window": 32}


def test_answer_tokens_that_fill_a_batch_weigh_nothing(corpus: Path) -> None:
    batch = Batches(corpus, 1024)[Job("1", 512)]
    filled = padded(batch, len(batch.at) + 100)
    assert len(set(filled.at[len(batch.at) :].tolist())) == 100
    found = []
    for given in (batch, filled):
        trainer = Trainer(model.create(3, **SMALL), torch.device("cpu"), compiled=False)
        results = trainer.backward(given)
        found.append(
            [results["answer"], results["exact"], results["lead"], trainer.net.get_input_embeddings().weight.grad]
        )
    for given, other in zip(*found, strict=True):
        torch.testing.assert_close(other, given)


def test_a_question_fails_by_any_token_of_its_answer() -> None:
    batch = dataclasses.replace(
        random_batch(512, 512, torch.device("cpu")),
        question=torch.tensor([0, 0, 1, 2, 2, 0]),
        weight=torch.tensor([4.0, 1.0, 4.0, 4.0, 1.0, 0.0]),
        questions=5,
    )
    right = torch.tensor([True, True, False, True, False, False])
    assert failed(right, batch).tolist() == [False, True, True, False, False]


@pytest.mark.gpu
def test_a_replayed_step_is_the_step_itself() -> None:
    """To the bit, padded alike; a batch with more answer tokens than the graph has room for makes a new one."""
    device = torch.device("cuda")
    sizes = {512: [512, 900, 700, 1000, 1300, 800], 1024: [100, 1500, 1200, 600]}
    room = {512: [512, 900, 1024, 1024, 2048, 2048], 1024: [100, 1500, 2048, 2048]}
    batches = [(length, i) for i in range(6) for length in sizes if i < len(sizes[length])]

    def batch_of(length: int, number: int) -> Batch:
        whole = random_batch(length, 32768, torch.device("cpu"))
        count = sizes[length][number]
        at = torch.randperm(32767, generator=torch.Generator().manual_seed(number))[:count]
        token, weight = whole.ids.flatten()[at + 1], torch.ones(count)
        return dataclasses.replace(
            whole, at=at, token=token, weight=weight, lead=weight.bool(), question=torch.arange(count), questions=count
        ).pin_memory()

    histories, weights = [], []
    for graphed in (False, True):
        history = []
        with torch.cuda.stream(torch.cuda.current_stream()):  # which the trainer changes
            trainer = Trainer(model.create(3, **SMALL), device, graphed=graphed)
            for length, number in batches:
                batch = batch_of(length, number)
                if not graphed and number >= EAGER:
                    batch = padded(batch, room[length][number])
                results = trainer.step(batch, 1e-3 / (1 + number))
                history.append({name: value.item() for name, value in results.items()})
            torch.cuda.synchronize()
        histories.append(history)
        weights.append([master.clone() for master in trainer.optimizer.masters])
    assert histories[0] == histories[1]
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))
