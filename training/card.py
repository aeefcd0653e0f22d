"""The recall table of the model card, made from the results that `training.evaluate` wrote.

    python -m training.card

rewrites the table between the two marks of the card.
"""

import json
from pathlib import Path
from typing import Any

CARD = Path(__file__).parents[1] / "server" / "longreach" / "default_model" / "README.md"
RESULTS = Path(__file__).with_name("results")
BEGIN, END = "<!-- recall: begin -->", "<!-- recall: end -->"


def table(results: list[dict[str, Any]]) -> str:
    """Markdown rows of exact match by length and kind of prompt, a column for each form; `-` where nothing was
    measured.
    """
    cells = {name: cell for result in results for name, cell in result["cells"].items()}
    forms = ("chat", "bare", "cue", "stem")
    rows = [
        "| tokens | prompts | " + " | ".join(forms) + " | prompts a cell |",
        "|---|---|" + "---|" * (len(forms) + 1),
    ]
    keys = sorted({(int(name.split("/")[0]), name.split("/")[2]) for name in cells if "not_stated" not in name})
    for length, split in keys:
        found = [cells.get(f"{length}/{form}/{split}") for form in forms]
        counts = {cell["n"] for cell in found if cell}
        shown = [f"{cell['exact']:.2f}" if cell else "-" for cell in found]
        rows.append(f"| {length} | {split} | " + " | ".join(shown) + f" | {'/'.join(map(str, sorted(counts)))} |")
    for name, cell in sorted(cells.items()):
        if "not_stated" in name:
            rows.append(
                f"| {name.split('/')[0]} | not stated | {cell['exact']:.2f} over all forms | | | | {cell['n']} |"
            )
    return "\n".join(rows)


def measured() -> list[dict[str, Any]]:
    """The committed results, in name order."""
    return [json.loads(path.read_text()) for path in sorted(RESULTS.glob("recall-*.json"))]


def main() -> None:
    """Rewrite the table of the card."""
    text = CARD.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    CARD.write_text(f"{before}{BEGIN}\n{table(measured())}\n{END}{after}")


if __name__ == "__main__":
    main()
