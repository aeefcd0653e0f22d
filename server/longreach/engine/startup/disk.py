"""The disk tier of an engine: its folder, and the namespace of what it keeps there."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from longreach_patches import LoadedModel

from longreach.engine.device.forward_pass import ForwardPass
from longreach.engine.disk.disk_store import DiskStore
from longreach.engine.kv_cache.disk_tier import DiskTier
from longreach.engine.kv_cache.host_tier import HostTier
from longreach.engine.messages import EngineConfig

_SAMPLES = 64  # numbers of each weight that the namespace depends on


def check_disk(config: EngineConfig) -> None:
    """See that the settings of the disk tier go with the others.

    Raises:
        ValueError: they do not; the message names the cure.
    """
    if config.kv_disk is None:
        if config.kv_disk_bytes:
            raise ValueError("--kv-disk-bytes bounds the folder of --kv-disk; name that, too")
        return
    if not config.kv_disk_bytes:
        raise ValueError("--kv-disk: say how many bytes the folder may have, with --kv-disk-bytes 100GiB")
    if not config.kv_offload_bytes:
        raise ValueError(
            "--kv-disk: entries pass through host memory; give --kv-offload-bytes, best as much as the longest "
            "document takes in the KV cache"
        )
    if config.tensor_parallel_size * config.context_parallel_size > 1:
        raise ValueError("--kv-disk is for one GPU; leave it out where a model is split over several")


def open_disk(config: EngineConfig, computing: ForwardPass, host: HostTier | None) -> None:
    """Put the disk tier below the `host` tier, if there is to be one.

    Raises:
        ValueError: its folder cannot be had; the message names the cure.
    """
    if config.kv_disk is None:
        return
    assert host is not None
    assert computing.host is not None
    store = DiskStore(Path(config.kv_disk), namespace_of(computing), config.kv_disk_bytes)
    host.disk = DiskTier(store, host, computing.host, computing.pages.shape.bytes_per_page)


def namespace_of(computing: ForwardPass) -> str:
    """Hexadecimal digits that stand for all that entries depend on beside their key: the weights, and the layout.

    Keys have the tokens, the salt, the attention policy and the model's name already.
    """
    pages, states = computing.pages, computing.states
    digest = hashlib.sha256(f"{pages.shape!r} {None if states is None else states.shape!r}".encode())
    digest.update(_weights(computing.loaded))
    for scales in pages.scales:
        for tensor in scales or ():
            digest.update(_bytes(tensor))
    return digest.hexdigest()[:32]


def _weights(loaded: LoadedModel) -> bytes:
    """A digest of the model's config, and of some numbers of each of its weights and buffers."""
    digest = hashlib.sha256(loaded.config.to_json_string().encode())
    for name, tensor in sorted(loaded.patched.model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        flat = tensor.detach().reshape(-1)
        digest.update(_bytes(flat[:: max(1, flat.numel() // _SAMPLES)]))
    return digest.digest()


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes()
