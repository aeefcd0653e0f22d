"""How much memory the engine's processes have, for its signs of life."""

from __future__ import annotations

import sys

from longreach.engine.stats import EngineMemory
from longreach.util.process_memory import family_bytes


def engine_memory() -> EngineMemory:
    """What this process, its children and PyTorch have at this moment.

    The driver is not asked: it may hold up kernels. PyTorch's own books need no driver.
    """
    own, children = family_bytes()
    return EngineMemory(resident=own, of_children=children, reserved=_reserved_bytes())


def _reserved_bytes() -> int:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return 0
    return torch.cuda.memory_reserved()
