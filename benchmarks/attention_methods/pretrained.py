"""Methods in a pretrained model: their error on the queries, keys and values of its heads, and the answers it gives.

The model is the embedded one. Its layers with a window of their own stay as they are; the others compute the method, on
the prompt and on its answer. The model was trained with exact attention and is not trained again: what is measured is
what the method loses there, and not what a model that was made for it could do.
"""

from __future__ import annotations

from typing import Any

import torch
from longreach_kernels import attention
from longreach_patches.loader import load_model
from torch import Tensor

from benchmarks.attention_methods.catalogue import Attend, Method
from benchmarks.attention_methods.measure import error
from benchmarks.attention_methods.reformer import CHUNK
from benchmarks.dynamic_model import MODEL, Probe, answered, probing
from training.recall.codec import Codec
from training.recall.documents import TASKS
from training.recall.samples import Sample
from training.recall.suite import Plan, sampler_of, samples


class Swapped:
    """Stands where the patched model's attention does: ``attend`` in the layers that attend to everything."""

    def __init__(self, attend: Attend) -> None:
        self.attend = attend

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, *, scale: float, backend: str) -> Tensor:
        """q (1, Hq, N, D), k and v (1, Hkv, N, D): out like q."""
        if mask.band.window is not None:
            return attention(q, k, v, mask, scale=scale, backend=backend)
        assert scale == q.shape[-1] ** -0.5
        return self.attend(q, *repeated(q, k, v)).to(q.dtype)


def repeated(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """k and v (B, Hkv, N, D) for each query head of q (B, Hq, N, D)."""
    group = q.shape[1] // k.shape[1]
    return k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)


class Pretrained:
    """The embedded model on a device, and the prompts that it is asked."""

    def __init__(self, device: torch.device, lengths: tuple[int, ...], count: int) -> None:
        self.device = device
        self.model = load_model(str(MODEL), device=str(device)).patched.model
        self.plan = Plan(lengths=lengths, count=count)
        self.sampler = sampler_of(Codec.load(MODEL), self.plan)

    def _ids(self, sample: Sample, end: int) -> Tensor:
        return torch.from_numpy(sample.ids[:end].copy()).long().to(self.device)

    def heads(self, length: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        """q, k, v (1, Hq, N, D) of each layer that attends to everything, for a prompt with 16 facts of a kind."""
        sample, _ = next(samples(self.sampler, self.plan, "multikey", length))
        ids = self._ids(sample, len(sample.ids) // CHUNK * CHUNK)
        with probing(Probe(None, len(ids), keep_inputs=True)) as probe, torch.no_grad():
            self.model(ids[None], use_cache=False, logits_to_keep=1)
        made = []
        for inputs in probe.inputs:
            q, k, v = (x.transpose(0, 1)[None].contiguous() for x in inputs)
            made.append((q, *repeated(q, k, v)))
        return made

    def errors(self, method: Method, length: int) -> list[float]:
        """Relative errors of a method, one for each such layer, first to last."""
        assert method.attend is not None
        with torch.no_grad():
            return [error(method, method.attend(q, k, v), q, k, v) for q, k, v in self.heads(length)]

    def prompts(self, length: int) -> list[tuple[str, Sample]]:
        """(task, sample) of all tasks of `training.recall`."""
        return [(task, sample) for task in TASKS for sample, _ in samples(self.sampler, self.plan, task, length)]

    def recall(self, method: Method, length: int, prompts: list[tuple[str, Sample]]) -> dict[str, Any]:
        """How many prompts of a length are answered right: each token of the answer is the most likely one."""
        assert method.attend is not None
        swapped: Any = Swapped(method.attend)
        right: dict[str, int] = dict.fromkeys(TASKS, 0)
        for task, sample in prompts:
            question = sample.questions[0]
            right[task] += answered(self.model, self._ids(sample, question.end), question.start, swapped)
        return {
            "method": method.name,
            "tokens": length,
            "prompts": len(prompts),
            "right": sum(right.values()),
            "right_by_task": right,
        }
