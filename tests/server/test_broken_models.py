"""`longreach serve` on models that are broken: it ends at once, with one line that names the file and the fault."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from longreach.config import EMBEDDED_MODEL
from safetensors.torch import load_file, save_file

from tests.server.load.process import ServerProcess


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def bad_header_length(path: Path) -> None:
    path.write_bytes((2**40).to_bytes(8, "little") + path.read_bytes()[8:])


def missing_tensor(path: Path) -> None:
    tensors = load_file(path)
    del tensors["model.norm.weight"]
    save_file(tensors, path, {"format": "pt"})


def wrong_type(path: Path) -> None:
    tensors = load_file(path)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int32)
    save_file(tensors, path, {"format": "pt"})


def own_code(path: Path) -> None:
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"model_type": "evil", "auto_map": {"AutoConfig": "evil.C"}})
    )
    path.with_name("evil.py").write_text("raise SystemExit('it ran')")


@pytest.mark.parametrize(
    ("name", "damage", "fault"),
    [
        ("model.safetensors", cut, "not a whole safetensors file"),
        ("model.safetensors", bad_header_length, "not a whole safetensors file"),
        ("model.safetensors", missing_tensor, "missing keys: model.norm.weight"),
        ("model.safetensors", wrong_type, "model.norm.weight is of type I32"),
        ("config.json", own_code, "code from a model repository is never run"),
        ("tokenizer.json", cut, "the tokenizer"),
    ],
    ids=lambda value: value.__name__ if callable(value) else None,
)
def test_a_broken_model(tmp_path: Path, name: str, damage: Callable[[Path], None], fault: str) -> None:
    model = tmp_path / "model"
    shutil.copytree(EMBEDDED_MODEL, model)
    damage(model / name)
    start = time.monotonic()
    with ServerProcess(str(model)) as server:
        assert server.wait(timeout=60) == 1
        # Not a measurement: a start that hangs until some deadline of its own would take longer.
        assert time.monotonic() - start < 30
        [line] = [line for line in server.lines if "ERROR" in line]
        assert fault in line
        assert str(model) in line
        assert Path(name).stem in line
        assert "Traceback" not in server.log
        assert "it ran" not in server.log
