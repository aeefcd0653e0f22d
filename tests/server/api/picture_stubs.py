"""What stands in for the drawing of a mask in its process; imports little, for the sake of processes started for it."""

from __future__ import annotations

import os
import signal

from longreach.api.schema.answers.attention_policies import MaskPicture
from longreach.policies.values import AttentionPolicy


def killed_at_work(policy: AttentionPolicy, length: int) -> tuple[MaskPicture, bytes]:
    """End as a process does that the kernel kills for its memory."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def drawn_at_once(policy: AttentionPolicy, length: int) -> tuple[MaskPicture, bytes]:
    """An empty picture, whose density is the number of its process."""
    told = MaskPicture(
        policy=policy.name,
        parameters={},
        length=length,
        block=128,
        exact=True,
        density=os.getpid(),
        tiles_visited=0,
        tiles_total=0,
        flops_saved_share=0.0,
        grid=[],
    )
    return told, b""
