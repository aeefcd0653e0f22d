"""Reformer's attention within hash buckets (Kitaev et al. 2020), as transformers implements it."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor, nn
from transformers import ReformerConfig
from transformers.models.reformer.modeling_reformer import LSHSelfAttention

CHUNK = 64


class _Given(nn.Module):
    """Stands where a projection would: gives back the numbers that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: Tensor | None = None

    def forward(self, _: Tensor) -> Tensor:
        """(B, N, H D), whatever the hidden states are."""
        assert self.numbers is not None
        return self.numbers


@lru_cache(maxsize=16)
def _layer(heads: int, channels: int, length: int, hashes: int, device: torch.device) -> LSHSelfAttention:
    exponent = (2 * length // CHUNK).bit_length() - 1  # two buckets for each chunk, as the paper has it
    # Many buckets are hashed in two steps (the paper's section 2): the directions would outweigh the keys.
    buckets = [2 ** (exponent // 2), 2 ** (exponent - exponent // 2)] if exponent > 7 else 2**exponent
    config = ReformerConfig(
        attention_head_size=channels,
        num_attention_heads=heads,
        hidden_size=heads * channels,
        lsh_attn_chunk_length=CHUNK,
        lsh_num_chunks_before=1,
        lsh_num_chunks_after=0,
        lsh_attention_probs_dropout_prob=0.0,
        num_hashes=hashes,
        num_buckets=buckets,
        hash_seed=0,
        is_decoder=True,
    )
    layer = LSHSelfAttention(config)
    layer.query_key, layer.value = _Given(), _Given()  # pyright: ignore[reportAttributeAccessIssue]
    return layer.to(device)


def reformer(q: Tensor, k: Tensor, v: Tensor, hashes: int = 4) -> Tensor:
    """Causal LSH attention with ``hashes`` rounds: queries and keys are the same vectors, ``q``; ``k`` is not read.

    A key is the query's direction, of length 1, and a query does not see itself unless it sees nothing else (the
    paper's section 2, "shared-QK"). What else lies in a chunk depends on later tokens, too, since buckets are cut into
    chunks in order: an output is not a function of the tokens before it alone.

    Args:
        q, v: (B, H, N, D); N a multiple of 64. Sets torch's seed, from which the hashes are drawn.

    Returns:
        Like q.

    Raises:
        ValueError: N is no multiple of 64.
    """
    heads, length, channels = q.shape[1:]
    if length % CHUNK:
        raise ValueError(f"q: Reformer's chunks need a length that is a multiple of {CHUNK}, got {length}")
    layer = _layer(heads, channels, length, hashes, q.device)
    assert isinstance(layer.query_key, _Given)
    assert isinstance(layer.value, _Given)
    layer.query_key.numbers, layer.value.numbers = (x.transpose(1, 2).flatten(2) for x in (q, v))
    out = layer(layer.query_key.numbers).hidden_states
    layer.query_key.numbers = layer.value.numbers = None  # or the graph of the last call would live on
    return out.unflatten(2, (heads, channels)).transpose(1, 2)


def shared_keys(q: Tensor) -> Tensor:
    """The keys that Reformer's queries ``q`` (B, H, N, D) stand for, at a scale of 1."""
    return torch.nn.functional.normalize(q.float(), dim=-1)
