"""A gauge of quality: with our attention, the committed model still answers prompts that nobody saw before."""

from pathlib import Path

import pytest
import torch

from training import evaluate
from training.evaluate import Cell
from training.recall.suite import Plan

SEED = 20  # of no training and of no committed result
LEAST = {
    **dict.fromkeys(("single", "many", "multikey", "uuid"), 0.9),
    **dict.fromkeys(("multivalue", "chain", "absent", "frequent", "count", "first", "last"), 0.8),
}


@pytest.fixture(scope="module")
def shares(model_directory: Path) -> dict[str, float]:
    """What is answered exactly of ten prompts of 1,024 tokens for each task."""
    torch.set_num_threads(2)
    codec, model = evaluate._codec(model_directory), evaluate.load(model_directory, torch.device("cpu"))
    plan = Plan(tasks=tuple(LEAST), lengths=(1024,), count=10, seed=SEED)
    cells = [Cell("gauge", plan, task, 1024) for task in LEAST]
    return {
        cell.task: evaluate.measure(model, codec, cell, evaluate._draw(model_directory, cell))["exact"]
        for cell in cells
    }


@pytest.mark.parametrize("task", LEAST)
def test_recall_is_what_it_was(shares: dict[str, float], task: str) -> None:
    assert shares[task] >= LEAST[task]
