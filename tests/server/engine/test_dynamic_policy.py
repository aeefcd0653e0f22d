"""Dynamic attention in the engine: the same tiles are chosen for a prompt however it is cut, and beside whomever."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from longreach.engine.messages import Failed
from longreach.engine.updates import AttentionUse
from longreach.policies.parse import policy_of
from longreach.policies.values import DENSE, AttentionPolicy
from longreach_kernels import Causal, Window
from longreach_kernels.call import AttentionCall
from longreach_kernels.masks.tile_counts import tile_count
from longreach_kernels.sparse import Antidiagonal, Density, Moments, Pooled, Recall, Speedup
from longreach_patches import ChoicePart, TileChoice, tile_choice

from tests.kernels.accuracy import paged
from tests.server.engine.conftest import save_model
from tests.server.engine.driving import drain
from tests.server.engine.test_policies import build as build_small
from tests.server.engine.test_policies import spec

LENGTH = 3300


def dynamic(**parameters: object) -> AttentionPolicy:
    return policy_of({"policy": "dynamic", "dense_below": 2048} | parameters).resolve()


SPARSE = dynamic(density=0.2)
EVERYTHING = policy_of("dynamic:1").resolve()
OTHERS = {
    "recall": dynamic(),
    "pooled": dynamic(density=0.3, estimator="pooled"),
    "speedup": dynamic(speedup=3),
    "antidiagonal": dynamic(recall=0.9, estimator="antidiagonal"),
    "moments": dynamic(recall=0.9, estimator="moments"),
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # The last layer computes wanted rows alone; one before it sees everything, without rotary positions.
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    layers = {"num_hidden_layers": 3, "layer_types": kinds, "no_rope_layers": [1, 0, 1]}
    return save_model(tmp_path_factory.mktemp("model"), max_position_embeddings=8192, sliding_window=200, **layers)


def build(model_dir: Path, **changes: Any) -> Any:
    # A step's size depends on its time only where answers are being written; what is compared must not depend on it.
    return build_small(
        model_dir, **({"page_size": 128, "kv_cache_bytes": 1 << 25, "max_batched_tokens": 8192} | changes)
    )


def run(engine: Any, *requests: Any) -> tuple[dict[str, list[int]], dict[str, AttentionUse]]:
    for one in requests:
        assert engine.submit(one) is None
    tokens, updates, failures = drain(engine)
    assert not failures
    return tokens, {
        name: update.attention for name, news in updates.items() for update in news if update.attention is not None
    }


def close(one: AttentionUse, other: AttentionUse) -> bool:
    assert one.kept_mass is not None
    assert other.kept_mass is not None
    same = msgspec.structs.replace(one, kept_mass=None) == msgspec.structs.replace(other, kept_mass=None)
    numbers = [(kept.mean, kept.p5, kept.least) for kept in (one.kept_mass, other.kept_mass)]
    return (
        same and one.kept_mass.queries == other.kept_mass.queries and numbers[0] == pytest.approx(numbers[1], abs=1e-4)
    )


def test_what_is_chosen_does_not_depend_on_chunks_or_neighbours(model_dir: Path) -> None:
    one = spec("a", SPARSE, LENGTH)
    tokens, uses = run(build(model_dir), one)
    density = uses["a"].tiles / uses["a"].dense_tiles
    # Of 26 rows of tiles the first 16 and the last 5 are read whole.
    assert 0.7 < density < 0.95
    beside = [
        spec("dense", DENSE, 700),
        spec("window", policy_of("window:100").resolve(), 900),
        spec("b", SPARSE, 2900),
    ]
    for size, neighbours in ((512, []), (700, beside)):
        engine = build(model_dir, max_batched_tokens=size)
        again, others = run(engine, *neighbours, one)
        assert again["a"] == tokens["a"]
        assert close(others["a"], uses["a"])
    kept = uses["a"].kept_mass
    assert kept is not None
    assert kept.least < 0.95


def test_a_recall_of_one_is_dense_attention_and_nothing_is_estimated(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tile_choice, "choose_tiles", lambda *_, **__: pytest.fail("tiles were chosen"))
    tokens, uses = run(build(model_dir), spec("a", EVERYTHING, LENGTH))
    assert tokens == run(build(model_dir), spec("a", DENSE, LENGTH))[0]
    use = uses["a"]
    assert use.tiles == use.dense_tiles
    assert use.pairs == use.dense_pairs
    assert use.kept_mass is None, "no layer is changed"


@pytest.mark.parametrize("policy", OTHERS.values(), ids=OTHERS)
def test_targets_and_estimators_reach_the_kernels(
    model_dir: Path, policy: AttentionPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []
    select: Callable[..., Any] = tile_choice.choose_tiles
    monkeypatch.setattr(tile_choice, "choose_tiles", lambda *a, **k: asked.append(k) or select(*a, **k))
    planned: list[dict[str, Any]] = []
    plan: Callable[..., Any] = tile_choice.plan_tiles
    monkeypatch.setattr(tile_choice, "plan_tiles", lambda *a, **k: planned.append(k) or plan(*a, **k))
    _, uses = run(build(model_dir), spec("a", policy, LENGTH, max_tokens=2))
    [how] = asked  # one chunk, and one of the layers sees everything
    assert (how["target"], how["estimator"]) == {
        OTHERS["recall"]: (Recall(0.95), Moments()),  # auto: the layer has no rotary positions
        OTHERS["pooled"]: (Density(0.3), Pooled()),
        OTHERS["speedup"]: (Speedup(3), Moments()),
        OTHERS["antidiagonal"]: (Recall(0.9), Antidiagonal()),
        OTHERS["moments"]: (Recall(0.9), Moments()),
    }[policy]
    assert [options["prompt_lens"].tolist() for options in planned] == [[LENGTH]]
    assert uses["a"].tiles <= uses["a"].dense_tiles


def test_a_prompt_up_to_where_all_is_dense_is_computed_as_if_it_were(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tile_choice, "choose_tiles", lambda *_, **__: pytest.fail("nothing is to be chosen"))
    whole = dynamic(dense_below=LENGTH)
    tokens, uses = run(build(model_dir), spec("a", whole, LENGTH), spec("b", DENSE, LENGTH), spec("c", whole, 700))
    assert tokens["a"] == tokens["b"]
    use = uses["a"]
    assert (use.tiles, use.pairs) == (use.dense_tiles, use.dense_pairs)
    assert use.kept_mass is not None
    assert use.kept_mass.mean == use.kept_mass.least == 1
    assert uses["c"].tiles == uses["c"].dense_tiles


def test_auto_takes_the_estimator_that_suits_each_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    select: Callable[..., Any] = tile_choice.choose_tiles
    monkeypatch.setattr(tile_choice, "choose_tiles", lambda *a, **k: asked.append(k["estimator"]) or select(*a, **k))
    full = {"num_hidden_layers": 4, "layer_types": ["full_attention"] * 4, "max_position_embeddings": 8192}
    model = save_model(tmp_path, no_rope_layers=[1, 0, 1, 1], **full)
    run(build(model), spec("a", OTHERS["recall"], LENGTH, max_tokens=1))
    assert asked == [Antidiagonal(), Moments(), Antidiagonal()]


def test_the_layers_of_a_step_share_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k_pages, _, batch = paged([600], [4000], 16, 4, 2, 16)
    made: list[Any] = []
    plan: Callable[..., Any] = tile_choice.plan_tiles
    monkeypatch.setattr(tile_choice, "plan_tiles", lambda *a, **k: made.append(plan(*a, **k)) or made[-1])
    zeros = torch.zeros_like(batch.context_lens)
    part = ChoicePart(0, len(q), batch, batch.context_lens * 2, frozenset(), zeros)
    choice = TileChoice(Recall(0.5), dict.fromkeys(range(3), Antidiagonal()), 2048, (part,))
    shape = SimpleNamespace(group_of=(0, 0, 0))
    step = SimpleNamespace(pages=SimpleNamespace(keys=(k_pages, k_pages, k_pages[..., :8]), shape=shape))
    given = step, choice, tile_choice.ChoiceRecord(), AttentionCall(Causal(), 0.25), "cpu"
    first, second = (tile_choice._choose(x, 0, i, *given) for i, x in enumerate((q, q.flip(0))))
    assert len(made) == 1
    assert not torch.equal(first.tiles, second.tiles)
    tile_choice._choose(q[:, :, :8], 0, 2, *given)  # a layer of another shape
    assert len(made) == 2


def test_chunks_of_the_prompt_are_whole_tiles_and_the_answer_is_dense(model_dir: Path) -> None:
    engine = build(model_dir, max_batched_tokens=700)
    plans = []
    launch = engine._runner.launch
    engine._runner.launch = lambda plan: plans.append(plan) or launch(plan)
    run(engine, spec("a", SPARSE, LENGTH), spec("b", DENSE, 800))
    chunks = [chunk for plan in plans for chunk in plan.chunks if chunk.request.id == "a"]
    reading = [chunk for chunk in chunks if chunk.start < LENGTH]
    assert len(reading) > 5
    assert all(chunk.start % 128 == 0 and chunk.policy == SPARSE for chunk in reading)
    writing = [plan for plan in plans if all(chunk.start >= chunk.request.prompt_tokens for chunk in plan.chunks)]
    assert writing
    assert all(plan.is_dense and plan.is_decode_only for plan in writing)


def test_cached_pages_of_a_dynamic_prompt_continue_in_whole_tiles(model_dir: Path) -> None:
    engine = build(model_dir)
    first, _ = run(engine, spec("a", SPARSE, LENGTH))
    second, uses = run(engine, spec("b", SPARSE, LENGTH))
    assert second["b"] == first["a"]
    use = uses["b"]
    assert use.dense_tiles == 4 * 26  # the last tile of queries, by four heads of the one layer
    assert use.tiles == use.dense_tiles


def test_pairs_of_a_dynamic_prompt_are_counted_when_it_has_been_read(model_dir: Path) -> None:
    engine = build(model_dir)
    _, uses = run(engine, spec("a", SPARSE, LENGTH, max_tokens=1))
    use = uses["a"]
    whole, window = tile_count(Causal(), 0, LENGTH), tile_count(Window(200), 0, LENGTH)
    assert engine.stats.causal_pairs == 3 * whole.pairs
    assert (use.dense_pairs, use.other_pairs) == (4 * whole.pairs, 2 * 4 * window.pairs)
    assert engine.stats.computed_pairs == pytest.approx((use.pairs + use.other_pairs) / 4, abs=1)
    assert 2 * window.pairs < engine.stats.computed_pairs < whole.pairs + 2 * window.pairs


def test_what_dynamic_cannot_do_ends_the_request(model_dir: Path) -> None:
    asked = msgspec.structs.replace(spec("a", SPARSE, LENGTH), prompt_logprobs=0)
    for engine, one, message in (
        (build(model_dir), asked, "the log-probabilities of a prompt"),
        (build(model_dir, page_size=64), spec("a", SPARSE, LENGTH), "--page-size is 64"),
        (build(model_dir, max_batched_tokens=256), spec("a", SPARSE, LENGTH), "--max-batched-tokens is 256"),
    ):
        failed = engine.submit(one)
        assert isinstance(failed, Failed)
        assert failed.kind == "invalid"
        assert message in failed.message
