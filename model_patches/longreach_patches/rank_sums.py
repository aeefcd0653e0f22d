"""Sums over ranks: by NCCL or gloo, or, if asked, small ones of GPUs of one host through memory that all of them map.

In a step of few tokens a sum is a few kilobytes, and takes as long as the ranks need to find each other. NCCL needs
three times as long for that as one kernel that reads every rank's part where it lies (docs/adr/0038).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup

logger = logging.getLogger(__name__)

# Every rank reads every rank's part, so that the time grows with the number of them: what a rank may read in one sum.
_READ_BYTES = 2 << 20
_ALIGNMENT = 16  # the kernel's loads and stores
_DTYPES = (torch.bfloat16, torch.float32)  # what the kernel adds; it does not know float16
# NVLink multicast stays off. The buffer is an allocation of its own, and not part of a pool.
_SETTINGS = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "TORCH_SYMMMEM_IMPLICIT_POOL": "0"}

T = TypeVar("T")


class SmallSums:
    """One buffer on each rank's GPU that all of them read, and the sums that go through it.

    torch's one-shot kernel waits until all ranks have launched it, adds their parts in the order of the ranks, and ends
    when all of them have read this one's. So all ranks get the same bits; those of an element depend on nothing beside
    it; and whatever comes next in the stream may write the buffer again, in a replayed graph as in an eager step. All
    sums have to be on one stream, or in streams that wait for each other, and in the same order on all ranks.
    """

    def __init__(self, buffer: Tensor, group_name: str) -> None:
        """Of a `buffer` (B,) uint8 in symmetric memory, which the ranks of the group have exchanged (`of`)."""
        self._buffer = buffer
        self._group_name = group_name

    @classmethod
    def of(cls, group: ProcessGroup, device: torch.device) -> SmallSums:
        """What the ranks of `group`, on GPUs of one host, this one on `device`, add small tensors with.

        A collective operation, to be called before a graph is captured, and once in a process.

        Raises:
            ValueError: one of the ranks cannot; raised on all of them, with what that one says.
        """
        rank, size = distributed.get_rank(group), distributed.get_world_size(group)
        nbytes = _READ_BYTES // size // _ALIGNMENT * _ALIGNMENT
        indices = _gathered(device.index, group)
        buffer = _together(lambda: _allocate(nbytes, device, indices), group)
        _together(lambda: _meet(buffer, group), group)
        sums = cls(buffer, group.group_name)
        _together(lambda: sums._try(rank, size), group)
        if rank == 0:
            logger.info("sums over GPUs of up to %d KiB go through symmetric memory", nbytes >> 10)
        return sums

    def holds(self, out: Tensor) -> bool:
        """Whether a sum of tensors like `out` goes through the buffer. Ranks that agree about their tensors' shapes,
        dtypes and places in their storages agree about this."""
        return (
            out.device == self._buffer.device
            and out.dtype in _DTYPES
            and out.is_contiguous()
            and 0 < out.nbytes <= self._buffer.nbytes
            and out.nbytes % _ALIGNMENT == 0
            and out.storage_offset() * out.itemsize % _ALIGNMENT == 0  # storages begin at a multiple
        )

    def part(self, out: Tensor) -> Tensor:
        """Where this rank has to write its part of the sum for `out`: its beginning of the buffer, of `out`'s shape."""
        return self._buffer[: out.nbytes].view(out.dtype).view(out.shape)

    def add(self, part: Tensor, out: Tensor) -> None:
        """Write the sum of all ranks' `part`, made by `part`, to `out`."""
        # Not the operation that copies the part itself: its threads do not wait for each other between the copy and
        # the signal to the other ranks.
        torch.ops.symm_mem.one_shot_all_reduce_out(part, "sum", self._group_name, out)

    def _try(self, rank: int, size: int) -> None:
        """Sums of whole buffers, which also load the kernels: nothing is to be loaded while a graph is captured."""
        for dtype in _DTYPES:
            out = torch.zeros(self._buffer.nbytes // dtype.itemsize, dtype=dtype, device=self._buffer.device)
            part = self.part(out)
            part.fill_(rank + 1)
            self.add(part, out)
            if not bool((out == size * (size + 1) // 2).all()):
                raise ArithmeticError(f"a sum of {dtype} was wrong")


@dataclass(frozen=True)
class RankSum:
    """The sum over the ranks of `group`; through `small` what that holds.

    `part` says where each rank writes its part, and `add` makes the sum of them:

        part = ranks.part(out)
        ...  # write all of it
        ranks.add(part, out)
    """

    group: ProcessGroup
    small: SmallSums | None = None

    def part(self, out: Tensor) -> Tensor:
        """A tensor of `out`'s shape and dtype with anything in it, or `out` itself. It is this rank's until `add`, and
        there is one at a time."""
        return out if self.small is None or not self.small.holds(out) else self.small.part(out)

    def add(self, part: Tensor, out: Tensor) -> None:
        """Write the sum of all ranks' `part` to `out`. All ranks get the same bits."""
        if part is out or self.small is None:
            distributed.all_reduce(out, group=self.group)
        else:
            self.small.add(part, out)


_met = False  # of this process, as torch's count of exchanges is, by which ranks find each other's


def _has_multicast(index: int) -> bool:
    from torch._C._autograd import DeviceType
    from torch._C._distributed_c10d import _SymmetricMemory

    return _SymmetricMemory.has_multicast_support(DeviceType.CUDA, index)


def _allocate(nbytes: int, device: torch.device, indices: list[int]) -> Tensor:
    """A buffer that the ranks on the GPUs `indices`, this one's among them, can map.

    Raises:
        RuntimeError: they cannot, or not from this rank.
    """
    import torch.distributed._symmetric_memory as symmetric_memory

    if _met:
        raise RuntimeError("this process has shared memory with other ranks before, and only a new one can")
    for index in indices:
        if index != device.index and not torch.cuda.can_device_access_peer(device.index, index):
            raise RuntimeError(f"GPU {device.index} cannot read the memory of GPU {index}")
    os.environ.update(_SETTINGS)
    if _has_multicast(device.index):
        raise RuntimeError("NVLink multicast cannot be turned off")
    return symmetric_memory.empty(nbytes, dtype=torch.uint8, device=device)


def _meet(buffer: Tensor, group: ProcessGroup) -> None:
    """Map the other ranks' buffers. torch keeps the mapping as long as the buffer."""
    import torch.distributed._symmetric_memory as symmetric_memory

    global _met
    _met = True
    handle = symmetric_memory.rendezvous(buffer, group.group_name)
    if getattr(handle, "multicast_ptr", 0):
        raise RuntimeError("NVLink multicast is bound to the buffer")


def _together(act: Callable[[], T], group: ProcessGroup) -> T:
    """What `act` returns, once it has succeeded on all ranks: one that went on alone would wait for the others.

    Raises:
        ValueError: it failed on one of them; raised on all.
    """
    result: T | None = None
    problem: Exception | None = None
    try:
        result = act()
    except Exception as error:  # noqa: BLE001 - whatever it was, the others have to hear of it
        problem = error
    mine = "" if problem is None else (str(problem).strip() or type(problem).__name__).splitlines()[0][:300]
    for rank, said in enumerate(_gathered(mine, group)):
        if said:
            raise ValueError(f"--symmetric-sums: rank {rank} cannot set them up; leave it out: {said}") from problem
    return result  # pyright: ignore[reportReturnType]


def _gathered(mine: T, group: ProcessGroup) -> list[T]:
    """What every rank says, by rank."""
    said: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(said, mine, group=group)
    return said
