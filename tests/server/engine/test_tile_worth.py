"""When choosing tiles of a prompt is dropped for dense attention: by what the prompt's earlier spans have chosen."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from longreach.engine.requests import tile_worth
from longreach.engine.requests.tile_worth import PROBE, SPAN, TileHistory, TilePart, Tiling, break_even
from longreach.policies.parse import policy_of

from tests.server.engine.conftest import save_model
from tests.server.engine.driving import drain
from tests.server.engine.test_policies import build, spec

LAYERS = frozenset({0, 2})
TILING = Tiling.of(LAYERS, (128, 128), 2, SPAN)
LONG = 40 * SPAN
DIFFUSE, SPARSE = 0.99, 0.3


def read(
    shares: dict[int, float], end: int, chunk: int = SPAN, below: int = SPAN
) -> tuple[TileHistory, list[TilePart]]:
    """A prompt that is read up to `end`, whose layers choose such shares of their tiles; what is told of a chunk comes
    when the one after it has been planned."""
    history, seen = TileHistory(), []
    waiting: list[TilePart] = []
    for start in range(0, end, chunk):
        parts = history.parts(start, min(start + chunk, end), LONG, below, TILING)
        for part in waiting:
            told = {layer: part.probe_tiles if layer in part.probed else part.tiles for layer in LAYERS}
            counted = {layer: layer not in part.dense or layer in part.probed for layer in LAYERS}
            history.add(part, {layer: int(told[layer] * shares[layer]) * counted[layer] for layer in LAYERS})
        waiting = parts
        seen += parts
    return history, seen


def test_a_layer_whose_attention_is_diffuse_is_dense_but_for_probes() -> None:
    history, parts = read({0: DIFFUSE, 2: SPARSE}, 16 * SPAN)
    assert TILING.lag == 3
    assert [part.start // SPAN for part in parts] == list(range(16))
    # The first span is dense by the policy and probed; of the next two nothing is known.
    assert (parts[0].dense, parts[0].probed, parts[0].is_below) == (LAYERS, LAYERS, True)
    assert [part.dense for part in parts[1:3]] == [frozenset()] * 2
    assert all(part.dense == {0} and not part.is_below for part in parts[3:])
    assert [part.start // SPAN for part in parts[1:] if part.probed] == [6, 10, 14]
    assert all(part.probed <= {0} for part in parts[1:])
    assert all(part.probe_start == part.end - PROBE for part in parts)
    told = parts[:-1]  # the last one is under way
    assert history.offered == 2 * sum(part.tiles for part in told)
    assert history.dropped == sum(part.tiles for part in told[3:])
    assert history.visited > history.dropped


def test_a_layer_chooses_again_when_a_probe_says_that_it_pays() -> None:
    history, _ = read({0: DIFFUSE, 2: DIFFUSE}, 7 * SPAN)
    [probed] = history.parts(6 * SPAN, 7 * SPAN, LONG, SPAN, TILING)
    assert probed.probed == LAYERS
    history.add(probed, {0: probed.probe_tiles // 4, 2: probed.probe_tiles})
    assert history.parts(8 * SPAN, 9 * SPAN, LONG, SPAN, TILING)[0].dense == LAYERS, "not known in all steps"
    assert history.parts(9 * SPAN, 10 * SPAN, LONG, SPAN, TILING)[0].dense == {2}


@pytest.mark.parametrize("chunk", [SPAN - 128, 1280, 640])
def test_what_is_decided_does_not_depend_on_the_cut(chunk: int) -> None:
    def layers(parts: list[TilePart]) -> list[tuple[frozenset[int], frozenset[int]]]:
        dense: list[frozenset[int]] = []
        probed: list[frozenset[int]] = []
        for part in parts:
            rows = (part.end - part.start) // 128
            looked = (part.end - max(part.start, part.probe_start)) // 128 if part.probed else 0
            dense += [part.dense] * rows
            probed += [frozenset()] * (rows - looked) + [part.probed] * looked
        return list(zip(dense, probed, strict=True))

    shares = {0: DIFFUSE, 2: SPARSE}
    whole, cut = read(shares, 12 * SPAN), read(shares, 12 * SPAN, chunk)
    assert layers(whole[1]) == layers(cut[1])
    assert all(first.end == second.start for first, second in pairwise(cut[1]))


def test_nothing_is_probed_that_no_later_span_of_the_prompt_can_use() -> None:
    short = TileHistory().parts(0, SPAN, 3 * SPAN, SPAN, TILING)
    assert not any(part.probed for part in short)
    below = TileHistory().parts(0, SPAN, LONG, 20 * SPAN, TILING)
    assert not any(part.probed for part in below)
    assert TileHistory().parts(17 * SPAN, 18 * SPAN, LONG, 20 * SPAN, TILING)[0].probed == LAYERS


def test_tokens_that_are_computed_again_are_counted_once() -> None:
    history, _ = read({0: SPARSE, 2: SPARSE}, 4 * SPAN)
    counts = history.visited, history.offered, history.end
    [again] = history.parts(SPAN, 2 * SPAN, LONG, SPAN, TILING)
    history.add(again, {0: again.tiles, 2: again.tiles})
    assert (history.visited, history.offered, history.end) == counts


def test_the_break_even_rises_with_the_keys() -> None:
    assert 0.8 < break_even(16384) < break_even(131072) < 0.95


def test_longer_steps_look_further_back() -> None:
    """When a step is planned, the one before it may not have ended."""
    for tokens in (512, SPAN, 2 * SPAN, 3 * SPAN):
        lag = Tiling.of(LAYERS, (128, 128), 2, tokens).lag
        assert (lag - 1) * SPAN >= 2 * tokens
        assert (lag - 2) * SPAN < 2 * tokens


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    kinds = ["full_attention", "full_attention", "sliding_attention"]
    layers = {"num_hidden_layers": 3, "layer_types": kinds, "no_rope_layers": [0, 0, 1]}
    return save_model(tmp_path_factory.mktemp("model"), max_position_embeddings=8192, sliding_window=64, **layers)


def test_a_server_drops_choices_that_do_not_pay(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With spans of 512 tokens, of which the first is dense by the policy, and of the next two nothing is known."""
    monkeypatch.setattr(tile_worth, "SPAN", 512)
    monkeypatch.setattr(tile_worth, "PROBE", 128)
    length = 4000
    policy = policy_of({"policy": "dynamic", "recall": 0.999, "dense_below": 512}).resolve()

    def told(tokens: int, share: float, *others: Any) -> Any:
        monkeypatch.setattr(tile_worth, "break_even", lambda keys: share)
        engine = build(model_dir, page_size=128, kv_cache_bytes=1 << 25, max_batched_tokens=tokens)
        for one in (*others, spec("a", policy, length)):
            assert engine.submit(one) is None
        drawn, updates, failures = drain(engine)
        assert not failures
        [use] = [update.attention for update in updates["a"] if update.attention is not None]
        return drawn["a"], use

    tokens, never = told(512, 0.0)
    assert never.unchosen == 4 * 2 * sum(range(13, 33)), "heads, layers and tiles of 128 queries from 1,536 to 4,000"
    assert never.unchosen < never.tiles <= never.dense_tiles
    assert never.kept_mass is not None
    # Beside a prompt that reads other things, and cut otherwise, it drops the same.
    again, beside = told(512, 0.0, spec("b", policy_of("dense").resolve(), 900))
    assert again == tokens
    assert (beside.tiles, beside.unchosen, beside.dense_tiles) == (never.tiles, never.unchosen, never.dense_tiles)
    _, always = told(512, 2.0)
    assert always.unchosen == 0
    assert always.dense_tiles == never.dense_tiles
    assert always.tiles <= never.tiles
