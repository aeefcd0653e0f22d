"""The engine over a real patched model: what it generates is what the model generates, alone or in a crowd."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from longreach.engine.updates import Updates
from transformers import AutoModelForCausalLM

from tests.server.engine.conftest import ids
from tests.server.engine.driving import build, drain, spec


def test_greedy_tokens_are_those_of_transformers_generate(model_dir: Path) -> None:
    prompt = ids(70, seed=1)
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, attn_implementation="eager").eval()
    out = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    engine, _ = build(model_dir)
    engine.submit(spec("a", prompt))
    assert drain(engine)[0]["a"] == out[0, 70:].tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_requests_in_a_crowd_get_what_each_gets_alone(model_dir: Path, temperature: float) -> None:
    prompts = {f"r{n}": ids(n, seed=n) for n in (1, 2, 15, 16, 17, 60, 90, 120, 33, 48, 5)}
    engine, _ = build(model_dir)
    alone = {}
    for name, prompt in prompts.items():
        engine.submit(spec(name, prompt, temperature))
        alone |= drain(engine)[0]
    for name, prompt in prompts.items():  # 11 requests for 8 places: some wait
        engine.submit(spec(name, prompt, temperature))
    together, _, failures = drain(engine)
    assert together == alone
    assert not failures
    assert engine.scheduler.allocator.num_available == engine.scheduler.allocator.num_pages


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("promised", [1, 1024])
def test_planning_ahead_of_the_tokens_does_not_change_an_answer(
    model_dir: Path, temperature: float, promised: int
) -> None:
    """With results taken one step late, as on a GPU: stops, preemptions, drafts and cached prompts among others."""
    own = {f"r{n}": ids(n, seed=n) for n in (3, 20, 41, 60, 77)} | {"copy": ids(77, seed=77)}
    specs = {name: spec(name, prompt, temperature, max_tokens=50) for name, prompt in own.items()}
    plain, _ = build(model_dir)
    alone: dict[str, list[int]] = {}
    for one in specs.values():
        plain.submit(one)
        alone |= drain(plain)[0]
    engine, _ = build(model_dir, kv_cache_bytes=11 * 16 * 512)
    engine.scheduler.limits = dataclasses.replace(engine.scheduler.limits, promised_tokens=promised)
    engine._runner.overlaps = True
    stop = alone["r41"][30]
    for name, one in specs.items():
        more = {"r20": {"speculate": 3}, "r41": {"stop_token_ids": [stop]}}.get(name, {})
        assert engine.submit(msgspec.structs.replace(one, **more)) is None
    requests = [*engine.scheduler.waiting.values()]
    tokens, updates, failures = drain(engine)
    assert not failures
    alone["r41"] = alone["r41"][: alone["r41"].index(stop) + 1]
    assert tokens == alone
    assert updates["r41"][-1].finish_reason == "stop"
    assert promised > 1 or any(request.preempted for request in requests), "there was room for all"
    assert engine.scheduler.allocator.num_available == engine.scheduler.allocator.num_pages


def test_updates_tell_how_far_a_prompt_is_and_end_once(model_dir: Path) -> None:
    engine, _ = build(model_dir)
    engine.submit(spec("a", ids(60, seed=2), max_tokens=2))
    _, updates, _ = drain(engine)
    assert [(u.computed, len(u.tokens), u.finish_reason) for u in updates["a"]] == [
        (24, 0, None),
        (48, 0, None),
        (60, 1, None),
        (60, 1, "length"),
    ]
    assert {u.prompt_tokens for u in updates["a"]} == {60}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("speculate", [0, 5])
def test_chunks_cache_resumption_and_drafts_do_not_change_an_answer(
    model_dir: Path, temperature: float, speculate: int
) -> None:
    shared, own = ids(75, seed=8) * 2, {f"r{n}": ids(n, seed=n) for n in (3, 20, 41)}
    prompts = {name: shared + tail for name, tail in own.items()} | {"same": shared}
    plain, _ = build(model_dir, prefix_cache=False, max_batched_tokens=256)
    alone = {}
    for name, prompt in prompts.items():
        plain.submit(spec(name, prompt, temperature, max_tokens=40))
        alone |= drain(plain)[0]
    engine, _ = build(model_dir)
    engine.submit(spec("gone", prompts["r41"], temperature))
    for _ in range(5):
        engine.step()
    engine.cancel("gone")
    for _ in range(2):  # the first of them go on where "gone" ended; the second find everything
        for name, prompt in prompts.items():
            engine.submit(spec(name, prompt, temperature, max_tokens=40, speculate=speculate))
        tokens, updates, failures = drain(engine)
        assert not failures
        assert tokens == alone
        # all 7 full pages that "gone" read; every request is the follower of another or of that
        assert min(news[-1].cached for news in updates.values()) >= 112


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_a_preempted_request_goes_on_with_the_same_answer(model_dir: Path, prefix_cache: bool) -> None:
    prompts = {f"r{n}": ids(n, seed=n) for n in (40, 50, 60)}
    plain, _ = build(model_dir)
    alone = {}
    for name, prompt in prompts.items():
        plain.submit(spec(name, prompt, 1.0, max_tokens=100))
        alone |= drain(plain)[0]
    engine, _ = build(model_dir, kv_cache_bytes=16 * 16 * 512, prefix_cache=prefix_cache)
    engine.scheduler.limits = dataclasses.replace(engine.scheduler.limits, promised_tokens=1)
    for name, prompt in prompts.items():
        assert engine.submit(spec(name, prompt, 1.0, max_tokens=100)) is None
    requests = [*engine.scheduler.waiting.values()]
    tokens, _, failures = drain(engine)
    assert not failures
    assert tokens == alone
    assert any(request.preempted for request in requests), "there was room for all"


class Countdown:
    """A grammar of exactly `length` tokens, of the even ids; it breaks down where `fails`."""

    def __init__(self, length: int, fails: bool = False) -> None:
        self._left, self._fails = length, fails
        self.error: str | None = None

    def mask(self) -> np.ndarray | None:
        if self._fails and self._left == 1:
            self.error = "too complex"
            return None
        return np.full(8, 0b01010101, np.uint8)

    def accept(self, token: int) -> bool:
        self._left -= 1
        return self._left == 0


@pytest.mark.parametrize("overlaps", [False, True])
def test_an_answer_follows_its_grammar_to_the_end_or_to_its_error(model_dir: Path, overlaps: bool) -> None:
    engine, _ = build(model_dir)
    engine._runner.overlaps = overlaps
    for name, grammar in (("even", "good"), ("stuck", "bad"), ("free", None)):
        constraint = None if grammar is None else Countdown(5, fails=grammar == "bad")
        engine.submit(spec(name, ids(30, seed=1), 1.0, grammar=grammar, speculate=4), constraint)
    tokens, updates, failures = drain(engine)
    assert len(tokens["even"]) == 5
    assert all(token % 2 == 0 for token in tokens["even"])
    assert updates["even"][-1].finish_reason == "stop"
    assert [(f.request_id, f.kind, f.message) for f in failures] == [("stuck", "grammar", "too complex")]
    assert len(tokens["free"]) == 12


def test_speculation_takes_fewer_steps_where_a_prompt_is_copied(model_dir: Path) -> None:
    engine, _ = build(model_dir)
    steps = []
    for speculate in (0, 6):
        engine.submit(spec("a", ids(9, seed=1) * 9, max_tokens=60, speculate=speculate))
        updates = drain(engine)[1]["a"]
        assert sum(len(update.tokens) for update in updates) == 60
        steps.append(len(updates))
    assert steps[1] < steps[0], "no draft ever stood"


def test_cancelling_frees_pages_at_once_and_disturbs_nobody(model_dir: Path) -> None:
    engine, _ = build(model_dir)
    prompt = ids(40, seed=3)
    engine.submit(spec("stays", prompt))
    expected = drain(engine)[0]["stays"]
    engine.submit(spec("stays", prompt))
    engine.submit(spec("goes", ids(100, seed=4)))
    first = [u for news in engine.step() if isinstance(news, Updates) for u in news.updates]
    held = engine.scheduler.allocator.num_available
    engine.cancel("goes")
    engine.cancel("never was")
    assert engine.scheduler.allocator.num_available > held
    [early] = [u.tokens for u in first if u.request_id == "stays"]
    tokens, _, _ = drain(engine)
    assert early + tokens["stays"] == expected
    assert set(tokens) == {"stays"}
    assert {u.request_id for u in first} == {"stays", "goes"}


def test_what_cannot_run_fails_as_the_callers_fault(model_dir: Path) -> None:
    engine, started = build(model_dir)
    failed = engine.submit(spec("a", ids(started.max_model_len, seed=5)))
    assert failed is not None
    assert failed.kind == "invalid"
    assert not engine.has_work


def test_stats_and_the_wait_before_the_first_step_are_told(model_dir: Path) -> None:
    engine, _ = build(model_dir, max_num_seqs=1)
    now = iter(range(10**6))
    engine._clock = lambda: float(next(now))
    assert engine.stats.free_pages == engine.stats.pages == engine.scheduler.allocator.num_pages
    for name in ("first", "second"):
        engine.submit(spec(name, ids(30, seed=1), max_tokens=4))
    assert (engine.stats.running, engine.stats.waiting) == (0, 2)
    assert engine.step_seconds == 0
    engine.step()
    assert (engine.stats.running, engine.stats.waiting) == (1, 1)
    assert engine.stats.free_pages < engine.stats.pages
    _, updates, _ = drain(engine)
    first, second = updates["first"][0].waited, updates["second"][0].waited
    assert 0 < first < second
    assert {update.waited for update in updates["second"]} == {second}
    assert (engine.stats.running, engine.stats.waiting) == (0, 0)
    assert engine.stats.free_pages + engine.stats.cached_pages == engine.stats.pages
    # Every look at this clock is a second: a step has at least one between its begin and its end.
    assert engine.stats.step_seconds >= engine.stats.steps >= 8


def test_pairs_of_queries_and_keys_are_counted_layer_by_layer(model_dir: Path) -> None:
    engine, _ = build(model_dir, prefix_cache=False)
    engine.submit(spec("a", ids(60, seed=2), max_tokens=5))
    drain(engine)
    queries = range(60 + 4)  # the last token is not computed
    assert engine.stats.causal_pairs == 2 * sum(q + 1 for q in queries)
    assert engine.stats.computed_pairs == sum(q + 1 for q in queries) + sum(min(q + 1, 9) for q in queries)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_model_len": 300}, "longer than the 256 positions of this model; use --max-model-len 256 or less"),
        (
            {"max_model_len": 200, "kv_cache_bytes": 1 << 15},
            r"68.0 KiB and 32.0 KiB are there; .* --max-model-len 48",
        ),
        ({"kv_cache_bytes": 100}, "no memory is left for the KV cache"),
        ({"kv_offload_bytes": 2**43}, r"--kv-offload-bytes: 8192.0 GiB are more than the .* of host memory"),
        ({"max_num_seqs": 100}, "max_num_seqs"),
        ({"attention_backend": "hopper"}, r"backend: .hopper. needs tensors on a CUDA GPU"),
    ],
)
def test_settings_that_cannot_hold_are_named(model_dir: Path, changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(model_dir, **changes)


def test_the_length_that_really_fits_is_announced(model_dir: Path) -> None:
    _, started = build(model_dir, kv_cache_bytes=1 << 15)
    # 7 pages of one of the two layers: 3 of the full one for 48 tokens, and as many of the other's window.
    assert (started.max_model_len, started.kv_tokens) == (48, 7 * 48 // 6)
    assert (started.attention_backend, started.dtype, started.eos_token_ids) == ("cpu", "float32", [2])
    assert started.host_kv_tokens == 0
    _, started = build(model_dir, kv_offload_bytes=5 * 16 * 512 + 1)
    assert (started.page_bytes, started.page_groups, started.host_kv_tokens) == (8 * 512, 2, 5 * 16)
