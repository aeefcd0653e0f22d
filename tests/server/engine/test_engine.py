"""The engine over a real patched model: what it generates is what the model generates, alone or in a crowd."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from longreach.engine.build import build_engine
from longreach.engine.engine import Engine
from longreach.engine.errors import DeviceLostError
from longreach.engine.host_pages import PageMoves
from longreach.engine.messages import EngineConfig, Failed, Generate, Logprob, Sampling, Started, Update, Updates
from longreach.engine.plan import StepPlan
from longreach.engine.speculation import MAX_DRAFTS
from longreach_patches import KVPages
from transformers import AutoModelForCausalLM

from .conftest import ids


def build(model_dir: Path, **changes: object) -> tuple[Engine, Started]:
    settings = {"max_num_seqs": 8, "max_batched_tokens": 24, "page_size": 16, "kv_cache_bytes": 1 << 20}
    return build_engine(EngineConfig(model=str(model_dir), device="cpu", **(settings | changes)))  # type: ignore[arg-type]


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


def test_greedy_tokens_are_those_of_transformers_generate(model_dir: Path) -> None:
    prompt = ids(70, seed=1)
    model = AutoModelForCausalLM.from_pretrained(model_dir, attn_implementation="eager").eval()
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
    assert engine.scheduler.pool.num_available == engine.scheduler.pool.num_pages


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
    engine, _ = build(model_dir, kv_cache_bytes=16 * 16 * 512)
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
    assert engine.scheduler.pool.num_available == engine.scheduler.pool.num_pages


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


def scores(updates: list[Update]) -> tuple[list[Logprob], list[Logprob]]:
    """The log-probabilities of the prompt and of the answer."""
    return [s for u in updates for s in u.prompt_logprobs], [s for u in updates for s in u.logprobs]


@pytest.mark.parametrize("speculate", [0, 5])
def test_logprobs_are_those_of_the_model_however_they_are_computed(model_dir: Path, speculate: int) -> None:
    prompt = ids(25, seed=3) * 3
    engine, _ = build(model_dir)
    engine.submit(spec("before", prompt))  # its pages are in the cache, and must not be taken over unscored
    drain(engine)
    for name in ("a", "b"):
        engine.submit(spec(name, prompt, 1.0, max_tokens=20, logprobs=3, prompt_logprobs=2, speculate=speculate))
    engine.submit(spec("unscored", ids(50, seed=9), 1.0))
    tokens, updates, failures = drain(engine)
    assert not failures
    model = AutoModelForCausalLM.from_pretrained(model_dir, attn_implementation="eager").eval()
    whole = prompt + tokens["a"]
    with torch.no_grad():
        expected = model(torch.tensor([whole])).logits[0].log_softmax(-1)
    for name in ("a", "b"):
        of_prompt, of_answer = scores(updates[name])
        assert [s.token for s in of_prompt] == prompt[1:]
        assert [s.token for s in of_answer] == tokens["a"]
        for position, score in enumerate(of_prompt + of_answer, start=1):
            row = expected[position - 1]
            count = 2 if position < len(prompt) else 3
            assert score.logprob == pytest.approx(row[whole[position]].item(), abs=1e-3)
            assert score.top_logprobs == pytest.approx(row.topk(count).values.tolist(), abs=1e-3)
            assert len(score.top_tokens) == count
    assert scores(updates["unscored"]) == ([], [])
    assert updates["a"][-1].cached < len(prompt) // 16 * 16


def test_prompt_logprobs_never_need_more_rows_than_a_step_has_room_for(model_dir: Path) -> None:
    engine, _ = build(model_dir, max_batched_tokens=200)
    sizes = []
    launch = engine._runner.launch
    engine._runner.launch = lambda plan: sizes.append(sum(c.num_rows for c in plan.chunks)) or launch(plan)  # type: ignore[method-assign]
    engine.submit(spec("long", ids(220, seed=3), prompt_logprobs=0, max_tokens=2))
    engine.submit(spec("other", ids(220, seed=4), prompt_logprobs=0, max_tokens=2))
    _, updates, _ = drain(engine)
    assert max(sizes) <= MAX_DRAFTS + 2
    assert len(scores(updates["long"])[0]) == len(scores(updates["other"])[0]) == 219


def test_a_preempted_request_tells_each_logprob_once(model_dir: Path) -> None:
    engine, _ = build(model_dir, kv_cache_bytes=16 * 16 * 512, prefix_cache=True)
    engine.scheduler.limits = dataclasses.replace(engine.scheduler.limits, promised_tokens=1)
    prompts = {f"r{n}": ids(n, seed=n) for n in (40, 50, 60)}
    for name, prompt in prompts.items():
        engine.submit(spec(name, prompt, 1.0, max_tokens=100, logprobs=0, prompt_logprobs=0))
    requests = [*engine.scheduler.waiting.values()]
    tokens, updates, failures = drain(engine)
    assert not failures
    assert any(request.preempted for request in requests)
    for name, prompt in prompts.items():
        of_prompt, of_answer = scores(updates[name])
        assert ([s.token for s in of_prompt], [s.token for s in of_answer]) == (prompt[1:], tokens[name])


def test_penalties_and_logprobs_are_the_same_one_step_ahead(model_dir: Path) -> None:
    """What depends on the tokens before waits for them, and what is told of a step is told with it."""
    how = Sampling(temperature=0.0, presence_penalty=1.5, frequency_penalty=1.0, repetition_penalty=1.5)
    told = []
    for overlaps in (False, True):
        engine, _ = build(model_dir)
        engine._runner.overlaps = overlaps
        one = spec("penalized", ids(40, seed=1), max_tokens=30, logprobs=1, prompt_logprobs=0)
        engine.submit(msgspec.structs.replace(one, sampling=how))
        engine.submit(spec("scored", ids(60, seed=2), 1.0, max_tokens=30, logprobs=0, prompt_logprobs=1))
        tokens, updates, failures = drain(engine)
        assert not failures
        of_prompt, of_answer = scores(updates["scored"])
        assert ([s.token for s in of_prompt], [s.token for s in of_answer]) == (ids(60, seed=2)[1:], tokens["scored"])
        told.append(tokens)
    assert told[0] == told[1]
    engine.submit(spec("penalized", ids(40, seed=1), max_tokens=30))
    assert drain(engine)[0]["penalized"] != told[0]["penalized"], "penalties change nothing"


class _Countdown:
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
        constraint = None if grammar is None else _Countdown(5, fails=grammar == "bad")
        engine.submit(spec(name, ids(30, seed=1), 1.0, grammar=grammar, speculate=4), constraint)
    tokens, updates, failures = drain(engine)
    assert len(tokens["even"]) == 5
    assert all(token % 2 == 0 for token in tokens["even"])
    assert updates["even"][-1].finish_reason == "stop"
    assert [(f.request_id, f.kind, f.message) for f in failures] == [("stuck", "invalid", "too complex")]
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
    held = engine.scheduler.pool.num_available
    engine.cancel("goes")
    engine.cancel("never was")
    assert engine.scheduler.pool.num_available > held
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


class _Faulty:
    """Stands in for the runner: `fault` may raise before a step; what it reads is looked at."""

    def __init__(self, engine: Engine) -> None:
        self.real = engine._runner
        self.overlaps = False
        self.fault: Callable[[StepPlan], None] = lambda plan: None
        self.dirty_reads = 0

    def launch(self, plan: StepPlan) -> Callable[[], dict[str, list[int]]]:
        self.fault(plan)
        for chunk in plan.chunks:
            self.dirty_reads += any(self.pages.values[0][page].isnan().any() for page in chunk.request.pages)
        return self.real.launch(plan)

    @property
    def pages(self) -> KVPages:
        return self.real._computing.pages

    def take_seconds(self) -> float | None:
        return self.real.take_seconds()

    def move(self, moves: PageMoves) -> None:
        self.real.move(moves)

    def recover(self) -> None:
        self.real.recover()


@pytest.fixture
def faulty(model_dir: Path) -> tuple[Engine, _Faulty]:
    """An engine whose steps fail as the test says."""
    engine, _ = build(model_dir, prefix_cache=False)
    engine._runner = _Faulty(engine)  # type: ignore[assignment]
    for values in engine._runner.pages.values:  # type: ignore[attr-defined]
        values.zero_()  # memory on a CPU comes as it is
    return engine, engine._runner  # type: ignore[return-value]


def names_in(plan: StepPlan) -> set[str]:
    return {chunk.request.id for chunk in plan.chunks}


def test_a_step_that_fails_costs_only_the_request_that_makes_it_fail(faulty: tuple[Engine, _Faulty]) -> None:
    engine, runner = faulty
    specs = [spec(f"r{n}", ids(5, seed=n), temperature=1.0) for n in range(7)]
    for one in specs:
        engine.submit(one)
    expected = drain(engine)[0]

    def fail_one(plan: StepPlan) -> None:
        if "r3" in names_in(plan) and any(c.request.id == "r3" and c.request.generated == 4 for c in plan.chunks):
            raise RuntimeError("boom")

    runner.fault = fail_one
    for one in specs:
        engine.submit(one)
    tokens, _, failures = drain(engine)
    assert [(f.request_id, f.kind) for f in failures] == [("r3", "internal")]
    assert tokens.pop("r3") == expected.pop("r3")[:4]
    assert tokens == expected
    assert engine.scheduler.pool.num_available == engine.scheduler.pool.num_pages


def test_a_step_for_which_memory_is_short_goes_on_in_parts(faulty: tuple[Engine, _Faulty]) -> None:
    engine, runner = faulty

    def out_of_memory(plan: StepPlan) -> None:
        if plan.num_tokens > 15:
            raise torch.OutOfMemoryError("CUDA out of memory")

    runner.fault = out_of_memory
    for n in range(5):
        engine.submit(spec(f"small{n}", ids(4, seed=n)))
    engine.submit(spec("large", ids(60, seed=9)))
    tokens, _, failures = drain(engine)
    assert [failure.request_id for failure in failures] == ["large"]
    assert {name: len(own) for name, own in tokens.items() if own} == {f"small{n}": 12 for n in range(5)}


def test_a_lost_device_ends_the_process_instead_of_one_request_after_the_other(faulty: tuple[Engine, _Faulty]) -> None:
    engine, runner = faulty

    def lost() -> None:
        raise DeviceLostError("an illegal memory access was encountered")

    def fault(plan: StepPlan) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    runner.fault, runner.recover = fault, lost  # type: ignore[method-assign]
    engine.submit(spec("a", ids(5, seed=1)))
    with pytest.raises(DeviceLostError):
        engine.step()


def test_a_launch_that_says_the_device_is_lost_is_not_tried_again_in_parts(faulty: tuple[Engine, _Faulty]) -> None:
    """Where several ranks compute a step, the others wait: there is nobody to launch its halves with."""
    engine, runner = faulty
    launches = []

    def lost(plan: StepPlan) -> None:
        launches.append(plan)
        raise DeviceLostError("a step failed on one rank of several")

    runner.fault = lost
    for n in range(3):
        engine.submit(spec(f"r{n}", ids(4, seed=n)))
    with pytest.raises(DeviceLostError):
        engine.step()
    assert len(launches) == 1


def test_an_error_that_shows_late_ends_the_requests_of_its_step_only(faulty: tuple[Engine, _Faulty]) -> None:
    engine, runner = faulty
    launch, recovered = runner.launch, []

    def late(plan: StepPlan) -> Callable[[], dict[str, list[int]]]:
        result = launch(plan)
        return result if recovered or "b" not in names_in(plan) else broken

    def broken() -> dict[str, list[int]]:
        raise RuntimeError("boom")

    runner.launch, runner.recover = late, lambda: recovered.append(True)  # type: ignore[method-assign]
    for name in "ab":
        engine.submit(spec(name, ids(5, seed=1)))
    assert {failed.request_id for failed in drain(engine)[2]} == {"a", "b"}
    assert recovered
    engine.submit(spec("c", ids(5, seed=1)))
    assert len(drain(engine)[0]["c"]) == 12


def test_a_row_that_is_no_number_fails_alone_and_leaves_no_trace_in_its_pages(faulty: tuple[Engine, _Faulty]) -> None:
    engine, runner = faulty
    good = spec("good", ids(20, seed=7), max_tokens=30)
    engine.submit(good)
    expected = drain(engine)[0]["good"]
    engine.submit(good)
    engine.submit(spec("bad", ids(40, seed=6)))
    while "bad" not in engine.scheduler.running or engine.scheduler.running["bad"].generated < 2:
        engine.step()
    pages = list(engine.scheduler.running["bad"].pages)
    for values in runner.pages.values:
        values[pages] = float("nan")
    _, _, failures = drain(engine)
    assert [(f.request_id, f.message) for f in failures] == [("bad", "the model's output was not a number")]
    runner.dirty_reads = 0
    many = [spec(f"later{n}", ids(100, seed=n), max_tokens=20) for n in range(8)] + [good]
    for one in many:
        engine.submit(one)
    seen: set[int] = set()
    tokens: list[int] = []
    while engine.has_work:
        for news in engine.step():
            assert isinstance(news, Updates)
            tokens += [token for update in news.updates if update.request_id == "good" for token in update.tokens]
        seen.update(page for request in engine.scheduler.running.values() for page in request.pages)
    assert seen.issuperset(pages), "the pages were not used again"
    assert runner.dirty_reads == 0
    assert tokens == expected


def test_pages_of_a_request_that_went_away_are_cleaned_too(faulty: tuple[Engine, _Faulty]) -> None:
    engine, runner = faulty
    engine.submit(spec("gone", ids(100, seed=6)))
    engine.step()
    pages = list(engine.scheduler.running["gone"].pages)
    runner.pages.values[0][pages] = float("nan")  # nothing has been drawn: nobody knows
    engine.cancel("gone")
    engine.submit(spec("next", ids(100, seed=6)))
    tokens, _, failures = drain(engine)
    assert not failures
    assert len(tokens["next"]) == 12
    assert runner.dirty_reads == 0


def test_a_request_that_cannot_be_taken_fails_alone(faulty: tuple[Engine, _Faulty], monkeypatch: Any) -> None:
    engine, _ = faulty

    def broken(request: object) -> None:
        raise KeyError("boom")

    with monkeypatch.context() as patch:
        patch.setattr(engine.scheduler, "add", broken)
        failed = engine.submit(spec("a", ids(5, seed=1)))
    assert failed is not None
    assert (failed.request_id, failed.kind) == ("a", "internal")
    engine.submit(spec("b", ids(5, seed=1)))
    assert len(drain(engine)[0]["b"]) == 12


def test_stats_and_the_wait_before_the_first_step_are_told(model_dir: Path) -> None:
    engine, _ = build(model_dir, max_num_seqs=1)
    now = iter(range(10**6))
    engine._clock = lambda: float(next(now))
    assert engine.stats.free_pages == engine.stats.pages == engine.scheduler.pool.num_pages
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
            r"100.0 KiB and 32.0 KiB are there; .* --max-model-len 64",
        ),
        ({"kv_cache_bytes": 100}, "no memory is left for the KV cache"),
        ({"kv_offload_bytes": 2**43}, r"--kv-offload-bytes: 8192.0 GiB are more than the .* of host memory"),
        ({"max_num_seqs": 100}, "max_num_seqs"),
        ({"attention_backend": "hopper"}, r"backend: .hopper. takes fp16 or bf16"),
    ],
)
def test_settings_that_cannot_hold_are_named(model_dir: Path, changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(model_dir, **changes)


def test_the_length_that_really_fits_is_announced(model_dir: Path) -> None:
    _, started = build(model_dir, kv_cache_bytes=1 << 15)
    assert started.max_model_len == started.kv_tokens == 64
    assert (started.attention_backend, started.dtype, started.eos_token_ids) == ("cpu", "float32", [2])
    assert started.host_kv_tokens == 0
    _, started = build(model_dir, kv_offload_bytes=5 * 16 * 512 + 1)
    assert (started.page_bytes, started.host_kv_tokens) == (16 * 512, 5 * 16)
