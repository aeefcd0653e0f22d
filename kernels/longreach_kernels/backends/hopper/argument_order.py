"""Groups of arguments, brought into the order in which a kernel's entry takes them."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any, NamedTuple


def argument_order(kernel: Any, *groups: str | type[NamedTuple]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """A function that sorts the values of groups, laid end to end, into the order of the kernel's parameters.

    The order is found once, by names, so that a launch pays for one pass over its arguments.

    Args:
        kernel: a jitted kernel. Its TMA descriptors come first and its constants last; neither is in a group.
        groups: parameters by name, and tuples whose fields are named like parameters.

    Raises:
        ValueError: the kernel's other parameters are not exactly the groups' names.
    """
    names = [name for group in groups for name in ((group,) if isinstance(group, str) else group._fields)]
    wanted = [name for name in kernel.arg_names if not name.endswith("_desc") and not name.isupper()]
    if sorted(names) != sorted(wanted):
        raise ValueError(f"kernel: its parameters are {wanted}, the groups have {names}")
    return itemgetter(*(names.index(name) for name in wanted))
