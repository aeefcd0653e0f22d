"""The bodies of `POST /v1/messages` and `POST /v1/messages/count_tokens`, in Anthropic's protocol."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, PrivateAttr, model_validator

from longreach.api.schema.requests.chat_messages import Message
from longreach.api.schema.requests.chat_turn import ChatTurn
from longreach.api.schema.requests.document_field import DocumentField
from longreach.api.schema.requests.fields import (
    MAX_MESSAGES,
    MAX_PROMPT_TOKENS,
    Stops,
    StrictModel,
    invalid,
    located,
    only,
)
from longreach.api.schema.requests.formats import JsonSchema
from longreach.api.schema.requests.harmless import FreeObject, harmless
from longreach.api.schema.requests.message_blocks import Block, ResultBlock, System, SystemBlock, TurnMessage
from longreach.api.schema.requests.message_tools import (
    MAX_MESSAGE_TOOLS,
    AnyTool,
    MessageFunction,
    MessageToolChoice,
    ToolSelection,
    select,
)
from longreach.api.schema.requests.message_turns import chat_messages
from longreach.api.schema.requests.sampling import SamplingFields
from longreach.errors import ThreadNotFoundError

# What templates call the switch of reasoning, and the strongest effort that they know.
_SWITCHES = ("enable_thinking", "thinking")
_EFFORTS = {"xhigh": "high", "max": "high"}

_TIERS = (None, "auto", "standard_only", "default", "flex")
MessageTier = Annotated[
    Literal["default", "flex"] | None,
    only(*_TIERS),
    AfterValidator(lambda tier: "default" if tier in ("auto", "standard_only") else tier),
]


class Thinking(StrictModel):
    """`thinking`: given to chat templates that can switch reasoning on and off.

    `adaptive` and `between_tools` leave it to the model. `budget_tokens` is given to templates that read
    `thinking_budget`, and is no limit of its own. With `display: omitted` blocks of thinking have a signature alone.
    """

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = Field(None, ge=1, le=MAX_PROMPT_TOKENS)
    display: Literal["summarized", "updates", "omitted"] | None = None


class MessageFormat(StrictModel):
    """The JSON schema that the answer follows."""

    type: Literal["json_schema"]
    schema_: JsonSchema = Field(alias="schema")


class OutputConfig(StrictModel):
    """`output_config`: the answer's form. `effort` is given to chat templates that read `reasoning_effort`."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: MessageFormat | None = None
    task_budget: Any = None


class MessageMetadata(StrictModel):
    """`metadata`: who asks."""

    user_id: Annotated[str | None, Field(max_length=1024)] = None


class Thread(StrictModel):
    """`thread`: where Anthropic's servers keep a conversation between requests.

    Nothing is kept here. `create` asks for nothing of the answer. `continue` is an error that Anthropic's SDKs know:
    they send the whole conversation again.

    Raises:
        ThreadNotFoundError: `continue`. It goes before what else is wrong: such a request has a part of a conversation.
    """

    type: Literal["create", "continue"]
    previous_message_id: Annotated[str | None, Field(max_length=256)] = None

    @model_validator(mode="after")
    def _check_type(self) -> Thread:
        if self.type == "continue":
            raise ThreadNotFoundError
        return self


class PromptFields(StrictModel):
    """What the prompt of a message is made of, and the form of the answer."""

    NESTED: ClassVar = (Block, ResultBlock, SystemBlock, MessageFunction)  # what schemas of its fields name
    FREE_BYTES: ClassVar = 4 * 1024 * 1024  # inputs of the calls of a long conversation

    messages: Annotated[list[TurnMessage], Field(min_length=1, max_length=MAX_MESSAGES)] = Field(
        description="The conversation so far. With a last message of the assistant, the answer goes on with it."
    )
    system: System | None = Field(None, description="The system prompt, as a string or blocks of text.")
    tools: Annotated[list[AnyTool] | None, Field(max_length=MAX_MESSAGE_TOOLS)] = Field(
        None, description="Tools; those that only Anthropic's servers can run are left out, and told in the answer."
    )
    tool_choice: MessageToolChoice | None = Field(None, description="By default auto.")
    thinking: Thinking | None = Field(None, description="By default as the model's chat template has it.")
    output_config: OutputConfig | None = Field(None, description="The answer's form, and the effort.")
    output_format: MessageFormat | None = Field(None, description="The older name of `output_config.format`.")
    context_management: FreeObject | None = Field(None, description="No edit is applied, and the answer says so.")

    chat_template_kwargs: FreeObject | None = Field(
        None, description="Variables for the chat template, which has to read each of them."
    )

    _chat: list[Message] = PrivateAttr()
    _selection: ToolSelection = PrivateAttr()

    @model_validator(mode="after")
    def _read(self) -> PromptFields:
        if self._continues and any(block.type == "tool_use" for block in self.messages[-1].content):
            why = "the last message calls a tool, whose result must follow"
            raise located(invalid(why), "messages", len(self.messages) - 1)
        if self.output_format is not None and self.output_config is not None and self.output_config.format is not None:
            raise located(invalid("cannot be set together with `output_config.format`"), "output_format")
        # Here, since long bodies are checked in a thread.
        self._chat = chat_messages(self.system or (), self.messages)
        self._selection = select(self.tools or [], self.tool_choice)
        return self

    @property
    def _continues(self) -> bool:
        """Whether the answer goes on with the last message."""
        return self.messages[-1].role == "assistant"

    @property
    def tools_left_out(self) -> list[str]:
        """The kinds of tools that the model is not told of."""
        return self._selection.left_out

    @property
    def hides_thinking(self) -> bool:
        """Whether the text of reasoning is not to be shown."""
        return self.thinking is not None and self.thinking.display == "omitted"

    def turn(self, reads: Callable[[str], bool]) -> ChatTurn:
        """What is asked, for a chat template that `reads` some variables."""
        kwargs = self.chat_template_kwargs or {}
        own = {name: value for name, value in self._variables(reads).items() if reads(name)}
        form = self.output_format
        if form is None and self.output_config is not None:
            form = self.output_config.format
        return ChatTurn(
            messages=self._chat,
            param="messages",
            tools=self._selection.tools,
            tool_choice=self._selection.choice,
            parallel_tool_calls=self._selection.parallel,
            form=None if form is None else ("json_schema", form.schema_),
            form_field="output_config.format" if self.output_format is None else "output_format",
            opens_answer=not self._continues,
            continues=self._continues,
            variables={**own, **kwargs},
            variable_fields={name: f"chat_template_kwargs.{name}" for name in kwargs},
        )

    def _variables(self, reads: Callable[[str], bool]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        thinking, config = self.thinking, self.output_config
        if thinking is not None and thinking.type in ("enabled", "disabled"):
            switch = next(filter(reads, _SWITCHES), _SWITCHES[0])
            found[switch] = thinking.type == "enabled"
        if thinking is not None and thinking.budget_tokens is not None:
            found["thinking_budget"] = thinking.budget_tokens
        if config is not None and config.effort is not None:
            found["reasoning_effort"] = _EFFORTS.get(config.effort, config.effort)
        return found


class MessageRequest(SamplingFields, PromptFields, harmless("messages")):
    """Answer the last message of a conversation, in Anthropic's protocol.

    Fields of sampling and serving that Anthropic does not have are as on the other endpoints.
    """

    max_tokens: int = Field(
        ge=0,
        le=MAX_PROMPT_TOKENS,
        description="0 reads the prompt into the cache. The context's end ends an answer, too.",
    )
    stop_sequences: Stops = Field([], description="Strings that end the answer; with `stop` together.")
    metadata: MessageMetadata | None = Field(None, description="`user_id` says who asks.")
    thread: Thread | None = Field(
        None, description="No threads are kept: `create` asks for nothing, `continue` is a 404 `thread_not_found`."
    )
    service_tier: MessageTier = Field(
        None,
        description="`flex`, for batches: read after all other prompts, and no step is kept short for its answer.",
        json_schema_extra={"enum": [*_TIERS]},
    )

    @model_validator(mode="after")
    def _check_together(self) -> MessageRequest:
        if self.min_tokens > self.max_tokens:
            raise invalid(f"`min_tokens` ({self.min_tokens}) is greater than `max_tokens` ({self.max_tokens})")
        formed = self.output_format is not None or (self.output_config is not None and self.output_config.format)
        forced = self.tool_choice is not None and self.tool_choice.type in ("any", "tool")
        if self.min_tokens and (formed or forced):
            raise invalid("`min_tokens` cannot be set where a grammar decides when the answer may end")
        if formed and forced:
            raise located(invalid("cannot force a call where `output_config.format` is set"), "tool_choice")
        return self

    @property
    def user(self) -> str | None:
        """Who asks, if the request says so."""
        return None if self.metadata is None else self.metadata.user_id


class CountTokensRequest(PromptFields, DocumentField, harmless("count_tokens")):
    """Count the tokens of the prompt that a message would have."""

    model: str = Field(min_length=1, max_length=256, description="A name of the served model.")
