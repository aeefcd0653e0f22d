"""The messages of Anthropic's protocol: roles with blocks of text, documents, reasoning, calls and their results.

A block is one model with the members of all kinds, and not a union of models: long bodies are decoded by the types of
their fields, which a union of objects has not (see `typed_decoding`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from longreach.api.schema.requests.fields import MAX_TOOLS, StrictModel, check_levels, described, invalid, located
from longreach.api.schema.requests.file_parts import reference, sent_file
from longreach.documents.wrapping import about, wrapped

MAX_BLOCKS = 65536

# What each kind needs, and what else it may have. The last three ask nothing of an answer.
_ALWAYS = frozenset({"type", "cache_control", "caller", "toolset_name"})
_NEEDED: dict[str, tuple[str, ...]] = {
    "text": ("text",),
    "thinking": ("thinking",),
    "redacted_thinking": ("data",),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id",),
    "tool_reference": ("tool_name",),
    "document": ("source",),
}
_ALLOWED: dict[str, frozenset[str]] = {
    "text": frozenset({"citations"}),
    "thinking": frozenset({"signature"}),
    "redacted_thinking": frozenset(),
    "tool_use": frozenset(),
    "tool_result": frozenset({"content", "is_error"}),
    "tool_reference": frozenset(),
    "document": frozenset({"title", "context", "citations"}),
}
_OF_ROLE: dict[str, frozenset[str]] = {
    "system": frozenset({"text"}),
    "user": frozenset({"text", "document", "tool_result"}),
    "assistant": frozenset({"text", "thinking", "redacted_thinking", "tool_use"}),
}
_OF_RESULT = frozenset({"text", "document", "tool_reference"})
_MEDIA = frozenset({"image", "search_result", "container_upload", "browser_state"})
_SOURCES = {"text": "data", "base64": "data", "content": "content", "file": "file_id"}


class BlockSource(StrictModel):
    """Where a document comes from: `text` or `base64` (a PDF) with `data`, `content` with blocks of text, or `file`
    with a `file_id`.

    Sources of other types are refused. Images have one as well, and are refused by their kind.
    """

    type: Annotated[str | None, Field(max_length=64)] = None
    media_type: Annotated[str | None, Field(max_length=256)] = None
    data: str | None = None
    url: str | None = None
    file_id: Annotated[str | None, Field(max_length=256)] = None
    content: Any = None


class ResultBlock(StrictModel):
    """A block of a tool's result: `text`, `document`, or `tool_reference`, which is read as the tool's name."""

    type: Annotated[str, Field(max_length=64)]
    text: str | None = None
    tool_name: Annotated[str | None, Field(max_length=128)] = None
    citations: Any = None
    source: BlockSource | str | None = None
    title: str | None = None
    context: str | None = None
    content: Any = None
    cache_control: Any = None
    caller: Any = None
    toolset_name: Annotated[str | None, Field(max_length=128)] = None

    @model_validator(mode="after")
    def _check_kind(self) -> ResultBlock:
        _check_members(self, _OF_RESULT, "the result of a tool")
        return self


def _as_blocks(value: object) -> object:
    """A string is short for one block of text."""
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        raise invalid("must be a string or a list of blocks", "invalid_type")
    return value


def _blocks_schema(name: str) -> dict[str, Any]:
    items = {"$ref": f"#/components/schemas/{name}"}
    return {"anyOf": [{"type": "string"}, {"type": "array", "items": items, "maxItems": MAX_BLOCKS}]}


ResultContent = Annotated[
    list[ResultBlock],
    Field(max_length=MAX_BLOCKS),
    BeforeValidator(_as_blocks),
    described(_blocks_schema("ResultBlock")),
]


def _input(value: dict[str, Any] | None) -> dict[str, Any] | None:
    check_levels(value)
    return value


class Block(StrictModel):
    """A block of a message.

    `text`, `thinking` and `redacted_thinking` (which nobody can read, and the model is not given), `tool_use` with its
    `input`, `tool_result`, and `document` with its `source`. `citations` of texts and `cache_control` change nothing.
    Images are refused.
    """

    type: Annotated[str, Field(max_length=64)]
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None
    id: Annotated[str | None, Field(min_length=1, max_length=256)] = None
    name: Annotated[str | None, Field(min_length=1, max_length=128)] = None
    input: Annotated[dict[str, Any] | None, BeforeValidator(_input)] = None
    tool_use_id: Annotated[str | None, Field(min_length=1, max_length=256)] = None
    content: ResultContent | None = None
    is_error: bool | None = None
    citations: Any = None
    source: BlockSource | str | None = None
    title: str | None = None
    context: str | None = None
    cache_control: Any = None
    caller: Any = None
    toolset_name: Annotated[str | None, Field(max_length=128)] = None


Content = Annotated[
    list[Block], Field(max_length=MAX_BLOCKS), BeforeValidator(_as_blocks), described(_blocks_schema("Block"))
]


class TurnMessage(StrictModel):
    """A message. One of the role `system` in the midst of a conversation stays where it is."""

    role: Literal["user", "assistant", "system"]
    content: Content

    @model_validator(mode="after")
    def _check_blocks(self) -> TurnMessage:
        for number, block in enumerate(self.content):
            try:
                _check_members(block, _OF_ROLE[self.role], f"a message of the role {self.role}")
            except PydanticCustomError as error:
                raise located(error, "content", number) from None
        if not self.content and self.role != "assistant":
            raise located(invalid("must have at least one block"), "content")
        if sum(block.type == "tool_use" for block in self.content) > MAX_TOOLS:
            raise located(invalid(f"must have at most {MAX_TOOLS} blocks of the type `tool_use`"), "content")
        return self


class SystemBlock(StrictModel):
    """A block of the system prompt."""

    type: Literal["text"]
    text: str
    citations: Any = None
    cache_control: Any = None


System = Annotated[
    list[SystemBlock],
    Field(max_length=MAX_BLOCKS),
    BeforeValidator(_as_blocks),
    described(_blocks_schema("SystemBlock")),
]


def _check_members(block: Block | ResultBlock, kinds: frozenset[str], where: str) -> None:
    kind = block.type
    if kind in _MEDIA:
        raise invalid(
            f"this server reads text alone; blocks of the type `{kind}` are not supported", "unsupported_value"
        )
    if kind not in kinds:
        allowed = " or ".join(f"`{one}`" for one in sorted(kinds))
        raise invalid(f"in {where}, blocks must be of the type {allowed}, not `{kind}`", "unsupported_value")
    given = {name for name in block.model_fields_set if getattr(block, name) is not None}
    missing = [name for name in _NEEDED[kind] if name not in given]
    if missing:
        raise invalid(f"a block of the type `{kind}` needs `{missing[0]}`", "missing_required_parameter")
    if kind == "document":
        _check_document(block)
    strange = given - _ALWAYS - {*_NEEDED[kind]} - _ALLOWED[kind]
    if strange:
        raise invalid(f"a block of the type `{kind}` has no `{min(strange)}`", "unknown_parameter")


def _check_document(block: Block | ResultBlock) -> None:
    source, citations = block.source, block.citations
    if not isinstance(source, BlockSource):
        raise invalid("a document's `source` must be an object", "invalid_type", "source")
    if citations is not None and not (isinstance(citations, dict) and citations.get("enabled") in (None, False)):
        why = "answers have no citations: leave `citations` out, or set its `enabled` to false"
        raise invalid(why, "unsupported_value", "citations")
    kind = source.type or ""
    if kind not in _SOURCES:
        cure = (
            "send `text` with `data`, `base64` with a PDF's `data`, `content` with blocks of text, or `file` with a "
            "`file_id`"
        )
        raise invalid(f"sources of the type `{kind}` are not read here; {cure}", "unsupported_value", "source")
    if getattr(source, _SOURCES[kind]) is None:
        why = f"a source of the type `{kind}` needs `{_SOURCES[kind]}`"
        raise invalid(why, "missing_required_parameter", "source")
    if kind == "text" and source.media_type not in (None, "text/plain"):
        raise invalid("the `media_type` of a text is `text/plain`", "unsupported_value", "source.media_type")
    if kind == "base64" and source.media_type != "application/pdf":
        raise invalid("the `media_type` of `base64` is `application/pdf`", "unsupported_value", "source.media_type")
    document_text(block)


def document_text(block: Block | ResultBlock) -> str:
    """What stands in a message for a document, whose source is one of those that are read.

    A title is the name of a text that has none of its own. A file that is kept has one: there the title stands behind
    the text, so that the prompt begins as others about the file do.

    Raises:
        PydanticCustomError: its content is no text.
    """
    source = block.source
    assert isinstance(source, BlockSource), "documents are checked"
    if source.type == "file":
        return reference(source.file_id or "", "source.file_id") + about(block.title, block.context)
    if source.type == "base64":
        return sent_file(source.data or "", block.title, source.media_type, "source.data") + about(None, block.context)
    text = source.data or "" if source.type == "text" else _text_of_content(source.content)
    return wrapped(text, block.title) + about(None, block.context)


def _text_of_content(content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid("must be a string or a list of blocks", "invalid_type", "source.content")
    texts: list[str] = []
    for number, block in enumerate(content):
        text = block.get("text") if isinstance(block, dict) and block.get("type") == "text" else None
        if not isinstance(text, str):
            raise invalid(
                "blocks of a document must be of the type `text`, with a `text`",
                "unsupported_value",
                f"source.content.{number}",
            )
        texts.append(text)
    return "\n".join(texts)
