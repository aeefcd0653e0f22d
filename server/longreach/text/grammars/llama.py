"""Llama's calls: JSON objects at the beginning of an answer, or behind `<|python_tag|>`.

Only objects that begin with the name are calls, `{"name": "look", "parameters": ...`; so the name is their mark.
"""

from __future__ import annotations

from collections.abc import Sequence

from longreach.text.grammars.functions import Callee
from longreach.text.grammars.json_formats import Marked
from longreach.text.grammars.written import Written, literal, plain, spaced

TAG = "<|python_tag|>"


def llama3_json(callees: Sequence[Callee], written: Written, parallel: bool) -> Marked:
    """What follows the mark, and the rule `first` of calls without one."""
    again = [f"(BLANK? again{index} rest{index})" for index in range(len(callees))]
    rules = [
        f"first: ({' | '.join(f'begun{index} rest{index}' for index in range(len(callees)))}) more*",
        f"more: {' | '.join(again)}",
        'key: "\\"parameters\\"" | "\\"arguments\\""',
        f"tagged: ({' | '.join(f'inner{index} rest{index}' for index in range(len(callees)))}) more*",
    ]
    for index, one in enumerate(callees):
        head = f"{spaced('{')}({spaced(*_TYPE)})?{spaced(*_NAME)}[ \\t\\r\\n]*{plain(literal(one.name))}"
        rules += [
            f"begun{index}[lazy]: /{head}/",
            f"again{index}[lazy]: /;{head}/",
            f"inner{index}[lazy]: /{head}/",
            f'rest{index}: BLANK? "," BLANK? key BLANK? ":" BLANK? {one.arguments} BLANK? "}}"',
        ]
    return Marked({TAG: "tagged"}, None, rules)


_TYPE = ('"type"', ":", '"function"', ",")
_NAME = ('"name"', ":")
