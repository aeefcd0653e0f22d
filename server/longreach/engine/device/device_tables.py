"""The page tables of running requests, on the device. A step brings what has changed in them, not the tables."""

from __future__ import annotations

import torch

from longreach.engine.device.batch_builder import Int64
from longreach.util.transfer import upload


class DeviceTables:
    """(groups, max_num_seqs, max_pages) int32 page ids: of each group of layers a row for each `Request.seq_slot`.

    `batch_builder.BatchBuilder` keeps the same tables on the host, and says of each step what it changed. All of that
    has to be put in, step by step. Whoever computes a step reads rows: later changes do not touch what it has read.
    """

    def __init__(self, num_groups: int, max_num_seqs: int, max_pages: int, device: torch.device) -> None:
        self._tables = torch.zeros((num_groups, max_num_seqs, max_pages), dtype=torch.int32, device=device)

    def update(self, changes: Int64) -> None:
        """Put in the `changes` of a step, as `HostBatch.table_changes`."""
        if not changes.shape[1]:
            return
        [on_device] = upload([changes.reshape(-1)], self._tables.device)
        places, ids = on_device.view(2, -1)
        self._tables.view(-1)[places] = ids.int()

    def rows(self, seq_slots: torch.Tensor, num_pages: int) -> torch.Tensor:
        """(groups, B, num_pages) int32, contiguous: the first pages of the requests at `seq_slots` (B,) int64."""
        return self._tables[:, :, :num_pages].index_select(1, seq_slots)
