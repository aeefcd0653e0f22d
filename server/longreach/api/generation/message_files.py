"""Files in the messages of a turn: each is put where its mark stands, before a prompt is made of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from longreach.api.schema.requests.chat_messages import Message
from longreach.api.schema.requests.chat_turn import ChatTurn
from longreach.api.schema.requests.file_parts import files_in, is_sent_pdf, named_files, sent_pdf, with_files
from longreach.api.service.call import Call
from longreach.api.service.file_text import read_pdf
from longreach.api.service.loaded_document import LoadedDocument, load_document
from longreach.documents.document import Document
from longreach.documents.errors import NONE_KEPT
from longreach.documents.wrapping import wrapped
from longreach.errors import InvalidRequestError, quoted

MAX_FILES = 256


async def with_kept_files(call: Call[Any], turn: ChatTurn) -> ChatTurn:
    """The turn with the texts of the kept files and of the PDFs in its messages; the same turn if they have none.

    Raises:
        DocumentNotFoundError: the caller has no such file.
        InvalidRequestError: nothing is kept, a file is no text, a PDF cannot be read, or they are too many or too long.
        ApiError: as `load_document` and `read_pdf`.
        ClientGoneError: the caller went away.
    """
    marks = named_files(message.content for message in turn.messages)
    if not marks:
        return turn
    param = turn.param
    if len(marks) > MAX_FILES:
        raise _refused(param, f"the messages have {len(marks)} files; {MAX_FILES} are allowed")
    names = [mark for mark in marks if not is_sent_pdf(mark)]
    found = await _kept(call, names, param)
    sizes = {name: document.bytes for name, document in found.items()}
    _check_size(call, turn, sizes)
    texts: dict[str, str] = {}
    for mark in filter(is_sent_pdf, marks):
        pdf = await call.service.reading.call(sent_pdf, mark, caller=call.record.caller)
        read = await call.attend(read_pdf(call.service, call.record, pdf.data, pdf.name, param))
        texts[mark] = wrapped(read.text, pdf.name)
        sizes[mark] = len(read.text)
    _check_size(call, turn, sizes)
    loaded: dict[str, LoadedDocument] = {
        name: await load_document(call.service, call.record, name, param) for name in names
    }

    def put_in() -> list[Message]:
        texts.update({name: wrapped(one.text, one.document.name) for name, one in loaded.items()})
        return [_with(message, texts) for message in turn.messages]

    messages = await call.attend(call.service.reading.call(put_in, caller=call.record.caller))
    first = found.get(marks[0])
    return replace(turn, messages=messages, first_file=None if first is None else first.id)


async def _kept(call: Call[Any], names: list[str], param: str) -> dict[str, Document]:
    """The kept texts with these names."""
    documents = call.service.documents
    if names and not documents.enabled:
        why = f"{NONE_KEPT}; send the file itself (`file_data`), or start the server with --documents memory"
        raise _refused(param, why)
    found = {name: await documents.find(call.record.owner, name, param) for name in names}
    for name, document in found.items():
        if document.kind != "text":
            why = f"{quoted(name)} is a document of {document.kind}, and no text; refer to it by `document`"
            raise _refused(param, why)
    return found


def _check_size(call: Call[Any], turn: ChatTurn, sizes: dict[str, int]) -> None:
    counts = Counter(name for message in turn.messages for name in files_in(message.content))
    size = sum(bytes_of_one * counts[name] for name, bytes_of_one in sizes.items())
    if size > (most := call.service.settings.body_limit(call.engine.info.max_model_len)):
        why = f"the files in them have {size} bytes together; {most} are allowed (--max-body-bytes)"
        raise InvalidRequestError(f"`{turn.param}`: {why}.", param=turn.param, code="context_length_exceeded")


def _with(message: Message, texts: dict[str, str]) -> Message:
    """The message with `texts` in place of marks."""
    if not message.content or (content := with_files(message.content, texts)) is message.content:
        return message
    return message.model_copy(update={"content": content})


def _refused(param: str, why: str) -> InvalidRequestError:
    return InvalidRequestError(f"`{param}`: {why}.", param=param, code="unsupported_value")
