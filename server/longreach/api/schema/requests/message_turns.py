"""From the messages of Anthropic's protocol to those of a chat, in the order in which they were said."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Sequence
from typing import Literal

from longreach.api.schema.requests.chat_messages import CalledFunction, Message, ToolCall
from longreach.api.schema.requests.fields import MAX_TOOLS, invalid, located
from longreach.api.schema.requests.message_blocks import (
    Block,
    ResultBlock,
    SystemBlock,
    TurnMessage,
    document_text,
)

# Claude Code begins its system prompt with a line for whoever bills. It differs from request to request in some
# versions, and would keep all prompts from sharing a prefix in the cache. Anthropic's own servers take it out, too.
_BILLING = "x-anthropic-billing-header:"

# A signature says who wrote a block of reasoning. One whose text was not to be shown carries it, in Base64: the next
# turn's prompt needs it.
SIGNATURE = "longreach.1."


def signature_of(hidden: str = "") -> str:
    """The signature of a block of reasoning, whose text is `hidden` if the block does not show it."""
    return SIGNATURE + base64.b64encode(hidden.encode("utf-8", "surrogatepass")).decode()


def chat_messages(system: Sequence[SystemBlock], messages: Sequence[TurnMessage]) -> list[Message]:
    """The messages of a chat.

    Texts of one message are joined by newlines, those of an answer by nothing, as they were written. Messages of one
    role that follow each other are one. A result that is an error is told as such by its first word.
    """
    found: list[Message] = []
    texts = [block.text for block in system if not block.text.startswith(_BILLING)]
    if any(texts):
        found.append(Message(role="system", content="\n".join(texts)))
    for message in messages:
        if message.role == "assistant":
            found.append(_answer(message.content))
        else:
            found += _said(message.role, message.content)
    return [*_merged(found)]


def _said(role: Literal["system", "user", "assistant"], blocks: Iterable[Block]) -> Iterable[Message]:
    """Texts and results, in their order."""
    texts: list[str] = []
    for block in blocks:
        if block.type != "tool_result":
            text = _text(block)
            texts += [] if text.startswith(_BILLING) else [text]
            continue
        if texts:
            yield Message(role=role, content="\n".join(texts))
            texts = []
        yield Message(role="tool", tool_call_id=block.tool_use_id, content=_result(block))
    if texts:
        yield Message(role=role, content="\n".join(texts))


def _result(block: Block) -> str:
    texts = [_text(one) for one in block.content or ()]
    return ("Error: " if block.is_error else "") + "\n".join(texts)


def _text(block: Block | ResultBlock) -> str:
    """What a block says; for a file that is kept its mark stands there."""
    if block.type == "document":
        return document_text(block)
    return (block.tool_name if isinstance(block, ResultBlock) and block.type == "tool_reference" else block.text) or ""


def _answer(blocks: Sequence[Block]) -> Message:
    calls = [_call(block) for block in blocks if block.type == "tool_use"]
    reasoning = "".join(_reasoning(block) for block in blocks)
    return Message(
        role="assistant",
        content="".join(block.text or "" for block in blocks),
        reasoning_content=reasoning or None,
        tool_calls=calls or None,
    )


def _reasoning(block: Block) -> str:
    """What a block shows of the reasoning, or its signature hides; empty for other blocks."""
    if block.thinking or not (block.signature or "").startswith(SIGNATURE):
        return block.thinking or ""
    try:
        hidden = base64.b64decode((block.signature or "")[len(SIGNATURE) :], validate=True)
        return hidden.decode("utf-8")
    except ValueError:  # no Base64, or no text
        return ""  # it was written by somebody else


def _call(block: Block) -> ToolCall:
    arguments = json.dumps(block.input, ensure_ascii=False)
    function = CalledFunction(name=block.name or "", arguments=arguments)
    return ToolCall(id=block.id or "", type="function", function=function)


def _merged(messages: Iterable[Message]) -> Iterable[Message]:
    """Messages of the same role as one, where both are plain text of the user, or of an answer that goes on."""
    group: list[Message] = []
    for message in messages:
        if group and not _goes_on(group[-1], message):
            yield _joined(group)
            group = []
        group.append(message)
    if group:
        yield _joined(group)


def _goes_on(last: Message, message: Message) -> bool:
    same = last.role == message.role
    return same and (message.role == "user" or (message.role == "assistant" and message.reasoning_content is None))


def _joined(group: Sequence[Message]) -> Message:
    """Messages of one role as one message.

    Raises:
        ValidationError: they have too many calls together.
    """
    if len(group) == 1:
        return group[0]
    texts = [message.content or "" for message in group]
    if group[0].role == "user":
        return Message(role="user", content="\n".join(texts))
    calls = [call for message in group for call in message.tool_calls or ()]
    if len(calls) > MAX_TOOLS:
        why = f"answers without a result between them must have at most {MAX_TOOLS} blocks of the type `tool_use`"
        raise located(invalid(why), "messages")
    return Message(
        role="assistant",
        content="".join(texts),
        reasoning_content=group[0].reasoning_content,
        tool_calls=calls or None,
    )
