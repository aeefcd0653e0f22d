"""A chat as one text: the model's own Jinja template, in a sandbox, with what transformers offers to templates.

Templates come with the model and never with a request. They run in Jinja's immutable sandbox.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from longreach.errors import TokenizerError, quoted
from longreach.text.special_tokens import named_tokens
from longreach.text.template_files import DEFAULT, chat_templates, given_template

# For models that were never given a template: plain words, which a base model can continue.
DEFAULT_TEMPLATE = """\
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- raise_exception('this model has no chat template, and so no place for results of tools') }}
    {%- endif %}
    {{- 'System' if message.role in ('system', 'developer') else message.role | capitalize }}: {{ message.content }}
{{ '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}Assistant:{% endif %}"""
# Where the default template's next turn would begin, a base model's answer has ended.
DEFAULT_STOPS = ["\n\nUser:", "\n\nSystem:"]

_PROBE = "a1b2c3"
# What the server fills in, and the functions that templates call.
_OWN = frozenset({"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"})
_THOUGHT = re.compile(r"think|reason|analysis", re.IGNORECASE)


class TemplateRefusalError(Exception):
    """A template's own `raise_exception`."""


class RenderError(Exception):
    """A template cannot be filled in with these messages; says why."""


class ChatTemplate:
    """The template of one model; loaded by `ChatTemplate.load`.

    Arguments:
        templates: by name; one is `DEFAULT`. None for a model that has none.
        tokens: the special tokens that templates can write, by their names.
        origin: what messages call them.

    Attributes:
        stops: strings that end an answer beside those of the request.
        is_default: the model has no template of its own. Then the tokenizer adds its special tokens to the text.
        sources: the texts of the templates; `source` is that of plain chats.
        tokens: the special tokens that templates can write, by their names.
    """

    def __init__(
        self, templates: dict[str, str] | None, tokens: dict[str, str], origin: str = "the model's chat template"
    ) -> None:
        self.is_default = templates is None
        self.stops = DEFAULT_STOPS if templates is None else []
        self.sources = [DEFAULT_TEMPLATE] if templates is None else [*templates.values()]
        environment = _environment()
        texts = {DEFAULT: DEFAULT_TEMPLATE} if templates is None else templates
        try:
            self._templates = {name: environment.from_string(text) for name, text in texts.items()}
            parsed = [environment.parse(text) for text in texts.values()]
        except jinja2.TemplateSyntaxError as error:
            raise TokenizerError(f"{origin}, line {error.lineno}: not valid Jinja ({error.message})") from error
        self.source = texts[DEFAULT]
        self._variables = {name for tree in parsed for name in jinja2.meta.find_undeclared_variables(tree)}
        self.tokens = tokens
        self._of_parts = {name for name, template in self._templates.items() if self._reads_parts_only(template)}

    @classmethod
    def load(cls, model: str, given: str | None = None) -> ChatTemplate:
        """Read the templates of a model directory or hub id; `template_files` says where they are looked for.

        `given` is a file or a template that takes the place of all of them.

        Raises:
            TokenizerError: one is not valid, and the message names its line; or a file cannot be read.
        """
        if given is None:
            return cls(chat_templates(model), named_tokens(model))
        origin, text = given_template(given)
        return cls({DEFAULT: text}, named_tokens(model), origin)

    def reads(self, variable: str) -> bool:
        """Whether the template makes any use of a variable."""
        return variable in self._variables

    def takes(self, variable: str) -> bool:
        """Whether the template reads a variable that a request may give: no message, special token or function."""
        return variable in self._variables and variable not in _OWN | self.tokens.keys()

    @property
    def speaks_of_thought(self) -> bool:
        """Whether anything in the templates names reasoning; a model without cannot be asked for more or less of it."""
        return any(_THOUGHT.search(source) for source in self.sources)

    def fill(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] = (),
        add_generation_prompt: bool = True,
        continues: bool = False,
        **variables: Any,
    ) -> str:
        """The chat as a text. Filling in a long document takes its time: not in the event loop.

        With `continues` the text ends where the content of the last message does.

        Raises:
            RenderError: the template refuses the messages, or cannot be filled in with them.
        """
        name = "tool_use" if tools and "tool_use" in self._templates else DEFAULT
        end = f"<{secrets.token_hex(16)}>" if continues else ""
        if continues:
            *before, last = messages
            if not isinstance(last.get("content"), str) or not last["content"]:
                raise RenderError("the last one has no content that an answer could go on with")
            messages = [*before, {**last, "content": last["content"] + end}]
        try:
            text = self._templates[name].render(
                self.tokens,
                messages=[*map(_in_parts, messages)] if name in self._of_parts else messages,
                tools=list(tools) or None,
                add_generation_prompt=add_generation_prompt,
                **{"documents": None, **variables},
            )
        except TemplateRefusalError as refusal:
            raise RenderError(f"the model's chat template refuses them: {quoted(str(refusal), 256)}") from None
        except Exception as error:  # noqa: BLE001 - foreign code, which assumes what these messages do not have
            what = f"{type(error).__name__}: {quoted(str(error), 256)}"
            raise RenderError(f"the model's chat template cannot be filled in with them ({what})") from None
        if not continues:
            return text
        whole, mark, _ = text.rpartition(end)
        if not mark:
            raise RenderError("the model's chat template does not show the last one, which an answer is to go on with")
        return whole

    def _reads_parts_only(self, template: jinja2.Template) -> bool:
        """Whether a template, as some of models with images, drops a text that is not in a list of parts."""
        message = {"role": "user", "content": _PROBE}
        return not self._shows(template, message) and self._shows(template, _in_parts(message))

    def _shows(self, template: jinja2.Template, message: dict[str, Any]) -> bool:
        try:
            return _PROBE in template.render(self.tokens, messages=[message], tools=None, documents=None)
        except Exception:  # noqa: BLE001 - foreign code; a request's error will say what it does not like
            return False


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}] if content else []}


def _environment() -> ImmutableSandboxedEnvironment:
    """What transformers gives to templates; see its documentation on writing chat templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationBlock]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)  # local time, as there
    return environment


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """JSON without HTML escapes, which Jinja's own filter would make."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise(message: str) -> NoReturn:
    raise TemplateRefusalError(message)


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training; here it is its contents."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own form

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Parse up to `{% endgeneration %}`."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
