"""The disk tier of an engine: its folder, and the namespace of what it keeps there."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from longreach_patches import LoadedModel

from longreach.engine.device.forward_pass import ForwardPass
from longreach.engine.device.ranks.leader import Ranks
from longreach.engine.device.ranks.process_group import LOADING, Joined
from longreach.engine.device.ranks.rank_places import RankPlaces
from longreach.engine.disk.disk_store import DiskStore
from longreach.engine.kv_cache.disk_tier import DiskTier
from longreach.engine.kv_cache.host_tier import HostTier
from longreach.engine.messages import EngineConfig

_DIGITS = 32  # of the name of a namespace
_DIGEST = "entries/{}"  # by which a rank tells its own
_SAMPLES = 64  # numbers of each weight that the namespace depends on


def open_disk(
    config: EngineConfig, joined: Joined, computing: ForwardPass, host: HostTier | None, ranks: Ranks | None = None
) -> None:
    """Put the disk tier below the `host` tier, if there is to be one. All of it is rank 0's; of the other `ranks` their
    host memory is needed, and `tell_digest`.

    Raises:
        ValueError: its folder cannot be had; the message names the cure.
    """
    if config.kv_disk is None:
        return
    assert host is not None
    assert computing.host is not None
    memory = computing.host if ranks is None else RankPlaces(computing.host, ranks)
    namespace = namespace_of(computing, joined)
    store = DiskStore(Path(config.kv_disk), namespace, config.kv_disk_bytes, waits=config.handover)
    host.disk = DiskTier(store, host, memory, computing.pages.shape.bytes_per_page)


def namespace_of(computing: ForwardPass, joined: Joined) -> str:
    """Hexadecimal digits that stand for all that entries depend on beside their key: the weights, and the layout, of
    each rank, and how many ranks split what.

    Keys have the tokens, the salt, the attention policy and the model's name already.
    """
    layout, own = joined.layout, _digest(computing)
    if joined.store is None:
        return own
    names = [_DIGEST.format(rank) for rank in range(1, layout.size)]
    joined.store.wait(names, LOADING)
    others = [joined.store.get(name).decode() for name in names]
    split = f"{layout.tensor_size} {layout.context_size}"
    return hashlib.sha256(" ".join([split, own, *others]).encode()).hexdigest()[:_DIGITS]


def tell_digest(computing: ForwardPass, joined: Joined) -> None:
    """Tell rank 0 what `namespace_of` has to know of this one."""
    assert joined.store is not None
    joined.store.set(_DIGEST.format(joined.layout.rank), _digest(computing))


def _digest(computing: ForwardPass) -> str:
    """Hexadecimal digits that stand for one rank's weights and layout."""
    pages, states = computing.pages, computing.states
    digest = hashlib.sha256(f"{pages.shape!r} {None if states is None else states.shape!r}".encode())
    digest.update(_weights(computing.loaded))
    for scales in pages.scales:
        for tensor in scales or ():
            digest.update(_bytes(tensor))
    return digest.hexdigest()[:_DIGITS]


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
