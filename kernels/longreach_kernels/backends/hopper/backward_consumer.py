"""The consumer warpgroups of the Hopper backward kernel: the five products of a step, and the softmax between them.

Each owns 64 keys, whose dK and dV it holds in registers, and takes one half of every dQ. The assembler decides much of
a step's cost, so what it made of it is tested (`tests/kernels/compile_hopper_backward.py`).
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# (the stubs describe host functions; device functions take and return other types)
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from longreach_kernels.backends.hopper.backward_workers import CONSUMERS, KEYS

# A part of dQ, 64 rows and 64 columns, lies in shared memory as the threads hold it: 16 bytes of each thread, and then
# the next 16 of each. So they are stored without conflicts from one address, and added to the sum as 16 KB in a row.
PART = gl.constexpr(
    gl.SharedLinearLayout(
        [[0, 1], [8, 0], [0, 2], [0, 4], [1, 0], [2, 0], [4, 0], [16, 0], [32, 0], [0, 8], [0, 16], [0, 32]], [], 128
    )
)


@gluon.jit
def _meet():
    """Both consumers' threads wait for each other."""
    gl.inline_asm_elementwise("bar.sync 9, 256; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _hold():
    """Keep loads that follow from moving up, where they would take registers that products in flight still need."""
    gl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _mask(st, iota_s, keys, position, key_tile, FORM: gl.constexpr):
    """Logits of one tile, -inf where the query may not see the key; `position` is the first query's."""
    cols = iota_s.load(gl.SliceLayout(0, st.type.layout))
    from_col = gl.full(keys.shape, 0, gl.int32, keys.type.layout)
    if FORM.causal:
        from_col = keys - position
    from_col = gl.where(keys < key_tile.num_keys, from_col, FORM.block_m)
    st = gl.where(cols[None, :] >= from_col[:, None], st, float("-inf"))
    if FORM.windowed:
        st = gl.where(cols[None, :] < (keys - position + key_tile.window)[:, None], st, float("-inf"))
    return st


@gluon.jit
def _dq_product(c: gl.constexpr, ds_s, k_s, stage, zero, D: gl.constexpr):
    """This consumer's half of dQ = dS K, over the keys of both."""
    if D == 128:  # 64 queries, each consumer its half of the head dim
        dq = warpgroup_mma(
            ds_s.index(stage).permute((1, 0)),
            k_s.index(0).slice(c * 64, 64, dim=1),
            zero,
            use_acc=False,
            is_async=True,
        )
        dq = warpgroup_mma(
            ds_s.index(stage + 1).permute((1, 0)), k_s.index(1).slice(c * 64, 64, dim=1), dq, is_async=True
        )
    else:  # each consumer its half of 128 queries
        dq = warpgroup_mma(
            ds_s.index(stage).slice(c * 64, 64, dim=1).permute((1, 0)),
            k_s.index(0),
            zero,
            use_acc=False,
            is_async=True,
        )
        dq = warpgroup_mma(
            ds_s.index(stage + 1).slice(c * 64, 64, dim=1).permute((1, 0)), k_s.index(1), dq, is_async=True
        )
    return dq


@gluon.jit
def consume(c: gl.constexpr, inputs, gradients, key_tile, scale, scale_log2, FORM: gl.constexpr):
    """Consumer warpgroup c: keys `64 c` of the tile and the 63 after it."""
    BM: gl.constexpr = FORM.block_m
    D: gl.constexpr = FORM.head_dim
    RING: gl.constexpr = FORM.ring
    PARTS: gl.constexpr = FORM.parts
    GROUP: gl.constexpr = FORM.group
    k_s = inputs.k
    ds_s = gradients.ds
    dtype: gl.constexpr = k_s.dtype
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])  # noqa: E741
    P: gl.constexpr = gl.DotOperandLayout(0, O, 2)
    Q: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    key_in_seq = key_tile.tile * (CONSUMERS * KEYS) + c * KEYS
    keys = key_in_seq + gl.arange(0, KEYS, gl.SliceLayout(1, S))
    dk = gl.zeros([KEYS, D], gl.float32, O)
    dv = gl.zeros([KEYS, D], gl.float32, O)
    zero = gl.zeros([KEYS, BM], gl.float32, S)
    no_dq = gl.zeros([64, 64], gl.float32, Q)
    k = k_s.index(c)
    v = inputs.v.index(c)
    mbarrier.wait(inputs.kv_full, 0)
    for i in range(key_tile.num_tiles * GROUP):
        slot = i % RING
        tile = key_tile.first + key_tile.num_tiles - 1 - i // GROUP
        q = inputs.q.index(slot)
        grad = inputs.grad.index(slot)
        mbarrier.wait(inputs.full.index(slot), (i // RING) & 1)
        st = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
        dpt = warpgroup_mma(v, grad.permute((1, 0)), zero, use_acc=False, is_async=True)
        st = warpgroup_mma_wait(1, deps=(st,))
        _hold()
        lse = inputs.stats.index(slot).slice(0, 1, dim=0).load(S)
        if (tile < key_tile.inner) | (tile >= key_tile.inner_end):
            st = _mask(st, gradients.iota, keys, tile * BM + key_tile.offset, key_tile, FORM)
        p = gl.exp2(st * scale_log2 - lse)
        # Issued before dP is waited for: the exponentials run beside dP, and what follows it beside dV.
        p_op = gl.convert_layout(p.to(dtype), P)
        dv_next = warpgroup_mma(p_op, grad, dv, is_async=True)
        dpt = warpgroup_mma_wait(1, deps=(dpt,))
        _hold()
        delta = inputs.stats.index(slot).slice(1, 1, dim=0).load(S)
        ds = (p * (dpt - delta)).to(dtype)
        stage = (i & 1) * CONSUMERS
        ds_s.index(stage + c).store(ds)
        fence_async_shared()
        _meet()
        ds_op = gl.convert_layout(ds, P)
        dq = _dq_product(c, ds_s, k_s, stage, no_dq, D)
        dk_next = warpgroup_mma(ds_op, q, dk, is_async=True)
        dq, dv, p_op = warpgroup_mma_wait(1, deps=(dq, dv_next, p_op))
        part = i % PARTS
        mbarrier.wait(gradients.dq_empty.index(part), ((i // PARTS) & 1) ^ 1)
        gradients.dq.index(part * CONSUMERS + c)._reinterpret(gl.float32, [64, 64], PART).store(dq)
        fence_async_shared()
        mbarrier.arrive(gradients.dq_full.index(part), count=1)
        dk, ds_op = warpgroup_mma_wait(0, deps=(dk_next, ds_op))
        mbarrier.arrive(inputs.empty.index(slot), count=1)

    v.store(dv.to(dtype))  # neither the values nor, once both consumers are here, the keys are needed any more
    _meet()
    k.store((dk * scale).to(dtype))
