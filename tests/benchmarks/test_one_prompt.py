"""What `benchmarks/one_prompt.py` makes of a stream and of its figures."""

from __future__ import annotations

import pytest

from benchmarks import one_prompt


@pytest.mark.system
def test_a_prompt_is_timed_and_its_progress_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_prompt, "_SILENCE", 0.02)
    monkeypatch.setattr(one_prompt, "memory_gib", lambda: [7.0])
    result = one_prompt.measure("tiny", 6000, 4, ["--device", "cpu", "--max-model-len", "8192"])
    asked = result["one_prompt"]
    assert asked["itl_s"]["count"] == 3
    assert asked["moments"], "comments came while the prompt was read"
    read = [moment["read"] for moment in asked["moments"]]
    assert read == sorted(read)
    assert read[-1] <= 6000
    assert all(moment["seconds"] <= asked["ttft_s"] for moment in asked["moments"])
    assert "| 6,000 |" in one_prompt.table(result)


@pytest.mark.unit
def test_the_table_has_the_figures_and_some_moments() -> None:
    moments = [{"seconds": 5.0 * n, "read": 20_000 * n, "memory_gib": [90.0 + n / 10]} for n in range(1, 50)]
    result = {
        "environment": {"device": "GPU", "versions": {"torch": "2", "triton": "3"}, "date": "2026-01-01"},
        "model": {"shape": "llama-8b"},
        "flags": "--kv-cache-dtype fp8",
        "prompt_tokens": 1_000_000,
        "one_prompt": {"ttft_s": 300.0, "itl_s": {"p50": 0.02, "p99": 0.03}, "moments": moments, "memory_gib": [97.0]},
    }
    lines = one_prompt.table(result).splitlines()
    assert lines[2] == "| 1,000,000 | 300.0 | 20.0 / 30.0 | 97.0 |"
    assert lines[6] == "| 5 | 20,000 | 90.1 |"
    assert 8 <= sum(line.startswith("| ") and line.endswith(" |") for line in lines[6:]) <= 10
    assert lines[-1].startswith("llama-8b, `--kv-cache-dtype fp8`; GPU; torch 2, triton 3")
