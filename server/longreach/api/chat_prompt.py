"""From a chat's messages to the prompt that the model's template makes of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from longreach.api.schema.formats import Function, Tool
from longreach.api.schema.messages import Message
from longreach.errors import InvalidRequestError
from longreach.text.answer_format import AnswerFormat
from longreach.text.chat_template import ChatTemplate
from longreach.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Chat:
    """What a model's files say of chats: how they are written, and how its answers are to be read."""

    template: ChatTemplate
    format: AnswerFormat

    @classmethod
    def load(cls, model: str) -> Chat:
        """Read both of a model directory or hub id.

        Raises:
            TokenizerError: one cannot be used.
        """
        template = ChatTemplate.load(model)
        return cls(template, AnswerFormat.load(model, template.sources))

    async def prompt(
        self,
        messages: list[Message],
        tokenizer: Tokenizer,
        tools: list[Tool] | None = None,
        add_generation_prompt: bool = True,
        **variables: str | bool | None,
    ) -> tuple[str, list[int]]:
        """The prompt as text and as token ids, both made in threads.

        Raises:
            InvalidRequestError: the template refuses the messages, or has no place for tools or a variable.
        """
        given = {name: value for name, value in variables.items() if value is not None}
        for name in given:
            if not self.template.reads(name):
                raise _unsupported(name, f"this model's chat template does not read `{name}`")
        if tools and not self.template.reads("tools"):
            raise _unsupported("tools", "this model's chat template has no place for tools")
        text = await self.template.render(
            [message.for_template() for message in messages],
            [tool.model_dump(exclude_none=True) for tool in tools or []],
            add_generation_prompt,
            **given,
        )
        return text, await tokenizer.encode(text, special=self.template.is_default)


def call_schema(functions: list[Function], named: bool, parallel: bool) -> dict[str, Any]:
    """The JSON schema of an answer that has to call: one function's arguments, or a list of calls."""
    if named:
        return functions[0].parameters or {"type": "object"}
    one_of = [
        {
            "type": "object",
            "properties": {"name": {"const": function.name}, "parameters": function.parameters or {"type": "object"}},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for function in functions
    ]
    return {"type": "array", "items": {"anyOf": one_of}, "minItems": 1, **({} if parallel else {"maxItems": 1})}


def _unsupported(param: str, why: str) -> InvalidRequestError:
    return InvalidRequestError(f"`{param}`: {why}.", param=param, code="unsupported_value")
