"""What `benchmarks.policy_cost` asks and says, without a server."""

from __future__ import annotations

from longreach.policies.parse import policy_of

from benchmarks import report
from benchmarks.policy_cost import POLICIES, as_field, parsed, row, warmer


def test_policies_are_sent_as_they_are_written() -> None:
    for text in POLICIES:
        assert policy_of(as_field(parsed(text))).resolve() == parsed(text)


def test_what_compiles_kernels_beforehand_has_the_kind_of_target_and_reads_less() -> None:
    dense, window, recall, density = map(parsed, POLICIES)
    assert warmer(dense) is warmer(window) is None
    assert warmer(recall) == parsed("dynamic:0.05")
    assert warmer(density) == parsed('{"policy": "dynamic", "density": 0.05}')


def test_a_row_is_a_share_of_dense_attention_at_its_length() -> None:
    times = {(100, "dense"): [2.0, 1.0, 4.0], (100, "dynamic:0.95"): [1.0, 3.0]}
    usage = {"density": 0.5, "tiles_visited": 30, "tiles_skipped": 10, "tiles_unchosen": 20, "kept_mass": None}
    made = row(100, "dynamic:0.95", times[100, "dynamic:0.95"], usage, times)
    assert (made["ttft_s"], made["of_dense"], made["density"], made["unchosen"]) == (2.0, 1.0, 0.5, 0.5)
    where = {"device": "a GPU", "versions": {"torch": "2"}, "date": "today"}
    rows = [row(100, "dense", times[100, "dense"], None, times), made]
    table = report.table({"environment": where, "model": {"shape": "tiny"}, "rows": rows, "kernels": []})
    assert "| 100 | `dynamic:0.95` | 2.000 | 1.000 | 0.500 | 0.500 |  | 2 |" in table
    assert "| 100 | `dense` | 2.000 | 1.000 |  |  |  | 3 |" in table
