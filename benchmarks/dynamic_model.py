"""What dynamic prefill costs a model: answers and attention mass, with the embedded model, by estimator and target.

python -m benchmarks.dynamic_model --lengths 4096,16384 --count 5 --out result.json
python -m benchmarks.dynamic_model --lengths 32768 --tasks count,multivalue --count 100 --only "Moments(block=64), R"

Every prompt is read by each configuration with its answer behind it, and counts as right if each token of the answer
is the most likely one. All of a pair's prompts are the same. Mass is that of 64 positions of each prompt before its
last 512 tokens, over the layers that attend to everything.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import hashlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import longreach_patches.attention as seam
import torch
from longreach_kernels import PagedBatch, paged_attention
from longreach_kernels.sparse import (
    Antidiagonal,
    Density,
    Moments,
    Pooled,
    Recall,
    Threshold,
    kept_mass,
    select_tiles,
)
from longreach_kernels.sparse.select.query_tiles import query_tiles
from longreach_patches.loader import load_model
from torch import Tensor

from training.recall.codec import Codec
from training.recall.documents import TASKS
from training.recall.suite import Plan, sampler_of, samples

MODEL = Path(__file__).parent.parent / "server/longreach/default_model"
RETRIEVAL = ("single", "many", "multikey", "multivalue", "multiquery", "chain", "uuid", "absent")
PAGE, ROWS, TAIL = 128, 64, 512
CONFIGURATIONS: dict[str, dict[str, Any] | None] = {"dense": None}
for _estimator in (Antidiagonal(8), Antidiagonal(16), *map(Moments, (16, 32, 64, 128)), Pooled()):
    for _target in (Recall(0.8), Recall(0.9), Recall(0.95), Recall(0.98), Density(0.2), Density(0.3)):
        CONFIGURATIONS[f"{_estimator}, {_target}"] = {"estimator": _estimator, "target": _target}
CONFIGURATIONS["Pooled(), Threshold(0.15)"] = {"estimator": Pooled(), "target": Threshold(0.15)}
CONFIGURATIONS["Antidiagonal(stride=16), Recall(0.95), no dense tail"] = {
    "estimator": Antidiagonal(16),
    "target": Recall(0.95),
    "tail": 0,
}


class Probe:
    """Stands where the patched model's attention does; keeps what it saw.

    Attributes:
        options: of `select_tiles`; None for dense attention.
        prompt_len: tokens of the prompt, without the answer.
        kept, density: of each layer that attends to everything.
        inputs: q (N, Hq, D), k and v (N, Hkv, D) of each such layer, if `keep_inputs`.
    """

    def __init__(self, options: dict[str, Any] | None, prompt_len: int, keep_inputs: bool = False) -> None:
        self.options, self.prompt_len, self.keep_inputs = options, prompt_len, keep_inputs
        self.kept: list[Tensor] = []
        self.density: list[float] = []
        self.inputs: list[tuple[Tensor, Tensor, Tensor]] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, *, scale: float, backend: str) -> Tensor:
        """q (1, Hq, N, D), k and v (1, Hkv, N, D): out like q."""
        if mask.band.window is not None or (self.options is None and not self.keep_inputs):
            return _dense(q, k, v, mask, scale=scale, backend=backend)
        queries, keys, values = (x[0].transpose(0, 1).contiguous() for x in (q, k, v))
        if self.keep_inputs:
            self.inputs.append((queries, keys, values))
            return _dense(q, k, v, mask, scale=scale, backend=backend)
        assert self.options is not None
        out, kept, density = attend(queries, keys, values, self.prompt_len, scale, backend, self.options)
        self.kept.append(kept)
        self.density.append(density)
        return out.transpose(0, 1)[None]


_dense = seam.attention


def attend(
    q: Tensor, k: Tensor, v: Tensor, prompt_len: int, scale: float, backend: str, options: dict[str, Any]
) -> tuple[Tensor, Tensor, float]:
    """Dynamic attention of one prompt, (N, H, D) each: out, kept mass (rows, Hq), density."""
    num_tokens = len(q)
    k_pages, v_pages = (
        torch.nn.functional.pad(x, (0, 0, 0, 0, 0, -num_tokens % PAGE)).unflatten(0, (-1, PAGE)) for x in (k, v)
    )

    def integers(*numbers: int) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=q.device)

    table = torch.arange(len(k_pages), dtype=torch.int32, device=q.device)[None]
    batch = PagedBatch(integers(0, num_tokens), integers(num_tokens), table, num_tokens, num_tokens)
    lens = integers(prompt_len)
    lists = select_tiles(q, k_pages, batch, scale=scale, prompt_lens=lens, tail=options.get("tail", TAIL),
                         target=options["target"], estimator=options["estimator"], backend=backend)  # fmt: skip
    common = {"scale": scale, "backend": backend}
    out, lse = paged_attention(q, k_pages, v_pages, batch, lists=lists, return_lse=True, **common)
    rows = torch.linspace(0, max(0, prompt_len - TAIL - 1), ROWS, device=q.device).long()
    kept = kept_mass(q, k_pages, v_pages, batch, lse, rows, **common)
    visible = query_tiles(batch, num_tokens, lists.tile_q, lists.tile_k, None).visible().sum()
    return out, kept, int(lists.start[-1]) / (int(visible) * k.shape[1])


@contextlib.contextmanager
def probing(probe: Probe) -> Iterator[Probe]:
    """The patched model attends through ``probe`` meanwhile."""
    seam.attention = probe  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield probe
    finally:
        seam.attention = _dense


def answered(model: Any, ids: Tensor, start: int, probe: Probe) -> bool:
    """Whether each token of the answer, from ``start`` on, is the most likely one."""
    with probing(probe), torch.no_grad():
        keep = len(ids) - start + 1
        logits = model(ids[None], use_cache=False, logits_to_keep=keep).logits[0, :-1]
    return torch.equal(logits.argmax(-1), ids[start:])


def run(
    lengths: list[int], tasks: tuple[str, ...], count: int, device: torch.device, seed: int
) -> Iterator[dict[str, Any]]:
    """A row for each length, task and configuration."""
    model = load_model(str(MODEL), device=str(device)).patched.model
    plan = Plan(tasks=tasks, lengths=tuple(lengths), count=count, seed=seed)
    sampler = sampler_of(Codec.load(MODEL), plan)
    for length in lengths:
        drawn = [(task, [sample for sample, _ in samples(sampler, plan, task, length)]) for task in tasks]
        for (task, prompts), (name, options) in itertools.product(drawn, CONFIGURATIONS.items()):
            right, kept, density = [], [], []
            for sample in prompts:
                question = sample.questions[0]
                ids = torch.from_numpy(sample.ids[: question.end].copy()).long().to(device)
                probe = Probe(options, question.start)
                right.append(answered(model, ids, question.start, probe))
                kept += [x.flatten().cpu() for x in probe.kept]
                density += probe.density
            row: dict[str, Any] = {"tokens": length, "task": task, "choice": name}
            row |= {"prompts": len(right), "right": sum(right)}
            row["wrong"] = [number for number, is_right in enumerate(right) if not is_right]
            if kept:
                mass = torch.cat(kept).double().sort()[0]
                row |= {"kept_mean": mass.mean().item(), "kept_p5": mass[len(mass) // 20].item()}
                row |= {"kept_min": mass[0].item(), "density": sum(density) / len(density)}
                row |= {"density_min": min(density), "density_max": max(density)}
            yield row


def main() -> None:
    """Measure, print a line for each row, and write the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--lengths", default="4096,16384,32768", help="tokens of a prompt")
    parser.add_argument("--tasks", default=",".join(RETRIEVAL), help=f"of {', '.join(TASKS)}")
    parser.add_argument("--count", type=int, default=5, help="prompts a task and length")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--only", nargs="+", help="configurations whose name contains one of these, and dense")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    arguments = parser.parse_args()
    if arguments.only:
        for name in list(CONFIGURATIONS):
            if name != "dense" and not any(part in name for part in arguments.only):
                del CONFIGURATIONS[name]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    lengths = [int(x) for x in arguments.lengths.split(",")]
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    weights = hashlib.sha256((MODEL / "model.safetensors").read_bytes()).hexdigest()[:12]
    rows: list[dict[str, Any]] = []
    result = {"device": where, "torch": torch.__version__, "date": date, "weights": weights, "rows": rows}
    for row in run(lengths, tuple(arguments.tasks.split(",")), arguments.count, device, arguments.seed):
        rows.append(row)
        print({k: round(x, 3) if isinstance(x, float) else x for k, x in row.items()}, flush=True)
        if arguments.out is not None:
            arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
