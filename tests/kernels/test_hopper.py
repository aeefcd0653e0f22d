"""The Hopper kernel: what its compiler makes of it anywhere, and that it is right where there is a Hopper GPU."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from longreach_kernels import Causal, Full, Mask, Window, attention, paged_attention, ragged_attention
from longreach_kernels.hopper import launch

from .accuracy import check, check_paged, paged, qkv

SHARED_BYTES = 227 * 1024  # that a block may use on sm_90


def test_every_configuration_compiles_for_sm90_without_spills(tmp_path: Path) -> None:
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tests.kernels.compile_hopper"]
    root = Path(__file__).parent.parent.parent
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    compiled = json.loads(done.stdout)
    assert len(compiled) == 4 * len(launch.HEAD_DIMS)
    for name, facts in compiled.items():
        assert facts["spills"] == facts["stack_bytes"] == 0, (name, facts)
        assert facts["shared_bytes"] <= SHARED_BYTES, (name, facts)
        assert facts["wgmma"] > 0, (name, facts)
        assert facts["tma_loads"] > 0, (name, facts)


hopper = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]
MASKS = [Causal(), Full(), Window(1), Window(100), Window(1000)]
LENGTHS = [(1, 1), (239, 1), (799, 3), (1023, 1024), (108, 256), (1, 8191), (127, 4097), (128, 128), (4224, 4224)]


class TestOnHopper:
    pytestmark = hopper

    @pytest.mark.parametrize("head_dim", launch.HEAD_DIMS)
    @pytest.mark.parametrize("mask", MASKS, ids=repr)
    @pytest.mark.parametrize("lengths", LENGTHS)
    def test_dense(self, lengths: tuple[int, int], mask: Mask, head_dim: int) -> None:
        for dtype, heads in ((torch.bfloat16, (8, 2)), (torch.float16, (3, 3))):
            q, k, v = qkv(2, *heads, *lengths, head_dim, dtype, "cuda")
            assert launch.supports(q, mask, None, None)
            out, lse = attention(q, k, v, mask, backend="hopper", return_lse=True)
            check(out, lse, q, k, v, mask)

    @pytest.mark.parametrize("head_dim", launch.HEAD_DIMS)
    @pytest.mark.parametrize("mask", [Causal(), Window(300)], ids=repr)
    def test_pages_of_a_mixed_batch(self, mask: Mask, head_dim: int) -> None:
        queries, contexts = [1, 1, 100, 256, 33, 129, 7], [1, 513, 100, 4000, 40, 129, 7]
        q, k_pages, v_pages, batch = paged(
            queries, contexts, 128, 8, 2, head_dim, torch.bfloat16, "cuda", num_decodes=2
        )
        for laid_out in (q, q.transpose(0, 1).contiguous().transpose(0, 1)):  # by token, and by head
            out, lse = paged_attention(laid_out, k_pages, v_pages, batch, mask, backend="hopper", return_lse=True)
            check_paged(out, lse, q, k_pages, v_pages, batch, mask)

    def test_ragged_sequences_are_computed_as_if_alone(self) -> None:
        starts = torch.tensor([0, 5, 135, 136, 700], dtype=torch.int32, device="cuda")
        q, k, v = (x[0].transpose(0, 1).contiguous() for x in qkv(1, 8, 2, 700, 700, 128, torch.bfloat16, "cuda"))
        together = ragged_attention(q, k, v, starts, starts, Causal(), backend="hopper")
        for start, end in itertools.pairwise(starts.tolist()):
            part = (x[start:end].transpose(0, 1)[None].contiguous() for x in (q, k, v))
            alone = attention(*part, Causal(), backend="hopper")
            assert torch.equal(together[start:end], alone[0].transpose(0, 1))

    def test_a_hundred_runs_are_equal_to_the_bit(self) -> None:
        q, k, v = qkv(1, 8, 2, 2000, 2000, 128, torch.bfloat16, "cuda")
        first = attention(q, k, v, Causal(), backend="hopper")
        assert all(torch.equal(attention(q, k, v, Causal(), backend="hopper"), first) for _ in range(100))
