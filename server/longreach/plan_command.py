"""`longreach plan`: what a model takes of a device's memory, and the requests that fit, from its config alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from longreach_patches import (
    Footprint,
    PatchError,
    RankLayout,
    brings_kv_scales,
    check_files_if_any,
    layer_masks,
    load_config,
    resolve_device,
    resolve_dtype,
    resolve_kv_dtype,
    rope,
    rope_tables,
    scheme_of,
)
from rich import box
from rich.console import Console
from rich.table import Table
from transformers import PretrainedConfig

from longreach import gguf_source, hub
from longreach.engine.kv_cache.state_allocator import SLOTS_PER_REQUEST
from longreach.engine.messages import EngineConfig
from longreach.engine.startup.capacity import (
    Capacity,
    Demand,
    arch_of,
    batched_tokens,
    bounded_layers,
    host_places,
    host_tokens,
    readable,
    state_places,
)
from longreach.engine.startup.host_memory import HostMemory, host_memory
from longreach.engine.startup.vocabulary import check_vocabulary
from longreach.errors import quoted
from longreach.setting_values import parse_bytes
from longreach.text.tokenizer import Tokenizer

__all__ = ["Forecast", "PatchError", "Row", "forecast"]

# Sizes that GPUs are sold in, where none is named and none is there.
_GPU_MEMORY = [size << 30 for size in (24, 48, 80, 96, 141)]
_LEAST_GPU_MEMORY = 64 << 20
_TABLE_WIDTH = 100


@dataclass(frozen=True)
class Row:
    """One way to serve the model, on `gpus` devices; `context_parallel_size` of them have the same weights. Sizes are
    bytes on each device; `problem` says why nothing fits.

    `kv_bytes_per_request` is what the longest request takes of the KV cache, on each device; `windows` says whether
    some layers keep a window only, so that how many tokens fit depends on the length of requests. `host_kv_tokens` are
    what host memory keeps of the tokens that are evicted; `state_bytes` what a slot for recurrent states takes, of a
    model that keeps some.
    """

    device: str
    gpus: int
    memory_bytes: int
    kv_dtype: str
    weight_bytes: int
    step_bytes: int
    kv_bytes_per_token: int
    capacity: Capacity | None
    kv_bytes_per_request: int = 0
    windows: bool = False
    host_kv_tokens: int = 0
    problem: str | None = None
    context_parallel_size: int = 1
    state_bytes: int = 0

    def as_dict(self) -> dict[str, Any]:
        """The row as JSON has it."""
        row = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "capacity"}
        fits = self.capacity
        return row | {
            "kv_tokens": 0 if fits is None else fits.kv_tokens,
            "max_model_len": 0 if fits is None else fits.max_model_len,
            "concurrency": 0.0 if fits is None else round(fits.concurrency, 2),
            "state_slots": 0 if fits is None else fits.state_slots,
        }


@dataclass(frozen=True)
class Forecast:
    """All rows of one model; `note` is what a server says at its start of the length of its requests, or None.
    `quantization` names the formats of quantised weights."""

    model: str
    model_type: str
    dtype: str
    rows: tuple[Row, ...]
    note: str | None = None
    quantization: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """The forecast as JSON has it."""
        return {
            "model": self.model,
            "model_type": self.model_type,
            "dtype": self.dtype,
            "quantization": self.quantization,
            "note": self.note,
            "rows": [row.as_dict() for row in self.rows],
        }

    def print(self) -> None:
        """Print a table to the terminal."""
        numbers = self.dtype if self.quantization is None else f"{self.quantization}; {self.dtype}"
        table = Table(title=f"{self.model} ({self.model_type}, {numbers})", title_justify="left", box=box.SIMPLE)
        columns = ("devices", "memory", "weights", "KV type", "KV/token", "KV tokens", "longest", "at once")
        for name in columns:
            table.add_column(name, justify="left" if name == "devices" else "right", no_wrap=True)
        for row in self.rows:
            sizes = readable(row.memory_bytes), readable(row.weight_bytes)
            kv = row.kv_dtype.partition("_")[0], readable(row.kv_bytes_per_token)
            fits = row.capacity
            found = ["-"] * 3
            if fits is not None:
                found = [f"{fits.kv_tokens:,}", f"{fits.max_model_len:,}", f"{fits.concurrency:.2f}"]
            shared = f" ({row.gpus // row.context_parallel_size} x {row.context_parallel_size})"
            devices = f"{row.gpus} {row.device}" + (shared if row.context_parallel_size > 1 else "")
            table.add_row(devices, *sizes, *kv, *found)
        console = Console()
        console.width = max(console.width, _TABLE_WIDTH)
        console.print(table)
        console.print(
            "Sizes are those on each device. longest: tokens of prompt and answer; at once: how many of those."
        )
        for row in self.rows[:1]:
            if row.windows:
                console.print(
                    "KV/token is of all layers that attend. Layers with windows keep their windows only: KV tokens "
                    "are those of requests of the longest length, and fewer fit in shorter ones."
                )
        if any(row.context_parallel_size > 1 for row in self.rows):
            console.print("(m x n): the weights in m parts, each on n devices that share long steps by tokens.")
        if self.note is not None:
            console.print(self.note, highlight=False)
        for row in {(r.gpus, r.memory_bytes): r for r in self.rows if r.capacity and r.capacity.state_slots}.values():
            fits = row.capacity
            assert fits is not None
            console.print(
                f"{row.gpus} {row.device} of {readable(row.memory_bytes)}: {fits.state_slots} slots of "
                f"{readable(row.state_bytes)} for layers that keep a state; a running request has "
                f"{SLOTS_PER_REQUEST}, the others are copies that later requests start from. KV/token is of the layers "
                "that attend."
            )
        for row in {row.kv_dtype: row for row in self.rows if row.host_kv_tokens}.values():
            copies = ", in requests of the longest length with a copy of the state each" if row.state_bytes else ""
            console.print(f"Host memory keeps {row.host_kv_tokens:,} tokens ({row.kv_dtype}) that are evicted{copies}.")
        for problem in dict.fromkeys(row.problem for row in self.rows if row.problem):
            console.print(f"-: {problem}", highlight=False)


def _memory_of(text: str) -> int:
    """Bytes of a GPU's memory from text such as 80GiB.

    Raises:
        ValueError: it is none, or of no GPU.
    """
    size = parse_bytes(text, "--gpu-memory")
    if size < _LEAST_GPU_MEMORY:
        raise ValueError(f"--gpu-memory: {quoted(text)} are {size} bytes, and no GPU has so few; give a unit: 80GiB")
    return size


def forecast(
    name: str,
    config: EngineConfig,
    gpu_memory: list[str],
    tensor_sizes: list[str],
    kv_dtypes: list[str],
    context_sizes: Sequence[str] = ("1",),
    tokenizer: str | None = None,
) -> Forecast:
    """Plan for every combination of GPU memory (as text with a unit), numbers of ranks and type of the KV pages.

    With `device` "cpu" it is this machine. Without `gpu_memory` it is this machine's GPU, or else the sizes that GPUs
    are sold in. Ranks share the memory of a CPU. `tokenizer` is checked as a server would.

    Raises:
        ModelFilesError: there is no config.json to be had.
        TokenizerError: the other tokenizer cannot be read.
        PatchError: the config cannot be read, or the model is not supported.
        ValueError: an argument makes no sense, the other tokenizer has too many tokens, the model cannot be split or
            keep bounds so, or the longest request asked for is longer than the model's positions.
    """
    layouts = [
        RankLayout(_count("--tensor-parallel-size", tensor), _count("--context-parallel-size", context))
        for tensor in tensor_sizes
        for context in context_sizes
    ]
    for kv_dtype in kv_dtypes:
        resolve_kv_dtype(kv_dtype, torch.bfloat16)
    gguf = gguf_source.find(config.model, config.revision)
    if gguf is None:
        files = hub.small_files(config.model, config.revision)
    else:
        files = gguf_source.described(gguf, tokenizer=False)
    model = load_config(str(files), config.hf_overrides, config.quantization)
    scheme = scheme_of(model)
    if files == Path(config.model):  # of a hub id the cache may have a part, which a plan does not need
        check_files_if_any(files, () if scheme is None else scheme.types)
    if tokenizer is not None:
        check_vocabulary(tokenizer, Tokenizer.load(str(hub.tokenizer_files(tokenizer))).id_limit, model)
    on_gpu = config.device != "cpu"
    if not on_gpu and gpu_memory:
        raise ValueError("--gpu-memory says nothing about a CPU; leave it out, or --device cpu")
    dtype = resolve_dtype(config.dtype, torch.device("cuda" if on_gpu else "cpu"), model)
    host = None if on_gpu else host_memory()
    memory = [_memory_of(text) for text in gpu_memory] if host is None else [host.available]
    # Of a GPU that is not here nothing but its memory is known.
    here = on_gpu and not gpu_memory and torch.cuda.is_available()
    arch = arch_of(resolve_device(config.device)) if here else 0
    rows = []
    for size in memory or _own_memory(config) or _GPU_MEMORY:
        for layout in layouts:
            bounded = bounded_layers(config, layer_masks(model), layout)
            for kv_dtype in kv_dtypes:
                types = dtype, resolve_kv_dtype(kv_dtype, dtype, brings_scales=brings_kv_scales(model))
                part = Footprint.of(model, types[0], config.page_size, types[1], layout, bounded, arch)
                rows.append(_row(part, model, config, host, layout, size))
    notes = [_of_rope(model, config)]
    if gguf is not None:
        formats = None if scheme is None else scheme.name
        notes.insert(0, gguf_source.dequantized(str(gguf), str(dtype), rows[0].weight_bytes, formats))
    note = ". ".join(text for text in notes if text is not None)
    formats = None if scheme is None else scheme.name
    return Forecast(name, model.model_type, _name(dtype), tuple(rows), note or None, formats)


def _of_rope(model: PretrainedConfig, config: EngineConfig) -> str | None:
    """What is to be said of its rotary frequencies. Those of a request take a few kilobytes, whatever there are."""
    if config.rope_by_request:
        return rope_tables.described(rope_tables.tables_of(model, config.max_model_len))
    return rope.described(model, config.max_model_len or rope.longest_sequence(model))


def _row(
    part: Footprint,
    model: PretrainedConfig,
    config: EngineConfig,
    host: HostMemory | None,
    layout: RankLayout,
    memory: int,
) -> Row:
    count, on_gpu = layout.size, host is None
    tokens = batched_tokens(config, part, memory if on_gpu else None, layout.context_size)
    demand = Demand.of(part, model, config, tokens)
    if config.kv_cache_bytes is not None:
        room = config.kv_cache_bytes
    elif on_gpu:
        room = demand.gpu_room(memory, config.gpu_memory_utilization)
    else:
        room = demand.host_room(memory // count)
    capacity, problem = None, None
    page_bytes = part.pages.bytes_per_page
    # Of another machine's memory nothing is known; this one's is also what a CPU's pages take.
    left = HostMemory(config.kv_offload_bytes) if host is None else host.less(room // page_bytes * count * page_bytes)
    state_bytes = 0 if demand.states is None else demand.states.slot_bytes
    places = host_places(config, count * page_bytes, left, count * state_bytes)
    try:
        capacity = demand.fit(room, "" if host is None or config.kv_cache_bytes is not None else host.why)
    except ValueError as error:
        problem = str(error)
    longest = 0 if capacity is None else capacity.max_model_len
    return Row(
        device="GPU" if on_gpu else "CPU",
        gpus=count,
        memory_bytes=memory,
        kv_dtype=_name(part.pages.dtype),
        weight_bytes=demand.weight_bytes,
        step_bytes=demand.step_bytes,
        kv_bytes_per_token=demand.token_bytes,
        capacity=capacity,
        kv_bytes_per_request=demand.request_bytes(longest),
        windows=bool(demand.groups.windowed),
        host_kv_tokens=host_tokens(places, demand.groups, longest, state_places(page_bytes, state_bytes)),
        problem=problem,
        context_parallel_size=layout.context_size,
        state_bytes=state_bytes,
    )


def _own_memory(config: EngineConfig) -> list[int]:
    if not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_properties(resolve_device(config.device)).total_memory]


def _count(flag: str, text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 1024:
        raise ValueError(f"{flag}: give a number of GPUs, got {quoted(text)}")
    return int(text)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
