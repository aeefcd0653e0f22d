"""Triton's interpreter without work whose results it drops, or that it does anew at each operation.

A test of a kernel has some ten thousand operations, and most of their time is Python's. Values, types and errors stay
as they are: `tests/test_quick_interpreter.py` compares them. Left out are

- sums in 64 bits that look for overflows, whose verdict the interpreter drops unless its option `debug` is set;
- a search through triton.language at each call of a device function, for what the launch has replaced already;
- types of blocks, shapes of tensors and numpy's types that are equal to former ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import triton.language as tl
from triton.language import core
from triton.runtime import interpreter

# What was changed: an object, the name of its attribute, and the values before and after.
_CHANGES: list[tuple[Any, str, Any, Any]] = []


def quicken() -> None:
    """Change the interpreter of this process; a second time changes nothing."""
    if not _CHANGES:
        _drop_overflow_checks()
        _search_once_a_launch()
        _share_shapes()
        _look_up_dtypes()


@contextmanager
def slowly() -> Iterator[None]:
    """The interpreter as triton has it."""
    for obj, name, before, _ in _CHANGES:
        setattr(obj, name, before)
    try:
        yield
    finally:
        for obj, name, _, after in _CHANGES:
            setattr(obj, name, after)


def _change(obj: Any, name: str, value: Any) -> None:
    _CHANGES.append((obj, name, getattr(obj, name), value))
    setattr(obj, name, value)


def _drop_overflow_checks() -> None:
    semantic = interpreter.interpreter_semantic
    check = semantic.binary_op_sanitize_overflow_impl

    def check_if_told(*args: Any) -> None:
        if semantic.builder.options.debug:
            check(*args)

    _change(semantic, "binary_op_sanitize_overflow_impl", check_if_told)


def _search_once_a_launch() -> None:
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    done: list[set[int]] = []  # of each launch that runs, the modules in which functions are replaced
    used: dict[Callable[..., Any], set[int]] = {}

    def patch_once(fn: Callable[..., Any]) -> Any:
        if not done:
            return patch(fn)
        if fn not in used:
            used[fn] = {id(value) for value in fn.__globals__.values() if value is tl or value is core}
        if used[fn] and used[fn] <= done[-1]:
            return interpreter._LangPatchScope()
        done[-1].update(used[fn])
        return patch(fn)

    def launch_once(self: Any, *args: Any, **kwargs: Any) -> None:
        done.append(set())
        try:
            launch(self, *args, **kwargs)
        finally:
            done.pop()

    _change(interpreter, "_patch_lang", patch_once)
    _change(interpreter.GridExecutor, "__call__", launch_once)


def _share_shapes() -> None:
    make_block, make_tensor, equal = core.block_type.__init__, core.tensor.__init__, core.dtype.__eq__
    broadcast = interpreter.TritonSemantic.broadcast_impl_value
    blocks: dict[tuple[int, ...], tuple[Any, int, str]] = {}
    tensors: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = tuple([size.value if type(size) is core.constexpr else size for size in shape])
        known = blocks.get(key)
        if known is None or any(type(size) is not int for size in key):
            make_block(self, element_ty, shape)
            blocks[tuple(self.shape.values)] = self.shape, self.numel, str(self.shape)
            return
        self.element_ty = element_ty
        self.shape, self.numel, text = known
        self.name = f"<{text}, {element_ty}>"

    def tensor(self: Any, handle: Any, of_type: Any, /) -> None:
        key = tuple(of_type.shape.values) if of_type.is_block() else ()
        if (known := tensors.get(key)) is None:
            make_tensor(self, handle, of_type)
            tensors[key] = self.shape, self.numel
            return
        self.handle, self.type, self.dtype = handle, of_type, of_type.scalar
        self.shape, self.numel = known

    def same(self: Any, other: Any) -> bool:
        return self is other or equal(self, other)

    def broadcast_unless_same(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        if lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape is rhs.type.shape:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    _change(core.block_type, "__init__", block_type)
    _change(core.tensor, "__init__", tensor)
    _change(core.dtype, "__eq__", same)
    _change(interpreter.TritonSemantic, "broadcast_impl_value", broadcast_unless_same)


def _look_up_dtypes() -> None:
    find = interpreter._get_np_dtype
    known: dict[str, np.dtype] = {}

    def look_up(tt_dtype: Any) -> np.dtype:
        if isinstance(tt_dtype, tl.pointer_type):
            return find(tt_dtype)
        if isinstance(tt_dtype, tl.block_type):
            return look_up(tt_dtype.element_ty)
        if (dtype := known.get(tt_dtype.name)) is None:
            dtype = known[tt_dtype.name] = find(tt_dtype)
        return dtype

    _change(interpreter, "_get_np_dtype", look_up)
