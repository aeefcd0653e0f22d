"""Time and memory of a training step of GPT-2's sizes by length: our kernels, transformers' SDPA and eager attention.

    python -m benchmarks.training_steps --shapes small,medium --out result.json

A step is the forward and backward pass and AdamW's update on random tokens, as many at every length. The models have
GPT-2's depth, width, heads and vocabulary, and Llama's layers (rotary positions, RMS norms, gated activation, no
dropout), since GPT-2's own attention has learned positions that end at 1,024; all weights are random. The three
attentions start from the same weights; the loss of the first step is recorded for each.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from longreach.bench.sizes import whole_numbers
from longreach.bench.summary import environment
from longreach_patches import patch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

ATTENTIONS = ("longreach", "sdpa", "eager")
# Gated layers have three matrices: two thirds of GPT-2's inner width give as many parameters.
SHAPES: dict[str, dict[str, Any]] = {
    "small": {"num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 2048},
    "medium": {"num_hidden_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 2736},
    "tiny": {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128},
}
VOCABULARY = 50304  # GPT-2's 50,257, rounded up to a multiple of 128
_WARM, _RATE = 2, 1e-4
LATE = "not run: out of time"


def create(shape: str, longest: int, attention: str, device: torch.device) -> LlamaForCausalLM:
    """The model of a shape with weights that depend on nothing else, in bf16 on a GPU and else in fp32."""
    torch.manual_seed(0)
    sizes = SHAPES[shape]
    config = LlamaConfig(
        **sizes,
        num_key_value_heads=sizes["num_attention_heads"],
        vocab_size=512 if shape == "tiny" else VOCABULARY,
        max_position_embeddings=longest,
        tie_word_embeddings=True,
    )
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with device:  # where random numbers are drawn: a processor takes seconds for what a GPU does at once
        model = LlamaForCausalLM(config)
    nn.Module.to(model, dtype=dtype)
    if attention == "longreach":
        patch(model)
    else:
        model.set_attn_implementation(attention)
    return model.train()


def step(model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> torch.Tensor:
    """One update on ids (B, N): every token is a target. The loss, a scalar."""
    optimizer.zero_grad()
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    optimizer.step()
    return loss.detach()


def measure(model: LlamaForCausalLM, ids: torch.Tensor, steps: int) -> dict[str, Any]:
    """``ms``, the median of the timed steps; ``gib``, the peak of what was allocated, on a GPU; and ``loss``, that of
    the first step; or ``failed``, if the memory does not suffice."""
    cuda = ids.device.type == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, fused=cuda)
    times, losses = [], []
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    try:
        for _ in range(_WARM + steps):
            began = time.perf_counter()
            losses.append(step(model, optimizer, ids))
            if cuda:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
    except torch.OutOfMemoryError:
        return {"failed": "out of memory"}
    found: dict[str, Any] = {"ms": 1e3 * statistics.median(times[_WARM:]), "loss": losses[0].item()}
    return found | ({"gib": torch.cuda.max_memory_allocated() / 2**30} if cuda else {})


def rows_of(shape: str, lengths: tuple[int, ...], tokens: int, steps: int, deadline: float) -> list[dict[str, Any]]:
    """A row for each attention and length. Where one fails for lack of memory, longer ones do, too, and are not run."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows: list[dict[str, Any]] = []
    for attention in ATTENTIONS:
        found: dict[str, Any] = {}
        for length in sorted(lengths):
            if found.get("failed") != "out of memory":
                found = {"failed": LATE}
                if time.monotonic() < deadline:
                    model = create(shape, max(lengths), attention, device)
                    generator = torch.Generator().manual_seed(length)
                    batch = (max(1, tokens // length), length)
                    ids = torch.randint(model.config.vocab_size, batch, generator=generator).to(device)
                    found = measure(model, ids, steps)
                    del model
                    torch.cuda.empty_cache()
            rows.append({"shape": shape, "attention": attention, "tokens": length, **found})
            print(rows[-1], file=sys.stderr, flush=True)
    return rows


def table(result: dict[str, Any]) -> str:
    """Milliseconds and GiB of a step by shape, length and attention, and ours as a share of the others'."""
    names = result["attentions"]
    head = ["GPT-2", "tokens"]
    for name in names:
        head += [f"{name}: ms", "GiB"]
    head += [f"{name} / ours" for name in names[1:]]
    lines = [head, ["---", *["---:"] * (len(head) - 1)]]
    found = {(row["shape"], row["tokens"], row["attention"]): row for row in result["rows"]}
    for shape, tokens in dict.fromkeys((row["shape"], row["tokens"]) for row in result["rows"]):
        rows = [found[shape, tokens, name] for name in names]
        cells = [shape, f"{tokens:,}"]
        for row in rows:
            cells += [row.get("failed") or f"{row['ms']:.1f}", f"{row['gib']:.2f}" if "gib" in row else ""]
        cells += [f"{row['ms'] / rows[0]['ms']:.2f}" if "ms" in row and "ms" in rows[0] else "" for row in rows[1:]]
        lines.append(cells)
    where = result["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items() if version[0].isdigit())
    caption = f"{result['tokens_a_step']:,} tokens a step; {where['device']}; {versions}; {where['date']}."
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + f"\n\n{caption}\n"


def draw(result: dict[str, Any], path: Path) -> None:
    """Milliseconds and GiB of a step against length, on logarithmic axes."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    panels = [("ms", "a training step (ms)"), ("gib", "peak of memory (GiB)")]
    panels = [panel for panel in panels if any(panel[0] in row for row in result["rows"])]
    size = (4.5 * len(panels), 3.8)
    figure, axes = pyplot.subplots(1, len(panels), figsize=size, squeeze=False, layout="constrained")
    shapes = list(dict.fromkeys(row["shape"] for row in result["rows"]))
    for axis, (key, title) in zip(axes[0], panels, strict=True):
        for i, name in enumerate(result["attentions"]):
            for shape, style in zip(shapes, ("-", "--", ":"), strict=False):
                rows = [r for r in result["rows"] if (r["shape"], r["attention"]) == (shape, name) and key in r]
                label = f"{shape}, {name}" if rows else None
                axis.plot(
                    [r["tokens"] for r in rows], [r[key] for r in rows], style, color=f"C{i}", marker=".", label=label
                )
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.xaxis.set_major_formatter(lambda n, _: f"{n / 1024:g}K")
        axis.set_xlabel("tokens of a sequence")
        axis.set_title(title, fontsize=10)
        axis.grid(visible=True, which="both", alpha=0.25)
    axes[0, 0].legend(frameon=False, fontsize=8)
    figure.suptitle(f"{result['environment']['device']}; {result['environment']['date']}", fontsize=9, color="gray")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def main() -> None:
    """Measure, print the table, and write the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--shapes", default="small,medium", help=", ".join(SHAPES))
    parser.add_argument("--lengths", default="1024,2048,4096,8192,16384,32768", help="tokens of a sequence")
    parser.add_argument("--tokens", type=int, default=32768, help="tokens a step, or one sequence if that is longer")
    parser.add_argument("--steps", type=int, default=5, help=f"steps that are timed, after {_WARM} that are not")
    parser.add_argument("--seconds", type=float, default=110, help="nothing further is begun after so many")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    arguments = parser.parse_args()
    shapes = arguments.shapes.split(",")
    if unknown := [shape for shape in shapes if shape not in SHAPES]:
        parser.error(f"--shapes: {', '.join(unknown)}: choose from {', '.join(SHAPES)}")
    try:
        lengths = whole_numbers("--lengths", arguments.lengths)
    except ValueError as error:
        parser.error(str(error))
    if not lengths or min(lengths) < 2 or arguments.steps < 1:
        parser.error("--lengths, --steps: need lengths of 2 tokens or more, and a step or more")
    deadline = time.monotonic() + arguments.seconds
    rows = [row for shape in shapes for row in rows_of(shape, lengths, arguments.tokens, arguments.steps, deadline)]
    result = {
        "environment": environment(),
        "attentions": list(ATTENTIONS),
        "tokens_a_step": arguments.tokens,
        "rows": rows,
    }
    print(table(result))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
