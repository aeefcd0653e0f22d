"""Between host and device without waiting: what goes up is pinned, what comes down is waited for when it is read."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import numpy as np
import torch

D = TypeVar("D")


def upload(arrays: list[np.ndarray], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Copy numpy arrays of one dtype to the device in a single transfer, without waiting for it."""
    hosts = [torch.from_numpy(array) for array in arrays]
    if device.type == "cpu":
        return tuple(hosts)
    packed = torch.cat(hosts).pin_memory().to(device, non_blocking=True)
    return packed.split([host.numel() for host in hosts])


def moved(value: D, device: torch.device) -> D:
    """A dataclass with its tensors, and those of dataclasses in it, on the device, without waiting for it."""
    if device.type == "cpu":
        return value
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(value):  # pyright: ignore[reportArgumentType]
        member = getattr(value, field.name)
        if isinstance(member, torch.Tensor):
            changes[field.name] = member.pin_memory().to(device, non_blocking=True)
        elif dataclasses.is_dataclass(member):
            changes[field.name] = moved(member, device)
    return dataclasses.replace(value, **changes)  # pyright: ignore[reportArgumentType, reportCallIssue]


class DeviceSpan:
    """How long a GPU works on what is launched between two places of the host's program, by the GPU's own clock."""

    def __init__(self) -> None:
        """The first place: it begins when all that was launched before has been computed."""
        self._start, self._end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._start.record()

    def end(self) -> None:
        """The second place."""
        self._end.record()

    def seconds(self) -> float:
        """Its length; waits for its end."""
        self._end.synchronize()
        return self._start.elapsed_time(self._end) / 1e3


class OnItsWay:
    """Tensors of one device that are being copied to the host."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self._tensors = tensors
        self._arrived: torch.cuda.Event | None = None
        if tensors[0].is_cuda:
            self._tensors = tuple(
                torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
                for tensor in tensors
            )
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def lists(self) -> list[list]:
        """The tensors as lists, once they have arrived."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return [tensor.tolist() for tensor in self._tensors]
