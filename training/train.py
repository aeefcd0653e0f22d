"""Train the embedded model: one command, seeded, by a curriculum of lengths.

    python -m training.train .scratch/corpus OUT --seconds 1000

Each stage adds a longer length and keeps some of the shorter ones; it warms up anew with a lower learning rate, and
ends when enough fresh prompts are answered exactly or its share of the time is used. What is kept is the state with
the best score on prompts of every length, half of them with phrasings and text that training never uses. OUT receives
log.jsonl and the exported model.
"""

import argparse
import json
import math
import multiprocessing
import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from transformers import SmolLM3ForCausalLM

from training import attention, data, model, tasks
from training import tokenizer as bpe
from training.data import Batch
from training.filler import HELD_OUT_MIX, TRAINING_MIX, Codec, Filler

TEXT_WEIGHT = 0.2
TEXT_POSITIONS = 4096


@dataclass(frozen=True)
class Stage:
    """Lengths by share of the batches, peak learning rate, the exact-match rate that ends the stage, and its share of
    the time at most.
    """

    mix: Mapping[int, float]
    rate: float
    gate: float
    share: float


STAGES = (
    Stage({512: 1.0}, 1.5e-3, 0.90, 0.30),
    Stage({512: 0.4, 4096: 0.6}, 1.0e-3, 0.95, 0.20),
    Stage({512: 0.25, 4096: 0.3, 16384: 0.45}, 7e-4, 0.98, 0.20),
    Stage({512: 0.35, 4096: 0.25, 16384: 0.22, 32768: 0.18}, 7e-4, 1.1, 1.0),
)
WARM_UP = 100  # steps, at the start of every stage


class Trainer:
    """The model, its optimizer and its log."""

    def __init__(self, net: SmolLM3ForCausalLM, device: torch.device, log: Path, *, compiled: bool) -> None:
        nn.Module.to(net, device)
        self.net, self.device, self.log = net, device, log
        if compiled:
            torch._dynamo.config.recompile_limit = 64
            for layer in net.model.layers:
                nn.Module.compile(layer, dynamic=False)
        matrices = [p for p in net.parameters() if p.ndim > 1]
        others = [p for p in net.parameters() if p.ndim <= 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}],
            betas=(0.9, 0.95),
            fused=device.type == "cuda",
        )
        self.started = time.monotonic()

    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started

    def write(self, **entry: object) -> None:
        """Append one line to the log."""
        line = json.dumps({"seconds": round(self.elapsed(), 1), **entry})
        print(line, flush=True)
        with self.log.open("a") as file:
            file.write(line + "\n")

    def outputs(self, batch: Batch) -> torch.Tensor:
        """Final hidden states (B * L, C) of a batch."""
        hidden = self.net.model(input_ids=batch.ids, use_cache=False).last_hidden_state
        return hidden.reshape(-1, hidden.shape[-1])

    def step(self, batch: Batch, rate: float) -> dict[str, torch.Tensor]:
        """One update; returns device scalars: losses, gradient norm, and the share of questions answered exactly
        before the update.
        """
        with torch.autocast("cuda", torch.bfloat16, enabled=self.device.type == "cuda"):
            hidden = self.outputs(batch)
            answers = self.net.lm_head(hidden[batch.at]).float()
            somewhere = torch.randint(batch.ids.numel() - 1, (TEXT_POSITIONS,), device=self.device)
            text = self.net.lm_head(hidden[somewhere]).float()
        losses = F.cross_entropy(answers, batch.token, reduction="none")
        answer_loss = (losses * batch.weight).sum() / batch.weight.sum()
        # The last position of a row predicts the next row's first token: too few to matter.
        text_loss = F.cross_entropy(text, batch.ids.reshape(-1)[somewhere + 1])
        (answer_loss + TEXT_WEIGHT * text_loss).backward()
        norm = nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return {
            "answer": answer_loss.detach(),
            "text": text_loss.detach(),
            "norm": norm,
            "exact": exact(answers, batch).mean(),
        }

    def score(self, batches: list[Batch]) -> float:
        """The share of first questions answered exactly; gradients stay on so that the compiled layers are used as
        they are.
        """
        right = total = 0.0
        for batch in batches:
            batch = batch.to(self.device)
            with torch.autocast("cuda", torch.bfloat16, enabled=self.device.type == "cuda"):
                logits = self.net.lm_head(self.outputs(batch)[batch.at])
            right += exact(logits, batch).sum().item()
            total += batch.questions
        return right / total


def exact(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    """For each question 1.0 if every answer token is the most likely one, that is if greedy decoding gives the
    answer; (questions,).
    """
    wrong = (logits.argmax(-1) != batch.token).float()
    return (torch.zeros(batch.questions, device=wrong.device).index_add_(0, batch.question, wrong) == 0).float()


def fixed_prompts(corpus: Path, lengths: list[int], tokens: int, count: int) -> dict[str, list[Batch]]:
    """Batches of single-question prompts by `length/split`, always the same; text and phrasings of the split."""
    codec, lexicon = Codec(bpe.load(corpus / "tokenizer")), data.load_lexicon(corpus)
    cells = {}
    for split, mix in (("seen", TRAINING_MIX), ("held_out", HELD_OUT_MIX)):
        sampler = tasks.Sampler(codec, Filler.load(corpus, codec, mix), lexicon)
        for length in lengths:
            rng = random.Random(f"evaluation {split} {length}")
            size = max(1, tokens // length)
            cells[f"{length}/{split}"] = [
                data.collate(
                    [
                        sampler.draw(
                            rng,
                            tasks.Spec(
                                length,
                                rng.choice((1, 4, 16)),
                                1,
                                depth=rng.random(),
                                phrasing="held_out" if split == "held_out" else "mixed",
                                absent=0.0,
                            ),
                        )
                        for _ in range(size)
                    ]
                )
                for _ in range(max(1, count // size))
            ]
    return cells


def train(
    trainer: Trainer,
    batches: Iterator[Batch],
    stages: tuple[Stage, ...],
    stage_now: "Synchronized[int]",
    cells: dict[str, list[Batch]],
    seconds: float,
) -> dict[str, torch.Tensor]:
    """Run the stages within `seconds`; returns the best state by mean score."""
    best, best_state, step, tokens = -1.0, {}, 0, 0
    for number, stage in enumerate(stages):
        stage_now.value = number
        last = number == len(stages) - 1
        begun = trainer.elapsed()
        allowed = seconds - begun if last else min(stage.share * seconds, seconds - begun)
        rates: dict[int, float] = {}
        in_stage, checked = 0, begun
        trainer.write(event="stage", stage=number, mix=stage.mix)
        while (now := trainer.elapsed()) - begun < allowed:
            batch = next(batches).to(trainer.device)
            cooling = 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, (now - begun) / allowed))) if last else 1.0
            results = trainer.step(batch, stage.rate * min(1.0, (in_stage + 1) / WARM_UP) * cooling)
            step, in_stage, tokens = step + 1, in_stage + 1, tokens + batch.ids.numel()
            length = batch.ids.shape[1]
            if step % 25 == 0:
                values = {name: round(value.item(), 4) for name, value in results.items()}
                if not math.isfinite(values["answer"]):
                    raise RuntimeError(f"the loss is {values['answer']} at step {step}: lower the stage's rate")
                rates[length] = 0.7 * rates.get(length, values["exact"]) + 0.3 * values["exact"]
                trainer.write(
                    step=step,
                    length=length,
                    tokens=tokens,
                    rate=round(trainer.optimizer.param_groups[0]["lr"], 6),
                    **values,
                )
            longest = max(stage.mix)
            passed = not last and in_stage >= 4 * WARM_UP and rates.get(longest, 0.0) >= stage.gate
            if passed or trainer.elapsed() - checked > max(20.0, seconds / 16) or trainer.elapsed() - begun >= allowed:
                checked = trainer.elapsed()
                scores = {name: round(trainer.score(cell), 4) for name, cell in cells.items()}
                mean = sum(scores.values()) / len(scores)
                trainer.write(event="score", step=step, mean=round(mean, 4), **scores)
                if mean >= best:
                    best, best_state = (
                        mean,
                        {name: p.detach().to("cpu", copy=True) for name, p in trainer.net.state_dict().items()},
                    )
            if passed:
                break
    trainer.write(event="end", step=step, tokens=tokens, best=round(best, 4))
    return best_state


def main() -> None:
    """Parse the command line, train, export."""
    parser = argparse.ArgumentParser(description="train the embedded model")
    parser.add_argument("corpus", type=Path, help="directory that training.corpus wrote")
    parser.add_argument("out", type=Path, help="where the log, the weights and the exported model go")
    parser.add_argument("--seconds", type=float, default=1000.0, help="time to train")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=131072, help="tokens a step")
    parser.add_argument("--workers", type=int, default=14, help="processes that make batches")
    parser.add_argument("--resume", type=Path, help="an exported model to go on from")
    parser.add_argument("--first-stage", type=int, default=0, help="stage to begin with when resuming")
    parser.add_argument("--pairs", type=int, default=3, help="pairs of layers")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--longest", type=int, default=32768, help="leave out the stages with longer prompts than this")
    parser.add_argument("--no-compile", action="store_true", help="run the layers eagerly")
    options = parser.parse_args()

    options.out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    attention.register()
    net = model.create(options.seed, pairs=options.pairs, hidden=options.hidden, mlp=3 * options.hidden)
    if options.resume:
        net.load_state_dict(SmolLM3ForCausalLM.from_pretrained(options.resume, dtype=torch.float32).state_dict())
    net.set_attn_implementation(attention.NAME)

    stages = tuple(s for s in STAGES if max(s.mix) <= options.longest)[options.first_stage :]
    lengths = sorted({length for s in stages for length in s.mix} & {4096, 16384, 32768}) or [512]
    stage_now = multiprocessing.Value("i", 0)
    stream = data.Stream(
        options.corpus, [s.mix for s in stages], options.tokens, stage_now, options.seed + 1000 * options.first_stage
    )
    batches = iter(data.loader(stream, options.workers))
    trainer = Trainer(net, device, options.out / "log.jsonl", compiled=not options.no_compile)
    cells = fixed_prompts(options.corpus, lengths, options.tokens, 128)
    trainer.write(
        event="start",
        parameters=sum(p.numel() for p in net.parameters()),
        torch=torch.__version__,
        device=torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
    )

    net.load_state_dict(train(trainer, batches, stages, stage_now, cells, options.seconds))
    model.export(net.cpu(), options.out / "model")
    bpe.save(bpe.load(options.corpus / "tokenizer"), options.out / "model", model.MAX_LENGTH)


if __name__ == "__main__":
    main()
