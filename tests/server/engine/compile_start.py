"""Which kernels the start of an engine compiles on several threads, which it still meets for the first time when it
launches them, and which requests meet that come after it. Prints all as JSON.

The GPU is a pretended one: tensors are on the CPU, the compiler takes a note and returns at once, and nothing is
launched. Graphs are captured as on a real one, on streams of their own: launches may take other memory then. Run as a
process of its own, because Triton's interpreter, chosen for the other tests, has no compiler. Arguments: a model's
directory, a backend, a dtype of pages.
"""

from __future__ import annotations

import gc
import itertools
import json
import random
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import triton
from longreach.engine.device.device_tables import DeviceTables
from longreach.engine.device.forward_pass import ForwardPass, StepGraphs
from longreach.engine.device.graphs import mixed
from longreach.engine.device.policies.layer_masks import LayerPolicies
from longreach.engine.device.ranks.process_group import Joined
from longreach.engine.messages import EngineConfig, Failed, Generate, Sampling
from longreach.engine.scheduling.limits import Limits
from longreach.engine.startup import build, parallel_compile
from longreach.engine.startup.calibrate import calibrate
from longreach.engine.startup.policy_steps import PolicySteps
from longreach.engine.startup.start_rank import RankState
from longreach.engine.startup.warmup import warm
from longreach.policies.values import (
    DENSE,
    AttentionPolicy,
    BigBird,
    Dynamic,
    LocalGlobal,
    Strided,
    VerticalSlash,
    Window,
)
from longreach_kernels import decode_needs
from longreach_kernels.backends import resolve as backends
from longreach_kernels.compilation import launches_compile_only
from longreach_kernels.compile_counts import CompileCounts
from longreach_patches import (
    Footprint,
    KVPages,
    LoadedModel,
    PageShape,
    chosen_layers,
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
# With other numbers than the start has.
ASKED: list[AttentionPolicy] = [
    Window(size=300, sinks=4),
    Window(size=1, sinks=0),
    Strided(stride=256),
    LocalGlobal(window=256),
    BigBird(window=256, random_blocks=2, seed=3),
    VerticalSlash(verticals=(140,), slashes=(0, 300)),
    *[Dynamic(estimator=name, recall=0.8, dense_below=100) for name in ("auto", "antidiagonal", "moments", "pooled")],
    Dynamic(density=0.3, dense_below=0),
    Dynamic(speedup=3, dense_below=0),
    Dynamic(decode_budget=100, dense_below=256),
    Dynamic(recall=1, decode_budget=37),
    Dynamic(recall=0.7, dense_below=0, min_mass=0.97),
    Dynamic(recall=1, decode_budget=64, min_mass=0.98),
]


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
    """Stands for Triton's compiler: `called` are the kernels that it was called for since `phase` was set, by phase."""

    def __init__(self) -> None:
        self.called: dict[str, list[str]] = {"ahead": [], "late": [], "after": []}
        self.phase = "ahead"
        self.launches = 0

    def __call__(self, src: Any, target: Any = None, options: Any = None, _env_vars: Any = None) -> Any:
        self.called[self.phase].append(src.name)
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
            ("upload", _upload),
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


def _upload(arrays: list[np.ndarray], device: torch.device) -> tuple[torch.Tensor, ...]:
    """As on a GPU: parts of one tensor, which begin at any multiple of an item's size."""
    hosts = [torch.from_numpy(array) for array in arrays]
    return torch.cat(hosts).split([host.numel() for host in hosts])


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
) -> KVPages:
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
    return pages


def serve(loaded: LoadedModel, pages: KVPages, limits: Limits, policies: LayerPolicies) -> int:
    """Requests of every kind in an engine over these pages, alone, in crowds and at random; how many there were."""
    tables = DeviceTables(len(pages.shape.groups), limits.max_num_seqs, -(-limits.max_model_len // PAGE), loaded.device)
    drawn = torch.zeros(limits.max_num_seqs, dtype=torch.int64)
    forward = ForwardPass(loaded, pages, drawn, tables, None, policies)
    state = RankState(forward, limits, layer_masks(loaded.config), 0, {}, CompileCounts())
    engine, _ = build._engine(EngineConfig(model="", page_size=PAGE), Joined(loaded.layout), state)
    rng, count = random.Random(0), itertools.count()

    def submit(length: int, policy: AttentionPolicy, **more: Any) -> None:
        prompt = [rng.randrange(loaded.config.vocab_size) for _ in range(length)]
        more = {"max_tokens": 4, "sampling": Sampling(temperature=0)} | more
        request = Generate(request_id=str(next(count)), prompt=prompt, attention=policy, **more)
        assert engine.submit(request) is None

    def drain() -> None:
        while engine.has_work:
            assert not [news for news in engine.step() if isinstance(news, Failed)]

    for policy in ASKED:
        for length in (1, 100, 700):
            submit(length, policy)
            drain()
        for length in (17, 300):
            submit(length, policy)
            submit(length, DENSE)
        submit(200, policy, speculate=4, max_tokens=8)
        drain()
    for policy in (DENSE, ASKED[0]):
        for _ in range(limits.max_num_seqs):
            submit(20, policy)
        drain()
    for _ in range(4):
        for policy in rng.sample([DENSE, *ASKED], 4):
            submit(
                int(2 ** rng.uniform(0, 12)), policy, speculate=rng.choice([0, 0, 4]), max_tokens=rng.randrange(1, 9)
            )
        drain()
    return next(count)


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
    own = layer_masks(loaded.config)
    kinds = loaded.dtype, PAGE, resolve_kv_dtype(kv_dtype, loaded.dtype)
    footprint = Footprint.of(loaded.config, *kinds, loaded.layout, chosen_layers(own))
    shape = footprint.pages
    policies = LayerPolicies(own, loaded.config.num_attention_heads, shape)
    q = torch.empty(1, loaded.config.num_attention_heads, shape.head_dim, dtype=loaded.dtype)
    page = torch.empty(1, PAGE, shape.num_kv_heads, shape.head_dim, dtype=shape.dtype)
    graphs_over = partial(StepGraphs.of, loaded, policies, partial(decode_needs, q, page, backend=backend))
    left = _pages_left_by(
        lambda: parallel_compile.compile_kernels(
            loaded, footprint, *_PLANNED, policies, calibrated=_STEP, graphs_over=graphs_over
        )
    )
    compiler.phase = "late"
    with torch.inference_mode():
        pages = start(loaded, shape, *_FOUND, graphs_over, policies)
    launches = compiler.launches
    compiler.phase = "after"
    # Nothing was computed: no token can be drawn from that.
    with patch(
        "longreach.engine.device.runner.sample", lambda logits, how: torch.zeros(len(logits), dtype=torch.int64)
    ):
        requests = serve(loaded, pages, _FOUND[1], policies)
    return {**compiler.called, "launches": launches, "left": left, "requests": requests}


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
