"""The kernels' mask of each static policy. Sizes are in tokens; block patterns round them up to tiles."""

from __future__ import annotations

from functools import singledispatch

from longreach_kernels import Mask
from longreach_kernels.masks import block_rules, mask

from longreach.policies import values
from longreach.sizes import TILE


@singledispatch
def mask_of(policy: values.Policy) -> Mask:
    """The causal mask of a policy.

    Raises:
        TypeError: it has none, since keys are chosen under it while it is computed.
        ValueError: a size is impossible.
    """
    raise TypeError(f"{policy.name} has no mask; register one with `mask_of.register`")


@mask_of.register
def _(policy: values.Dense) -> Mask:
    del policy
    return mask.Causal()


@mask_of.register
def _(policy: values.Window) -> Mask:
    return mask.Window(policy.size, policy.sinks)


@mask_of.register
def _(policy: values.Strided) -> Mask:
    return block_rules.Strided(_blocks(policy.stride), policy.per_head)


@mask_of.register
def _(policy: values.LocalGlobal) -> Mask:
    return block_rules.LocalGlobal(_blocks(policy.window), _blocks(policy.global_tokens))


@mask_of.register
def _(policy: values.BigBird) -> Mask:
    blocks = _blocks(policy.window), _blocks(policy.global_tokens)
    return block_rules.BigBird(*blocks, policy.random_blocks, policy.seed)


@mask_of.register
def _(policy: values.VerticalSlash) -> Mask:
    return block_rules.VerticalSlash(policy.verticals, policy.slashes)


def _blocks(tokens: int) -> int:
    """Blocks that hold so many tokens."""
    return -(-tokens // TILE)
