"""A kept document as requests use it: found for its owner, decoded, and at the beginning of a prompt."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pydantic import TypeAdapter, ValidationError

from longreach.api.http.request_log import RequestRecord
from longreach.api.schema.requests.chat_messages import Message
from longreach.api.service.encode import TextEncoder
from longreach.documents.document import Document, NewDocument, is_id
from longreach.documents.wrapping import wrapped
from longreach.errors import ContextLengthError, HttpError, InvalidRequestError, OverloadedError, UnavailableError
from longreach.text.beginning import Beginning
from longreach.util import exact_json

if TYPE_CHECKING:
    from longreach.api.service.service import Service

log = logging.getLogger(__name__)

_RETRY_AFTER_BODIES = 2
_MESSAGES = TypeAdapter(list[Message])
_LEADING = ("system", "developer")


@dataclass(frozen=True)
class LoadedDocument:
    """A document with its contents, of which `text`, `messages` or `tokens` is set, as its kind says.

    `beginning` is what prompts with it begin with, where that was encoded of late.
    """

    document: NewDocument
    text: str = ""
    messages: Sequence[Message] = ()
    tokens: Sequence[int] = ()
    beginning: Beginning | None = None

    @classmethod
    def of(cls, document: Document, contents: bytes) -> LoadedDocument:
        """A document of what is kept of it. Long ones take their time: not in the event loop.

        Raises:
            UnavailableError: the contents cannot be read.
        """
        try:
            if document.kind == "text":
                return cls(document, text=contents.decode())
            if document.kind == "tokens":
                return cls(document, tokens=token_ids_of(contents))
            return cls(document, messages=_MESSAGES.validate_python(exact_json.loads(contents)))
        except (ValueError, ValidationError) as error:
            log.error("the store of documents has one that cannot be read: %s", error)
            raise UnavailableError("A kept document cannot be read.", code="store_failed", retry=False) from None

    def require_of_tokenizer(self, tokenizer: str, param: str) -> None:
        """Check that token ids are those of the tokenizer with this digest.

        Raises:
            InvalidRequestError: they are another one's.
        """
        if self.document.kind == "tokens" and self.document.tokenizer != tokenizer:
            raise InvalidRequestError(
                f"`{param}`: the document's token ids are those of another tokenizer than this server has now. Upload "
                "the document again.",
                param=param,
                code="document_of_another_tokenizer",
            )

    def before(self, messages: Sequence[Message], param: str = "document") -> list[Message]:
        """The messages of a chat behind this document.

        A text stands at the beginning of the user's first message; where there is none, it is one itself, behind the
        system's first ones. Messages stand before all others.

        Raises:
            InvalidRequestError: it is of token ids, which no message can have.
        """
        if self.document.kind == "tokens":
            raise InvalidRequestError(
                f"`{param}`: a document of token ids can only stand before the `prompt` of /v1/completions. Upload its "
                "text.",
                param=param,
                code="invalid_value",
            )
        if self.document.kind == "messages":
            return [*self.messages, *messages]
        text = wrapped(self.text, self.document.name)
        for number, message in enumerate(messages):
            if message.role == "user":
                said = f"{text}\n{message.content}" if message.content else text
                return [*messages[:number], message.model_copy(update={"content": said}), *messages[number + 1 :]]
        first = next((i for i, message in enumerate(messages) if message.role not in _LEADING), len(messages))
        return [*messages[:first], Message(role="user", content=text), *messages[first:]]

    async def before_prompt(
        self, encoder: TextEncoder, *, param: str, special: bool = True, parse_special: bool = True
    ) -> list[int]:
        """The token ids that stand before the prompt of a completion; with `special` those that the tokenizer puts
        before a text, too.

        Raises:
            InvalidRequestError: it has messages, which a completion has no form for.
            ApiError: it does not fit into the context, or is of other tokens.
        """
        if self.document.kind == "messages":
            raise InvalidRequestError(
                f"`{param}`: a document of messages can only stand before a chat. Use /v1/chat/completions.",
                param=param,
                code="invalid_value",
            )
        if self.document.kind == "tokens":
            self.require_of_tokenizer(encoder.tokenizer.digest, param)
            if len(self.tokens) >= encoder.info.max_model_len:
                raise ContextLengthError(len(self.tokens), 1, encoder.info.max_model_len, param=param)
            if max(self.tokens) >= encoder.info.vocab_size:
                raise InvalidRequestError(
                    f"`{param}`: the document's token ids do not fit this server's model. Upload its text.",
                    param=param,
                    code="invalid_value",
                )
            return [*self.tokens]
        around = encoder.tokenizer.around if special else ([], [])
        first = [] if around is None else around[0]
        ids = await encoder.encode(
            self.text,
            param=param,
            answer_tokens=1,
            special=around is None,
            parse_special=parse_special,
            before=len(first),
            beginning=self.beginning,
        )
        return [*first, *ids]


async def load_document(
    service: Service, record: RequestRecord, reference: str, param: str = "document"
) -> LoadedDocument:
    """The document that a request refers to, by its id or by a name that no other has. It counts as used, and its bytes
    count as those of the request's body do. One that is still being uploaded is waited for.

    Raises:
        DocumentNotFoundError: the caller has no such document.
        InvalidRequestError: the name means several, or no documents are kept.
        HttpError: it is being uploaded through another server process.
        OverloadedError: there is no memory for it at this moment.
    """
    document = await service.documents.find(record.owner, reference, param)
    if (upload := service.uploads.get(document.id)) is not None:
        kept_as = await upload.wait()
        document = await service.documents.find(record.owner, kept_as if is_id(reference) else reference, param)
    if document.state == "uploading":
        raise HttpError(f"The document {document.id} is still being uploaded.", code="document_uploading", status=409)
    bodies, caller, size = service.bodies, record.caller, document.bytes
    if not bodies.fits(caller, size):
        raise OverloadedError(
            "The server is busy: the documents and bodies of its open requests take all the memory that they may.",
            retry_after=_RETRY_AFTER_BODIES,
            code="too_many_bytes",
        )
    bodies.add(caller, size)
    record.at_end.callback(bodies.remove, caller, size)
    record.reads_document(document.id)
    used, contents = await service.documents.use(document)
    loaded = await service.reading.call(LoadedDocument.of, used, contents, caller=caller, size=size)
    return replace(loaded, beginning=service.beginnings.get(used.id))


def token_ids_of(contents: bytes) -> list[int]:
    """Token ids from their little-endian int32."""
    ids = array("i")
    ids.frombytes(contents)
    return ids.tolist()


def packed_token_ids(ids: Sequence[int]) -> bytes:
    """Token ids as they are kept."""
    return array("i", ids).tobytes()
