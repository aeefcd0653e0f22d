"""Which kernels the start of an engine compiles on several threads, and which it still meets for the first time when it
launches them. Prints both as JSON.

The GPU is a pretended one: tensors are on the CPU, the compiler takes a note and returns at once, and nothing is
launched. Graphs are captured as on a real one, on streams of their own: launches may take other memory then. Run as a
process of its own, because Triton's interpreter, chosen for the other tests, has no compiler. Arguments: a model's
directory, a backend, a dtype of pages.
"""

from __future__ import annotations

import gc
import itertools
import json
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import triton
from longreach.engine.device.forward_pass import StepGraphs
from longreach.engine.device.graphs import mixed
from longreach.engine.device.policies.layer_masks import LayerPolicies
from longreach.engine.scheduling.limits import Limits
from longreach.engine.startup import parallel_compile
from longreach.engine.startup.calibrate import calibrate
from longreach.engine.startup.policy_steps import PolicySteps
from longreach.engine.startup.warmup import warm
from longreach_kernels import decode_needs
from longreach_kernels.backends import resolve as backends
from longreach_kernels.compilation import launches_compile_only
from longreach_patches import (
    Footprint,
    KVPages,
    LoadedModel,
    PageShape,
    compared_tokens,
    compute_both,
    layer_masks,
    load_model,
    resolve_kv_dtype,
)
from triton.backends.compiler import GPUTarget

PAGE = 128
_STEP = (600, 40)  # tokens and rows of the calibration
# Pages and limits as they are planned, and as they turn out.
_PLANNED = 90, Limits(40, 4096, 20000)
_FOUND = 83, Limits(40, 4096, 19001)


class _Driver:
    """A driver of an sm_90 that launches nothing."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


class _Stream:
    """A stream with nothing to wait for."""

    _made = itertools.count()

    def __init__(self, *_: Any) -> None:
        self.cuda_stream = next(self._made)

    def wait_stream(self, stream: _Stream) -> None:
        pass

    def synchronize(self) -> None:
        pass


class _Streams:
    """The current stream, and whether a graph is captured on it."""

    def __init__(self) -> None:
        self.current = _Stream()
        self.capturing = False

    @contextmanager
    def on(self, stream: _Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    @contextmanager
    def capture(self, *_: Any, **__: Any) -> Iterator[None]:
        self.capturing = True
        with self.on(_Stream()):
            yield
        self.capturing = False


class _Compiler:
    """Stands for Triton's compiler: `ahead` and `late` are the kernels that it was called for in either phase."""

    def __init__(self) -> None:
        self.ahead: list[str] = []
        self.late: list[str] = []
        self.starting = False
        self.launches = 0

    def __call__(self, src: Any, target: Any = None, options: Any = None, _env_vars: Any = None) -> Any:
        (self.late if self.starting else self.ahead).append(src.name)
        return SimpleNamespace(run=self._launch, launch_metadata=_nothing, function=None, packed_metadata=None)

    def _launch(self, *_: Any) -> None:
        assert not launches_compile_only()
        self.launches += 1


def pretend(backend: str) -> _Compiler:
    """Let tensors on the CPU pass for tensors on an H200."""
    compiler = _Compiler()
    triton.runtime.driver.set_active(_Driver())  # pyright: ignore[reportArgumentType]
    triton.compiler.compile = compiler
    import_module("longreach_kernels.backends.hopper.backend")  # it is imported by the first call otherwise
    chosen = backends.Backend(backend, "pretended")
    for module in [module for name, module in sys.modules.items() if name.startswith("longreach")]:
        for name, stand_in in (
            ("capability", lambda device: 90),
            ("resolve_backend", lambda *_: chosen),
            ("_processors", lambda device: 132),
            ("processors", lambda device: 132),
        ):
            if hasattr(module, name):
                setattr(module, name, stand_in)
    streams = _Streams()
    torch.cuda.is_current_stream_capturing = lambda: streams.capturing
    torch.cuda.current_stream = lambda device=None: streams.current
    torch.cuda.Stream, torch.cuda.stream = _Stream, streams.on
    torch.cuda.CUDAGraph, torch.cuda.graph = SimpleNamespace, streams.capture
    torch.cuda.graph_pool_handle = _nothing
    mixed.worthwhile = _all_of
    return compiler


def _nothing(*_: Any) -> None:
    pass


def _all_of(steps: Iterable[tuple[int, Callable[[], torch.Tensor]]]) -> list[int]:
    """Of large steps, which are measured on a GPU, that all are worth a graph; each is computed."""
    found = []
    for rows, run in steps:
        run()
        found.append(rows)
    return found


def start(
    loaded: LoadedModel,
    shape: PageShape,
    num_pages: int,
    limits: Limits,
    graphs_over: Callable[[KVPages, torch.Tensor, Limits], StepGraphs],
    policies: LayerPolicies,
) -> None:
    """What `start_rank` does on a GPU, but that numbers which nothing computed are not compared."""
    for tokens in compared_tokens(loaded.patched):
        compute_both(loaded.patched, tokens)
    calibration = calibrate(loaded, PAGE, *_STEP)
    scales = calibration.scales if shape.dtype != loaded.dtype else None
    pages = KVPages(shape, num_pages, loaded.device, scales)
    drawn = torch.zeros(limits.max_num_seqs, dtype=torch.int64)
    graphs_over(pages, drawn, limits).capture()
    warm(loaded, pages, limits)
    PolicySteps(loaded, pages, limits, policies).compute(all_contexts=False)


def _pages_left_by(compile_kernels: Callable[[], None]) -> int:
    """How many of the pages that `compile_kernels` makes are there when it hands the GPU's memory back, the garbage
    collector not having run."""
    made: list[weakref.ref[KVPages]] = []
    left: list[int] = []
    compile_only = parallel_compile.compile_only

    def make(*args: Any) -> KVPages:
        pages = KVPages(*args)
        made.append(weakref.ref(pages))
        return pages

    @contextmanager
    def then_look(*args: Any) -> Iterator[Any]:
        with compile_only(*args) as done:
            yield done
        left.append(sum(reference() is not None for reference in made))

    gc.disable()
    with patch.multiple(parallel_compile, KVPages=make, compile_only=then_look):
        compile_kernels()
    gc.enable()
    assert made
    return left[0]


def main(model: str, backend: str, kv_dtype: str) -> dict[str, Any]:
    """The kernels `ahead`, those that come `late`, the number of launches, and how many planned pages are `left` when
    the real ones are to be made."""
    compiler = pretend(backend)
    loaded = load_model(model, device="cpu", dtype="bfloat16", random_weights=True)
    footprint = Footprint.of(loaded.config, loaded.dtype, PAGE, resolve_kv_dtype(kv_dtype, loaded.dtype))
    shape = footprint.pages
    policies = LayerPolicies(layer_masks(loaded.config), loaded.config.num_attention_heads, shape)
    q = torch.empty(1, loaded.config.num_attention_heads, shape.head_dim, dtype=loaded.dtype)
    page = torch.empty(1, PAGE, shape.num_kv_heads, shape.head_dim, dtype=shape.dtype)
    graphs_over = partial(StepGraphs.of, loaded, policies, partial(decode_needs, q, page, backend=backend))
    left = _pages_left_by(
        lambda: parallel_compile.compile_kernels(
            loaded, footprint, *_PLANNED, policies, calibrated=_STEP, graphs_over=graphs_over
        )
    )
    compiler.starting = True
    with torch.inference_mode():
        start(loaded, shape, *_FOUND, graphs_over, policies)
    return {"ahead": sorted(compiler.ahead), "late": compiler.late, "launches": compiler.launches, "left": left}


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
