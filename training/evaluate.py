"""Recall of an exported model over many fresh prompts, on a GPU in a minute.

    python -m training.evaluate OUT/model training/results

The tasks are those of `longreach bench recall`, and so is the layout of the results, of which each plan gives one:
recall-PLAN.json. Here the prompts of a cell are answered
in batches: greedy decoding gives the right answer just if every token of it is the most likely one after the prompt
and the tokens before it, so one forward pass over prompt and answer tells.
"""

import argparse
import dataclasses
import hashlib
import json
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from longreach.bench.recall.measure import line, shares
from longreach.bench.recall.sampler import NOT_STATED
from longreach_kernels import Window
from longreach_patches import patch
from longreach_patches.attention import LAYER_ATTRIBUTE
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from training.recall.codec import Codec
from training.recall.forms import gap
from training.recall.samples import Sample
from training.recall.suite import Plan, sampler_of, samples

NEEDLES = ("single", "many", "multikey", "uuid")
SHORT = (1024, 4096, 16384, 32768)
PLANS = {
    "plain": Plan(lengths=SHORT, depths=10, count=100),
    "held_out": Plan(lengths=SHORT, depths=10, count=100, phrasing="held_out"),
    "unseen_text": Plan(lengths=(16384,), depths=10, count=100, filler="unseen"),
    "long": Plan(tasks=("single",), lengths=(65536, 131072), depths=10, count=100),
    # Every full layer restricted to a window with sinks: it must fail beyond the window, and nowhere else.
    "window": Plan(tasks=NEEDLES[:1], lengths=(512, 1024, 2048, *SHORT[1:]), depths=10, count=100),
}
WINDOW, SINKS = 1024, 4
TOKENS = 131072  # a forward pass


@dataclasses.dataclass(frozen=True)
class Cell:
    """One task at one length of a plan."""

    name: str
    plan: Plan
    task: str
    length: int


@cache
def _codec(directory: Path) -> Codec:
    return Codec.load(directory)


@cache
def _sampler(directory: Path, plan: Plan) -> Any:
    return sampler_of(_codec(directory), plan)


def _draw(directory: Path, cell: Cell) -> list[Sample]:
    """The samples of a cell; runs in a process of its own."""
    whole = dataclasses.replace(cell.plan, tasks=(cell.task,), lengths=(cell.length,))
    return [sample for sample, _ in samples(_sampler(directory, whole), whole, cell.task, cell.length)]


def load(directory: Path, device: torch.device, *, window: bool = False) -> PreTrainedModel:
    """The model with our attention; with `window`, its full layers see the last `WINDOW` tokens and `SINKS` first."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    nn.Module.to(model, device).eval()
    masks = patch(model).masks
    for mask, layer in zip(masks, model.base_model.layers, strict=True):
        if window and not isinstance(mask, Window):
            attention = getattr(layer.self_attn, LAYER_ATTRIBUTE)
            setattr(layer.self_attn, LAYER_ATTRIBUTE, dataclasses.replace(attention, mask=Window(WINDOW, SINKS)))
    return model


@torch.inference_mode()
def answered(model: PreTrainedModel, codec: Codec, batch: list[Sample]) -> Iterator[tuple[bool, bool]]:
    """For each sample of one length: is greedy decoding right, and does it say that the text does not state it?"""
    device = next(model.parameters()).device
    ids = torch.stack([torch.from_numpy(sample.ids) for sample in batch]).to(device)
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    for row, sample in enumerate(batch):
        asked = sample.questions[0]
        said = model.lm_head(hidden[row, asked.start - 1 : asked.end - 1]).argmax(-1).cpu()
        before = codec.decode(sample.ids[asked.start - 4 : asked.start])
        unknown = codec.encode(gap(before) + NOT_STATED)
        first = int(codec.blank[unknown[0]])  # the first token that says something
        named, right = int(unknown[first]), int(sample.ids[asked.start + first])
        alarm = asked.answer != NOT_STATED and int(said[first]) == named != right
        yield bool((said == torch.from_numpy(sample.ids[asked.start : asked.end])).all()), alarm


def measure(model: PreTrainedModel, codec: Codec, cell: Cell, drawn: list[Sample]) -> dict[str, Any]:
    """The row of a cell, as `longreach bench recall` has it, without times."""
    size = max(1, TOKENS // cell.length)
    found = [pair for i in range(0, len(drawn), size) for pair in answered(model, codec, drawn[i : i + size])]
    right, alarms = ([pair[i] for pair in found] for i in (0, 1))
    return {"task": cell.task, "length": cell.length, **shares(cell.plan, right, alarms)}


def main() -> None:
    """Evaluate a directory and write the JSON results."""
    parser = argparse.ArgumentParser(description="measure recall of an exported model")
    parser.add_argument("model", type=Path)
    parser.add_argument("results", type=Path, help="where recall-PLAN.json go")
    parser.add_argument("--plans", nargs="+", choices=list(PLANS), default=list(PLANS))
    parser.add_argument("--longest", type=int, default=131072, help="leave out longer prompts")
    parser.add_argument("--count", type=int, help="prompts a cell; default: the plan's, 100")
    parser.add_argument("--seed", type=int, default=Plan.seed, help="of the prompts")
    parser.add_argument("--workers", type=int, default=14, help="processes that make prompts")
    options = parser.parse_args()

    started = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    codec = _codec(options.model)
    cells = []
    for name in options.plans:
        plan = PLANS[name]
        lengths = tuple(length for length in plan.lengths if length <= options.longest)
        if lengths:
            count = plan.count if options.count is None else options.count
            plan = dataclasses.replace(plan, lengths=lengths, count=count, seed=options.seed)
            cells += [Cell(name, plan, task, length) for length in lengths for task in plan.tasks]
    rows: dict[str, list[dict[str, Any]]] = {cell.name: [] for cell in cells}
    models: dict[bool, PreTrainedModel] = {}
    with ProcessPoolExecutor(options.workers) as pool:
        drawn = pool.map(_draw, [options.model] * len(cells), cells)
        for cell, batch in zip(cells, drawn, strict=True):
            windowed = cell.name == "window"
            if windowed not in models:
                models[windowed] = load(options.model, device, window=windowed)
            rows[cell.name].append(measure(models[windowed], codec, cell, batch))
            print(f"{time.monotonic() - started:6.1f} s {cell.name:<11} {line(rows[cell.name][-1])}", flush=True)

    environment = {
        "weights": hashlib.sha256((options.model / "model.safetensors").read_bytes()).hexdigest()[:12],
        "on": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    options.results.mkdir(parents=True, exist_ok=True)
    for name, found in rows.items():
        plan = dataclasses.asdict(next(cell.plan for cell in cells if cell.name == name))
        result = {"environment": environment, "plan": plan, "rows": found}
        (options.results / f"recall-{name}.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
