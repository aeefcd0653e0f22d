"""The last layer computes the rows whose logits are wanted alone, and requests get what they got from all rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from longreach.engine.device.batch_builder import BatchBuilder, HostBatch
from longreach.engine.device.forward_pass import ForwardPass
from longreach.engine.messages import Generate, Sampling
from longreach.engine.requests.request import Request
from longreach.engine.requests.step_plan import Chunk, StepPlan
from longreach.policies.parse import policy_of
from longreach_patches import WantedRows

from tests.server.engine.conftest import ids, save_model
from tests.server.engine.driving import build, drain, spec

PAGE = 16


def batch_of(*chunks: tuple[int, int, int, int], batch_invariant: bool = False) -> HostBatch:
    """A step of chunks (prompt, start, length, drafts)."""
    made, page = [], 1
    for index, (prompt, start, length, drafts) in enumerate(chunks):
        of_request = Generate(
            request_id=str(index), prompt=list(range(3, 3 + prompt)), max_tokens=9, sampling=Sampling(temperature=0)
        )
        request = Request.of(of_request, 1, 0.0)
        request.seq_slot, request.computed = index, start
        if start >= prompt:  # it writes its answer
            request.tokens.extend([3] * (1 + start - prompt))
        request.hold.pages = list(range(page, page + -(-(start + length) // PAGE)))
        page += len(request.pages)
        made.append(Chunk.of(request, length, (3,) * drafts, batch_invariant=batch_invariant))
    return BatchBuilder(8, 64, PAGE).build(StepPlan.of(made))


def test_the_step_of_what_is_wanted() -> None:
    # An answer's token, the middle of a prompt, an answer with two drafts, the end of a prompt.
    batch = batch_of((20, 20, 1, 0), (90, 10, 40, 0), (30, 30, 3, 2), (50, 32, 18, 0))
    assert batch.seq_slots.tolist() == [0, 2, 1, 3]
    assert batch.rows_wanted.tolist() == [1, 3, 0, 1]
    alone = batch.of_wanted(lone_as_decodes=True)
    assert alone.cu_seqlens_q.tolist() == [0, 1, 4, 5]
    assert alone.context_lens.tolist() == [21, 33, 50]
    assert alone.positions.tolist() == [20, 30, 31, 32, 49]
    assert alone.seq_slots.tolist() == [0, 2, 3]
    assert (alone.num_decodes, alone.max_seqlen_q, alone.max_context_len) == (1, 3, 50)
    assert alone.cu_seqlens_q.dtype == alone.context_lens.dtype == np.int32


def test_lone_rows_are_decodes_but_where_bits_must_not_depend_on_the_cut() -> None:
    batch = batch_of((20, 20, 1, 0), (50, 32, 18, 0))
    alone = batch.of_wanted(lone_as_decodes=True)
    assert (alone.num_decodes, alone.max_seqlen_q) == (2, 1)
    batch = batch_of((20, 20, 3, 2), (50, 32, 18, 0), batch_invariant=True)
    assert batch.num_decodes == 3
    alone = batch.of_wanted(lone_as_decodes=False)
    assert alone.cu_seqlens_q.tolist() == [0, 1, 2, 3, 4]
    assert alone.context_lens.tolist() == [21, 22, 23, 50]
    assert (alone.num_decodes, alone.max_seqlen_q) == (3, 2)


@pytest.mark.parametrize("step", [24, 512])
def test_answers_are_those_of_all_rows(model_dir: Path, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    requests = [
        spec("a", ids(70, seed=1)),
        spec("scored", ids(50, seed=2), logprobs=2, prompt_logprobs=1),
        spec("b", ids(90, seed=3) * 2, temperature=1.0),
        spec("c", ids(11, seed=4) * 3, speculate=3),
    ]
    asked: list[WantedRows | None] = []
    wanted = ForwardPass._wanted

    def recorded(self: ForwardPass, *arguments: object) -> WantedRows | None:
        asked.append(wanted(self, *arguments))  # type: ignore[arg-type]
        return asked[-1]

    monkeypatch.setattr(ForwardPass, "_wanted", recorded)
    found: list[dict[str, list[int]]] = []
    scores: list[list[float]] = []
    for worth in (1 << 30, 1):
        monkeypatch.setattr(ForwardPass, "worth_leaving_out", worth)
        asked.clear()
        engine, _ = build(model_dir, max_batched_tokens=step)
        for one in requests:
            engine.submit(one)
        tokens, updates, failures = drain(engine)
        assert not failures
        found.append(tokens)
        scores.append([one.logprob for update in updates["scored"] for one in update.prompt_logprobs + update.logprobs])
        left_out = [rows for rows in asked if rows is not None]
        assert bool(left_out) == (worth == 1)
    # Where steps are short, there are some of which nothing is wanted.
    assert {rows.batch is None for rows in left_out} == ({True, False} if step == 24 else {False})
    assert found[0] == found[1]
    assert len(scores[0]) == 49 + 12
    assert scores[0] == pytest.approx(scores[1], abs=1e-4)


def test_answers_under_policies_are_those_of_all_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    layers = {"num_hidden_layers": 3, "layer_types": kinds, "no_rope_layers": [0, 1, 0]}
    model_dir = save_model(tmp_path, max_position_embeddings=2048, **layers)
    policies = {"window": "window:40:4", "strided": "strided:256", "dense": "dense", "dynamic": "dynamic:0.5"}
    budget = {"policy": "dynamic", "recall": 1, "decode_budget": 64}
    named = {name: policy_of(text).resolve() for name, text in policies.items()} | {
        "budget": policy_of(budget).resolve()
    }
    named["dynamic"] = policy_of({"policy": "dynamic", "recall": 0.5, "dense_below": 128}).resolve()
    requests = [
        spec(name, ids(900 - 90 * place, seed=place), attention=policy, max_tokens=5)
        for place, (name, policy) in enumerate(named.items())
    ]
    cut: list[tuple[bool, ...]] = []
    found, kept = [], []
    for worth in (1 << 30, 1):
        monkeypatch.setattr(ForwardPass, "worth_leaving_out", worth)
        engine, _ = build(
            model_dir, max_batched_tokens=700, page_size=128, kv_cache_bytes=1 << 24, page_bounds=True, max_num_seqs=8
        )
        computing = engine._runner._computing  # type: ignore[attr-defined]
        wanted = computing._wanted

        def recorded(*arguments: Any, wanted: Any = wanted) -> WantedRows | None:
            rows = wanted(*arguments)
            if rows is not None and rows.groups:
                cut.append(tuple(group.start == group.end for group in rows.groups))
            return rows

        monkeypatch.setattr(computing, "_wanted", recorded)
        for one in requests:
            assert engine.submit(one) is None
        tokens, updates, failures = drain(engine)
        assert not failures
        found.append(tokens)
        uses = {name: next(u.attention for u in news if u.tokens) for name, news in updates.items()}
        kept.append(
            {
                name: (use.tiles, use.kept_mass.mean, use.kept_mass.least)
                for name, use in uses.items()
                if use and use.kept_mass
            }
        )
        assert bool(cut) == (worth == 1)
    assert found[0] == found[1]
    assert set(kept[0]) == {"window", "strided", "dynamic"}
    assert kept[1] == {name: pytest.approx(told, abs=1e-5) for name, told in kept[0].items()}
    assert any(True in empty and False in empty for empty in cut), "a group of which nothing is wanted has its place"
