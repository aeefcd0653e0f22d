"""Exact match of the exported model: by length, form, phrasing and text (trained on or held out), and depth.

    python -m training.evaluate server/longreach/default_model training/results/recall.json

Each prompt is text; it is tokenized by the exported tokenizer and answered greedily until the end of sequence. Exact
match means that the answer, without the white space around it, is the value and nothing else.
"""

import argparse
import hashlib
import json
import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from training import tasks
from training import tokenizer as bpe
from training.facts import Phrasing
from training.filler import HELD_OUT_MIX, ORDINARY_MIX, TRAINING_MIX, Codec, Filler
from training.vocabulary import Lexicon

# What a cell's prompts are made of: their text, and how facts are stated and asked for.
SPLITS: dict[str, tuple[Mapping[str, float], Phrasing]] = {
    "plain": (ORDINARY_MIX, "plain"),
    "seen": (TRAINING_MIX, "mixed"),
    "held_out": (HELD_OUT_MIX, "held_out"),
}
MAX_NEW_TOKENS = 48


@dataclass(frozen=True)
class Prompt:
    """A prompt as text, the answer expected, and where its fact stands (share of the prompt before it)."""

    text: str
    answer: str
    question: str
    depth: float


def prompts(
    sampler: tasks.Sampler, length: int, form: str, count: int, phrasing: Phrasing, seed: int
) -> Iterator[Prompt]:
    """`count` fresh prompts, the asked fact at evenly spread depths; each among 1, 4 or 16 facts."""
    rng = random.Random(f"{seed} {length} {form} {phrasing}")
    for i in range(count):
        spec = tasks.Spec(
            length, (1, 4, 16)[i % 3], 1, form=form, depth=(i + 0.5) / count, phrasing=phrasing, absent=0.0
        )
        sample = sampler.draw(rng, spec)
        question = sample.questions[0]
        yield Prompt(sample.prompt(sampler.codec), question.answer, question.text, (i + 0.5) / count)


def not_stated_prompts(sampler: tasks.Sampler, length: int, count: int, seed: int) -> Iterator[Prompt]:
    """Prompts that ask for what they do not state."""
    rng = random.Random(f"{seed} {length} not stated")
    for i in range(count):
        sample = sampler.draw(rng, tasks.Spec(length, (1, 4, 16)[i % 3], 1, absent=1.0, form=rng.choice(tasks.FORMS)))
        yield Prompt(sample.prompt(sampler.codec), sample.questions[0].answer, sample.questions[0].text, 1.0)


class Answerer:
    """Greedy decoding of text prompts, one at a time, with a KV cache."""

    def __init__(self, directory: Path, device: str) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="sdpa")
        self.model = nn.Module.to(model, device).eval()
        self.device = device

    @torch.inference_mode()
    def answer(self, text: str) -> str:
        """The model's answer to `text` (special tokens written out in it), special tokens removed, white space kept."""
        ids = torch.tensor([self.tokenizer(text, add_special_tokens=False).input_ids], device=self.device)
        out = self.model(input_ids=ids, use_cache=True, logits_to_keep=1)
        new: list[int] = []
        while len(new) < MAX_NEW_TOKENS:
            token = int(out.logits[0, -1].argmax())
            if token == bpe.EOS_ID:
                break
            new.append(token)
            out = self.model(
                input_ids=torch.tensor([[token]], device=self.device),
                past_key_values=out.past_key_values,
                use_cache=True,
            )
        return self.tokenizer.decode(new, skip_special_tokens=True)


def measure(answerer: Answerer, batch: Iterator[Prompt]) -> dict[str, object]:
    """Exact match over prompts: {n, exact, by_depth (tenths of the prompt), wrong (up to five)}."""
    depths: dict[int, list[bool]] = {}
    wrong: list[dict[str, str]] = []
    for prompt in batch:
        got = answerer.answer(prompt.text)
        right = got.strip() == prompt.answer
        depths.setdefault(min(9, int(10 * prompt.depth)), []).append(right)
        if not right and len(wrong) < 5:
            wrong.append({"question": prompt.question, "expected": prompt.answer, "got": got})
    flags = [flag for tenth in depths.values() for flag in tenth]
    return {
        "n": len(flags),
        "exact": round(sum(flags) / len(flags), 4),
        "by_depth": {str(tenth): round(sum(f) / len(f), 4) for tenth, f in sorted(depths.items())},
        "wrong": wrong,
    }


def main() -> None:
    """Evaluate a directory and write the JSON result."""
    parser = argparse.ArgumentParser(description="measure recall of an exported model")
    parser.add_argument("model", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--corpus", type=Path, help="pools of training.corpus; without it, smaller ones are made now")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16384, 32768])
    parser.add_argument("--count", type=int, default=100, help="prompts per length, form and split")
    parser.add_argument("--splits", nargs="+", choices=list(SPLITS), default=list(SPLITS))
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="leave out the cells that would start later than this"
    )
    options = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    answerer = Answerer(options.model, device)
    codec = Codec(bpe.load(options.model))
    lexicon = Lexicon()
    started = time.monotonic()
    cells: dict[str, object] = {}
    left_out: list[str] = []
    tokens = max(60_000, 2 * max(options.lengths))
    samplers = {}
    for split in options.splits:
        mix, _ = SPLITS[split]
        filler = (
            Filler.load(options.corpus, codec, mix)
            if options.corpus
            else Filler.build(codec, mix, tokens, options.seed)
        )
        samplers[split] = tasks.Sampler(codec, filler, lexicon)

    def run(name: str, batch: Iterator[Prompt]) -> None:
        if time.monotonic() - started > options.seconds:
            left_out.append(name)
            return
        cells[name] = measure(answerer, batch)
        print(name, json.dumps(cells[name]), flush=True)

    for length in options.lengths:
        for split, sampler in samplers.items():
            for form in tasks.FORMS:
                run(
                    f"{length}/{form}/{split}",
                    prompts(sampler, length, form, options.count, SPLITS[split][1], options.seed),
                )
        if "seen" in samplers:
            run(f"{length}/not_stated/seen", not_stated_prompts(samplers["seen"], length, options.count, options.seed))

    result = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "seed": options.seed,
        "count": options.count,
        "model_sha256": hashlib.sha256((options.model / "model.safetensors").read_bytes()).hexdigest(),
        "cells": cells,
        "left_out": left_out,
    }
    options.result.parent.mkdir(parents=True, exist_ok=True)
    options.result.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
