"""What `benchmarks/upload.py` sends, and what its table says."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import report, upload

RESULT = Path(__file__).parents[2] / "benchmarks" / "results" / "upload-two-cores.json"


def test_texts_are_as_long_as_was_asked_and_begin_otherwise() -> None:
    words = upload.Words()
    one, other = words.text(5000), words.text(5000)
    assert 5000 <= len(one) < 5200
    assert one[:200] != other[:200]


def test_a_row_tells_the_time_after_the_last_byte_beside_that_of_a_chunk() -> None:
    result = json.loads(RESULT.read_text())
    row = result["uploads"][0]
    [line] = [line for line in report.table(result).splitlines() if line.startswith(f"| {row['tokens']:,} |")]
    assert f"| {row['first_token_s']:.3f} |" in line
    assert f"| {row['chunk_s']:.3f} ({row['chunk_tokens']:,} tokens) |" in line
