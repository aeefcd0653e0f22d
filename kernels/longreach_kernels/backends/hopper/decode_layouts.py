"""Where the tiles of the Hopper decode kernel lie: in shared memory as TMA writes them, and in registers."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def shared_view(bits, head_dim, tile, box, slices, transposed):
    """The shared memory of a key tile as (slice, key, channel), or (slice, channel, key): boxes of `box` keys one
    behind another, each as TMA writes it, in columns of 128 bytes whose 16-byte chunks are swizzled by the row."""
    size = bits // 8
    width = min(128, head_dim * size)
    chunk = 16 // size
    keys = tile // slices

    def place(row, channel):
        part, key = row // keys, row % keys
        return [part, channel, key] if transposed else [part, key, channel]

    def powers(start, end):
        return [1 << i for i in range(start.bit_length() - 1, end.bit_length() - 1)]

    bases = [place(0, channel) for channel in powers(1, width // size)]
    lines = 128 // width  # rows that share a line of 128 bytes
    bases += [place(row, row // lines * chunk if lines <= row < 8 else 0) for row in powers(1, box)]
    bases += [place(0, channel) for channel in powers(width // size, head_dim)]
    bases += [place(row, 0) for row in powers(box, tile)]
    return gl.SharedLinearLayout(bases, [], 1024)


@gluon.constexpr_function
def words_layout(head_dim, keys, slices, d_warps):
    """Registers of an 8-bit value tile as words of four channels, (slice, key, D / 4): a thread holds `head_dim / 8 /
    d_warps` channels in a row, of the keys that it multiplies."""
    words = head_dim // 32
    registers = [[0, 1, 0], [0, 8, 0]] + [[0, 0, 1 << i] for i in range((words // d_warps).bit_length() - 1)]
    registers += [[0, 1 << i, 0] for i in range(4, keys.bit_length() - 1)]
    lanes = [[0, 2, 0], [0, 4, 0], [0, 0, words], [0, 0, 2 * words], [0, 0, 4 * words]]
    warps = [[0, 0, words >> i + 1] for i in reversed(range(d_warps.bit_length() - 1))]
    warps += [[1 << i, 0, 0] for i in range(slices.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [slices, keys, head_dim // 4])


@gluon.constexpr_function
def replicated(size, warps):
    """A vector whole in every thread."""
    registers = [[1 << i] for i in range(size.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, [[0]] * 5, [[0]] * (warps.bit_length() - 1), [], [size])


@gluon.constexpr_function
def merge_layout(group, head_dim, warps):
    """(splits, group, channels): a thread holds all splits of its channels where the group has rows enough."""
    lanes = min(32, head_dim // 4)
    rows = 32 // lanes
    warp_rows = min(warps, max(1, group // rows))
    return gl.BlockedLayout([1, 1, 4], [1, rows, lanes], [warps // warp_rows, warp_rows, 1], [2, 1, 0])
