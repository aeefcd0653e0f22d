"""One forward pass: arrays to the device, the patched model over the pages, a token for every row that draws one.

On a GPU nothing here waits for it. The tokens that a step draws stay there for the next one, and are copied to the host
behind it; whoever wants them waits for that copy alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from itertools import accumulate, islice

import numpy as np
import torch
from longreach_kernels.compile_beside import KernelsBeside

from longreach.engine.device.attended_blocks import StepAttended
from longreach.engine.device.batch_builder import BatchBuilder, HostBatch
from longreach.engine.device.forward_pass import ForwardPass
from longreach.engine.device.policies.mass_samples import StepSamples
from longreach.engine.device.ranks.leader import Ranks
from longreach.engine.device.ranks.process_group import leave
from longreach.engine.device.ranks.rank_messages import Compute, Move
from longreach.engine.errors import DeviceLostError
from longreach.engine.kv_cache.offload_index import CacheMoves
from longreach.engine.requests.step_plan import Chunk, StepPlan
from longreach.engine.sampling.logit_processors import Draw
from longreach.engine.sampling.logprobs import StepLogprobs
from longreach.engine.sampling.sampler import SamplingTensors, sample
from longreach.util.transfer import DeviceSpan, OnItsWay, moved, upload


class Runner:
    """Executes plans on one device, and has the other `ranks` do their part of them.

    It keeps of requests the table of their pages, on the host and on the device, and there the token each drew last.
    With `kernels` no step waits for the compilation of one.
    """

    def __init__(
        self,
        computing: ForwardPass,
        builder: BatchBuilder,
        ranks: Ranks | None = None,
        kernels: KernelsBeside | None = None,
    ) -> None:
        self._loaded = computing.loaded
        self.overlaps = self._loaded.device.type == "cuda"
        self._computing = computing
        self._builder = builder
        self._ranks = ranks
        self._kernels = kernels
        self._vocab_size = self._loaded.config.vocab_size
        self._seconds: float | None = None

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Callable[[], dict[str, list[int]]]:
        """Compute every chunk of `plan`; the result waits for the tokens that were drawn."""
        batch = self._builder.build(plan)
        span = DeviceSpan() if self._loaded.device.type == "cuda" else None
        with contextlib.nullcontext() if self._kernels is None else self._kernels.guarded():
            logits, samples = self._logits(plan, batch)
        attended = self._computing.attended(plan)
        drawing = [chunk for chunk in plan.chunks if chunk.num_draws]
        draws = [Draw(chunk.request, chunk.drafts[:after]) for chunk in drawing for after in range(chunk.num_draws)]
        tokens = logits.new_empty(0, dtype=torch.int64)
        if draws:
            how = SamplingTensors.of(draws, self._vocab_size)
            tokens = sample(self._drawing_rows(logits, plan), moved(how, self._loaded.device))
        drawn = _Drawn(drawing, tokens, StepLogprobs(plan, logits, tokens), samples, attended)
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

    def move(self, moves: CacheMoves) -> None:
        """As `StepRunner.move`."""
        if self._ranks is not None and self._computing.has_to_do(moves):
            self._ranks.send(Move(moves))
        self._computing.move(moves)

    def recover(self) -> None:
        """Give cached memory back after a step that failed.

        Raises:
            DeviceLostError: the error was one that CUDA does not recover from.
        """
        self._builder.forget()
        if self._loaded.device.type == "cpu":
            return
        try:
            torch.cuda.synchronize(self._loaded.device)
            torch.cuda.empty_cache()
        except RuntimeError as error:  # torch's errors of CUDA are among them
            raise DeviceLostError(_first_line(error)) from error

    def close(self) -> None:
        """As `StepRunner.close`."""
        if self._kernels is not None:
            self._kernels.close()
        if self._ranks is not None:
            self._ranks.dismiss()
            self._computing.close()
            leave()
            self._ranks.close()

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
        slots = np.array([chunk.request.seq_slot for chunk in drawing])
        last = np.cumsum([chunk.num_draws for chunk in drawing]) - 1
        slots, last = upload([slots, last], self._loaded.device)
        # What is not a number ends its request one step late; until then it stands for some token.
        self._computing.drawn[slots] = tokens[last].clamp(min=0)

    def _logits(self, plan: StepPlan, batch: HostBatch) -> tuple[torch.Tensor, StepSamples | None]:
        if self._ranks is None:
            return self._computing.logits(batch, plan)
        self._ranks.send(Compute(batch))
        try:
            return self._computing.logits(batch, plan)
        except Exception as error:  # the other ranks wait for this one's part of a sum, for ever
            raise DeviceLostError(f"a step failed on one rank of several: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


class _Drawn:
    """What a step has drawn by request, the log-probabilities, and what was measured, on their way to the host."""

    def __init__(
        self,
        drawing: list[Chunk],
        tokens: torch.Tensor,
        logprobs: StepLogprobs,
        samples: StepSamples | None,
        attended: StepAttended | None,
    ) -> None:
        self._drawing = drawing
        self._tokens = OnItsWay(tokens)
        self._logprobs = logprobs
        self._samples = samples
        self._attended = attended

    def __call__(self) -> dict[str, list[int]]:
        [drawn] = self._tokens.lists()
        self._logprobs.deliver()
        if self._attended is not None:
            self._attended.deliver()
        tokens = iter(drawn)
        found = {chunk.request.id: list(islice(tokens, chunk.num_draws)) for chunk in self._drawing}
        if self._samples is not None:
            self._samples.deliver(found)
        return found
