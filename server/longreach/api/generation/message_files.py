"""Kept files in the messages of a turn: each is put where its mark stands, before a prompt is made of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from longreach.api.schema.requests.chat_messages import Message
from longreach.api.schema.requests.chat_turn import ChatTurn
from longreach.api.schema.requests.file_parts import files_in, named_files, with_files
from longreach.api.service.call import Call
from longreach.api.service.loaded_document import load_document
from longreach.documents.errors import NONE_KEPT
from longreach.documents.wrapping import wrapped
from longreach.errors import InvalidRequestError, quoted

MAX_FILES = 256


async def with_kept_files(call: Call[Any], turn: ChatTurn) -> ChatTurn:
    """The turn with the texts of the files that its messages name; the same turn if they name none.

    Raises:
        DocumentNotFoundError: the caller has no such file.
        InvalidRequestError: nothing is kept, a file is no text, or they are too many or too long.
        ApiError: as `load_document`.
        ClientGoneError: the caller went away.
    """
    names = named_files(message.content for message in turn.messages)
    if not names:
        return turn
    documents, param = call.service.documents, turn.param
    if not documents.enabled:
        why = f"{NONE_KEPT}; send the file itself (`file_data`), or start the server with --documents memory"
        raise _refused(param, why)
    if len(names) > MAX_FILES:
        raise _refused(param, f"the messages name {len(names)} files; {MAX_FILES} may be named")
    found = {name: await documents.find(call.record.owner, name, param) for name in names}
    for name, document in found.items():
        if document.kind != "text":
            why = f"{quoted(name)} is a document of {document.kind}, and no text; refer to it by `document`"
            raise _refused(param, why)
    counts = Counter(name for message in turn.messages for name in files_in(message.content))
    size = sum(found[name].bytes * count for name, count in counts.items())
    if size > (most := call.service.settings.body_limit(call.engine.info.max_model_len)):
        why = f"the files in them have {size} bytes together; {most} are allowed (--max-body-bytes)"
        raise InvalidRequestError(f"`{param}`: {why}.", param=param, code="context_length_exceeded")
    loaded = {name: await load_document(call.service, call.record, name, param) for name in names}

    def put_in() -> list[Message]:
        texts = {name: wrapped(one.text, one.document.name) for name, one in loaded.items()}
        return [_with(message, texts) for message in turn.messages]

    messages = await call.attend(call.service.reading.call(put_in, caller=call.record.caller))
    return replace(turn, messages=messages, first_file=found[names[0]].id)


def _with(message: Message, texts: dict[str, str]) -> Message:
    """The message with `texts` in place of marks."""
    if not message.content or (content := with_files(message.content, texts)) is message.content:
        return message
    return message.model_copy(update={"content": content})


def _refused(param: str, why: str) -> InvalidRequestError:
    return InvalidRequestError(f"`{param}`: {why}.", param=param, code="unsupported_value")
