"""Kernels are compiled on threads without being launched; nothing is launched past the function that decides it."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import longreach_kernels
import longreach_patches
import pytest
import torch
from longreach_kernels.backends.resolve import interpreting
from longreach_kernels.compilation import compile_only


def test_kernels_are_compiled_and_loaded_by_threads_and_launched_later(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_in_threads"],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["ready"], found["failed"]) == (1, 1)
    assert found["cache_hits"] == [False], "compiled once for all launches, and for none anew"
    assert [name.partition("_")[0] for name in found["loaded_by"]] == ["compiler"]
    assert found["loaded"] == 1
    assert (found["launched_ahead"], found["launches"]) == (0, 2)
    assert len(list(tmp_path.glob("*/_double_kernel.cubin"))) == 4
    # What does not compile is said, and fails where it is needed, with the compiler's own words.
    [warning] = found["logged"]
    assert "could not be compiled ahead: CompileTimeAssertionFailure" in warning
    assert found["raised_ahead"] == ""
    assert "only even things" in found["raised"]
    # A step that misses kernels launches nothing from the first of them on, and what it launches all when it comes
    # again. Whoever launches without a guard waits, and is counted apart.
    words = "2 kernels of the step are not compiled yet; compute it again when they are"
    assert found["beside"]["ended"] == [[words, 1], ["", 4], ["CompileTimeAssertionFailure", 0]]
    assert found["beside"]["counts"] == [{"_double_kernel": 2}, {"_double_kernel": 1}]
    assert found["beside"]["turns"] == [True, True]


@pytest.mark.skipif(not interpreting(), reason="needs Triton's interpreter")
def test_the_interpreter_has_no_compiler() -> None:
    with (
        pytest.raises(ValueError, match="TRITON_INTERPRET: the interpreter compiles nothing"),
        compile_only(torch.device("cpu"), 1),
    ):
        pass


@pytest.mark.parametrize("package", [longreach_kernels, longreach_patches])
def test_every_launch_comes_through_the_one_function(package: object) -> None:
    folder = Path(package.__path__[0])  # pyright: ignore[reportAttributeAccessIssue]
    launches = []
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                target = ast.unparse(node.func.value)
                if target.endswith("kernel"):
                    launches.append(f"{path.relative_to(folder)}: {target}")
    assert launches == (["backends/triton/config.py: kernel"] if package is longreach_kernels else [])
