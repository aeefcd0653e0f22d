"""A small engine, the requests it is given, and all that it says until nothing is left."""

from __future__ import annotations

from pathlib import Path

from longreach.engine.engine import Engine
from longreach.engine.messages import EngineConfig, Failed, Generate, Sampling, Started
from longreach.engine.startup.build import build_engine
from longreach.engine.updates import Update


def build(model_dir: Path, **changes: object) -> tuple[Engine, Started]:
    settings: dict[str, object] = {"device": "cpu", "max_num_seqs": 8, "max_batched_tokens": 24}
    settings |= {"page_size": 16, "kv_cache_bytes": 1 << 20}
    return build_engine(EngineConfig(model=str(model_dir), **(settings | changes)))  # type: ignore[arg-type]


def spec(name: str, prompt: list[int], temperature: float = 0.0, **more: object) -> Generate:
    how = Sampling(temperature=temperature, seed=5)
    return Generate(request_id=name, prompt=prompt, sampling=how, **({"max_tokens": 12} | more))  # type: ignore[arg-type]


def drain(engine: Engine) -> tuple[dict[str, list[int]], dict[str, list[Update]], list[Failed]]:
    """Step until nothing is left: tokens by request, updates by request, failures."""
    tokens: dict[str, list[int]] = {}
    updates: dict[str, list[Update]] = {}
    failures = []
    while engine.has_work:
        for news in engine.step():
            if isinstance(news, Failed):
                failures.append(news)
                continue
            for update in news.updates:
                tokens.setdefault(update.request_id, []).extend(update.tokens)
                updates.setdefault(update.request_id, []).append(update)
        engine.scheduler.check()
    return tokens, updates, failures
