"""Kernels that are launched before the kernel in front of them has ended (programmatic dependent launch, from sm_90).

A step of one token is a chain of short kernels. Between two of them memory is idle: the last programs of one end, their
results are flushed, the next is launched. A kernel that overlaps is resident by then. It waits with `follow`, once, and
before it reads or writes anything.

Every kernel that is launched with `overlap_options` has to wait in all of its programs, also in those without work.
That a kernel has ended is known to those after it only because each waited for the one before it.
"""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from longreach_kernels.backends.triton.config import capability

OVERLAPS = True
_FROM = 90  # compute capability


def overlap_options(device: torch.device) -> dict[str, Any]:
    """OVERLAP and the launch option of a kernel that calls `follow`."""
    if not OVERLAPS or capability(device) < _FROM:
        return {"OVERLAP": False}
    return {"OVERLAP": True, "launch_pdl": True}


@triton.jit
def let_follow(OVERLAP: tl.constexpr):
    """Let the next kernel begin once all programs of this one have come here, or have ended.

    Called where little is left to do: programs that wait hold registers and shared memory that others could have.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def follow(OVERLAP: tl.constexpr):
    """Wait until the kernel before has ended and its results are there."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
