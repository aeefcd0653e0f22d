"""Compile what a model needs before it serves: `longreach warmup`.

Triton compiles a kernel when it is first launched with a kind of arguments, and keeps the result in a folder
(`TRITON_CACHE_DIR`) under a hash of the source, the arguments' kinds, the options, the GPU's architecture and Triton's
version. So this command starts the engine, which compiles what the start and all requests need (`parallel_compile`),
captures graphs and runs the steps of `warmup`. Then it sends requests of the shapes that traffic has, under every
attention policy, and says how many kernels these still met. Whoever starts with the same folder, GPU and versions finds
everything by those hashes.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from longreach_kernels import resolve_backend
from longreach_kernels.backends.resolve import interpreting
from longreach_patches import resolve_device

from longreach.engine.engine import Engine
from longreach.engine.messages import EngineConfig, Failed, Generate, Sampling, Started
from longreach.engine.rope_choice import factor_for
from longreach.engine.startup.build import build_engine
from longreach.engine.startup.policy_steps import kinds_of_policies
from longreach.sizes import LEAST_TILED_STEP, TILE

# Compiled code depends on whether a size is 1, or divisible by 16, and on no more of it.
_LENGTHS = (1, 15, 16, 100, 129, 1024)
_ANSWER = 6
_CROWD = 3
_SAMPLINGS = (
    Sampling(temperature=0),
    Sampling(temperature=0.8, top_p=0.9, top_k=40, seed=1),
    Sampling(temperature=1.0, min_p=0.05, presence_penalty=0.5, repetition_penalty=1.1, seed=2),
)


@dataclass(frozen=True)
class Warmth:
    """What a warm-up did: `compiled` kernels are new in the folder `cache`, `late` of them since a request needed one
    that the start had not compiled; `found` were there before.

    `cache` is None where nothing is compiled; `reason` says why the backend is what it is.
    """

    backend: str
    reason: str
    cache: Path | None
    compiled: int = 0
    late: int = 0
    found: int = 0
    requests: int = 0
    seconds: float = 0.0


def compile_ahead(config: EngineConfig) -> Warmth:
    """Compile the kernels of `config`'s model on its device; on a CPU there is nothing to do, and no model is loaded.

    Raises:
        EngineStartError: a rank's process cannot be started.
        longreach_patches.PatchError: the model cannot be loaded or is not supported.
        ValueError: the settings cannot hold together or do not fit the machine, or the model fails on a request.
    """
    device = resolve_device(config.device)
    if device.type == "cpu":
        backend = resolve_backend(config.attention_backend, device, torch.float32)
        if backend.name == "cpu" or backend.name == "reference" or interpreting():
            return Warmth(backend.name, backend.reason, None)
    from triton import knobs

    start = time.monotonic()
    cache = Path(knobs.cache.dir)
    before = compiled_kernels(cache)
    engine, started = build_engine(config)
    requests = exercise(engine, started)
    stats = engine.stats
    engine.close()
    after = compiled_kernels(cache)
    return Warmth(
        started.attention_backend,
        started.backend_reason,
        cache,
        compiled=len(after - before),
        late=sum(stats.compiled_beside.values()) + sum(stats.compiled_in_steps.values()),
        found=len(before),
        requests=requests,
        seconds=time.monotonic() - start,
    )


def compiled_kernels(cache: Path) -> set[str]:
    """The kernels in Triton's folder, each by its hash; empty where there is no folder yet."""
    return {path.parent.name for path in cache.glob("*/*.cubin")}


def exercise(engine: Engine, started: Started) -> int:
    """Send requests alone and in a crowd, short and longer than a step, drawn and scored in all ways; how many.

    Raises:
        ValueError: one of them failed; the message is the engine's.
    """
    rng = random.Random(0)  # noqa: S311 - any prompt will do
    longest = started.max_model_len - _ANSWER
    lengths = [n for n in (*_LENGTHS, started.max_batched_tokens + 129) if n <= longest]
    sent = 0

    def request(length: int, **more: object) -> Generate:
        nonlocal sent
        sent += 1
        prompt = [rng.randrange(started.vocab_size) for _ in range(length)]
        factor = factor_for(started.rope_tables, length, _ANSWER)
        return Generate(
            request_id=f"warmup-{sent}",
            prompt=prompt,
            max_tokens=_ANSWER,
            rope_factor=factor,
            **more,  # pyright: ignore[reportArgumentType]
        )

    for sampling in _SAMPLINGS:
        for length in lengths:
            _run(engine, [request(length, sampling=sampling)])
    for length in lengths:
        _run(engine, [request(length, sampling=sampling) for sampling in _SAMPLINGS for _ in range(_CROWD)])
    shortest = min(64, longest)
    _run(engine, [request(shortest, logprobs=2, prompt_logprobs=2), request(shortest, speculate=4)])
    # Without whole tiles in pages and steps a dynamic prompt is refused, without bounds a budget is.
    tiled = started.page_size % TILE == 0 and started.max_batched_tokens >= LEAST_TILED_STEP
    for policy in kinds_of_policies():
        if (tiled or not policy.is_dynamic) and (started.page_bounds or policy.answer_budget is None):
            _run(engine, [request(length, attention=policy) for length in lengths[-2:]])
    return sent


def _run(engine: Engine, requests: list[Generate]) -> None:
    failures = [failed for request in requests if (failed := engine.submit(request))]
    while engine.has_work:
        failures += [news for news in engine.step() if isinstance(news, Failed)]
    if failures:
        raise ValueError(f"a warm-up request failed: {failures[0].message}")
