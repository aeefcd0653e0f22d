"""One forward pass: arrays to the device, the patched model over the pages, a token for every row that draws one.

On a GPU nothing here waits for it. The tokens that a step draws stay there for the next one, and are copied to the host
behind it; whoever wants them waits for that copy alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate, islice

import numpy as np
import torch
from longreach_kernels import PagedBatch
from longreach_patches import KVPages, LoadedModel, PagedStep

from .adjustments import Draw
from .batch import BatchBuilder, HostBatch
from .errors import DeviceLostError
from .graphs import DecodeGraphs
from .host_pages import PageMoves
from .host_store import HostStore
from .kept_mass import StepSamples
from .logprobs import StepLogprobs
from .mixed_graphs import MixedGraphs
from .plan import Chunk, StepPlan
from .policies import LayerPolicies
from .sampler import SamplingTensors, sample
from .transfer import DeviceSpan, OnItsWay, moved, upload


def forward(loaded: LoadedModel, step: PagedStep, input_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor):
    """Run the model over T tokens, input_ids and positions (T,), and return the logits (R, V) of `rows` (R,)."""
    output = loaded.patched.model(
        input_ids=input_ids[None],
        position_ids=positions[None],
        attention_mask=step.mask_placeholder,
        use_cache=False,
        logits_to_keep=rows,
        paged_step=step,
    )
    return output.logits[0]


def fill_pending(input_ids: torch.Tensor, rows: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
    """input_ids (B,) with the requests' last tokens, `drawn` by `rows` (B,), where the host did not know them."""
    return torch.where(input_ids < 0, drawn[rows], input_ids)


class Runner:
    """Executes plans on one device. It keeps of requests the table of their pages and the token each drew last.

    `drawn` (max_num_seqs,) int64 are those tokens, by the requests' rows.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        pages: KVPages,
        builder: BatchBuilder,
        drawn: torch.Tensor,
        graphs: tuple[DecodeGraphs, MixedGraphs] | None,
        policies: LayerPolicies,
        host: HostStore | None = None,
    ) -> None:
        self.overlaps = loaded.device.type == "cuda"
        self._loaded = loaded
        self._pages = pages
        self._builder = builder
        self._drawn = drawn
        self._graphs = graphs
        self._policies = policies
        self._host = host
        self._vocab_size = loaded.config.vocab_size
        self._seconds: float | None = None

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Callable[[], dict[str, list[int]]]:
        """Compute every chunk of `plan`; the result waits for the tokens that were drawn."""
        batch = self._builder.build(plan)
        span = DeviceSpan() if self._loaded.device.type == "cuda" else None
        logits, samples = None, None
        if self._graphs is not None and not batch.groups:
            decode, mixed = self._graphs
            logits = decode.replay(batch) if plan.is_decode_only else mixed.replay(plan, batch)
        if logits is None:
            logits, samples = self._eager(plan, batch)
        drawing = [chunk for chunk in plan.chunks if chunk.num_draws]
        draws = [Draw(chunk.request, chunk.drafts[:after]) for chunk in drawing for after in range(chunk.num_draws)]
        tokens = logits.new_empty(0, dtype=torch.int64)
        if draws:
            how = SamplingTensors.of(draws, self._vocab_size)
            tokens = sample(self._drawing_rows(logits, plan), moved(how, self._loaded.device))
        drawn = _Drawn(drawing, tokens, StepLogprobs(plan, logits, tokens), samples)
        self._remember(drawing, tokens)  # last: until then the step can be launched again
        if span is None:
            return drawn
        span.end()

        def result() -> dict[str, list[int]]:
            found = drawn()
            self._seconds = (self._seconds or 0.0) + span.seconds()
            return found

        return result

    def take_seconds(self) -> float | None:
        """As `StepRunner.take_seconds`."""
        seconds, self._seconds = self._seconds, None
        return seconds

    def move(self, moves: PageMoves) -> None:
        """As `StepRunner.move`."""
        if self._host is not None:
            self._host.move(moves)
        elif moves.unclean:
            self._pages.clear(moves.unclean)

    def recover(self) -> None:
        """Give cached memory back after a step that failed.

        Raises:
            DeviceLostError: the error was one that CUDA does not recover from.
        """
        if self._loaded.device.type == "cpu":
            return
        try:
            torch.cuda.synchronize(self._loaded.device)
            torch.cuda.empty_cache()
        except RuntimeError as error:  # torch's errors of CUDA are among them
            raise DeviceLostError(str(error).strip().partition("\n")[0]) from error

    def _drawing_rows(self, logits: torch.Tensor, plan: StepPlan) -> torch.Tensor:
        """The rows that tokens are drawn from: the last ones of each chunk, where others are there to be scored."""
        if all(chunk.num_rows == chunk.num_draws for chunk in plan.chunks):
            return logits
        ends = accumulate(chunk.num_rows for chunk in plan.chunks)
        rows = [row for chunk, end in zip(plan.chunks, ends, strict=True) for row in range(end - chunk.num_draws, end)]
        [on_device] = upload([np.array(rows)], self._loaded.device)
        return logits[on_device]

    def _remember(self, drawing: list[Chunk], tokens: torch.Tensor) -> None:
        """Keep the last token of each request, which the next step may take up before the host knows it."""
        if not self.overlaps or not drawing:
            return
        rows = np.array([chunk.request.row for chunk in drawing])
        last = np.cumsum([chunk.num_draws for chunk in drawing]) - 1
        rows, last = upload([rows, last], self._loaded.device)
        # What is not a number ends its request one step late; until then it stands for some token.
        self._drawn[rows] = tokens[last].clamp(min=0)

    def _eager(self, plan: StepPlan, batch: HostBatch) -> tuple[torch.Tensor, StepSamples]:
        device = self._loaded.device
        long = upload([batch.input_ids, batch.positions, batch.slots, batch.logit_rows, batch.rows], device)
        short = upload([batch.cu_seqlens_q, batch.context_lens, batch.page_table.reshape(-1)], device)
        input_ids, positions, slots, logit_rows, rows = long
        cu_seqlens_q, context_lens, page_table = short
        if self.overlaps:
            for tokens, sequences in _lone(batch):
                input_ids[tokens] = fill_pending(input_ids[tokens], rows[sequences], self._drawn)
        paged = PagedBatch(
            cu_seqlens_q=cu_seqlens_q,
            context_lens=context_lens,
            page_table=page_table.view(batch.page_table.shape),
            max_seqlen_q=batch.max_seqlen_q,
            max_context_len=batch.max_context_len,
            num_decodes=batch.num_decodes,
        )
        samples = StepSamples(plan, batch, paged)
        groups = self._policies.groups(plan, batch, paged, samples.samples)
        step = PagedStep(self._pages, paged, slots, groups)
        logits = forward(self._loaded, step, input_ids, positions, logit_rows)
        samples.collect(groups)
        return logits, samples


def _lone(batch: HostBatch) -> Iterator[tuple[slice, slice]]:
    """The tokens and the sequences of those that compute one token, which the step before this may have drawn."""
    if not batch.groups:
        yield slice(batch.num_decodes), slice(batch.num_decodes)
    for group in batch.groups:
        count = group.num_decodes
        tokens, sequences = group.rows.start, group.sequences.start
        yield slice(tokens, tokens + count), slice(sequences, sequences + count)


class _Drawn:
    """What a step has drawn by request, the log-probabilities, and what was measured, on their way to the host."""

    def __init__(
        self, drawing: list[Chunk], tokens: torch.Tensor, logprobs: StepLogprobs, samples: StepSamples | None
    ) -> None:
        self._drawing = drawing
        self._tokens = OnItsWay(tokens)
        self._logprobs = logprobs
        self._samples = samples

    def __call__(self) -> dict[str, list[int]]:
        [drawn] = self._tokens.lists()
        self._logprobs.deliver()
        if self._samples is not None:
            self._samples.deliver()
        tokens = iter(drawn)
        return {chunk.request.id: list(islice(tokens, chunk.num_draws)) for chunk in self._drawing}
