"""Kernels that are launched before the kernel in front of them has ended (programmatic dependent launch, from sm_90).

A step of one token is a chain of short kernels. Between two of them memory is idle: the last programs of one end, their
results are flushed, the next is launched. A kernel that overlaps is resident by then, and has done what does not
depend on the results before it. It then waits with `follow`, once, and before it reads or writes anything else.

Every kernel that is launched with `overlap_options` has to wait in all of its programs, also in those without work.
That a kernel has ended is known to those after it only because each waited for the one before it.
"""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false
from __future__ import annotations

from typing import Any, Literal

import torch
import triton
import triton.language as tl

from longreach_kernels.backends.triton.config import capability

# When a product or attention lets the next kernel begin: "early", as soon as all of its programs have begun, "late", as
# soon as all have only to finish; or "never": then kernels do not overlap.
OVERLAP: Literal["never", "late", "early"] = "late"
_FROM = 90  # compute capability
LATE: tl.constexpr = tl.constexpr(1)
EARLY: tl.constexpr = tl.constexpr(2)
_CODES = {"never": 0, "late": LATE.value, "early": EARLY.value}


def overlap_options(device: torch.device) -> dict[str, Any]:
    """OVERLAP and the launch option of a kernel that calls `follow`."""
    if OVERLAP == "never" or capability(device) < _FROM:
        return {"OVERLAP": 0}
    return {"OVERLAP": _CODES[OVERLAP], "launch_pdl": True}


@triton.jit
def let_follow(OVERLAP: tl.constexpr, PLACE: tl.constexpr):
    """Called at both places of a long kernel, EARLY and LATE: let the next kernel begin once all programs of this one
    have come here. It waits for their end in `follow`."""
    if OVERLAP == PLACE:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def follow(OVERLAP: tl.constexpr):
    """Wait until the kernel before has ended and its results are there."""
    if OVERLAP > 0:
        tl.extra.cuda.gdc_wait()


@triton.jit
def follow_briefly(OVERLAP: tl.constexpr):
    """`follow`, for a kernel so short that the next may begin with it."""
    if OVERLAP > 0:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
