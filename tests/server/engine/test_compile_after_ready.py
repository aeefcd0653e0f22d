"""On a GPU: after the start nothing is compiled, whatever is asked for; and where something is, nobody else waits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.server.engine.test_parallel_compile import TINY

# Starts an engine, sends requests of every kind, alone and beside others, and prints what was compiled for them. With
# "late" the start has left policies out; then nobody's step may have waited, and all answers come to their ends.
_SERVE = """
import json, sys
import longreach.engine.startup.policy_steps as policy_steps
from longreach.engine.messages import EngineConfig, Failed, Generate, Sampling
from longreach.engine.startup.build import build_engine
from longreach.policies.values import DENSE, Window, Dynamic
from tests.server.engine.compile_start import ASKED

model, kv_dtype, mode = sys.argv[1:]
if mode == "late":
    policy_steps.PolicySteps.compute = lambda self, **_: None
engine, started = build_engine(EngineConfig(
    model=model, random_weights=True, kv_cache_dtype=kv_dtype, kv_cache_bytes=1 << 28, page_bounds=True,
    max_num_seqs=40, max_batched_tokens=4096,
))
number, tokens, waited = 0, {}, set()

def submit(length, policy, **more):
    global number
    number += 1
    more = {"max_tokens": 4, "sampling": Sampling(temperature=0)} | more
    prompt = [(7 * number + 11 * at) % 500 for at in range(length)]
    assert engine.submit(Generate(request_id=f"r{number}", prompt=prompt, attention=policy, **more)) is None

def drain():
    while engine.has_work:
        for news in engine.step():
            assert not isinstance(news, Failed), news
            for update in news.updates:
                tokens.setdefault(update.request_id, []).extend(update.tokens)
                waited.update([update.request_id] if update.compiling else [])
        engine.scheduler.check()

few = [Window(size=300, sinks=4), ASKED[2], Dynamic(dense_below=0), Dynamic(recall=1, decode_budget=37)]
for policy in few if mode != "every" else [DENSE, *ASKED]:
    submit(3000, DENSE, max_tokens=60)
    submit(1500, policy)
    drain()
    if mode == "every":
        for length in (1, 100, 128):
            submit(length, policy)
        submit(300, policy, speculate=4, max_tokens=20)
        if not policy.is_dynamic:
            submit(300, policy, logprobs=2, prompt_logprobs=2)
        drain()
stats = engine.stats
print(json.dumps([stats.compiled_beside, stats.compiled_in_steps, sorted(waited), tokens]))
engine.close()
"""


def _serve(model: Path, kv_dtype: str, mode: str, cache: Path) -> list[Any]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    command = [sys.executable, "-c", _SERVE, str(model), kv_dtype, mode]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_nothing_is_compiled_for_requests_of_any_kind(tmp_path: Path, kv_dtype: str) -> None:
    TINY.save_pretrained(tmp_path / "model")
    beside, in_steps, waited, _ = _serve(tmp_path / "model", kv_dtype, "every", tmp_path / "cache")
    assert (beside, in_steps, waited) == ({}, {}, [])


@pytest.mark.gpu
def test_what_the_start_left_out_is_compiled_while_others_go_on(tmp_path: Path) -> None:
    TINY.save_pretrained(tmp_path / "model")
    *_, expected = _serve(tmp_path / "model", "auto", "ready", tmp_path / "ready")
    beside, in_steps, waited, tokens = _serve(tmp_path / "model", "auto", "late", tmp_path / "late")
    assert {"forward_kernel", "decode_kernel", "folded_kernel"} <= set(beside)
    assert in_steps == {}
    assert {"r2", "r4", "r6"} <= set(waited)
    assert not {"r1", "r3", "r5", "r7"} & set(waited), "dense requests go on"
    # Bits depend on what is computed together.
    assert {name: len(found) for name, found in tokens.items()} == {name: len(one) for name, one in expected.items()}
