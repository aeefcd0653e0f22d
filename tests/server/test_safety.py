"""What the source must never do: read what can carry code, or run code that comes with a model."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import longreach
import longreach_kernels
import longreach_patches
import pytest

PACKAGES = [Path(package.__file__).parent for package in (longreach, longreach_patches, longreach_kernels)]
CARRIERS = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
CALLS = {"torch.load", "torch.jit.load", "eval", "exec", "os.system", "yaml.load"}


def faults(source: str) -> Iterator[str]:
    """What a module does of that, line by line."""
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        line = 0
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            line = node.lineno
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
            line = node.lineno
        elif isinstance(node, ast.Call):
            if ast.unparse(node.func) in CALLS:
                yield f"line {node.lineno}: calls {ast.unparse(node.func)}"
            for keyword in node.keywords:
                value = ast.unparse(keyword.value)
                if (keyword.arg, value) in {
                    ("trust_remote_code", "True"),
                    ("use_safetensors", "False"),
                    ("allow_pickle", "True"),
                }:
                    yield f"line {node.lineno}: {keyword.arg}={value}"
        for name in names:
            if name.partition(".")[0] in CARRIERS:
                yield f"line {line}: imports {name}"


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_nothing_that_carries_code_is_read(package: Path) -> None:
    files = sorted(package.rglob("*.py"))
    assert len(files) > 5
    assert not {f"{path.relative_to(package)}, {fault}" for path in files for fault in faults(path.read_text())}


@pytest.mark.parametrize(
    "bad",
    [
        "import pickle",
        "from dill import loads",
        "import torch\ntorch.load('x')",
        "def f(x):\n    return eval(x)",
        "AutoModel.from_pretrained(m, trust_remote_code=True)",
    ],
)
def test_the_check_sees_what_it_is_for(bad: str) -> None:
    assert list(faults(bad))
