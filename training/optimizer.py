"""AdamW on float32 master weights of a model that computes in a lower precision."""

from collections.abc import Iterator

import torch
from torch import nn

WEIGHT_DECAY = 0.05
CLIP = 1.0


class MasterAdamW:
    """Takes a float32 model, keeps its weights as masters, and turns the model's own into `dtype`.

    `step` reads the model's gradients, updates the masters, and rounds them into the model.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self.names = [name for name, _ in model.named_parameters()]
        self.masters = [p.detach().clone() for p in model.parameters()]
        self.weights = list(model.parameters())
        for weight in self.weights:  # but no buffers: rotary frequencies stay exact
            weight.data = weight.data.to(dtype)
        groups = [
            {"params": [m for m in self.masters if m.ndim > 1], "weight_decay": WEIGHT_DECAY},
            {"params": [m for m in self.masters if m.ndim <= 1], "weight_decay": 0.0},
        ]
        self.adam = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=self.masters[0].is_cuda)
        for master in self.masters:
            master.grad = torch.zeros_like(master)

    @torch.no_grad()
    def step(self, rate: float) -> torch.Tensor:
        """One update at learning rate `rate`; returns the norm of the gradient before it was clipped to `CLIP`."""
        gradients = [m.grad for m in self.masters if m.grad is not None]
        torch._foreach_copy_(gradients, [w.grad for w in self.weights])
        norm = nn.utils.clip_grad_norm_(self.masters, CLIP)
        for group in self.adam.param_groups:
            group["lr"] = rate
        self.adam.step()
        self.round()
        for weight in self.weights:
            weight.grad = None
        return norm

    @torch.no_grad()
    def round(self) -> None:
        """Put the masters, rounded, into the model."""
        torch._foreach_copy_(self.weights, self.masters)

    def tensors(self) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
        """The state in bfloat16, by file: the weights rounded, what that loses, and Adam's two averages."""
        half = torch.bfloat16
        rounded = [m.to(half) for m in self.masters]
        yield "weights", dict(zip(self.names, rounded, strict=True))
        rest = [(m - r.float()).to(half) for m, r in zip(self.masters, rounded, strict=True)]
        yield "rest", dict(zip(self.names, rest, strict=True))
        for name in ("exp_avg", "exp_avg_sq"):
            averages = [self.adam.state[m][name].to(half) for m in self.masters]
            yield name, dict(zip(self.names, averages, strict=True))

    @torch.no_grad()
    def restore(self, files: dict[str, dict[str, torch.Tensor]], steps: int) -> None:
        """Take up the state of `tensors` after `steps` updates."""
        for name, master in zip(self.names, self.masters, strict=True):
            master.copy_(files["weights"][name].float() + files["rest"][name].float())
            self.adam.state[master] = {
                "step": torch.tensor(float(steps), device=master.device if master.is_cuda else "cpu"),
                "exp_avg": files["exp_avg"][name].float().to(master.device),
                "exp_avg_sq": files["exp_avg_sq"][name].float().to(master.device),
            }
        self.round()
