from training import bars, card


def _row(task: str, exact: float, *, length: int = 16384, false_alarms: float = 0.0) -> dict[str, object]:
    return {"task": task, "length": length, "exact": exact, "false_alarms": false_alarms}


def _results(**plans: list[dict[str, object]]) -> bars.Results:
    return {name: {"rows": rows} for name, rows in plans.items()}


def _line(table: str, label: str) -> list[str]:
    """The cells after the label of a row of the table."""
    (line,) = (line for line in table.splitlines() if line.startswith(f"| {label}"))
    return [cell.strip() for cell in line.split("|")[2:-1]]


def test_the_worst_value_stands_in_the_table_and_is_bold_where_it_is_short() -> None:
    good = _results(plain=[_row("single", 1.0), _row("uuid", 0.991), _row("copy", 0.5)])
    bad = _results(plain=[_row("single", 1.0), _row("uuid", 0.989)])
    table = bars.table({"good": good, "bad": bad})
    assert _line(table, "one fact") == ["0.99", "0.991", "**0.989**"]
    assert "- bad: uuid at 16,384 has 0.989 (one fact" in table
    assert "- good" not in table
    assert bars.table({"good": good}).endswith("Nothing is short of it.")


def test_what_was_not_measured_is_a_dash() -> None:
    table = bars.table({"nothing": _results()})
    assert all(cells[1] == "–" for cells in (_line(table, bar.label) for bar in bars.BARS))


def test_held_out_phrasings_are_averaged_by_length_and_listed_one_by_one() -> None:
    rows = [_row("single", 1.0), _row("absent", 0.94), _row("single", 0.96, length=1024)]
    table = bars.table({"it": _results(held_out=rows)})
    assert _line(table, "phrasings that it was never trained on")[1] == "0.960"
    assert _line(table, "such phrasings")[1] == "**0.940**"


def test_false_alarms_are_of_what_is_stated_and_at_most_two_of_a_hundred() -> None:
    rows = [_row("absent", 1.0, false_alarms=1.0), _row("first", 0.97, false_alarms=0.02)]
    assert _line(bars.table({"it": _results(held_out=rows)}), "false alarms")[1] == "0.020"
    rows.append(_row("last", 0.97, false_alarms=0.03))
    assert _line(bars.table({"it": _results(held_out=rows)}), "false alarms")[1] == "**0.030**"


def test_unknown_text_costs_what_usual_text_answers_more() -> None:
    results = _results(plain=[_row("count", 1.0), _row("chain", 0.97)], unseen_text=[_row("count", 0.97)])
    assert _line(bars.table({"it": results}), "lost in text of other kinds")[1] == "**0.030**"
    results["unseen_text"]["rows"] = [_row("count", 0.98), _row("chain", 0.98)]
    assert _line(bars.table({"it": results}), "lost in text of other kinds")[1] == "0.020"


def test_the_page_has_the_table_of_the_committed_results() -> None:
    text = bars.PAGE.read_text()
    assert bars.written(text) == text
    assert all(card.measured(directory) for directory in bars.COLUMNS.values())
