"""`min_mass` in the engine: drawn queries keep it, what is told is what was read, and nothing depends on chunks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from longreach.engine.requests.floor_tests import FloorTests, margin
from longreach.policies.parse import policy_of
from longreach.policies.values import DENSE, AttentionPolicy, SparseDecode

from tests.server.engine.conftest import save_model
from tests.server.engine.driving import drain
from tests.server.engine.test_dynamic_policy import build, run
from tests.server.engine.test_policies import spec

LENGTH = 3300


def policy(**parameters: object) -> AttentionPolicy:
    return policy_of({"policy": "dynamic", "dense_below": 1024, "density": 0.1} | parameters).resolve()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The second of three layers alone chooses tiles: the last one computes what is wanted."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    layers = {"num_hidden_layers": 3, "layer_types": kinds, "no_rope_layers": [1, 0, 1]}
    return save_model(tmp_path_factory.mktemp("model"), max_position_embeddings=8192, sliding_window=200, **layers)


def test_what_falls_below_is_read_again_and_told(model_dir: Path) -> None:
    bare = run(build(model_dir), spec("a", policy(), LENGTH))[1]["a"]
    assert bare.floor is None
    low, high = (run(build(model_dir), spec("a", policy(min_mass=x), LENGTH)) for x in (0.01, 0.9999))
    told = low[1]["a"].floor
    assert told is not None
    assert (told.widened, told.dense, told.below) == (0, 0, 0)
    assert low[1]["a"].tiles == bare.tiles
    again = high[1]["a"].floor
    assert again is not None
    # Of 26 tiles the first 8 and the last 5 are read whole; two KV heads in the one layer that sees everything.
    assert again.rows == told.rows == 2 * (26 - 8 - 5)
    assert again.chosen_least == pytest.approx(told.kept_least)
    assert again.widened + again.dense > 0
    assert again.kept_least >= 0.9999
    assert high[1]["a"].tiles > bare.tiles
    assert 0 <= again.below <= again.below_most <= 1


def test_the_certificate_does_not_depend_on_chunks_neighbours_or_the_cache(model_dir: Path) -> None:
    asked = spec("a", policy(min_mass=0.9), LENGTH)
    tokens, uses = run(build(model_dir), asked)
    engine = build(model_dir, max_batched_tokens=700)
    beside = [spec("dense", DENSE, 700), spec("b", policy(min_mass=0.9), 2900), spec("c", policy(min_mass=0.5), 2000)]
    again, others = run(engine, *beside, asked)
    assert again["a"] == tokens["a"]
    one, other = uses["a"].floor, others["a"].floor
    assert one is not None
    assert other is not None
    assert msgspec.structs.asdict(other) == pytest.approx(msgspec.structs.asdict(one), abs=1e-4)
    # What comes from the cache was certified for whoever computed it, and is not counted again.
    cached = run(engine, spec("again", policy(min_mass=0.9), LENGTH))[1]["again"].floor
    assert cached is not None
    assert cached.rows == 0
    assert cached.below_most == 0
    # Another bound is another policy, whose pages are its own.
    assert run(engine, spec("d", policy(min_mass=0.91), LENGTH))[1]["d"].floor.rows == one.rows  # type: ignore[union-attr]


def test_answers_whose_bound_promises_too_little_read_everything(model_dir: Path) -> None:
    found: dict[object, tuple[Any, Any]] = {}
    for bound in (None, 0.01, 0.9999):
        own = policy_of({"policy": "dynamic", "recall": 1, "decode_budget": 64, "min_mass": bound}).resolve()
        engine = build(model_dir, page_bounds=True)
        assert engine.submit(spec("a", own, 1200, max_tokens=20, logprobs=5)) is None
        tokens, updates, _ = drain(engine)
        scores = [score.logprob for update in updates["a"] for score in update.logprobs]
        found[bound] = updates["a"][-1].decode, (tokens["a"], scores)
    engine = build(model_dir, page_bounds=True)
    assert engine.submit(spec("a", DENSE, 1200, max_tokens=20, logprobs=5)) is None
    tokens, updates, _ = drain(engine)
    dense = [score.logprob for update in updates["a"] for score in update.logprobs]
    bare, strict = found[None][0], found[0.9999][0]
    assert bare.whole_share == 0
    assert bare.missed_max > 0.01
    assert strict.whole_share == 1
    assert strict.missed_max == 0
    assert strict.keys_read == strict.keys
    assert strict.kv_bytes_saved < 0  # the bounds were read besides
    assert strict.kept_least == pytest.approx(1)
    assert found[0.9999][1][0] == tokens["a"]
    assert found[0.9999][1][1] == pytest.approx(dense, abs=1e-4)
    assert found[None][1][1] != pytest.approx(dense, abs=1e-4)
    assert found[0.01][0].missed_max <= 0.99


def test_tiles_that_are_computed_again_are_counted_once() -> None:
    tests = FloorTests()
    counts, least = torch.tensor([[2.0, 1, 0, 1, 1.9]] * 4).numpy(), torch.tensor([[0.95, 0.5]] * 4).numpy()
    tests.add(1024, 128, counts, least)
    tests.add(1280, 128, counts, least)
    found = tests.found(drawn=8, kv_heads=2)
    assert (found.rows, found.widened, found.dense) == (12, 6, 0)
    assert found.kept_mean == pytest.approx(0.95)
    assert (found.kept_least, found.chosen_least) == pytest.approx((0.95, 0.5))
    assert found.below == pytest.approx(6 / (8 * 12))
    assert found.below_most == pytest.approx(found.below + margin(6, 8))


def test_the_bound_holds_for_any_share_of_queries_below() -> None:
    """Of many prompts whose rows have known shares below, few have more left than is told."""
    generator = torch.Generator().manual_seed(0)
    draws, drawn, broken = 400, 8, 0
    for share in (0.01, 0.05, 0.1, 0.3):
        for _ in range(50):
            below = torch.rand(draws, drawn, generator=generator) < share
            left = share * float((~below.any(1)).float().mean())
            told = float((below.sum(1) == 1).float().mean()) / drawn
            broken += left > told + margin(draws, drawn)
    assert broken <= 0.05 * 200


def test_names_of_pages_tell_bounds_apart() -> None:
    keys = {policy(min_mass=x).key for x in (None, 0.95, 0.98)}
    assert len(keys) == 3
    assert SparseDecode(64).key != SparseDecode(64, 0.98).key
    assert policy_of("dynamic:min_mass=0.98").resolve() == policy_of({"policy": "dynamic", "min_mass": 0.98}).resolve()
    assert policy_of("dynamic:0.9:min_mass=0.98").resolve().parameters["recall"] == 0.9


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"policy": "window", "min_mass": 0.98}, "take the policy dynamic"),
        ("window:4096:min_mass=0.98", "take the policy dynamic"),
        ({"policy": "dynamic", "min_mass": 1}, "0.9999"),
        ({"policy": "dynamic", "min_mass": 0}, "0.01"),
        ("dynamic:min_mass=0.98:0.9", "stands behind a part with a name"),
        ("dynamic:0.9:recall=0.8", "given twice"),
    ],
)
def test_what_cannot_be_promised_is_refused(value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        policy_of(value)
