"""Write the table of docs/attention-policies.md from the policies' schema.

python docs/policy_tables.py            # writes the page
python docs/policy_tables.py --check    # changes nothing, fails if the page is not what the schema says
"""

from __future__ import annotations

import json
from pathlib import Path

import generated_page
from longreach.api.endpoints.attention_policies import policy_info
from longreach.api.schema.answers.attention_policies import PolicyParameter
from longreach.policies.schemas import SCHEMAS
from msgspec import UNSET

PAGE = Path(__file__).resolve().parent / "attention-policies.md"
BEGIN, END = "<!-- policies -->\n", "<!-- end -->\n"


def render(page: str) -> str:
    """The page with its table made anew."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"page: needs the lines {BEGIN.strip()} and {END.strip()}")
    lines = ["| policy | parameter | range | default | |", "|---|---|---|---|---|"]
    for kind in SCHEMAS:
        info = policy_info(kind)
        lines.append(f"| `{info.policy}` | | | | {' '.join(info.description.split())} |")
        for name, parameter in info.parameters.items():
            cells = f"`{name}` | {_range(parameter)} | `{json.dumps(parameter.default)}` | {parameter.description}"
            lines.append(f"| | {cells} |")
    return before + begin + "\n" + "\n".join(lines) + "\n\n" + end + after


def _range(parameter: PolicyParameter) -> str:
    if parameter.values is not UNSET:
        return " or ".join(parameter.values)
    if parameter.minimum is UNSET:
        return parameter.type
    return f"{parameter.type}, {parameter.minimum} to {parameter.maximum}"


def main() -> None:
    """Write the page, or with --check compare it."""
    generated_page.main(PAGE, render, __file__, "the schema says")


if __name__ == "__main__":
    main()
