"""What a request's grammar says of its next token, as plain data; `grammar` has the real one."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt


class Constraint(Protocol):
    """The state of one answer within its grammar."""

    def mask(self) -> npt.NDArray[np.uint8] | None:
        """Which tokens may come next, (ceil(V / 8),), the lowest bit first; None after an error."""
        ...

    def accept(self, token: int) -> bool:
        """The token was drawn; whether the answer is complete, so that nothing may follow."""
        ...

    @property
    def error(self) -> str | None:
        """Why the grammar cannot be followed any further."""
        ...
