"""How many KV pages fit, and so which requests: the same arithmetic for `longreach plan` and for the server's start.

The plan knows the weights, the pages and the largest step from the model's config, and assumes what a GPU's driver and
libraries take. The server measures what is in use and what the largest step takes, and reserves what was planned even
where it measures less: its report is the plan's, unless it needs more than was assumed or others use its memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from longreach_kernels import Mask
from longreach_patches import Footprint, RankLayout, chosen_layers, rope
from transformers import PretrainedConfig

from longreach.engine.kv_cache.groups import PageGroups
from longreach.engine.messages import EngineConfig
from longreach.engine.requests.prompt_lookup import MAX_DRAFTS
from longreach.engine.startup.host_memory import HostMemory, readable
from longreach.engine.startup.state_demand import StateDemand

# Tokens in a step: enough to keep a GPU's matrix units busy; on a CPU few enough that running answers keep moving.
_GPU_BATCHED_TOKENS = 8192
_CPU_BATCHED_TOKENS = 512
# On a GPU where each chunk unpacks the weights anew, and with so much memory that the activations of a longer one take
# little of it.
_UNPACKING_BATCHED_TOKENS = 16384
_UNPACKING_LEAST_BYTES = 64 << 30
# A CPU's pages take at most this share of the available memory, and no more than this many longest prompts need.
_CPU_MEMORY_SHARE = 0.25
_CPU_LONGEST_PROMPTS = 2
# Left for graphs, libraries and fragmentation on a GPU, beside the largest step.
_GPU_RESERVE_BYTES = 1 << 30
# What a CUDA context with the kernels' code takes, and the matrix library's workspace in a step.
_GPU_CONTEXT_BYTES = 640 << 20
_GPU_MATMUL_BYTES = 64 << 20
# What copies between a GPU and pinned host memory are counted to move at least: PCIe 4.0, 16 lanes, one direction.
_LINK_BYTES_PER_SECOND = 20e9
# The part of the bound on inter-token delay that bringing pages back may take; those they replace may take as much.
_LINK_SHARE = 0.5


def arch_of(device: torch.device) -> int:
    """A GPU's compute capability as one number (90 for 9.0); 0 for a CPU."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def batched_tokens(config: EngineConfig, footprint: Footprint, gpu_memory: int | None, context_size: int = 1) -> int:
    """The token budget of a step: the one that is set, or by default as many on each context rank as one alone would
    have. `gpu_memory` are the bytes of a GPU, None for a CPU.

    Where products of many tokens unpack their weights first, a larger chunk does that less often. `max_itl` still
    bounds the steps beside answers.
    """
    if config.max_batched_tokens is not None:
        return config.max_batched_tokens
    unpacks = footprint.scratch_bytes > 0 and not config.batch_invariant
    if gpu_memory is None:
        tokens = _CPU_BATCHED_TOKENS
    elif unpacks and gpu_memory >= _UNPACKING_LEAST_BYTES:
        tokens = _UNPACKING_BATCHED_TOKENS
    else:
        tokens = _GPU_BATCHED_TOKENS
    return tokens * context_size


@dataclass(frozen=True)
class Capacity:
    """`num_pages` pages, and the longest request, prompt and answer, that is served with them.

    `groups` are the model's groups of layers, each of which takes pages of its own. Where some keep a window only, how
    many tokens fit depends on the length of their sequences. `state_slots` are for recurrent states, of a model that
    keeps some.
    """

    num_pages: int
    groups: PageGroups
    max_model_len: int
    state_slots: int = 0

    @property
    def kv_tokens(self) -> int:
        """Tokens that fit into all pages together, in sequences of the longest length."""
        if not self.groups.windowed:
            return self.num_pages * self.groups.page_size
        return int(self.num_pages * self.max_model_len // self.groups.ids_for(self.max_model_len))

    @property
    def concurrency(self) -> float:
        """How many of the longest requests fit at once."""
        return self.kv_tokens / self.max_model_len


@dataclass(frozen=True)
class Demand:
    """What a model needs of the memory of one device; all sizes in bytes.

    Attributes:
        weight_bytes: of the weights.
        step_bytes: of the largest step's activations, as told from the config.
        token_bytes: of one token in the KV cache, in all layers.
        page_bytes: of one page of a group of layers.
        groups: the groups of layers that take pages.
        step_tokens, step_rows: tokens in the largest step, and how many of them draw the next.
        max_positions: the longest sequence that the model is made for.
        asked_len: the longest request that was asked for, or None.
        selection_bytes: of `step_bytes`, what choosing keys by their bounds takes.
        states: what recurrent states take, of a model that keeps some.
    """

    weight_bytes: int
    step_bytes: int
    token_bytes: int
    page_bytes: int
    groups: PageGroups
    step_tokens: int
    step_rows: int
    max_positions: int
    asked_len: int | None
    selection_bytes: int = 0
    states: StateDemand | None = None

    @classmethod
    def of(cls, footprint: Footprint, model: PretrainedConfig, config: EngineConfig, batched_tokens: int) -> Demand:
        """The demand of a model, whose own config is `model`, served as `config` says.

        Raises:
            ValueError: the length that was asked for is more than the model is made for, or settings for states do not
                go with it; the message names the cure.
        """
        asked, max_positions = config.max_model_len, rope.longest_sequence(model)
        rope.check_length(model, asked)
        tokens = min(batched_tokens, asked or max_positions)
        rows = min(config.max_num_seqs + MAX_DRAFTS, tokens)
        return cls(
            weight_bytes=footprint.weight_bytes,
            step_bytes=footprint.step_bytes(tokens, rows),
            token_bytes=footprint.pages.bytes_per_token,
            page_bytes=footprint.pages.bytes_per_page,
            groups=PageGroups(config.page_size, footprint.pages.windows, batched_tokens),
            step_tokens=tokens,
            step_rows=rows,
            max_positions=max_positions,
            asked_len=asked,
            selection_bytes=footprint.selection_bytes,
            states=StateDemand.of(footprint, config),
        )

    @property
    def wanted_len(self) -> int:
        """The longest request that may be served if it fits."""
        return self.asked_len or self.max_positions

    def planned_use(self) -> int:
        """What a GPU has in use once the weights are there, if nobody else uses it."""
        return self.weight_bytes + _GPU_CONTEXT_BYTES

    def gpu_room(self, total: int, utilization: float, used: int = 0, peak: int = 0) -> int:
        """What is left for pages of a GPU's `total`; `used` and `peak` (of a step in which no keys are chosen) count
        where they exceed the plan."""
        step = max(peak + self.selection_bytes, self.step_bytes + _GPU_MATMUL_BYTES)
        return max(0, int(total * utilization) - max(used, self.planned_use()) - step - _GPU_RESERVE_BYTES)

    def request_bytes(self, length: int) -> int:
        """What a request of `length` tokens takes of the KV cache."""
        return self.groups.ids_for(length) * self.page_bytes

    def host_room(self, available: int) -> int:
        """What pages and states get of a CPU's available memory, the weights being there."""
        enough = _CPU_LONGEST_PROMPTS * self.request_bytes(self.wanted_len) + self._unused_bytes
        if self.states is not None:
            enough += self.states.most_bytes
        return min(enough, int(_CPU_MEMORY_SHARE * available))

    @property
    def _unused_bytes(self) -> int:
        """Of the page that stands where windows have dropped theirs."""
        return self.page_bytes if self.groups.windowed else 0

    def fit(self, room: int, why: str = "") -> Capacity:
        """The pages and states that `room` bytes hold; `why` says what allows no more, for people.

        Raises:
            ValueError: not the length that was asked for, or none at all; the message names the fix.
        """
        slots = 0
        if self.states is not None:
            slots = self.states.slots(room, why)
            room -= slots * self.states.slot_bytes
        num_pages = max(0, (room - self._unused_bytes) // self.page_bytes)
        longest = self.groups.longest(num_pages, self.wanted_len)
        if self.asked_len is not None and longest < self.asked_len:
            raise ValueError(
                f"max_model_len {self.asked_len} needs a KV cache of {readable(self.request_bytes(self.asked_len))} "
                f"and {readable(room)} are there{why}; the longest that fits is --max-model-len {longest}"
            )
        if longest < 2:
            raise ValueError(
                f"no memory is left for the KV cache{why}; use a smaller model or raise --gpu-memory-utilization"
            )
        return Capacity(num_pages, self.groups, longest, slots)


def bounded_layers(config: EngineConfig, own: tuple[Mask, ...], layout: RankLayout) -> tuple[int, ...]:
    """The layers, of those with the masks `own`, that keep bounds of their keys as `config` says.

    Raises:
        ValueError: none could, there are several ranks, or a setting names a layer that is not there; the message names
            the fix.
    """
    if not config.page_bounds:
        return ()
    if layout.size > 1:
        raise ValueError(f"--page-bounds is for one GPU; leave it out, or {layout.flags}")
    layers = chosen_layers(own, config.attention_dense_layers)
    if not layers:
        raise ValueError(
            "--page-bounds: no layer of this model has keys to choose from, since each that attends has a window of "
            "its own or is one of --attention-dense-layers; leave it out"
        )
    return layers


def host_places(config: EngineConfig, page_bytes: int, memory: HostMemory, state_bytes: int = 0) -> int:
    """Places of `page_bytes`, a page each, that `memory` has for the cache as `config` says; of a model whose requests
    keep states, of `state_bytes`.

    Raises:
        ValueError: it is less than a page and a state, more than is there, or for nothing; the message names the fix.
    """
    size = config.kv_offload_bytes
    if not size:
        return 0
    if not config.prefix_cache:
        raise ValueError("--kv-offload-bytes keeps pages of the prefix cache; leave out --no-prefix-cache")
    if state_bytes and config.state_cache_bytes == 0:
        raise ValueError(
            "--kv-offload-bytes keeps what later prompts begin with, and with --state-cache-bytes 0 none begins in the "
            "cache; leave one of them out"
        )
    if size < page_bytes:
        raise ValueError(f"--kv-offload-bytes: one page takes {page_bytes} bytes, got {size}; give more, or 0 for none")
    if state_bytes and size // page_bytes < 1 + state_places(page_bytes, state_bytes):
        least = (1 + state_places(page_bytes, state_bytes)) * page_bytes
        raise ValueError(
            f"--kv-offload-bytes: one page and one copy of a state take {least} bytes, got {size}; give more, or 0 for "
            "none"
        )
    if size > memory.available:
        raise ValueError(
            f"--kv-offload-bytes: {readable(size)} are more than the {readable(memory.available)} of host memory that "
            f"can be had{memory.why}; give less"
        )
    return size // page_bytes


def state_places(page_bytes: int, state_bytes: int) -> int:
    """Places in host memory, of a page each, that one copy of a state takes; 0 for a model that keeps none."""
    return -(-state_bytes // page_bytes)


def host_tokens(places: int, groups: PageGroups, length: int, places_of_state: int) -> int:
    """Tokens that host memory keeps: all of their pages in all groups. Of a model that keeps states, in sequences of
    `length` tokens with one copy of the state each."""
    if not places_of_state:
        return places // len(groups.windows) * groups.page_size
    return places * length // (len(groups.windows) * groups.pages_for(length) + places_of_state)


def restored_pages(max_itl: float, page_bytes: int) -> int:
    """How many pages a step may bring back from the host without holding up running answers beyond `max_itl`."""
    return max(1, int(_LINK_SHARE * max_itl * _LINK_BYTES_PER_SECOND / page_bytes))
