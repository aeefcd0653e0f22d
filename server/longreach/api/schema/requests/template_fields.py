"""Fields that a model's chat template is filled in with, under all the names that clients have for them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, PlainValidator, model_validator

from longreach.api.schema.requests.fields import StrictModel, described, invalid, neutral, only, or_default
from longreach.api.schema.requests.harmless import FreeObject, free_object

MAX_DOCUMENTS = 1024


class ReasoningOptions(StrictModel):
    """`reasoning`: OpenRouter's object for what `reasoning_effort`, `enable_thinking` and `include_reasoning` ask."""

    effort: Annotated[str | None, Field(max_length=32)] = None
    enabled: bool | None = None
    exclude: bool | None = None
    max_tokens: Annotated[None, only(None)] = neutral(None)
    summary: Annotated[None, only(None)] = neutral(None)


class ThinkingOptions(StrictModel):
    """`thinking`: DeepSeek's, GLM's and Anthropic's object for what `enable_thinking` asks."""

    type: Literal["enabled", "disabled"]
    budget_tokens: Annotated[None, only(None)] = neutral(None)


def _documents(value: object) -> list[dict[str, Any]] | None:
    if value is None:
        return None
    if not isinstance(value, list):
        raise invalid("must be a list of objects", "invalid_type")
    for index, document in enumerate(value):
        if not isinstance(document, dict):
            raise invalid("must be an object", "invalid_type", index)
    if len(value) > MAX_DOCUMENTS:
        raise invalid(f"must have at most {MAX_DOCUMENTS} documents")
    return [free_object(document) for document in value]


_DOCUMENTS_SCHEMA = {
    "anyOf": [{"type": "array", "items": {"type": "object"}, "maxItems": MAX_DOCUMENTS}, {"type": "null"}]
}


class TemplateVariables(NamedTuple):
    """What a template is filled in with beside messages and tools: `values`, and the `fields` that each comes from."""

    values: dict[str, Any]
    fields: dict[str, str]


class TemplateFields(StrictModel):
    """How a chat is written; a variable is refused if the model's template does not read it."""

    reasoning_effort: Annotated[str | None, Field(max_length=32)] = Field(
        None,
        description="For the template. If it does not read that, `none` switches thinking off, `medium` asks nothing.",
    )
    enable_thinking: bool | None = Field(None, description="For the template, as `enable_thinking` or `thinking`.")
    reasoning: ReasoningOptions | None = Field(None, description="The same and `include_reasoning`, as one object.")
    thinking: ThinkingOptions | None = Field(None, description="`enable_thinking` as an object.")
    verbosity: Literal["low", "medium", "high"] | None = Field(
        None, description="For the template, if it reads that; else it asks for nothing."
    )
    chat_template_kwargs: FreeObject | None = Field(
        None, description="Variables for the template, which has to read each of them."
    )
    documents: Annotated[list[dict[str, Any]] | None, PlainValidator(_documents), described(_DOCUMENTS_SCHEMA)] = Field(
        None, description="Documents for the template."
    )
    add_generation_prompt: bool | None = Field(
        None, description="End the chat where the assistant's answer begins; true unless the last message goes on."
    )
    continue_final_message: Annotated[bool, or_default(False)] = Field(
        False, description="The answer goes on with the last message, which stays open."
    )

    @model_validator(mode="after")
    def _check_template_fields(self) -> TemplateFields:
        if self.continues and self.add_generation_prompt:
            raise invalid("`continue_final_message` and `add_generation_prompt` cannot both be true")
        for index, message in enumerate((getattr(self, "messages", None) or [])[:-1]):
            if message.prefix:
                raise invalid(f"`messages.{index}.prefix`: only the last message can be gone on with")
        self.variables  # noqa: B018 - raises where two fields contradict each other
        return self

    @property
    def continues(self) -> bool:
        """Whether the answer goes on with the last message: `prefix: true` on that says so as well."""
        messages = getattr(self, "messages", None)
        return self.continue_final_message or bool(messages and messages[-1].prefix)

    @property
    def opens_answer(self) -> bool:
        """Whether the chat ends where a new message of the assistant begins."""
        return self.add_generation_prompt is not False and not self.continues

    @property
    def variables(self) -> TemplateVariables:
        """What the template is filled in with.

        Raises:
            PydanticCustomError: two fields give one variable different values.
        """
        reasoning = self.reasoning or _NO_OPTIONS
        thinking = None if self.thinking is None else self.thinking.type == "enabled"
        asked: list[tuple[str, str, Any]] = [
            ("reasoning_effort", "reasoning_effort", self.reasoning_effort),
            ("reasoning_effort", "reasoning.effort", reasoning.effort),
            ("enable_thinking", "enable_thinking", self.enable_thinking),
            ("enable_thinking", "reasoning.enabled", reasoning.enabled),
            ("enable_thinking", "thinking", thinking),
            ("verbosity", "verbosity", self.verbosity),
            ("documents", "documents", self.documents or None),
            *((name, f"chat_template_kwargs.{name}", v) for name, v in (self.chat_template_kwargs or {}).items()),
        ]
        values: dict[str, Any] = {}
        fields: dict[str, str] = {}
        for name, origin, value in asked:
            if value is None:
                continue
            if name in values and values[name] != value:
                raise invalid(f"`{fields[name]}` and `{origin}` contradict each other")
            values.setdefault(name, value)
            fields.setdefault(name, origin)
        return TemplateVariables(values, fields)


_NO_OPTIONS = ReasoningOptions.model_validate({})
