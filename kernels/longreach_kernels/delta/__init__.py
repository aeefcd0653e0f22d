"""The gated delta rule: layers that keep a state of fixed size for each sequence, in a slot, in place of keys.

`gated_delta_rule` is the recurrence. `short_convolution` and `decay_and_beta` come before it, `gated_norm` after it. A
step's sequences and their slots are a `StateBatch`. No call waits for the host, so that steps replay as CUDA graphs.
"""

from longreach_kernels.delta.batch import StateBatch
from longreach_kernels.delta.convolution import short_convolution
from longreach_kernels.delta.gates import decay_and_beta
from longreach_kernels.delta.norm import gated_norm
from longreach_kernels.delta.rule import gated_delta_rule

__all__ = ["StateBatch", "decay_and_beta", "gated_delta_rule", "gated_norm", "short_convolution"]
