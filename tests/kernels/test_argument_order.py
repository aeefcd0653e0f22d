"""Arguments of the Gluon kernels reach the parameter of their name."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from longreach_kernels.backends.hopper import decode_arguments, decode_launch, forward_arguments, forward_launch
from longreach_kernels.backends.hopper.argument_order import argument_order
from longreach_kernels.backends.hopper.decode import decode_kernel
from longreach_kernels.backends.hopper.forward import forward_kernel

FORWARD = ("Output", "Pages", "Sizes", "Lists", "Logits", "Split")
DECODE = ("Output", "Pages", "Sizes", "Scales")


class _Pair(NamedTuple):
    first: Any
    second: Any


class _Kernel:
    arg_names = ("q_desc", "second", "counter", "first", "FORM")


@pytest.mark.parametrize(
    ("kernel", "counter", "module", "groups", "order"),
    [
        (forward_kernel, "counter", forward_arguments, FORWARD, forward_launch._ORDER),
        (decode_kernel, "counters", decode_arguments, DECODE, decode_launch._ORDER),
    ],
    ids=["forward", "decode"],
)
def test_every_argument_goes_to_the_parameter_of_its_name(
    kernel: Any, counter: str, module: Any, groups: tuple[str, ...], order: Any
) -> None:
    names = (counter, *(name for group in groups for name in getattr(module, group)._fields))
    taken = tuple(name for name in kernel.arg_names if not name.endswith("_desc") and name not in ("FORM", "OVERLAP"))
    assert order(names) == taken
    assert order(tuple(range(len(names)))) == tuple(names.index(name) for name in taken)


def test_groups_are_sorted_by_name() -> None:
    assert argument_order(_Kernel, "counter", _Pair)(("c", "1", "2")) == ("2", "c", "1")


@pytest.mark.parametrize("groups", [("counter",), (_Pair,), (_Pair, "counter", "other"), (_Pair, _Pair, "counter")])
def test_a_group_that_does_not_fit_is_refused(groups: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match="kernel: its parameters are"):
        argument_order(_Kernel, *groups)
