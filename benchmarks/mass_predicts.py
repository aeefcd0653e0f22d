"""Which measure of kept attention mass tells that an answer is lost?

A model completes "The pass key for the silver lantern is" behind a long text that names the key. The same prompt is
computed by dense attention, under windows, and with chosen key tiles, in plain torch and fp32. Every row's kept mass is
known, so every measure that a server could bound is compared by how well it tells lost answers from found ones: the
share of pairs of a lost and a found one in which the lost one has the lower value (0.5 is chance).

    python -m benchmarks.mass_predicts MODEL --tokens 2048 --prompts 4 --out mass.json
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from longreach.bench.summary import environment
from torch import Tensor

TILE = 128
STRIDE = 16  # keys of a folded vector in the estimate
QUESTION = 16  # last rows of the prompt that count as the question's
KEY_DIGITS = 5
LEVELS = (0.5, 0.9, 0.98)


@dataclass(frozen=True)
class Setting:
    """What is seen. `window` and `sinks` in tokens, or tiles up to `recall` of the estimate or a `density` of them."""

    name: str
    window: int | None = None
    sinks: int = 64
    recall: float | None = None
    density: float | None = None
    local: int = 128
    tail: int = 512
    oracle: bool = False


SETTINGS = [
    Setting("dense"),
    *(Setting(f"window {size}", window=size) for size in (256, 512, 1024, 1536, 3072)),
    *(Setting(f"density {share}", density=share) for share in (0.02, 0.1, 0.3)),
    *(Setting(f"recall {share}", recall=share) for share in (0.5, 0.7, 0.9, 0.95, 0.98)),
    *(Setting(f"density {share}, no tail", density=share, tail=0) for share in (0.02, 0.05, 0.1, 0.2, 0.3)),
    *(Setting(f"recall {share}, no tail", recall=share, tail=0) for share in (0.3, 0.5, 0.7, 0.9, 0.95)),
]

SUBJECTS = (
    "The miller",
    "A teacher",
    "The old clerk",
    "Her cousin",
    "The night guard",
    "A sailor",
    "The gardener",
    "My neighbour",
)
VERBS = ("walked past", "wrote about", "looked after", "complained of", "painted", "remembered", "sold", "repaired")
OBJECTS = (
    "the harbour",
    "a wooden bridge",
    "the green door",
    "an empty barn",
    "the market hall",
    "three letters",
    "a broken clock",
)
TIMES = (
    "in the morning",
    "before the rain",
    "on a Tuesday",
    "after supper",
    "late in autumn",
    "without a word",
    "for the second time",
)
NAMES = (
    "silver lantern",
    "copper kettle",
    "velvet curtain",
    "paper crown",
    "stone lion",
    "amber bottle",
    "iron gate",
    "glass wing",
)


def prompt_of(tokenizer: Any, tokens: int, seed: int) -> tuple[list[int], list[int], list[int]]:
    """Ids of a prompt of about so many tokens, of its answer, and the positions of the asked key's sentence."""
    draw = random.Random(seed)
    names = draw.sample(NAMES, 4)
    keys = [str(draw.randrange(10 ** (KEY_DIGITS - 1), 10**KEY_DIGITS)) for _ in names]
    sentence = lambda: " ".join(draw.choice(x) for x in (SUBJECTS, VERBS, OBJECTS, TIMES)) + ". "  # noqa: E731
    encode = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    spots = sorted(draw.uniform(0.02, 0.85) for _ in names)
    ids: list[int] = []
    place: list[int] = []
    if tokenizer.bos_token_id is not None:
        ids.append(tokenizer.bos_token_id)
    for spot, name, key in [*zip(spots, names, keys, strict=True), (1.0, names[0], keys[0])]:
        while len(ids) < spot * (tokens - 40):
            ids += encode(sentence())
        if spot < 1.0:
            start = len(ids)
            ids += encode(f"The pass key for the {name} is {key}. ")
            if name == names[0]:
                place = list(range(start, len(ids)))
    question = f"The pass key for the {names[0]} is"
    both = encode(question + " " + keys[0])
    asked = encode(question)
    return ids + asked, both[len(asked) :], place


def estimate(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """(Hkv, Q, K): the antidiagonal estimate of each key tile's mass (XAttention), q (Hq, N, D), k (Hkv, N, D), N whole
    tiles."""
    heads, length, _ = q.shape
    folded_q = q.unflatten(1, (-1, STRIDE)).flip(2).flatten(2)
    folded_k = k.unflatten(1, (-1, STRIDE)).flatten(2).repeat_interleave(heads // len(k), 0)
    logits = folded_q @ folded_k.mT * (scale / STRIDE)
    order = torch.arange(length // STRIDE, device=q.device)
    weights = logits.masked_fill(order > order[:, None], float("-inf")).softmax(-1)
    per = TILE // STRIDE
    tiles = weights.unflatten(-1, (-1, per)).sum(-1).unflatten(1, (-1, per)).mean(2)
    return tiles.unflatten(0, (len(k), -1)).mean(1)


def kept_tiles(mass: Tensor, setting: Setting, prompt: int) -> Tensor:
    """(Hkv, Q, K) bool."""
    count = mass.shape[1]
    order = torch.arange(count, device=mass.device)
    visible = order <= order[:, None]
    near = order * TILE + TILE > order[:, None] * TILE - setting.local
    end = (order[:, None] * TILE + TILE - 1) >= prompt - setting.tail if setting.tail else order[:, None] < 0
    forced = visible & (near | (order == 0) | end)
    ranked, index = mass.masked_fill(~visible, -1).masked_fill(forced, 2).sort(-1, descending=True)
    mine = mass.gather(-1, index)
    if setting.recall is not None:
        keep = mine.cumsum(-1) - mine < setting.recall * mass.sum(-1, keepdim=True)
    else:
        budget = (visible.sum(-1) * (setting.density or 1.0)).ceil()
        keep = order < budget[:, None]
    del ranked
    return (torch.zeros_like(visible.expand_as(mass)).scatter(-1, index, keep.expand_as(mass)) | forced) & visible


class Measured:
    """Attention of all layers under a setting, and what it keeps: (layers, Hq, N) by row."""

    def __init__(self, setting: Setting, prompt: int) -> None:
        self.setting, self.prompt = setting, prompt
        self.kept: list[Tensor] = []
        self.density: list[float] = []
        self.looked_at: list[Tensor] = []

    def __call__(self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **given: Any) -> Any:
        """As transformers' attention functions; one sequence."""
        q, k, v = query[0], key[0], value[0]
        heads, length, _ = q.shape
        scale = given.get("scaling") or q.shape[-1] ** -0.5
        group = heads // len(k)
        own = given.get("sliding_window")
        keep = None
        if self.setting.recall is not None or self.setting.density is not None:
            pad = -length % TILE
            padded_q, padded_k = (torch.nn.functional.pad(x, (0, 0, 0, pad)) for x in (q, k))
            keep = kept_tiles(estimate(padded_q, padded_k, scale), self.setting, self.prompt).repeat_interleave(
                group, 0
            )
        k, v = (x.repeat_interleave(group, 0) for x in (k, v))
        position = torch.arange(length, device=q.device)
        out, kept, seen_pairs, pairs = torch.empty_like(q), q.new_empty(heads, length), 0.0, 0.0
        for start in range(0, length, 1024):
            rows = slice(start, min(start + 1024, length))
            at = position[rows, None]
            causal = position <= at
            if own is not None:
                causal &= position > at - own
            weights = (q[:, rows] @ k.mT * scale).masked_fill(~causal, float("-inf")).softmax(-1)
            seen = causal
            if own is None and keep is not None:
                seen = causal & keep[:, at // TILE, position // TILE]
            elif own is None and self.setting.window is not None:
                seen = causal & ((position > at - self.setting.window) | (position < self.setting.sinks))
            if rows.stop == length:
                last = weights[:, self.prompt - QUESTION - start :].mean(1) if self.prompt - QUESTION >= start else None
                self.looked_at.append(torch.zeros_like(weights[:, 0]) if last is None else last)
            share = (weights * seen).sum(-1)
            out[:, rows] = (weights * seen) @ v / share[..., None].clamp(min=1e-30)
            kept[:, rows] = share
            seen_pairs += float(seen.expand(heads, -1, -1).sum())
            pairs += float(causal.sum()) * heads
        if own is None:
            self.kept.append(kept)
            self.density.append(seen_pairs / pairs)
        else:
            self.looked_at.pop()
        return out.transpose(0, 1)[None], None


def measures(measured: Measured, place: list[int]) -> dict[str, float]:
    """All that a bound could be on; (layers, Hq, N) of kept mass in."""
    kept = torch.stack(measured.kept)
    flat = kept.flatten()
    end = measured.prompt
    question, before = kept[..., end - QUESTION :], kept[..., : end - QUESTION]
    seen = torch.stack(measured.looked_at)[:-1, :, : end - QUESTION].amax(1)  # (layers - 1, N), of the layer above
    seen = seen * (torch.arange(seen.shape[-1], device=seen.device) >= 8)  # the first tokens, where attention rests
    seen = seen / seen.sum(-1, keepdim=True).clamp(min=1e-9)
    weighted = (before[:-1] * seen[:, None]).sum(-1)  # (layers - 1, Hq)
    spot = kept[..., place]
    result = {
        "mean of all rows": float(flat.mean()),
        "5th percentile of all rows": float(flat.float().kthvalue(max(1, int(0.05 * len(flat)))).values),
        "least of all rows": float(flat.min()),
        "worst head's mean of all rows": float(kept.mean(-1).min()),
        "question rows: mean": float(question.mean()),
        "question rows: mean of the worst layer": float(question.mean((1, 2)).min()),
        "question rows: 5th percentile of heads": float(question.mean(-1).flatten().quantile(0.05)),
        "question rows: worst head's mean": float(question.mean(-1).min()),
        "question rows: worst head's least row": float(question.min()),
        "rows that the question looks at: mean": float(weighted.mean()),
        "rows that the question looks at: worst head": float(weighted.min()),
        "the key's rows: mean (not known to a server)": float(spot.mean()),
        "the key's rows: worst head": float(spot.mean(-1).min()),
    }
    result |= {f"share of rows above {level}": float((flat >= level).float().mean()) for level in LEVELS}
    return {name: round(value, 5) for name, value in result.items()}  # near 1 more digits are rounding errors


def auc(lost: list[float], found: list[float]) -> float | None:
    """How often a lost answer has the lower value than a found one; ties count half."""
    if not lost or not found:
        return None
    pairs = [(a < b) + 0.5 * (a == b) for a in lost for b in found]
    return sum(pairs) / len(pairs)


def main() -> None:
    """Measure and write a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--tokens", default="2048")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_grad_enabled(False)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    now: dict[str, Any] = {}
    AttentionInterface.register("measured", lambda *given, **more: now["of"](*given, **more))
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, attn_implementation="sdpa")
    model = model.eval().to(device)  # pyright: ignore[reportArgumentType]
    model.set_attn_implementation("measured")
    rows: list[dict[str, Any]] = []
    result: dict[str, Any] = {}
    for tokens in map(int, args.tokens.split(",")):
        for seed in range(args.prompts):
            prompt, answer, place = prompt_of(tokenizer, tokens, 1000 * tokens + seed)
            ids = torch.tensor([prompt + answer[:-1]], device=device)
            for setting in SETTINGS:
                if setting.window is not None and setting.window >= tokens:
                    continue
                now["of"] = measured = Measured(setting, len(prompt))
                logits = model(ids, logits_to_keep=len(answer)).logits[0].float()
                right = torch.tensor(answer, device=device)
                found = bool((logits.argmax(-1) == right).all())
                if setting.name == "dense" and not found:
                    print(f"{tokens} tokens, prompt {seed}: dense attention does not answer", flush=True)
                    break
                loss = float(-logits.log_softmax(-1).gather(1, right[:, None]).mean())
                row = {"tokens": tokens, "seed": seed, "setting": setting.name, "found": found, "loss": loss}
                row |= {"density": sum(measured.density) / len(measured.density), **measures(measured, place)}
                rows.append(row)
                print(
                    f"{tokens} {seed} {setting.name:24} {'found' if found else 'LOST '} loss {loss:6.3f} "
                    f"density {row['density']:.3f} mean {row['mean of all rows']:.3f} "
                    f"question's worst head {row['question rows: worst head' + chr(39) + 's mean']:.3f}",
                    flush=True,
                )
            if args.out is not None and rows:
                result = {"environment": environment(), "model": {"name": Path(args.model).name}, "rows": rows}
                args.out.write_text(json.dumps(result, indent=0) + "\n")
                if seed % 4 == 3:
                    print(table(result), flush=True)
    print(table(result))


def table(result: dict[str, Any]) -> str:
    """Markdown: each measure, and how well it tells lost answers from found ones."""
    rows = [row for row in result["rows"] if row["setting"] != "dense"]
    names = [name for name in rows[0] if name not in ("tokens", "seed", "setting", "found", "loss", "density")]
    kinds = {
        "all": rows,
        "chosen tiles": [row for row in rows if not row["setting"].startswith("window")],
        "chosen tiles, end read whole": [
            row for row in rows if not row["setting"].startswith("window") and "no tail" not in row["setting"]
        ],
    }
    lines = ["| measure | " + " | ".join(kinds) + " |", "| --- |" + " ---: |" * len(kinds)]
    for name in names:
        found = [
            auc([r[name] for r in some if not r["found"]], [r[name] for r in some if r["found"]])
            for some in kinds.values()
        ]
        lines.append(f"| {name} | " + " | ".join("" if x is None else f"{x:.3f}" for x in found) + " |")
    counts = ", ".join(f"{name}: {sum(not r['found'] for r in some)} of {len(some)}" for name, some in kinds.items())
    where = result["environment"]
    prompts = len({(row["tokens"], row["seed"]) for row in rows})
    told = f"Lost answers: {counts}; {prompts} prompts. {where['device']}; torch {where['versions']['torch']}; "
    return "\n".join(lines) + f"\n\n{told}{where['date']}."


if __name__ == "__main__":
    main()
