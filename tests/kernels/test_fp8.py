"""Pages of 8-bit floats (e4m3) with a scale for each KV head."""

import pytest
import torch
from longreach_kernels import Causal, Mask, Window, paged_attention, write_pages
from longreach_kernels.backends.reference import page_writes as reference

from tests.kernels.accuracy import FP8, check_fp8, paged, quantized


@pytest.fixture(params=["cpu", "triton", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request: pytest.FixtureRequest) -> tuple[str, str]:
    """(backend, device)"""
    if request.param == "cuda":
        return "triton", "cuda"
    if request.param == "triton" and torch.cuda.is_available():
        pytest.skip("the interpreter is tested where there is no GPU")
    return request.param, "cpu"


@pytest.mark.parametrize("mask", [Causal(), Window(30, 3)], ids=repr)
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("options", [{}, {"softcap": 20.0}], ids=["plain", "softcap"])
def test_attention_over_fp8_pages(page_size: int, mask: Mask, options: dict, place):
    backend, device = place
    q, k_pages, v_pages, batch = paged([1, 9, 1, 0], [70, 40, 5, 3], page_size, 4, 2, 64, device=device, num_decodes=1)
    check_fp8(q, k_pages, v_pages, batch, mask, backend, **options)


def test_writes_divide_by_the_scale_and_saturate(place):
    backend, device = place
    k_scale, v_scale = torch.tensor([0.5, 2.0], device=device), torch.tensor([1.0, 0.25], device=device)
    k_pages, v_pages = (torch.zeros(3, 4, 2, 8, device=device).to(FP8) for _ in range(2))
    # Numbers that fp8 holds: the interpreter loses the carry of a mantissa that rounds up.
    k, v = (torch.randint(-15, 16, (5, 2, 8), device=device).float() / 4 for _ in range(2))
    k[2, 0, 0], v[3, 1, 1] = 1e4, -1e4
    slots = torch.tensor([11, -1, 0, 5, -1], device=device)
    write_pages(k, v, k_pages, v_pages, slots, k_scale=k_scale, v_scale=v_scale, backend=backend)
    for row, slot in ((0, 11), (2, 0), (3, 5)):
        for x, pages, scale in ((k, k_pages, k_scale), (v, v_pages, v_scale)):
            expected = (x[row] / scale[:, None]).clamp(-448, 448)
            assert torch.equal(pages[slot // 4, slot % 4].float(), expected)
    assert k_pages.float().flatten(0, 1).any(-1).any(-1).sum() == 3


def test_scales_belong_to_fp8_pages_and_to_nothing_else():
    q, k_pages, v_pages, batch = paged([3], [20], 8, 4, 2, 64)
    ones = torch.ones(2)
    with pytest.raises(ValueError, match=r"^k_scale: only float8"):
        paged_attention(q, k_pages, v_pages, batch, k_scale=ones)
    k8, v8 = k_pages.to(FP8), v_pages.to(FP8)
    for named, scales in (
        ("k_scale", {"v_scale": ones}),
        ("v_scale", {"k_scale": ones}),
        ("k_scale", {"k_scale": torch.ones(4), "v_scale": ones}),
        ("v_scale", {"k_scale": ones, "v_scale": ones.double()}),
    ):
        with pytest.raises(ValueError, match=rf"^{named}: "):
            paged_attention(q, k8, v8, batch, **scales)
    with pytest.raises(ValueError, match=r"^v_pages: "):
        paged_attention(q, k8, v_pages, batch, k_scale=ones, v_scale=ones)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("page_size", [16, 64, 128])
def test_fp8_pages_under_16_bit_queries(page_size: int, device: str):
    if device == "cpu" and torch.cuda.is_available():
        pytest.skip("the interpreter is tested where there is no GPU")
    lengths = ([1, 1, 1000, 700], [4000, 513, 3000, 700]) if device == "cuda" else ([1, 1, 40, 30], [300, 130, 90, 30])
    dtype = torch.bfloat16 if device == "cuda" else torch.float16  # the interpreter multiplies no bf16
    q, k_pages, v_pages, batch = paged(*lengths, page_size, 8, 2, 128, dtype, device, num_decodes=2)
    check_fp8(q, k_pages, v_pages, batch, Causal(), "triton")


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [16, 128])
def test_a_gpu_writes_what_the_reference_does(page_size: int):
    _, k_pages, v_pages, _ = paged([700], [3000], page_size, 8, 2, 128, torch.bfloat16, "cuda")
    k, v = k_pages.flatten(0, 1), v_pages.flatten(0, 1)
    scales = quantized(k_pages)[1], quantized(v_pages)[1]
    k8, v8 = (torch.zeros(k_pages.shape, device="cuda").to(FP8) for _ in range(2))
    write_pages(k, v, k8, v8, torch.arange(len(k), device="cuda"), k_scale=scales[0], v_scale=scales[1])
    for pages, expected in zip((k8, v8), reference.quantized(k, v, FP8, scales), strict=True):
        assert torch.equal(pages.flatten(0, 1).float(), expected.float())
