"""`benchmarks/decode_budget.py` with a tiny model, and what its table says."""

from __future__ import annotations

import sys

import pytest

from benchmarks import decode_budget


def test_every_budget_is_timed_with_bounds_and_dense_answers_without_them_too() -> None:
    saved: list[int] = []
    result = decode_budget.run(
        "tiny", 1024, [None, 128], [1, 2], 8, True, lambda found: saved.append(len(found["rows"]))
    )
    rows = result["rows"]
    assert saved == [1, 2, 3, 4, 5, 6]
    assert [(row["page_bounds"], row["budget"], row["answers"]) for row in rows] == [
        (False, None, 1),
        (False, None, 2),
        (True, None, 1),
        (True, None, 2),
        (True, 128, 1),
        (True, 128, 2),
    ]
    assert all(row["steps"] >= 8 and 0 < row["itl_ms"] <= row["itl_max_ms"] for row in rows)
    assert [row["keys_read"] for row in rows[:4]] == [None] * 4
    # At most 128 of at least 1,025 keys, and at least the seven whole blocks that are read besides the last.
    assert all(112 / 1050 < row["keys_read"] < 128 / 1025 for row in rows[4:])
    text = decode_budget.table(result)
    assert "| budget 128 | yes | 2 |" in text
    assert "| dense | no | 1 |" in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--budgets", "few"], "--budgets"),
        (["--tokens", "2"], "--tokens must be 8 or more"),
        (["--length", "100"], "--length 512 or more"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    said: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["decode_budget.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        decode_budget.main()
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
