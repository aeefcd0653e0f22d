"""Fields that give an answer its form: `response_format`, `regex`, `grammar`, `tools` and `tool_choice`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, StringConstraints, model_validator

from longreach.api.schema.requests.fields import (
    MAX_TOOLS,
    StrictModel,
    check_levels,
    described,
    invalid,
    or_default,
)
from longreach.api.schema.requests.structured_outputs import Form, GuidedFields, guided_forms

# OpenAI allows 64 characters, Anthropic 128: the names of an MCP server and of its tool together.
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,128}$")]
# Agents explain some of their tools on several pages.
MAX_DESCRIPTION = 64 * 1024


def _json_object(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise invalid("must be a JSON schema: an object", "invalid_type")
    check_levels(value)
    return value


JsonSchema = Annotated[dict[str, Any], PlainValidator(_json_object), described({"type": "object"})]


class NamedSchema(StrictModel):
    """The `json_schema` member of a response format. It is always enforced, `strict` or not."""

    name: Name
    description: Annotated[str | None, Field(max_length=4096)] = None
    schema_: JsonSchema = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(StrictModel):
    """`response_format`: free text, any JSON object, or JSON that follows a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def _check_together(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise invalid("`json_schema` belongs to the type `json_schema`, and to no other")
        return self


class Function(StrictModel):
    """A function that the model may call; `parameters` is the JSON schema of its arguments."""

    name: Name
    description: Annotated[str | None, Field(max_length=MAX_DESCRIPTION)] = None
    parameters: Annotated[JsonSchema, or_default({})] = Field({}, validate_default=False)
    strict: bool | None = Field(None, description="True: all calls follow `parameters`. Forced calls do so either way.")


class Tool(StrictModel):
    """An entry of `tools`."""

    type: Literal["function"]
    function: Function


class NamedFunction(StrictModel):
    """The name of a function."""

    name: Name


class NamedTool(StrictModel):
    """`tool_choice` that names one function."""

    type: Literal["function"]
    function: NamedFunction


class FormFields(GuidedFields):
    """The form that the answer must have. Those of these that are set must ask for the same."""

    response_format: ResponseFormat | None = Field(None, description="text, json_object, or json_schema.")
    regex: Annotated[str | None, Field(min_length=1)] = Field(
        None, description="The answer matches this regular expression (Rust's syntax, without look-around)."
    )
    grammar: Annotated[str | None, Field(min_length=1)] = Field(
        None, description="The answer is a sentence of this grammar, in llguidance's dialect of Lark."
    )

    @model_validator(mode="after")
    def _check_one_form(self) -> FormFields:
        forms = self._forms()
        for name, form in forms[1:]:
            if form != forms[0][1]:
                raise invalid(f"`{forms[0][0]}` and `{name}` cannot both be set")
        if forms and getattr(self, "min_tokens", 0):
            raise invalid("`min_tokens` cannot be set where a grammar decides when the answer may end")
        return self

    @property
    def form(self) -> Form | None:
        """The kind of grammar and its text; None for free text."""
        forms = self._forms()
        return forms[0][1] if forms else None

    @property
    def form_field(self) -> str:
        """The field that `form` comes from."""
        forms = self._forms()
        return forms[0][0] if forms else "response_format"

    def _forms(self) -> list[tuple[str, Form]]:
        """All forms that are asked for, by the fields' names."""
        found: list[tuple[str, Form]] = []
        if self.response_format is not None and self.response_format.type != "text":
            named = self.response_format.json_schema
            found.append(("response_format", ("json_schema", {"type": "object"} if named is None else named.schema_)))
        if self.regex is not None:
            found.append(("regex", ("regex", self.regex)))
        if self.grammar is not None:
            found.append(("grammar", ("lark", self.grammar)))
        return [*found, *guided_forms(self)]


class ToolFields(StrictModel):
    """Functions that the model may call."""

    tools: Annotated[list[Tool] | None, Field(max_length=MAX_TOOLS)] = Field(
        None, description="Functions; the model's chat template must have a place for them."
    )
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = Field(
        None, description="none, auto (the default with tools), required, or one function by name."
    )
    parallel_tool_calls: Annotated[bool, or_default(True)] = Field(
        True, description="False: the answer ends after its first call."
    )

    @model_validator(mode="after")
    def _check_choice(self) -> ToolFields:
        names = [tool.function.name for tool in self.tools or []]
        if len(names) != len(set(names)):
            raise invalid("`tools`: two functions have the same name")
        if isinstance(self.tool_choice, NamedTool):
            if self.tool_choice.function.name not in names:
                raise invalid("`tool_choice`: there is no such function in `tools`")
        elif self.tool_choice == "required" and not names:
            raise invalid("`tool_choice` is only allowed with `tools`")
        return self
