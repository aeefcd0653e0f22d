"""Answers under windows are captured when their combination has come often enough, and computed as without a graph."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from longreach.engine.device.batch_builder import HostBatch
from longreach.engine.device.device_tables import DeviceTables
from longreach.engine.device.forward_pass import ForwardPass, fill_pending, forward
from longreach.engine.device.graphs import policy as policy_graphs
from longreach.engine.device.graphs.capture import Captured
from longreach.engine.device.graphs.policy import STEPS_BEFORE, PolicyGraphs, Replayed
from longreach.engine.device.ranks.process_group import Joined, layout_of
from longreach.engine.engine import Engine
from longreach.engine.messages import EngineConfig, Generate, Sampling
from longreach.engine.startup import build as building
from longreach.engine.startup.start_rank import start_rank
from longreach.policies.values import DENSE, AttentionPolicy, Dynamic, SparseDecode, Strided, Window
from longreach_kernels import DecodeNeeds
from longreach_patches import PagedStep

from tests.server.engine.conftest import ids, save_model
from tests.server.engine.driving import drain

WINDOW = Window(size=40, sinks=3)
BOTH_ENDS = Window(size=30, sinks=20)
NARROW = Window(size=18, sinks=0)
STRIDED = Strided(stride=256, per_head=False)
DYNAMIC = Dynamic(recall=0.9, estimator="pooled", dense_below=2048)
BUDGET = Dynamic(recall=0.9, decode_budget=96, estimator="pooled", dense_below=2048)

Run = Callable[[], torch.Tensor]


class _Pretended:
    """Stands for a CUDA graph: a replay runs the step."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.logits = torch.full_like(run(), torch.nan)

    def replay(self) -> None:
        self.logits.copy_(self._run())


class _Graphs:
    """The graphs of policies alone, and the batches that they replayed."""

    def __init__(self, by_policy: PolicyGraphs) -> None:
        self.by_policy = by_policy
        self.replayed: list[HostBatch] = []

    def close(self) -> None:
        self.by_policy.close()

    def replay(self, batch: HostBatch, page_tables: DeviceTables) -> Replayed | None:
        found = self.by_policy.replay(batch, page_tables)
        if found is not None:
            self.replayed.append(batch)
        return found


class _Watched(ForwardPass):
    """Computes what was replayed a second time without graphs, and compares."""

    def logits(self, batch: HostBatch, plan: Any = None) -> Any:
        found = super().logits(batch, plan)
        graphs: Any = self._graphs
        if any(replayed is batch for replayed in graphs.replayed):
            with torch.inference_mode():
                torch.testing.assert_close(found[0], self._eager(batch, None)[0], rtol=1e-4, atol=1e-4)
        return found


@pytest.fixture(scope="module")
def long_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a layer whose own window is wider than one policy's and narrower than the others'."""
    return save_model(tmp_path_factory.mktemp("model"), max_position_embeddings=2048, sliding_window=25)


def _config(model_dir: Path, page_size: int = 16, page_bounds: bool = False) -> EngineConfig:
    return EngineConfig(
        page_bounds=page_bounds,
        model=str(model_dir),
        device="cpu",
        max_num_seqs=8,
        max_batched_tokens=512,
        page_size=page_size,
        kv_cache_bytes=1 << 23,
        max_itl=1000.0,
    )


def build(model_dir: Path, **changes: Any) -> tuple[Engine, _Graphs]:
    config = _config(model_dir, **changes)
    alone = Joined(layout_of(config))
    state = start_rank(config, alone)
    plain = state.forward
    by_policy = PolicyGraphs(
        lambda step, *tensors: forward(plain.loaded, _forgetful(step), *tensors),
        lambda input_ids, rows: fill_pending(input_ids, rows, plain.drawn),
        plain.pages,
        lambda num_seqs, context: DecodeNeeds(workspace_bytes=num_seqs * context, by_length=True),
        state.limits,
        plain.policies.answers,
    )
    graphs: Any = _Graphs(by_policy)
    watched = _Watched(plain.loaded, plain.pages, plain.drawn, plain.page_tables, graphs, plain.policies)
    return building._engine(config, alone, state._replace(forward=watched))[0], graphs


def _forgetful(step: PagedStep) -> PagedStep:
    """The step without what was remembered of its lengths, which the CPU's kernels read on the host."""
    groups = [replace(group, batch=replace(group.batch)) for group in step.groups]
    return replace(step, batch=replace(step.batch), groups=tuple(groups))


def spec(name: str, attention: AttentionPolicy, length: int = 90, tokens: int = 14) -> Generate:
    how = Sampling(temperature=0.0, seed=5)
    prompt = ids(length, seed=length)
    return Generate(request_id=name, attention=attention, max_tokens=tokens, prompt=prompt, sampling=how)


def pretend(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let capturing work without a GPU; the list has the rows of each."""
    captured: list[int] = []

    def capture(run: Run, pool: Any) -> Captured:
        graph: Any = _Pretended(run)
        captured.append(len(graph.logits))
        return Captured(graph, graph.logits)

    monkeypatch.setattr(policy_graphs, "capture", capture)
    return captured


def test_dense_requests_and_windows_answer_beside_each_other(
    long_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured = pretend(monkeypatch)
    requests = [
        spec("a", DENSE),
        spec("b", WINDOW, 91),
        spec("c", BOTH_ENDS, 300, tokens=40),
        spec("d", WINDOW, 17),
        spec("e", WINDOW, 200),
        spec("f", NARROW, 120),
    ]
    engine, graphs = build(long_model_dir)
    for request in requests:
        assert engine.submit(request) is None
    together = drain(engine)
    assert together[2] == []
    plain, _ = building.build_engine(_config(long_model_dir))
    for request in requests:
        assert plain.submit(request) is None
        assert drain(plain)[0][request.request_id] == together[0][request.request_id]
    combinations = graphs.by_policy.captured
    assert ((DENSE, 1), (NARROW, 1), (BOTH_ENDS, 1), (WINDOW, 4)) in combinations
    assert ((BOTH_ENDS, 1),) in combinations, "when the others had ended"
    assert len(captured) >= len(combinations) == 2
    assert len(graphs.replayed) >= 14 + 26 - 3 * (STEPS_BEFORE + 1)


def test_no_graph_is_left_once_nothing_more_is_computed(long_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a process group waits for them, so that they must not wait for the garbage collector."""
    pretend(monkeypatch)
    engine, graphs = build(long_model_dir)
    assert engine.submit(spec("a", WINDOW)) is None
    drain(engine)
    captured = [
        weakref.ref(graph.graph) for known in graphs.by_policy._known.values() for graph, _ in known.captured.values()
    ]
    assert captured
    gc.disable()
    try:
        computing: Any = engine._runner
        computing._computing.close()
        assert not [graph for graph in captured if graph() is not None]
    finally:
        gc.enable()


def test_what_has_no_closed_form_is_launched(long_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    captured = pretend(monkeypatch)
    engine, graphs = build(long_model_dir, page_size=128)
    for request in (spec("a", STRIDED), spec("b", WINDOW), spec("c", DYNAMIC)):
        assert engine.submit(request) is None
        tokens, _, failed = drain(engine)
        assert len(tokens[request.request_id]) == 14
        assert failed == []
    assert {policy for groups in graphs.by_policy.captured for policy, _ in groups} == {WINDOW}
    assert captured == [1]


def test_the_last_token_of_a_prompt_is_measured_and_not_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch)
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]  # of the last layer no mass is measured
    layers = {"num_hidden_layers": 3, "layer_types": kinds, "no_rope_layers": [1, 0, 1]}
    engine, graphs = build(save_model(tmp_path, max_position_embeddings=2048, **layers))
    for index in range(2 * STEPS_BEFORE):  # prompts of one token, which are decodes but for that
        assert engine.submit(spec(f"warm-{index}", WINDOW, length=1, tokens=6)) is None
        updates = drain(engine)[1][f"warm-{index}"]
        [use] = [update.attention for update in updates if update.attention is not None]
        assert use.kept_mass is not None
        assert use.kept_mass.queries == 1
    assert len(graphs.replayed) > 0
    assert min(int(batch.context_lens.min()) for batch in graphs.replayed) == 2


def test_the_least_recently_used_graphs_are_dropped(long_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    captured = pretend(monkeypatch)
    monkeypatch.setattr(policy_graphs, "MOST_ROWS", 2)
    engine, graphs = build(long_model_dir)
    policies = [Window(size=30 + i, sinks=0) for i in range(3)]
    for index, policy in enumerate((*policies[:2], policies[0], policies[2])):
        assert engine.submit(spec(str(index), policy)) is None
        assert drain(engine)[2] == []
    assert graphs.by_policy.captured == [((policies[0], 1),), ((policies[2], 1),)]
    assert engine.submit(spec("again", policies[1])) is None
    drain(engine)
    assert graphs.by_policy.captured == [((policies[2], 1),), ((policies[1], 1),)]
    assert len(captured) == 4


def test_without_memory_for_a_graph_steps_are_launched_as_before(
    long_model_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    attempts: list[int] = []

    def capture(run: Run, pool: Any) -> Captured:
        attempts.append(1)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB\nmore words")

    monkeypatch.setattr(policy_graphs, "capture", capture)
    engine, graphs = build(long_model_dir)
    assert engine.submit(spec("a", WINDOW)) is None
    with caplog.at_level(logging.WARNING):
        tokens, _, failed = drain(engine)
    assert failed == []
    assert len(tokens["a"]) == 14
    assert (len(attempts), graphs.replayed) == (1, []), "tried once"
    [record] = [record for record in caplog.records if record.name == "longreach.engine.device.graphs.policy"]
    assert record.getMessage().endswith("CUDA out of memory. Tried to allocate 1 GiB")


def test_answers_within_a_budget_replay_and_tell_what_they_missed(
    long_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is measured as it begins, and all of the others are read whole in that step; what is told stays its own."""
    captured = pretend(monkeypatch)
    requests = [spec("a", BUDGET, 600, tokens=80), spec("b", BUDGET, 300, tokens=90), spec("c", DENSE, 30, tokens=70)]
    requests += [spec("d", WINDOW, 200, tokens=75), spec("e", BUDGET, 450, tokens=75)]
    settings = {"page_size": 128, "page_bounds": True}
    engine, graphs = build(long_model_dir, **settings)
    plain, _ = building.build_engine(_config(long_model_dir, **settings))
    uses = []
    for one in (engine, plain):
        for request in requests:
            assert one.submit(request) is None
        tokens, updates, failed = drain(one)
        assert failed == []
        uses.append({name: (tokens[name], news[-1].decode) for name, news in updates.items()})
    [kinds] = {groups for groups in graphs.by_policy.captured if len(groups) == 3}
    assert dict(kinds) == {DENSE: 1, WINDOW: 1, SparseDecode(96): 4}
    assert captured.count(6) == 2, "without and with measurements"
    assert len(graphs.replayed) > 60
    for name, (tokens, use) in uses[0].items():
        assert tokens == uses[1][name][0]
        expected = uses[1][name][1]
        if use is None or expected is None:
            assert use is expected
            continue
        assert (use.queries, use.keys_read, use.sampled) == (expected.queries, expected.keys_read, expected.sampled)
        assert use.sampled == 2, "at the first token and at the 64th after it"
        for field in ("missed_mean", "missed_max", "kept_mean", "kept_least"):
            assert getattr(use, field) == pytest.approx(getattr(expected, field), abs=1e-4)


def test_a_budget_chooses_out_of_a_context_that_fits(long_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    monkeypatch.setattr(policy_graphs, "_SMALLEST_CHOICE", 256)
    engine, graphs = build(long_model_dir, page_size=128, page_bounds=True)
    for name, length in (("short", 200), ("long", 700)):
        assert engine.submit(spec(name, BUDGET, length)) is None
        assert drain(engine)[2] == []
    assert [context for _, context in graphs.by_policy._known] == [256, 1024]
    assert engine.submit(spec("window", WINDOW, 200)) is None
    drain(engine)
    assert [context for _, context in graphs.by_policy._known][2:] == [2048], "the kernels go by the answers' lengths"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_graph_computes_what_the_step_does_to_the_bit(
    long_model_dir: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    plain, compared = policy_graphs.capture, []

    class Checked:
        def __init__(self, captured: Captured, run: Run) -> None:
            self._captured = captured
            self._run = run

        def replay(self) -> None:
            self._captured.graph.replay()
            logits = self._captured.logits.clone()
            torch.testing.assert_close(logits, self._run(), rtol=0, atol=0)
            compared.append(len(logits))

    def capture(run: Run, pool: Any) -> Captured:
        captured = plain(run, pool)
        graph: Any = Checked(captured, run)
        return Captured(graph, captured.logits)

    monkeypatch.setattr(policy_graphs, "capture", capture)
    config = EngineConfig(
        model=str(long_model_dir),
        device="cuda",
        dtype=dtype,
        page_size=128,
        page_bounds=True,
        kv_cache_bytes=1 << 26,
        max_num_seqs=8,
    )
    engine, _ = building.build_engine(config)
    policies = (DENSE, WINDOW, BOTH_ENDS, WINDOW, WINDOW)
    for index, policy in enumerate(policies):
        assert engine.submit(spec(str(index), policy, length=60 + 50 * index, tokens=20)) is None
    tokens, _, failed = drain(engine)
    assert failed == []
    assert {name: len(found) for name, found in tokens.items()} == {str(i): 20 for i in range(len(policies))}
    assert compared.count(6) >= 10, "one dense, one of the one and four of the other"
    compared.clear()
    for index in range(3):
        assert engine.submit(spec(f"budget-{index}", BUDGET, length=300 + 200 * index, tokens=70)) is None
    updates, failed = drain(engine)[1:]
    assert failed == []
    assert compared.count(4) >= 60
    for name in ("budget-0", "budget-1", "budget-2"):
        use = updates[name][-1].decode
        assert use is not None
        assert use.sampled == 2
        assert 0 <= use.missed_mean <= use.missed_max <= 1
    engine.close()
