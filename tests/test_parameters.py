"""No function takes more than twelve parameters, but for the entries of kernels and a few public functions."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MOST = 12
# Public functions whose options users write: as keywords, each taken apart on its first line, or on a command line.
PUBLIC = {
    "kernels/longreach_kernels/paged_api.py: paged_attention",
    "kernels/longreach_kernels/sparse/select/kept_mass.py: kept_mass",
    "kernels/longreach_kernels/sparse/select/select_tiles.py: select_tiles",
    "server/longreach/bench/load_command.py: load",
    "server/longreach/bench/recall_command.py: recall",
}


def is_entry(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a function is launched on a GPU as a kernel: it is jitted, and its name says so."""
    jitted = any(
        ast.unparse(decorator).partition("(")[0] in ("triton.jit", "gluon.jit") for decorator in function.decorator_list
    )
    return jitted and function.name.endswith("_kernel")


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """How many a call may give, but for the object that a method belongs to."""
    arguments = function.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return len([argument for argument in every if argument.arg not in ("self", "cls")])


def too_many(source: str) -> list[str]:
    """The names of functions in a module that take more than `MOST`."""
    return [
        node.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and parameters(node) > MOST and not is_entry(node)
    ]


@pytest.mark.parametrize("folder", ["kernels", "model_patches", "server"])
def test_no_function_takes_more_than_twelve_parameters(folder: str) -> None:
    found = {
        f"{path.relative_to(ROOT).as_posix()}: {name}"
        for path in (ROOT / folder).rglob("*.py")
        for name in too_many(path.read_text(encoding="utf-8"))
    }
    assert found == {name for name in PUBLIC if name.startswith(f"{folder}/")}


def test_only_the_entry_of_a_kernel_may_take_more() -> None:
    many = ", ".join(f"x{i}" for i in range(13))
    assert too_many(f"def f({many}): ...") == ["f"]
    assert too_many(f"class A:\n    def f(self, *, {many}): ...") == ["f"]
    assert too_many(f"def f({many.removesuffix(', x12')}): ...") == []
    assert too_many(f"@gluon.jit\ndef _walk({many}): ...") == ["_walk"]
    assert too_many(f"@triton.jit(do_not_specialize=['x0'])\ndef forward_kernel({many}): ...") == []
    assert too_many(f"def forward_kernel({many}): ...") == ["forward_kernel"]
