"""The states of Mamba-2: layers that keep a state of fixed size for each sequence, in a slot, in place of keys.

`ssd_scan` is the recurrence (state space duality, Dao and Gu 2024). `longreach_kernels.delta` has what it shares with
the gated delta rule: the `StateBatch` of a step's sequences and their slots, `short_convolution` before it and
`gated_norm` after it. No call waits for the host, so that steps replay as CUDA graphs.
"""

from longreach_kernels.ssm.scan import MAX_STATE_SIZE, ssd_scan

__all__ = ["MAX_STATE_SIZE", "ssd_scan"]
