"""Time and memory of a training step by length: our kernels, transformers' SDPA and eager attention.

    python -m training.compare training/results/steps.json

Every step is the forward and backward pass and the update of the model that `training.train` trains, on 32,768 tokens
(or one sequence, if that is longer). Layers run as they are unless --compile is given. Needs a GPU; each length runs
until it fails for lack of memory.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

from training import model
from training.data import TEXT_POSITIONS, Batch
from training.trainer import ATTENTIONS, Trainer

STEPS = 5  # timed, after two that are not


def random_batch(length: int, tokens: int, device: torch.device) -> Batch:
    """Random ids; a quarter of the positions of `text` count as answers."""
    generator = torch.Generator(device).manual_seed(length)
    ids = torch.randint(5, 4096, (max(1, tokens // length), length), device=device, generator=generator)
    text = torch.randint(0, ids.numel() - 1, (TEXT_POSITIONS,), device=device, generator=generator)
    at = text[: TEXT_POSITIONS // 4]
    token = ids.reshape(-1)[at + 1]
    whole = torch.ones_like(at)
    return Batch(ids, at, token, whole.float(), whole.bool(), torch.arange(len(at), device=device), text, len(at))


def measure(trainer: Trainer, batch: Batch) -> dict[str, float] | None:
    """Median milliseconds of a step and its peak of memory in GiB, or None if the memory does not suffice."""
    times = []
    torch.cuda.reset_peak_memory_stats()
    try:
        for _ in range(2 + STEPS):
            torch.cuda.synchronize()
            started = time.perf_counter()
            trainer.step(batch, 1e-5)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - started)
    except torch.OutOfMemoryError:
        trainer.net.zero_grad()
        torch.cuda.empty_cache()
        return None
    peak = torch.cuda.max_memory_allocated() / 2**30
    return {"ms": round(1000 * statistics.median(times[2:]), 2), "gib": round(peak, 2)}


def table(result: dict) -> str:
    """Markdown: milliseconds and GiB by length and attention."""
    names = list(result["steps"])
    lines = ["| tokens | " + " | ".join(f"{name}, ms | GiB" for name in names) + " |"]
    lines.append("|---:|" + "---:|---:|" * len(names))
    for length in result["lengths"]:
        cells = []
        for name in names:
            found = result["steps"][name].get(str(length))
            cells.append(f"{found['ms']:.1f} | {found['gib']:.2f}" if found else "out of memory | ")
        lines.append(f"| {length:,} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure and write JSON; prints the table."""
    parser = argparse.ArgumentParser(description="compare training steps by attention")
    parser.add_argument("result", type=Path)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16384, 32768, 65536])
    parser.add_argument("--attentions", nargs="+", choices=ATTENTIONS, default=list(ATTENTIONS))
    parser.add_argument("--tokens", type=int, default=32768, help="tokens a step")
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("training.compare needs a CUDA GPU: it times GPU kernels")

    device = torch.device("cuda")
    steps: dict[str, dict[str, dict[str, float] | None]] = {}
    for name in options.attentions:
        trainer = Trainer(model.create(0, pairs=options.pairs), device, attention=name, compiled=options.compile)
        steps[name] = {}
        for length in options.lengths:
            steps[name][str(length)] = measure(trainer, random_batch(length, options.tokens, device))
            print(name, length, steps[name][str(length)], flush=True)
            if steps[name][str(length)] is None:
                break
        del trainer
        torch.cuda.empty_cache()
    result = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "compiled": options.compile,
        "tokens": options.tokens,
        "lengths": options.lengths,
        "steps": steps,
    }
    options.result.parent.mkdir(parents=True, exist_ok=True)
    options.result.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))


if __name__ == "__main__":
    main()
