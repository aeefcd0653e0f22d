"""What the kernel benchmark believes a case must compute: its counts are those of the mask itself."""

from __future__ import annotations

import sys

import pytest
import torch
from longreach_kernels import Causal, Full, Mask, Window

from benchmarks.kernels.__main__ import main
from benchmarks.kernels.cases import SUITES, Case, parse_mask, random_blocks, select
from benchmarks.kernels.measure import measure, table
from benchmarks.kernels.peers import make


@pytest.mark.parametrize("mask", [Causal(), Full(), Window(5), Window(5, sinks=3), Window(99), Window(30, sinks=20)])
def test_pairs_are_those_that_the_mask_allows(mask: Mask) -> None:
    positions = torch.arange(40)
    allowed = int(mask.allowed(positions, positions).sum())
    assert Case("forward", 3, 40, mask=mask).pairs == 3 * allowed


def test_work_of_forward_backward_and_decode() -> None:
    forward, backward = (Case(kind, 2, 64, Hq=8, Hkv=2, D=16, mask=Full()) for kind in ("forward", "backward"))
    assert forward.flops == 4 * 2 * 64 * 64 * 8 * 16
    assert backward.flops * 2 == forward.flops * 5
    decode = Case("decode", 3, 1000, Hq=8, Hkv=2, D=16)
    assert decode.kv_bytes == 3 * 1000 * 2 * 16 * 2 * 2
    assert Case("decode", 3, 1000, mask=Window(10)).pairs == 30


def test_names_tell_cases_apart() -> None:
    names = [case.name for suite in ("forward", "decode", "backward") for case in SUITES[suite]()]
    assert len(set(names)) == len(names)


def test_random_blocks_have_the_density_asked_for_and_count_their_pairs() -> None:
    mask = random_blocks(512, 0.5, block=16)
    assert abs(mask.layout.float().mean() - 0.5) < 0.1
    positions = torch.arange(512)
    assert Case("forward", 1, 512, mask=mask).pairs == int(mask.allowed(positions, positions).sum())


def test_selection() -> None:
    assert [case.mask for case in select("forward", "window:64:2", "1024,2048")] == [Window(64, 2)] * 2
    assert select("decode") == list(SUITES["decode"]())
    for arguments in [("sideways",), ("forward", "circle"), ("forward", "window:x"), ("forward", None, "0")]:
        with pytest.raises(ValueError, match=r"must be|suites are"):
            select(*arguments)
    assert parse_mask("full") == Full()


def test_unknown_peers_and_a_missing_gpu_are_errors_that_say_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match="cudnn, fa2, flex, fa3"):
        make("fa9")
    if not torch.cuda.is_available():
        monkeypatch.setattr(sys, "argv", ["kernels", "--suite", "decode"])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2
        assert "needs a CUDA GPU" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_run_times_ours_and_a_peer() -> None:
    result = measure([Case("forward", 1, 1024), Case("decode", 2, 1024)], ["auto"], ["cudnn"], report=lambda _: None)
    assert [set(row["ms"]) for row in result["rows"]] == [{"longreach auto", "cudnn"}, {"longreach auto"}]
    assert "of the ceiling" in table(result)
