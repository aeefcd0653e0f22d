"""The body of `POST /v1/responses`, for text, and that of `POST /v1/responses/input_tokens`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from longreach.api.schema.requests.chat_messages import Message
from longreach.api.schema.requests.chat_turn import ChatTurn
from longreach.api.schema.requests.document_field import DocumentField
from longreach.api.schema.requests.fields import (
    MAX_PROMPT_TOKENS,
    MAX_TOP_LOGPROBS,
    StrictModel,
    invalid,
    or_default,
)
from longreach.api.schema.requests.formats import JsonSchema, Name, NamedFunction, NamedTool
from longreach.api.schema.requests.harmless import Metadata, harmless
from longreach.api.schema.requests.response_items import Input, InputItem
from longreach.api.schema.requests.response_tool_choice import Choice, ToolChoice, check_choice
from longreach.api.schema.requests.response_tools import (
    CustomTool,
    FunctionTool,
    NamespaceTool,
    OfferedTool,
    Tools,
    ToolSet,
)
from longreach.api.schema.requests.sampling import SamplingFields

LOGPROBS = "message.output_text.logprobs"
_INCLUDABLE = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]


class TextFormat(StrictModel):
    """`text.format`: free text, any JSON object, or JSON that follows `schema`."""

    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    description: Annotated[str | None, Field(max_length=4096)] = None
    schema_: JsonSchema | None = Field(None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _check_together(self) -> TextFormat:
        if (self.type == "json_schema") != (self.schema_ is not None and self.name is not None):
            raise invalid("`name` and `schema` belong to the type `json_schema`, and to no other")
        return self


class TextOptions(StrictModel):
    """`text`: the answer's form, and its `verbosity` for chat templates that read it. A forced call leaves no text."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(StrictModel):
    """`reasoning`: how much of it, for models whose chat template reads that. It comes whole, and without a summary."""

    effort: Annotated[str | None, Field(max_length=32)] = None
    summary: Literal["auto", "concise", "detailed", "none"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponseStreamOptions(StrictModel):
    """`stream_options` of a response. Events are never padded, whatever `include_obfuscation` says."""

    include_obfuscation: bool | None = None
    progress_comments: Annotated[bool, or_default(False)] = Field(
        False, description="Tell in comments how far the prompt has been read, while nothing else is to be told."
    )


class ConversationFields(StrictModel):
    """What a response answers: the conversation, and the tools that it may use."""

    NESTED: ClassVar = (InputItem, FunctionTool, CustomTool, NamespaceTool)  # what the schemas of fields name

    instructions: str | None = Field(None, description="A system message before everything else; not carried over.")
    previous_response_id: Annotated[str | None, Field(max_length=256)] = Field(
        None, description="Go on from this response: its input and output come before `input`."
    )
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    tools: Tools = Field(
        default_factory=ToolSet,
        description="Functions, custom tools, and namespaces of them. Other types are left out, and reported.",
        json_schema_extra={"default": None},
    )
    tool_choice: ToolChoice = Field(
        None, description="none, auto (the default), required, one tool by its name, or `allowed_tools`."
    )
    parallel_tool_calls: Annotated[bool, or_default(True)] = Field(
        True, description="False: the answer ends after its first call."
    )
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="auto: leave out the oldest turns of a conversation that does not fit."
    )

    @field_validator("tool_choice", mode="after")
    @classmethod
    def _check_choice(cls, choice: Choice | None, info: ValidationInfo) -> Choice | None:
        if (tools := info.data.get("tools")) is not None:  # else they are what is wrong
            check_choice(choice, tools)
        return choice

    @property
    def form(self) -> tuple[Literal["json_schema"], dict[str, Any]] | None:
        """The JSON schema that the answer has to follow, if any."""
        wanted = None if self.text is None else self.text.format
        if wanted is None or wanted.type == "text":
            return None
        return "json_schema", wanted.schema_ or {"type": "object"}

    @property
    def form_field(self) -> str:
        """The field that `form` comes from."""
        return "text.format"

    @property
    def offered(self) -> list[OfferedTool]:
        """The tools that may be called in this answer."""
        choice = self.tool_choice
        if choice is None or choice.names is None:
            return [*self.tools.offered]
        return [tool for tool in self.tools.offered if tool.shown in choice.names]

    def turn(self, messages: Sequence[Message]) -> ChatTurn:
        """What is asked of the model, where `messages` are the whole conversation without the instructions."""
        first = [] if self.instructions is None else [Message(role="system", content=self.instructions)]
        choice = self.tool_choice
        named = None
        if choice is not None and choice.single and choice.names:
            [name] = choice.names
            named = NamedTool(type="function", function=NamedFunction(name=name))
        return ChatTurn(
            messages=[*first, *messages],
            param="input",
            tools=[tool.tool for tool in self.offered],
            tool_choice=named or (None if choice is None or not self.tools else choice.mode),
            strict_by_default=frozenset(tool.shown for tool in self.offered if tool.is_strict),
            parallel_tool_calls=self.parallel_tool_calls,
            form=self.form,
            form_field=self.form_field,
            variables={
                "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
                "verbosity": None if self.text is None else self.text.verbosity,
            },
            variable_fields={"reasoning_effort": "reasoning.effort", "verbosity": "text.verbosity"},
        )


class ResponseRequest(SamplingFields, ConversationFields, harmless("responses")):
    """Answer a text or a conversation. It is kept for later requests unless `store` is false."""

    input: Input = Field(default_factory=list, description="A text, or the items of the conversation so far.")
    max_output_tokens: int | None = Field(
        None, ge=1, le=MAX_PROMPT_TOKENS, description="By default whatever the context has left."
    )
    max_tool_calls: int | None = Field(
        None, ge=1, le=2**31 - 1, description="Of tools that OpenAI runs; here there are none."
    )
    store: bool | None = Field(
        None, description="Keep the response for `previous_response_id` and GET; null and true: if the server does."
    )
    background: Annotated[bool, or_default(False)] = Field(
        False, description="Answer at once, and go on without the caller: GET has the rest."
    )
    include: Annotated[list[_INCLUDABLE] | None, Field(max_length=32)] = Field(
        None,
        description="`message.output_text.logprobs`: log-probabilities. For the others there is no data.",
    )
    stream_options: ResponseStreamOptions | None = Field(None, description="What a stream tells beside its events.")
    top_logprobs: int | None = Field(
        None, ge=0, le=MAX_TOP_LOGPROBS, description="Log-probabilities with so many of the likeliest tokens."
    )
    metadata: Metadata | None = Field(None, description="Returned as it is.")

    @model_validator(mode="after")
    def _check_together(self) -> ResponseRequest:
        if self.max_output_tokens is not None and self.min_tokens > self.max_output_tokens:
            raise invalid(
                f"`min_tokens` ({self.min_tokens}) is greater than `max_output_tokens` ({self.max_output_tokens})"
            )
        required = self.tool_choice is not None and self.tool_choice.mode == "required"
        if (self.form is not None or required) and self.min_tokens:
            raise invalid("`min_tokens` cannot be set where a grammar decides when the answer may end")
        return self

    @field_validator("background", mode="after")
    @classmethod
    def _check_background(cls, background: bool, info: ValidationInfo) -> bool:
        if background and info.data.get("store") is False:
            raise invalid("needs `store`: what goes on without its caller is fetched later")
        return background

    @property
    def logprobs(self) -> int | None:
        """Likeliest tokens that are told at each place; None for no log-probabilities."""
        if not self.top_logprobs and LOGPROBS not in (self.include or ()):
            return None
        return self.top_logprobs or 0


class InputTokensRequest(ConversationFields, DocumentField):
    """Count the tokens of the prompt that a response would read."""

    model: Annotated[str | None, Field(min_length=1, max_length=256)] = None
    input: Input = Field(default_factory=list, description="As in a response.")
