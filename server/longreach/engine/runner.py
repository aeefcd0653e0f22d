"""One forward pass: arrays to the device, the patched model over the pages, a token for every row that draws one."""

from __future__ import annotations

from itertools import islice

import torch
from longreach_kernels import PagedBatch
from longreach_patches import KVPages, LoadedModel, PagedStep

from .batch import BatchBuilder, HostBatch
from .errors import DeviceLostError
from .graphs import DecodeGraphs
from .plan import StepPlan
from .sampler import Draw, SamplingTensors, sample


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


class Runner:
    """Executes plans on one device. It keeps no state of requests but the table of their pages."""

    def __init__(self, loaded: LoadedModel, pages: KVPages, builder: BatchBuilder, graphs: DecodeGraphs | None) -> None:
        self._loaded = loaded
        self._pages = pages
        self._builder = builder
        self._graphs = graphs
        self._vocab_size = loaded.config.vocab_size
        self._previous: torch.cuda.Event | None = None

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> dict[str, list[int]]:
        """Compute every chunk of `plan`; the tokens (or NOT_A_NUMBER) of each request whose chunk draws any."""
        batch = self._builder.build(plan)
        drawing = [chunk for chunk in plan.chunks if chunk.num_draws]
        if self._graphs is not None and plan.is_decode_only:
            logits = self._graphs.replay(batch)
        else:
            logits = self._eager(batch)
        if not drawing:
            self._wait_for_previous_step()
            return {}
        draws = [Draw(chunk.request, after) for chunk in drawing for after in range(chunk.num_draws)]
        tokens = iter(sample(logits, SamplingTensors.of(draws, self._vocab_size, self._loaded.device)).tolist())
        return {chunk.request.id: list(islice(tokens, chunk.num_draws)) for chunk in drawing}

    def clean(self, pages: list[int]) -> None:
        """Fill pages with zeros."""
        self._pages.clear(pages)

    def recover(self) -> None:
        """Give cached memory back after a step that failed.

        Raises:
            DeviceLostError: the error was one that CUDA does not recover from.
        """
        self._previous = None
        if self._loaded.device.type == "cpu":
            return
        try:
            torch.cuda.synchronize(self._loaded.device)
            torch.cuda.empty_cache()
        except RuntimeError as error:  # torch's errors of CUDA are among them
            raise DeviceLostError(str(error).strip().partition("\n")[0]) from error

    def _wait_for_previous_step(self) -> None:
        """Let the host run one step ahead of the GPU and no further, so that progress and cancelling mean something."""
        if self._loaded.device.type == "cpu":
            return
        if self._previous is not None:
            self._previous.synchronize()
        self._previous = torch.cuda.Event()
        self._previous.record()

    def _eager(self, batch: HostBatch) -> torch.Tensor:
        device = self._loaded.device
        long = upload([batch.input_ids, batch.positions, batch.slots, batch.draw_rows], device)
        short = upload([batch.cu_seqlens_q, batch.context_lens, batch.page_table.reshape(-1)], device)
        input_ids, positions, slots, draw_rows = long
        cu_seqlens_q, context_lens, page_table = short
        paged = PagedBatch(
            cu_seqlens_q=cu_seqlens_q,
            context_lens=context_lens,
            page_table=page_table.view(batch.page_table.shape),
            max_seqlen_q=batch.max_seqlen_q,
            max_context_len=batch.max_context_len,
            num_decodes=batch.num_decodes,
        )
        return forward(self._loaded, PagedStep(self._pages, paged, slots), input_ids, positions, draw_rows)


def upload(arrays: list, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Copy numpy arrays of one dtype to the device in a single transfer, without waiting for it."""
    hosts = [torch.from_numpy(array) for array in arrays]
    if device.type == "cpu":
        return tuple(hosts)
    packed = torch.cat(hosts).pin_memory().to(device, non_blocking=True)
    return packed.split([host.numel() for host in hosts])
