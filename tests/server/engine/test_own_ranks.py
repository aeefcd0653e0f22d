"""Two ranks give the answers of one in families with softcap, by parts of the weights, and with learned sinks, by parts
of the tokens; the latter's layers are transformers' own.
"""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from longreach.engine.device import forward_pass as forward
from longreach.engine.engine import Engine
from longreach.engine.messages import EngineConfig
from longreach.engine.startup.build import build_engine
from longreach.policies.values import DENSE, Strided, Window
from longreach_patches import FAMILIES
from msgspec.structs import replace

from tests.patches.families.configs import config_of, random_model
from tests.server.engine.conftest import ids
from tests.server.engine.test_ranks import answers, same_scores, specs, tokens

POLICIES = {"dense": DENSE, "window": Window(size=300, sinks=4), "strided": Strided(stride=384, per_head=True)}
SIZES = {"gemma2": {"tensor_parallel_size": 2}, "gpt_oss": {"context_parallel_size": 2}}


def build(model_dir: Path, **sizes: int) -> Engine:
    settings = {"page_size": 16, "kv_cache_bytes": 1 << 24, "max_batched_tokens": 640, "max_itl": 60.0}
    config = EngineConfig(model=str(model_dir), device="cpu", dtype="float32", **(settings | sizes))  # type: ignore[arg-type]
    return build_engine(config)[0]


@pytest.mark.parametrize("family", SIZES)
def test_two_ranks_give_the_answers_of_one(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(family)
    config.max_position_embeddings, config.num_hidden_layers = 2048, 2
    config.layer_types = ["sliding_attention", "full_attention"]
    random_model(config, torch.float32).save_pretrained(tmp_path)
    requests = [
        replace(request, request_id=f"{name} {request.request_id}")
        for name, policy in POLICIES.items()
        for request in specs([ids(1203, 1), ids(40, 2)], policy, logprobs=1, stop_token_ids=[])
    ]
    alone = answers(build(tmp_path), requests)
    spread: list[object] = []
    plain = forward._spread
    monkeypatch.setattr(forward, "_spread", lambda *arguments: (spread.append(arguments[-1]), plain(*arguments))[1])
    with caplog.at_level(logging.INFO):
        two = build(tmp_path, **SIZES[family])
    try:
        together = answers(two, requests)
    finally:
        two.close()
    assert tokens(together) == tokens(alone)
    assert len({tuple(drawn) for drawn in tokens(alone).values()}) >= 3
    same_scores(alone, together)
    assert bool(spread) == ("context_parallel_size" in SIZES[family])
    assert ("layers are transformers' own" in caplog.text) != FAMILIES[family].fused
