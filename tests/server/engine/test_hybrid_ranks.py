"""Two ranks of a model that keeps states give the answers of one, by parts of weights and by parts of tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from longreach.engine.device import forward_pass as forward

from tests.patches.families.configs import config_of, random_model
from tests.server.engine.driving import build, drain, spec
from tests.server.engine.test_hybrid_engine import text

SIZES = {"qwen3_next": {"tensor_parallel_size": 2}, "qwen3_5_text": {"context_parallel_size": 2}}


@pytest.mark.parametrize("family", SIZES)
def test_two_ranks_give_the_answers_of_one(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt longer than a step, a second question about it beside drafts and a short one, and a next turn."""
    config = config_of(family)
    config.max_position_embeddings = 2048
    random_model(config, torch.float32).save_pretrained(tmp_path)
    document = text(1, 1300)
    turn = document + text(2, 9) + text(3, 30)
    rounds = [
        {"first": document + text(2, 9)},
        {"second": document + text(4, 20), "drafted": text(5, 7) * 12, "short": text(6, 30)},
        {"turn": turn},
    ]
    spread: list[object] = []
    plain = forward._spread
    monkeypatch.setattr(forward, "_spread", lambda *arguments: (spread.append(arguments[-1]), plain(*arguments))[1])
    settings = {"dtype": "float32", "max_batched_tokens": 560, "max_itl": 60.0, "kv_cache_bytes": 1 << 22}
    told, slots = [], []
    for sizes in ({}, SIZES[family]):
        engine, started = build(tmp_path, **(settings | sizes))
        slots.append(started.state_slots)
        answers = {}
        try:
            for prompts in rounds:
                for name, prompt in prompts.items():
                    more = {"speculate": 4} if name == "drafted" else {}
                    assert engine.submit(spec(name, prompt, max_tokens=20, **more)) is None
                tokens, updates, failures = drain(engine)
                assert not failures
                answers |= {name: (tokens[name], updates[name][-1].cached) for name in prompts}
        finally:
            engine.close()
        told.append(answers)
    assert told[0] == told[1]
    assert min(told[1][name][1] for name in ("second", "turn")) > 1100, "from copies of states"
    assert slots[1] > 1.5 * slots[0], "a rank's share of a state takes half as much"
    assert bool(spread) == ("context_parallel_size" in SIZES[family])
