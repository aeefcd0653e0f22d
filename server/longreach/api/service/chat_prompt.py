"""From a chat's messages to the prompt that the model's template makes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from longreach.api.schema.requests.chat_messages import Message
from longreach.api.schema.requests.formats import Tool
from longreach.api.service.template_variables import read_by
from longreach.errors import InvalidRequestError
from longreach.text.answer_format import AnswerFormat
from longreach.text.chat_template import ChatTemplate
from longreach.text.marks import Marks, unguarded
from longreach.text.template_calls import TemplateCalls


@dataclass(frozen=True)
class Chat:
    """What a model's files say of chats: how they are written, and how its answers are to be read."""

    template: ChatTemplate
    format: AnswerFormat
    arguments_are_text: bool = False  # of calls in earlier answers, as the template wants them

    @classmethod
    def load(cls, model: str, chat_template: str | None = None, call_format: str | None = None) -> Chat:
        """Read both of a model directory or hub id. `chat_template` goes before the model's, as in `ChatTemplate.load`;
        `call_format` names the format of calls, as in `AnswerFormat.load`.

        Raises:
            TokenizerError: one cannot be used.
        """
        template = ChatTemplate.load(model, chat_template)
        calls = TemplateCalls.of(template)
        form = AnswerFormat.load(model, template.sources, call_format, calls.new_id)
        return cls(template, form, calls.arguments_are_text)

    def text(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        marks: Marks,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
        fields: Mapping[str, str] | None = None,
        continues: bool = False,
    ) -> tuple[str, str]:
        """The prompt: as it is to be encoded, with special tokens in messages and tools broken, and as it reads.

        `fields` names the request's fields that `variables` come from. With `continues` the last message stays open.

        Raises:
            InvalidRequestError: the template refuses the messages, or has no place for tools or a variable.
        """
        variables = read_by(self.template, variables, fields or {})
        if tools and not self.template.reads("tools"):
            raise _unsupported("tools", "this model's chat template has no place for tools")
        guarded = self.template.render(
            marks.guard([self._for_template(message) for message in messages]),
            marks.guard([tool.model_dump(exclude_none=True) for tool in tools]),
            add_generation_prompt,
            continues,
            **marks.guard(dict(variables)),
        )
        return guarded, unguarded(guarded)

    def _for_template(self, message: Message) -> dict[str, Any]:
        plain = message.for_template()
        if self.arguments_are_text:
            for told, call in zip(plain.get("tool_calls", ()), message.tool_calls or (), strict=True):
                told["function"]["arguments"] = call.function.arguments or "{}"
        return plain


def _unsupported(param: str, why: str) -> InvalidRequestError:
    return InvalidRequestError(f"`{param}`: {why}.", param=param, code="unsupported_value")
