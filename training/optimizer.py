"""Muon for the matrices of the layers and AdamW for the rest, on float32 master weights of a bfloat16 model."""

from collections.abc import Iterator

import torch
from torch import nn

WEIGHT_DECAY = 0.05
CLIP = 1.0
MOMENTUM = 0.95
MATRIX_RATE = 8.0  # of AdamW's rate: an update of Muon's has singular values near 1, one of AdamW's entries near 1


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """Matrices (n, rows, columns) with their singular values brought near 1, between 0.7 and 1.2.

    Five Newton-Schulz steps in bfloat16 (Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural
    networks"). torch.optim.Muon takes matrices one by one, 20 ms for those of the embedded model on an H200, where a
    step of `MasterMuon` takes 3.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = (x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)).bfloat16()
    for _ in range(5):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).float()


class MasterMuon:
    """Takes a float32 model, keeps its weights as masters, and turns the model's own into `dtype`.

    `update` reads the model's gradients, updates the masters at the learning rate that `rate` holds, and rounds them
    into the model; it can be captured as a CUDA graph. Embeddings, which are looked up and not multiplied with, and
    vectors are AdamW's.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self.names = [name for name, _ in model.named_parameters()]
        self.masters = [p.detach().clone() for p in model.parameters()]
        self.weights: list[torch.Tensor] = list(model.parameters())
        for weight in self.weights:  # but no buffers: rotary frequencies stay exact
            weight.data = weight.data.to(dtype)
        for master in self.masters:
            master.grad = torch.zeros_like(master)
        looked_up = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
        self.matrices: dict[torch.Size, list[int]] = {}  # which masters are Muon's, by shape
        adams: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        for i, (weight, master) in enumerate(zip(self.weights, self.masters, strict=True)):
            if master.ndim == 2 and id(weight) not in looked_up:
                self.matrices.setdefault(master.shape, []).append(i)
            else:
                adams[master.ndim > 1].append(master)
        self.momentum = {shape: self.masters[at[0]].new_zeros(len(at), *shape) for shape, at in self.matrices.items()}
        groups = [{"params": p, "weight_decay": decay} for p, decay in zip(adams, (0.0, WEIGHT_DECAY), strict=True)]
        on_gpu = self.masters[0].is_cuda
        self.rate = torch.zeros((), device=self.masters[0].device)
        self.remembered, self.mean = 0, [torch.zeros_like(m) for m in self.masters]  # of how many, see `remember`
        self.adam = torch.optim.AdamW(groups, lr=self.rate, betas=(0.9, 0.95), fused=on_gpu, capturable=on_gpu)

    @torch.no_grad()
    def update(self) -> torch.Tensor:
        """One update; returns the norm of the gradient before it was clipped to `CLIP`."""
        gradients = [m.grad for m in self.masters if m.grad is not None]
        torch._foreach_copy_(gradients, [w.grad for w in self.weights if w.grad is not None])
        norm = nn.utils.clip_grad_norm_(self.masters, CLIP)
        self.adam.step()
        for shape, at in self.matrices.items():
            momentum, gradient = self.momentum[shape], torch.stack([gradients[i] for i in at])
            momentum.lerp_(gradient, 1 - MOMENTUM)
            updates = orthogonal(gradient.lerp_(momentum, MOMENTUM))  # Nesterov's
            masters = [self.masters[i] for i in at]
            updates.mul_(self.rate * (MATRIX_RATE * max(1, shape[0] / shape[1]) ** 0.5))
            torch._foreach_mul_(masters, 1 - self.rate * WEIGHT_DECAY)
            torch._foreach_sub_(masters, list(updates))
        self.round()
        for weight in self.weights:
            weight.grad = None
        return norm

    @torch.no_grad()
    def round(self) -> None:
        """Put the masters, rounded, into the model."""
        torch._foreach_copy_(self.weights, self.masters)

    @torch.no_grad()
    def remember(self) -> None:
        """Let the masters as they are now join the mean that `settle` takes."""
        self.remembered += 1
        torch._foreach_lerp_(self.mean, self.masters, 1 / self.remembered)

    @torch.no_grad()
    def settle(self) -> None:
        """Put the mean of what was remembered into the masters and the model.

        Izmailov et al. 2018, "Averaging weights leads to wider optima and better generalization".
        """
        torch._foreach_copy_(self.masters, self.mean)
        self.round()

    def _averages(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """The averages that updates are made of: file, name of the weight, tensor."""
        for shape, at in self.matrices.items():
            yield from (("average", self.names[i], m) for i, m in zip(at, self.momentum[shape], strict=True))
        for name, master in zip(self.names, self.masters, strict=True):
            if master in self.adam.state:
                yield "average", name, self.adam.state[master]["exp_avg"]
                yield "average_of_squares", name, self.adam.state[master]["exp_avg_sq"]

    def _whole(self, remembered: int) -> list[tuple[str, list[torch.Tensor]]]:
        """What a state keeps in more than bfloat16, with what the names of its files end in."""
        return [("", self.masters), *([("_mean", self.mean)] if remembered else [])]

    def tensors(self) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
        """The state in bfloat16, by file: the weights rounded, what that loses, both of their mean, the averages."""
        half = torch.bfloat16
        for suffix, masters in self._whole(self.remembered):
            rounded = [m.to(half) for m in masters]
            yield f"weights{suffix}", dict(zip(self.names, rounded, strict=True))
            rest = [(m - r.float()).to(half) for m, r in zip(masters, rounded, strict=True)]
            yield f"rest{suffix}", dict(zip(self.names, rest, strict=True))
        found: dict[str, dict[str, torch.Tensor]] = {}
        for file, name, tensor in self._averages():
            found.setdefault(file, {})[name] = tensor.to(half)
        yield from found.items()

    @torch.no_grad()
    def restore(self, files: dict[str, dict[str, torch.Tensor]], steps: int, remembered: int) -> None:
        """Take up the state of `tensors` after `steps` updates, `remembered` of which are in the mean."""
        self.remembered = remembered
        for suffix, masters in self._whole(remembered):
            for name, master in zip(self.names, masters, strict=True):
                master.copy_(files[f"weights{suffix}"][name].float() + files[f"rest{suffix}"][name].float())
        for group in self.adam.param_groups:
            for master in group["params"]:
                self.adam.state[master] = {
                    "step": torch.tensor(float(steps), device=master.device if master.is_cuda else "cpu"),
                    "exp_avg": torch.zeros_like(master),
                    "exp_avg_sq": torch.zeros_like(master),
                }
        for file, name, tensor in self._averages():
            tensor.copy_(files[file][name])
        self.round()
