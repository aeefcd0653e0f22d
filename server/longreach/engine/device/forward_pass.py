"""The part of a step that every rank computes: arrays to the device, and the patched model over the rank's pages."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from longreach_kernels import PagedBatch
from longreach_kernels.compile_beside import raise_if_missing
from longreach_kernels.delta import StateBatch
from longreach_patches import KVPages, LoadedModel, PagedStep, StateStep, StateStore, StepMeasurements, WantedRows
from torch import distributed, nn

from longreach.engine.device.attended_blocks import StepAttended, asks
from longreach.engine.device.batch_builder import HostBatch, HostGroup
from longreach.engine.device.device_tables import DeviceTables
from longreach.engine.device.graphs.capture import Needs, Tapped, others, tap_of
from longreach.engine.device.graphs.decode import DecodeGraphs
from longreach.engine.device.graphs.mixed import MixedGraphs
from longreach.engine.device.graphs.policy import PolicyGraphs, Replayed
from longreach.engine.device.offload_store import HostStore
from longreach.engine.device.policies.layer_masks import LayerPolicies
from longreach.engine.device.policies.mass_samples import StepSamples
from longreach.engine.kv_cache.offload_index import CacheMoves
from longreach.engine.requests.step_plan import StepPlan
from longreach.engine.scheduling.limits import Limits
from longreach.policies.values import SparseDecode
from longreach.util.transfer import upload

# Rows that the last layer need not compute before it is told so: that takes copies to the device, some 50 us.
_WORTH_LEAVING_OUT = 256
_TIMED = 3  # steps, of which the mean is told


def forward(loaded: LoadedModel, step: PagedStep, input_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor):
    """Run the model over T tokens, input_ids and positions (T,), and return the logits (R, V) of `rows` (R,), which are
    the step's wanted ones if it has any.

    Of a long step each context rank has some of the tokens; all have all logits.

    Raises:
        KernelsMissingError: under `KernelsBeside.guarded`, if kernels are not compiled yet; nothing was computed.
    """
    if (sizes := loaded.layout.token_sizes(len(input_ids))) is not None:
        return _spread(loaded, step, input_ids, positions, rows, sizes)
    output = loaded.patched.model(
        input_ids=input_ids[None],
        position_ids=positions[None],
        attention_mask=step.mask_placeholder,
        use_cache=False,
        logits_to_keep=rows if step.wanted is None else 0,  # 0: all that the last layer gives
        paged_step=step,
    )
    raise_if_missing()
    return output.logits[0]


def _spread(
    loaded: LoadedModel,
    step: PagedStep,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    rows: torch.Tensor,
    sizes: list[int],
) -> torch.Tensor:
    model, layout = loaded.patched.model, loaded.layout
    start = sum(sizes[: layout.context_rank])
    count = sizes[layout.context_rank]

    def gather(_: nn.Module, __: object, output: Any) -> Any:
        hidden = output.last_hidden_state[0]
        here = (rows >= start) & (rows < start + count)
        # Each row is in the sum once, so that it is what its rank computed.
        wanted = hidden[(rows - start).clamp(0, count - 1)].masked_fill_(~here[:, None], 0)
        distributed.all_reduce(wanted, group=layout.context_group)
        output.last_hidden_state = wanted[None]
        return output

    # Fused layers turn queries and keys once they have all tokens of their heads.
    own = positions if loaded.patched.fused else positions[start : start + count]
    hook = model.base_model.register_forward_hook(gather)
    try:
        output = model(
            input_ids=input_ids[None, start : start + count],
            position_ids=own[None],
            attention_mask=step.mask_placeholder,
            use_cache=False,
            logits_to_keep=0,
            paged_step=step,
        )
    finally:
        hook.remove()
    return output.logits[0]


def fill_pending(input_ids: torch.Tensor, seq_slots: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
    """input_ids (B,) with the last token, `drawn` at its `seq_slots` (B,), of each request where it is PENDING."""
    return torch.where(input_ids < 0, drawn[seq_slots], input_ids)


class StepGraphs(NamedTuple):
    """Captured steps: of answers, of answers under attention policies, and of prompts beside answers."""

    decode: DecodeGraphs
    by_policy: PolicyGraphs
    mixed: MixedGraphs

    @classmethod
    def of(
        cls,
        loaded: LoadedModel,
        policies: LayerPolicies,
        needs: Needs,
        pages: KVPages,
        drawn: torch.Tensor,
        limits: Limits,
        states: StateStore | None = None,
    ) -> StepGraphs:
        """For a model's steps over these pages and `states`, with nothing captured yet; `drawn` as for `ForwardPass`,
        `needs` what decodes need."""
        run, fill = functools.partial(forward, loaded), functools.partial(fill_pending, drawn=drawn)
        observed = policies.observed
        return cls(
            DecodeGraphs(run, fill, pages, needs, limits, states, observed),
            PolicyGraphs(run, fill, pages, needs, limits, policies.answers, states, observed),
            MixedGraphs(run, fill, pages, needs, limits, states, observed),
        )

    def steps(self) -> Iterator[Callable[[], torch.Tensor]]:
        """Steps that `capture` captures, each to be run before the next is taken: enough of them to launch every kernel
        that the others do, which depends on the answers and on the rows, but not on both."""
        for _, run in self.decode.steps():
            yield run
        seen_answers: set[int] = set()
        seen_rows: set[int] = set()
        for (answers, rows), run in self.mixed.steps():
            if answers not in seen_answers or rows not in seen_rows:
                seen_answers.add(answers)
                seen_rows.add(rows)
                yield run

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture what is known before there are requests."""
        pool = torch.cuda.graph_pool_handle()
        self.decode.capture(pool)
        self.mixed.capture(pool)
        self.by_policy.use(pool)

    def close(self) -> None:
        """Let go of all graphs, at once: not when the garbage collector comes by."""
        for graphs in self:
            graphs.close()

    @torch.inference_mode()
    def launch_seconds(self) -> float:
        """How long the smallest step takes when its kernels are launched one by one: it computes next to nothing."""
        *_, (_, run) = self.decode.steps()
        run()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(_TIMED):
            run()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / _TIMED

    def replay(self, batch: HostBatch, page_tables: DeviceTables) -> Replayed | None:
        """The logits (R, V) of a step and what it measured, valid until the next replay; None if no graph holds it."""
        if batch.groups:
            return self.by_policy.replay(batch, page_tables)
        graphs = self.decode if batch.is_decode_only else self.mixed
        logits = graphs.replay(batch, page_tables)
        return None if logits is None else Replayed(logits, tapped=graphs.tapped)


class ForwardPass:
    """A model, or one rank's part of it, with its pages, and with its states if it has layers that keep some.

    `drawn` (max_num_seqs,) int64 are the tokens that requests drew last, by their `seq_slot`; rank 0 fills it.
    `page_tables` are those of the requests, up to the last batch. The last layer leaves rows out that nobody looks at,
    where there are `worth_leaving_out` or more of them.
    """

    worth_leaving_out: float = _WORTH_LEAVING_OUT

    def __init__(
        self,
        loaded: LoadedModel,
        pages: KVPages,
        drawn: torch.Tensor,
        page_tables: DeviceTables,
        graphs: StepGraphs | None,
        policies: LayerPolicies,
        host: HostStore | None = None,
        states: StateStore | None = None,
    ) -> None:
        self.loaded = loaded
        self.pages = pages
        self.states = states
        self.drawn = drawn
        self.page_tables = page_tables
        self.policies = policies
        self._graphs = graphs
        self._tapped: Tapped | None = None
        self.host = host

    @torch.inference_mode()
    def logits(self, batch: HostBatch, plan: StepPlan | None = None) -> tuple[torch.Tensor, StepSamples | None]:
        """The logits (R, V) of a step, and what is measured of the requests of `plan`, if that is given."""
        self.page_tables.update(batch.table_changes)
        if self.loaded.layout.size > 1 and batch.has_pending:
            distributed.broadcast(self.drawn, 0)
        if self._graphs is not None and (replayed := self._graphs.replay(batch, self.page_tables)) is not None:
            self._tapped = replayed.tapped
            return replayed.logits, None if plan is None else StepSamples.of_replay(plan, replayed.step)
        return self._eager(batch, plan)

    @torch.inference_mode()
    def attended(self, plan: StepPlan) -> StepAttended | None:
        """What the tokens that the last step has drawn attended to, for the requests of its `plan` that ask."""
        backend = self.loaded.patched.backend.name
        return StepAttended.of(plan, self._tapped, self.pages, self.page_tables, backend)

    def _wanted(self, batch: HostBatch, logit_rows: torch.Tensor, samples: StepSamples | None) -> WantedRows | None:
        """What the last layer is asked for, where that is much less than all: nothing after it looks at other rows.

        Of `samples` it measures those of answers within a budget of keys, whose rows are all wanted.
        """
        if not self.loaded.patched.fused:
            return None  # the model's own last layer computes all
        unwanted = len(batch.input_ids) - len(batch.logit_rows)
        if unwanted < self.worth_leaving_out or self.loaded.layout.context_size > 1:
            return None
        invariant = self.loaded.patched.batch_invariant
        if batch.groups and (invariant or any(_recomputes_budget(group, batch) for group in batch.groups)):
            return None
        if not len(batch.logit_rows):
            return WantedRows(logit_rows, None)
        alone = batch.of_wanted(lone_as_decodes=not invariant)
        [seq_slots] = upload([alone.seq_slots], logit_rows.device)
        paged = self._on_device(alone, seq_slots)
        asked = None if samples is None else samples.samples
        if asked:
            budgets = (isinstance(group.policy, SparseDecode) for group in batch.groups)
            asked = [sample if is_budget else None for sample, is_budget in zip(asked, budgets, strict=True)]
        return WantedRows(logit_rows, paged, self.policies.groups(alone, paged, asked))

    @torch.inference_mode()
    def move(self, moves: CacheMoves) -> None:
        """As `step_retry.StepRunner.move`, for this rank's pages."""
        if self.host is not None:
            self.host.move(moves)
        elif moves.unclean:
            self.pages.clear(moves.unclean)

    def has_to_do(self, moves: CacheMoves) -> bool:
        """Whether `move` does anything; copies under way are waited for even if there are no others."""
        return self.host is not None or bool(moves.unclean)

    def close(self) -> None:
        """Compute nothing more. NCCL does not end while graphs hold its operations."""
        if self._graphs is not None:
            self._graphs.close()
        self._graphs = None

    def _eager(self, batch: HostBatch, plan: StepPlan | None) -> tuple[torch.Tensor, StepSamples | None]:
        device = self.loaded.device
        long = [batch.input_ids, batch.positions, batch.logit_rows, batch.seq_slots, *batch.all_slots]
        input_ids, positions, logit_rows, seq_slots, slots, *more = upload(long, device)
        other_slots = torch.stack(more) if more else None
        if batch.has_pending:
            for tokens, sequences in _lone(batch):
                input_ids[tokens] = fill_pending(input_ids[tokens], seq_slots[sequences], self.drawn)
        paged = self._on_device(batch, seq_slots)
        samples = StepSamples.of_step(plan, batch, paged) if plan is not None else None
        groups = self.policies.groups(batch, paged, samples.samples if samples is not None else None)
        wanted = self._wanted(batch, logit_rows, samples)
        states = self._states_of(batch, paged.cu_seqlens_q)
        asked = plan is not None and asks(plan)
        tap = tap_of(self.policies.observed, logit_rows) if asked else None
        step = PagedStep(
            self.pages,
            paged,
            slots,
            groups,
            wanted,
            states,
            other_slots=other_slots,
            unmeasured=self.policies.unmeasured,
            tap=tap,
        )
        self._tapped = None if tap is None else Tapped(tap.kept)
        logits = forward(self.loaded, step, input_ids, positions, logit_rows)
        measured = step.measured()
        if self.loaded.layout.size > 1:
            measured = _of_all_ranks(measured)
        if samples is not None:
            samples.collect(measured)
        return logits, samples

    def _on_device(self, batch: HostBatch, seq_slots: torch.Tensor) -> PagedBatch:
        """The sequences of a batch, those of the requests at `seq_slots` (B,)."""
        cu_seqlens_q, context_lens = upload([batch.cu_seqlens_q, batch.context_lens], seq_slots.device)
        tables = self.page_tables.rows(seq_slots, batch.num_pages)
        return PagedBatch(
            cu_seqlens_q=cu_seqlens_q,
            context_lens=context_lens,
            page_table=tables[0],
            other_tables=others(tables),
            max_seqlen_q=batch.max_seqlen_q,
            max_context_len=batch.max_context_len,
            num_decodes=batch.num_decodes,
        )

    def _states_of(self, batch: HostBatch, cu_seqlens_q: torch.Tensor) -> StateStep | None:
        """Where the step's sequences find their states, and leave them."""
        if self.states is None:
            return None
        read, write = upload(batch.state_slots, cu_seqlens_q.device)
        return StateStep(self.states, StateBatch(cu_seqlens_q, read, write, batch.max_seqlen_q, batch.state_decodes))


def _lone(batch: HostBatch) -> Iterator[tuple[slice, slice]]:
    """The tokens and the sequences of those that compute one token, which the step before this may have drawn."""
    if not batch.groups:
        yield slice(batch.num_decodes), slice(batch.num_decodes)
    for group in batch.groups:
        count = group.num_decodes
        tokens, sequences = group.tokens.start, group.sequences.start
        yield slice(tokens, tokens + count), slice(sequences, sequences + count)


def _recomputes_budget(group: HostGroup, batch: HostBatch) -> bool:
    """Whether it has tokens of answers within a budget of keys whose logits are not wanted: what they miss is measured
    in all layers."""
    if not isinstance(group.policy, SparseDecode):
        return False
    first, last = np.searchsorted(batch.logit_rows, [group.tokens.start, group.tokens.stop])
    return last - first < group.tokens.stop - group.tokens.start


def _of_all_ranks(measured: StepMeasurements) -> StepMeasurements:
    """What was measured, with the tiles that dynamic policies chose counted over the heads of all ranks."""
    for group in measured:
        if group.visited is not None:
            distributed.all_reduce(group.visited)  # in place: it was stacked for this
        for _, _, found in group.floor:
            distributed.all_reduce(found.counts)
            distributed.all_reduce(found.least, op=distributed.ReduceOp.MIN)
    return measured
