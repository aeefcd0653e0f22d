"""The result of a load test as Markdown: latencies by length, arrivals, and what policies gain and lose."""

from __future__ import annotations

from typing import Any

from longreach.bench.fit import PowerLaw, power_law

_PARTS = ("p50", "p90", "p99")
# Fewer have no tails: their p99 is their greatest.
FEWEST_SAMPLES = 3
# An exponent of fewer lengths, or of nearer ones, is a guess.
_FEWEST_LENGTHS = 4
_LEAST_RANGE = 8
_NO_GROWTH = (
    f"An exponent needs {_FEWEST_LENGTHS} lengths, the longest {_LEAST_RANGE} times the shortest. "
    f"It needs {FEWEST_SAMPLES} cold prompts of each, all near one power of the length."
)
_FARTHEST = 1.5  # a point that is farther from the law, as a factor, says that there is none


def report(result: dict[str, Any], picture: str | None) -> str:
    """A page: the tables, and the picture beside it if there is one."""
    page = f"# Load test by context length\n\n{table(result)}"
    return page if picture is None else f"{page}\n![Load test by context length]({picture})\n"


def table(result: dict[str, Any]) -> str:
    """All tables, then what they were measured on."""
    policies = result["policies"]
    tables = [_latency(policies), _arrivals(policies), _policies(policies)]
    text = ["\n".join("| " + " | ".join(cells) + " |" for cells in lines) for lines in tables if len(lines) > 2]
    return "\n\n".join([*text, *_growth(policies), _caption(result)]) + "\n"


def cold_rows(policy: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of one request at a time without a cached prefix (of the least concurrency that was measured)."""
    return next(iter(rows_by_concurrency(policy).values()), [])


def rows_by_concurrency(policy: dict[str, Any], prefix: str = "cold") -> dict[int, list[dict[str, Any]]]:
    """The rows of each concurrency, the least first."""
    rows = [row for row in policy["rows"] if row["prefix"] == prefix]
    return {n: [row for row in rows if row["concurrency"] == n] for n in sorted({row["concurrency"] for row in rows})}


def growth(policy: dict[str, Any]) -> PowerLaw | None:
    """How TTFT of cold prompts grows with their length; None where there are too few of them to tell."""
    rows = cold_rows(policy)
    lengths = {row["prompt_tokens"] for row in rows}
    if len(lengths) < _FEWEST_LENGTHS or max(lengths) < _LEAST_RANGE * min(lengths):
        return None
    if any(row["ttft_s"]["count"] < FEWEST_SAMPLES for row in rows):
        return None
    points = [(row["prompt_tokens"], row["ttft_s"]["p50"]) for row in rows]
    law = power_law(*zip(*points, strict=True))
    if law is None or any(max(law.at(x) / y, y / law.at(x)) > _FARTHEST for x, y in points):
        return None
    return law


def speedups(policy: dict[str, Any], dense: dict[str, Any]) -> dict[int, float]:
    """TTFT of dense attention over that of a policy, by prompt length."""
    base = {row["prompt_tokens"]: row["ttft_s"]["p50"] for row in cold_rows(dense)}
    rows = cold_rows(policy)
    return {n: base[n] / row["ttft_s"]["p50"] for row in rows if (n := row["prompt_tokens"]) in base}


def _latency(policies: list[dict[str, Any]]) -> list[list[str]]:
    several = len(policies) > 1
    head = ["prompt tokens", "prefix", "at once", "TTFT p50 / p90 / p99 (s)", "ITL p50 / p90 / p99 (ms)"]
    head += ["end to end p50 / p90 / p99 (s)", "goodput (requests/s)", "soon enough"]
    lines = [["attention", *head] if several else head]
    lines.append([*(["---"] if several else []), "---:", "---", *["---:"] * (len(head) - 2)])
    for policy in policies:
        for row in policy["rows"]:
            cells = [f"{row['prompt_tokens']:,}", _prefix(row), str(row["concurrency"]), *_times(row)]
            cells += [f"{row['goodput_per_s']:.3g}", f"{row['good']} of {row['requests']}"]
            lines.append([policy["name"], *cells] if several else cells)
    return lines


def _prefix(row: dict[str, Any]) -> str:
    if row["prefix"] == "cold" or row["cached_tokens"] is None:
        return row["prefix"]
    return f"{row['cached_tokens']:,.0f} cached"


def _arrivals(policies: list[dict[str, Any]]) -> list[list[str]]:
    several = len(policies) > 1
    head = ["arrivals (requests/s)", "prompt tokens", "TTFT p50 / p90 / p99 (s)", "ITL p50 / p90 / p99 (ms)"]
    head += ["end to end p50 / p90 / p99 (s)", "goodput (requests/s)", "soon enough", "refused"]
    lines = [["attention", *head] if several else head]
    lines.append([*(["---"] if several else []), *["---:"] * len(head)])
    for policy in policies:
        for row in policy["arrivals"]:
            lengths = [f"{part['prompt_tokens']:,}" for part in row["by_length"]]
            cells = [f"{row['rate_per_s']:g}", ", ".join(lengths), *_times(row), f"{row['goodput_per_s']:.3g}"]
            cells += [f"{row['good']} of {row['requests']}", str(row["refused"])]
            lines.append([policy["name"], *cells] if several else cells)
    return lines


def _policies(policies: list[dict[str, Any]]) -> list[list[str]]:
    """Speed-up over dense attention and recall, a column for each length."""
    lengths = sorted({row["prompt_tokens"] for policy in policies for row in cold_rows(policy)})
    lines = [["", *(f"{length:,}" for length in lengths)], ["---", *["---:"] * len(lengths)]]
    for policy in policies:
        if policy is not policies[0]:
            gain = speedups(policy, policies[0])
            cells = [f"{gain[n]:.2f}" if n in gain else "" for n in lengths]
            lines.append([f"{policy['name']}: speed-up of TTFT over {policies[0]['name']}", *cells])
        if "recall" in policy:
            found = {row["prompt_tokens"]: row for row in policy["recall"]}
            cells = [f"{found[n]['exact']:.2f}" if n in found else "" for n in lengths]
            lines.append([f"{policy['name']}: recall of one fact, {policy['recall'][0]['prompts']} prompts", *cells])
    return lines


def _growth(policies: list[dict[str, Any]]) -> list[str]:
    said, without = [], []
    for policy in policies:
        if law := growth(policy):
            rows = cold_rows(policy)
            first, last = rows[0]["prompt_tokens"], rows[-1]["prompt_tokens"]
            said.append(f"{policy['name']}: TTFT grows as N^{law.exponent:.2f} from {first:,} to {last:,} tokens.")
        elif policy["rows"]:
            without.append(policy["name"])
    if without:
        said.append(f"No exponent of TTFT is told of {', '.join(without)}. {_NO_GROWTH}")
    return [" ".join(said)] if said else []


def _times(row: dict[str, Any]) -> list[str]:
    return [
        _parts(row["ttft_s"], 1.0, 3),
        _parts(row["itl_s"], 1e3, 1),
        _parts(row["e2e_s"], 1.0, 2),
    ]


def _parts(summary: dict[str, Any], unit: float, digits: int) -> str:
    """The percentiles; the median alone of so few that they have no others."""
    shown = _PARTS if summary["count"] >= FEWEST_SAMPLES else _PARTS[:1]
    return " / ".join([f"{unit * summary[part]:.{digits}f}" for part in shown] + ["-"] * (len(_PARTS) - len(shown)))


def _caption(result: dict[str, Any]) -> str:
    where, model, load = result["environment"], result["model"], result["load"]
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items() if version[0].isdigit())
    what = model.get("name") or f"{model['shape']} shape, {model['weights']} weights, {model['dtype']}"
    limits = load["objective"]
    enough = (
        f"soon enough: {limits['ttft']:g} s of TTFT for each 1,024 tokens, a mean ITL of {1e3 * limits['itl']:g} ms"
    )
    answers = f"answers of {load['max_tokens']} tokens"
    return "; ".join([what, answers, enough, where["device"], versions, where["date"]]) + "."
