"""The methods of `benchmarks/attention_methods` against their papers' equations, and what is measured of them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from longreach_kernels import Causal, Full
from longreach_kernels.analysis.io_model import flash1_tiles
from longreach_kernels.analysis.io_simulation import flash1_forward
from longreach_kernels.backends.reference.forward import attention as reference
from longreach_kernels.call import AttentionCall
from torch import Tensor

from benchmarks.attention_methods import dram, kernelized, linformer
from benchmarks.attention_methods.catalogue import METHODS, SRAM, Method, chosen, flash1_causal
from benchmarks.attention_methods.exact import exact_rows, relative_error
from benchmarks.attention_methods.measure import Shape, error, row
from benchmarks.attention_methods.reformer import reformer, shared_keys

CPU = torch.device("cpu")
LENGTH = 300


def draw(length: int = LENGTH, heads: int = 2, channels: int = 16, scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    return [scale * torch.randn(1, heads, length, channels, generator=generator) for _ in range(3)]


@pytest.mark.parametrize("causal", [True, False])
def test_exact_rows_are_those_of_the_reference(causal: bool) -> None:
    q, k, v = (x.double() for x in draw())
    rows = torch.tensor([0, 7, LENGTH - 1])
    mask = Causal() if causal else Full()
    wanted, _ = reference(q, k, v, AttentionCall(mask, scale=0.3, softcap=None, sink_logits=None))
    assert relative_error(exact_rows(q, k, v, rows, causal=causal, scale=0.3), wanted[:, :, rows]) < 1e-12


def test_a_query_that_excludes_itself_takes_the_key_before_it() -> None:
    q, k, v = draw(2)
    out = exact_rows(q, k, v, torch.arange(2), scale=1.0, exclude_self=True)
    assert torch.allclose(out, v[:, :, [0, 0]].double())


def test_linear_attention_is_equation_9() -> None:
    q, k, v = draw()
    qf, kf = kernelized.elu_features(q).double(), kernelized.elu_features(k).double()
    weights = (qf @ kf.mT).tril()
    wanted = weights @ v.double() / weights.sum(-1, keepdim=True)
    assert relative_error(kernelized.linear_transformer(q, k, v), wanted) < 1e-5


def test_products_of_positive_features_are_on_average_the_softmax_kernel() -> None:
    q, k, _ = draw(20, channels=16, scale=0.3)
    directions = kernelized.projection(1 << 15, 16, CPU)
    blocks = directions.unflatten(0, (-1, 16))
    products = blocks @ blocks.mT
    off = products - torch.diag_embed(products.diagonal(dim1=1, dim2=2))
    assert off.abs().max() < 1e-4 * products.max()  # orthogonal in blocks
    estimate = (
        kernelized.positive_features(q, directions, is_query=True)
        @ kernelized.positive_features(k, directions, is_query=False).mT
    )
    wanted = torch.exp(q @ k.mT / math.sqrt(16))
    # Each query's row, and each head's keys, have a factor of their own; without both nothing is left but the kernel.
    ratio = (estimate / wanted).double()
    ratio = ratio / ratio.mean(-1, keepdim=True)
    assert (ratio - 1).abs().max() < 0.05


def test_performer_nears_exact_attention_with_more_features() -> None:
    q, k, v = draw(scale=0.3)
    exact = exact_rows(q, k, v, torch.arange(LENGTH), scale=0.25)
    few, many = (relative_error(kernelized.performer(q, k, v, m), exact) for m in (64, 8192))
    assert many < 0.02
    assert few > 4 * many


def test_linformer_with_identities_is_exact_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = draw()
    exact = exact_rows(q, k, v, torch.arange(LENGTH), causal=False, scale=0.25)
    assert relative_error(linformer.linformer(q, k, v), exact) > 0.1
    monkeypatch.setattr(linformer, "projections", lambda *_: (torch.eye(LENGTH), torch.eye(LENGTH)))
    assert relative_error(linformer.linformer(q, k, v), exact) < 1e-5


def test_linformers_projections_keep_products_on_average() -> None:
    e, f = linformer.projections(64, 1 << 14, CPU, torch.float32)
    assert (e.T @ e - torch.eye(64)).abs().max() < 0.05
    assert (e.T @ f).abs().max() < 0.05  # drawn independently


def test_reformer_within_one_chunk_is_exact_attention_of_shared_queries_and_keys() -> None:
    q, k, v = draw(64)
    exact = exact_rows(q, shared_keys(q), v, torch.arange(64), scale=1.0, exclude_self=True)
    assert relative_error(reformer(q, k, v), exact) < 1e-5


def test_reformer_misses_less_with_more_rounds_of_hashes() -> None:
    q, k, v = draw(1024, scale=4.0)
    exact = exact_rows(q, shared_keys(q), v, torch.arange(1024), scale=1.0, exclude_self=True)
    one, many = (relative_error(reformer(q, k, v, hashes), exact) for hashes in (1, 16))
    assert many < 0.6 * one


def test_reformer_needs_whole_chunks() -> None:
    q, k, v = draw()
    with pytest.raises(ValueError, match="multiple of 64, got 300"):
        reformer(q, k, v)


def test_flash_attention_1_moves_what_its_simulation_counts() -> None:
    length, channels = 1024, 64
    q, k, v = (x[0, 0].bfloat16() for x in draw(length, 1, channels))
    tiles = flash1_tiles(channels, SRAM)
    rows, columns = (torch.arange(0, length, size) for size in (tiles.rows, tiles.columns))
    layout = columns[None] < rows[:, None] + tiles.rows
    *_, traffic = flash1_forward(q, k, v, tiles, scale=0.125, layout=layout)
    assert flash1_causal(length, channels) == traffic.total


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_every_method_is_measured_forward_and_backward(method: Method) -> None:
    found = row(method, 128, Shape(2, 16, CPU))
    if method.attend is None:
        assert found.keys() == {"method", "tokens", "predicted_bytes"}
        return
    assert found["forward"]["ms"] > 0
    assert found["both"]["ms"] > 0
    exact = method.name in ("standard", "FlashAttention-2 (torch)") or method.mask is not None
    assert (found["error"] < 1e-5) == exact  # at 128 tokens every mask lets all causal pairs through


def test_a_mask_that_leaves_something_out_has_an_error_and_a_density_below_1() -> None:
    found = row(chosen("window 1024+4")[0], 2048, Shape(1, 16, CPU))
    assert 0.01 < found["error"] < 1
    pairs = 1024 * 1025 // 2 + 1024 * 1024 + sum(min(4, i) for i in range(1, 1025))
    assert found["density"] == pytest.approx(pairs / (2048 * 2049 / 2))


def test_gradients_of_methods_are_those_of_their_outputs() -> None:
    """What is timed as backward is the derivative of what is timed as forward."""
    q, k, v = (x.double().requires_grad_() for x in draw(128, 1, 8))
    direction = torch.randn(v.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for method in (m for m in METHODS if m.attend is not None and m.name in ("Linformer", "Reformer", "standard")):
        assert method.attend is not None
        out = method.attend(q, k, v)
        (grad,) = torch.autograd.grad((out * out).sum(), v)
        with torch.no_grad():
            step = 1e-4
            sums = [(method.attend(q, k, v + s * direction) ** 2).sum() for s in (step, -step)]
        assert ((sums[0] - sums[1]) / (2 * step)).item() == pytest.approx((grad * direction).sum().item(), rel=1e-3)


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "out of memory"),
        (RuntimeError("no kernel\nmore"), "RuntimeError: no kernel"),
    ],
)
def test_what_does_not_run_is_a_result(raised: Exception, said: str) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise raised

    found = row(Method("other", "nobody", attend), 128, Shape(1, 16, CPU))
    assert found["forward"] == found["both"] == {"failed": said}
    assert "error" not in found


def test_errors_are_against_the_attention_that_a_method_stands_for() -> None:
    q, k, v = draw(64)
    shared = Method("shared", "nobody", None, shared_qk=True)
    assert error(shared, reformer(q, k, v), q, k, v) < 1e-5
    assert error(Method("own keys", "nobody", None), reformer(q, k, v), q, k, v) > 0.1


PROFILE = """==PROF== Connected to process 12
==PROF== Profiling "kernel" - 0: 0%....100% - 1 pass
"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","12","kernel","dram__bytes_read.sum","{unit}","1,024"
"0","12","kernel","dram__bytes_write.sum","{unit}","96"
"1","12","other","dram__bytes_read.sum","{unit}","3"
"1","12","other","dram__bytes_write.sum","{unit}","5"
"""


def test_counted_bytes_join_the_rows_they_belong_to(tmp_path: Path) -> None:
    (tmp_path / "window_1024+4-256.csv").write_text(PROFILE.format(unit="byte"))
    rows = [{"method": "window 1024+4", "tokens": n} for n in (128, 256)]
    assert dram.join(rows, tmp_path) == 1
    assert rows == [
        {"method": "window 1024+4", "tokens": 128},
        {"method": "window 1024+4", "tokens": 256, "dram_bytes": 1128},
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (PROFILE.format(unit="Mbyte"), "add --print-units base"),
        ("==ERROR== no permission", "no column"),
        (
            "\n".join(PROFILE.format(unit="byte").splitlines()[:4]),
            "needs dram__bytes_read.sum and dram__bytes_write.sum",
        ),
    ],
)
def test_a_profile_without_bytes_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "a-128.csv").write_text(text)
    with pytest.raises(ValueError, match=said):
        dram.join([{"method": "a", "tokens": 128}], tmp_path)


def test_an_unknown_method_is_named() -> None:
    with pytest.raises(ValueError, match=r"Nystromformer: choose from standard, "):
        chosen("standard,Nystromformer")
