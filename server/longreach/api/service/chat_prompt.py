"""From a chat's messages to the prompt that the model's template makes of them."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from longreach.api.schema.requests.chat_messages import Message
from longreach.api.schema.requests.formats import Tool
from longreach.api.service.template_variables import read_by
from longreach.errors import InvalidRequestError
from longreach.text.answer_format import AnswerFormat
from longreach.text.chat_template import ChatTemplate, RenderError
from longreach.text.marks import Marks, unguarded
from longreach.text.prompt_places import PlaceMarks
from longreach.text.template_fit import TemplateFit


@dataclass(frozen=True)
class Chat:
    """What a model's files say of chats: how they are written, and how its answers are to be read."""

    template: ChatTemplate
    format: AnswerFormat

    @classmethod
    def load(cls, model: str, chat_template: str | None = None, call_format: str | None = None) -> Chat:
        """Read both of a model directory or hub id. `chat_template` goes before the model's, as in `ChatTemplate.load`;
        `call_format` names the format of calls, as in `AnswerFormat.load`.

        Raises:
            TokenizerError: one cannot be used.
        """
        template = ChatTemplate.load(model, chat_template)
        new_id = TemplateFit(template).new_id
        return cls(template, AnswerFormat.load(model, template.sources, call_format, new_id))

    @functools.cached_property
    def fit(self) -> TemplateFit:
        """How the template wants its conversations."""
        return TemplateFit(self.template)

    def text(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        marks: Marks,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
        fields: Mapping[str, str] | None = None,
        continues: bool = False,
        param: str = "messages",
        places: PlaceMarks | None = None,
    ) -> tuple[str, str]:
        """The prompt: as it is to be encoded, with special tokens in messages and tools broken, and as it reads.

        Each message is seen in it. Where the template does not take them as they are, they are rearranged. `fields`
        names the request's fields that `variables` come from. With `continues` the last message stays open. With
        `places` their marks are around the texts, in both.

        Raises:
            InvalidRequestError: the template refuses the messages or leaves one out, which names `param`; or it has no
                place for tools or a variable.
        """
        variables = read_by(self.template, variables, fields or {})
        if tools and not self.template.reads("tools"):
            raise _unsupported("tools", "this model's chat template has no place for tools")
        as_text = any(message.tool_calls for message in messages) and self.fit.style.arguments_as_text
        plain = self.fit.renamed([message.for_template(arguments_as_text=as_text) for message in messages])
        try:
            rendering = self.fit.rendering(
                plain, tools=bool(tools), opens_answer=add_generation_prompt, variables=variables
            )
            functions = [tool.model_dump(exclude_none=True) for tool in tools]
            if places is not None:
                plain, functions = places.around_messages(plain), places.around_tools(functions)
            guarded = self.template.fill(
                marks.guard(rendering.arranged(plain)),
                marks.guard(functions),
                add_generation_prompt,
                continues,
                **marks.guard(dict(variables)),
            )
        except RenderError as error:
            raise InvalidRequestError(f"`{param}`: {error}.", param=param, code="invalid_value") from None
        return guarded, unguarded(guarded)


def _unsupported(param: str, why: str) -> InvalidRequestError:
    return InvalidRequestError(f"`{param}`: {why}.", param=param, code="unsupported_value")
