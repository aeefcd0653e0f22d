"""The start of an engine compiles on several threads all that it launches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig

from tests.server.engine.conftest import CONFIG

TINY = LlamaConfig(
    vocab_size=512,
    hidden_size=256,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=32768,
    dtype="bfloat16",
)
# Starts an engine, and prints how many kernels were compiled in the parallel phase and which after it.
_REAL_START = """
import sys
from longreach.engine.messages import EngineConfig
from longreach.engine.startup import start_rank
from longreach.engine.startup.build import build_engine
from triton import knobs

compiled, ahead = [], []
compile_kernels = start_rank.compile_kernels

def listen(src, cache_hit, **_):
    if not cache_hit:
        compiled.append(src.name)

def spy(*args, **options):
    compile_kernels(*args, **options)
    ahead.extend(compiled)
    compiled.clear()

knobs.compilation.listener = listen
start_rank.compile_kernels = spy
engine, _ = build_engine(EngineConfig(model=sys.argv[1], random_weights=True, kv_cache_dtype=sys.argv[2]))
engine.close()
print(len(ahead), compiled)
"""


def _run(*arguments: str, cache: Path | None = None) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if cache is not None:
        environment["TRITON_CACHE_DIR"] = str(cache)
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    ("backend", "kv_dtype", "kernels"),
    [
        ("hopper", "fp8", {"forward_kernel", "_merge_kernel", "decode_kernel", "transpose_kernel"}),
        ("triton", "auto", {"forward_kernel", "split_kernel", "merge_kernel"}),
    ],
)
def test_the_start_launches_what_was_compiled_in_parallel(
    tmp_path: Path, model_dir: Path, backend: str, kv_dtype: str, kernels: set[str]
) -> None:
    model = model_dir  # with layers of two kinds, and heads that only the portable kernels take
    if backend == "hopper":
        TINY.save_pretrained(tmp_path)
        model = tmp_path
    else:
        assert len(set(CONFIG.layer_types or ())) == 2
    found = json.loads(_run("-m", "tests.server.engine.compile_start", str(model), backend, kv_dtype))
    assert found["late"] == []
    assert found["after"] == [], f"compiled for {found['requests']} requests"
    assert found["left"] == 0, "planned pages take the room of the real ones"
    of_layers = {"_norm_kernel", "_rows_kernel", "_rotate_kernel", "_gated_kernel"}
    of_agreement = {"_write_kernel"}  # own layers write keys that they have rotated themselves
    listed = {"recall_kernel", "count_kernel", "entries_kernel"}
    of_dynamic = {"folded_kernel", "join_kernel", "moments_kernel", "pooled_kernel"} | listed
    of_budgets = {"score_kernel", "choose_kernel", "weigh_kernel", "split_kernel", "merge_kernel"}
    assert kernels | of_layers | of_agreement | of_dynamic | of_budgets <= set(found["ahead"])
    assert found["launches"] > len(found["ahead"]), "the start itself launches"


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_a_real_start_compiles_nothing_by_itself(tmp_path: Path, kv_dtype: str) -> None:
    TINY.save_pretrained(tmp_path / "model")
    for expect_some in (True, False):
        ahead, late = _run("-c", _REAL_START, str(tmp_path / "model"), kv_dtype, cache=tmp_path / "cache").split(" ", 1)
        assert (int(ahead) > 0) == expect_some
        assert late == "[]"
