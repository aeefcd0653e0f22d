"""A model that calls tools well, played: it decides from the prompt alone, and always in the same way.

It knows four things that the programs ask of it: a pass key that stands in the prompt, what was asked first, the task
'read a file, change a word in it, say its pass key', and 'hand over'. Under a grammar it writes what it would have
written if that is a sentence of the grammar, and else one that is. This proves the protocol, not a model's quality.
"""

from __future__ import annotations

import json
import re
from typing import Any

from tests.clients import tool_use
from tests.clients.constrained import constrained
from tests.clients.conversation import Conversation

_TASK = re.compile(r"Read the file (\S+), replace the word (\w+) with (\w+) in it")
_KEY = re.compile(r"pass key[^\d\n]{0,60}(\d{5})")
_FIRST = "What did I ask first?"
_PATIENCE = 6  # calls before the model gives up
_THOUGHTS = "<think>\nI look at what was asked, and do it.\n</think>\n\n"


def answer(conversation: Conversation, grammar: str | None = None) -> str:
    """What the model writes, without the end token."""
    words, calls = _decide(conversation)
    ended = None if calls else tool_use.ending(conversation.tools, words)
    if ended is not None:
        calls = [ended]
    written = words if not calls else "\n".join(map(_written, calls))
    thoughts = _THOUGHTS if conversation.thinks else ""
    if grammar is None:
        return thoughts + written
    return constrained(grammar, words, calls, [thoughts + written, written])


def _decide(conversation: Conversation) -> tuple[str, list[tuple[str, Any]]]:
    """Words for the user, or calls."""
    asked = conversation.asked
    last = asked[-1] if asked else ""
    if _FIRST in last:
        return f'You asked {len(asked)} times. The first time: "{_first(asked)}"', []
    if "hand over" in last and (handed := tool_use.handing_over(conversation.tools)):
        return "", [handed]
    task = next((found for said in reversed(asked) if (found := _TASK.search(said))), None)
    if task is not None:
        return _work(conversation, task)
    key = _KEY.search("\n".join(message.text for message in reversed(conversation.messages)))
    return (f"The pass key is {key[1]}." if key else "I am ready."), []


def _work(conversation: Conversation, task: re.Match[str]) -> tuple[str, list[tuple[str, Any]]]:
    edit = tool_use.Edit(task[1], task[2], task[3])
    if not conversation.tools:
        return f"Changing {task[2]} to {task[3]}", []
    done = conversation.calls_since(task[0])
    contents = next((call.result for call in done if call.result and _KEY.search(call.result)), None)
    if contents is None:
        call = tool_use.reading(conversation.tools, edit)
        if call is None or len(done) >= _PATIENCE:
            return f"I cannot read the file. {_results(conversation, done)}", []
        return "", [call]
    key = _KEY.search(contents)
    line = re.search(rf"The {edit.old}[^\r\n\"\\]*", contents)
    if key is None or line is None:
        return f"The file does not say what I was told. {_results(conversation, done)}", []
    change = tool_use.editing(conversation.tools, edit, line[0])
    # Some clients add a tool's default arguments to the calls of the history.
    tried = [call for call in done if change and call.name == change[0] and edit.new in json.dumps(call.arguments)]
    if change is None or len(done) >= _PATIENCE:
        return f"I cannot change the file. {_results(conversation, done)}", []
    if not tried:
        return "", [change]
    return f"The pass key is {key[1]}. The file now has {edit.new} in place of {edit.old}.", []


def _results(conversation: Conversation, done: list[Any]) -> str:
    names = ", ".join(tool["name"] for tool in conversation.tools)
    said = "; ".join(f"{call.name}({json.dumps(call.arguments)}): {call.result}" for call in done)
    return f"Tools: {names}. Calls: {said}"


def _first(asked: list[str]) -> str:
    """The first thing asked for; agents put messages of their own before it."""
    found = (match for said in asked for match in (_TASK.search(said), _KEY.search(said)) if match)
    first = next(found, None)
    return asked[0][:100] if first is None else first[0]


def _written(call: tuple[str, Any]) -> str:
    name, arguments = call
    text = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{text}\n</tool_call>"
