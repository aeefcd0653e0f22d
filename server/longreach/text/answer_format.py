"""How one model marks the parts of its answers: reasoning, and calls of functions.

| told by | goes before |
|---|---|
| `--tool-call-format`, for calls | all else |
| the tokenizer's `response_template` | the chat template |
| the chat template, for the marks that are known | |

A model without marks answers in words alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from longreach.text.answer_reader import AnswerReader
from longreach.text.call_or_answer_reader import CallOrAnswerReader
from longreach.text.calls.formats import FORMATS, HARMONY, LISTED, NAMED, CallFormat, format_named
from longreach.text.calls.harmony import START
from longreach.text.calls.offered import NewId, Offered, openai_id
from longreach.text.harmony_reader import HarmonyReader
from longreach.text.reasoning import ReasoningMarks, reasoning_marks
from longreach.text.response_template import TemplateReader, beginning, has_calls, load_template
from longreach.text.special_tokens import CONFIG, read_object

if TYPE_CHECKING:
    from transformers.utils.chat_parsing.response_templates import ResponseTemplate


class AnswerFormat:
    """How one model marks the parts of its answers; loaded by `AnswerFormat.load`.

    Attributes:
        reasoning: the marks around reasoning; None if there are none.
        calls: how calls of functions are written; None if that is not known.
        new_id: makes the id of a call.
        template: the tokenizer's `response_template`, which then says all of it.
    """

    def __init__(
        self,
        reasoning: ReasoningMarks | None = None,
        calls: CallFormat | None = None,
        new_id: NewId = openai_id,
        template: ResponseTemplate | None = None,
    ) -> None:
        self.reasoning = reasoning
        self.calls = calls
        self.new_id = new_id
        self.template = template

    @classmethod
    def seen_in(cls, chat_template: str, new_id: NewId = openai_id) -> AnswerFormat:
        """The format whose marks a chat template is seen to use."""
        calls = next((one for one in FORMATS if one.is_seen_in(chat_template)), None)
        return cls(reasoning_marks(chat_template), calls, new_id)

    @classmethod
    def load(
        cls, model: str, chat_templates: Iterable[str], call_format: str | None = None, new_id: NewId = openai_id
    ) -> AnswerFormat:
        """The format of a model directory or hub id whose chat templates are given.

        Arguments:
            call_format: the name of the format of calls, if it is not to be looked for.
            new_id: makes the id of a call.

        Raises:
            TokenizerError: the tokenizer declares a `response_template` that cannot be used.
        """
        seen = cls.seen_in("\n".join(chat_templates), new_id)
        if call_format is not None:
            return cls(seen.reasoning, format_named(call_format), new_id)
        declared = read_object(model, CONFIG).get("response_template")
        return cls(new_id=new_id, template=load_template(declared)) if declared else seen

    @property
    def is_plain(self) -> bool:
        """Whether answers are words and nothing else."""
        return self.reasoning is None and self.calls is None and self.template is None

    @property
    def has_tool_calls(self) -> bool:
        """Whether calls of functions can be told from words."""
        return self.calls is not None or (self.template is not None and has_calls(self.template))

    def reads_marks(self, with_tools: bool) -> bool:
        """Whether marks are looked for in an answer that may call tools, or may not."""
        only_calls = self.reasoning is None and self.template is None and self.calls is not HARMONY
        return not self.is_plain and (with_tools or not only_calls)

    def reader(
        self,
        prompt: str,
        tools: Sequence[Mapping[str, Any]] = (),
        whole: bool = False,
        begun: str | None = None,
        *,
        followed: bool = False,
    ) -> AnswerReader:
        """A reader for one answer to `prompt`, which may call `tools`.

        Arguments:
            whole: as in `AnswerReader`.
            begun: what the message already says that the answer goes on with; None if it begins one.
            followed: the answer follows the grammar `words_and_calls`.
        """
        offered, continues = Offered(tools, self.new_id), begun is not None
        if self.template is not None:
            template = self.template
            return TemplateReader(template, beginning(template, prompt), offered, whole=whole, continues=continues)
        if self.calls is HARMONY:
            return HarmonyReader(prompt, offered, whole=whole, continues=continues)
        reasons = self.reasoning is not None and self.reasoning.opened_by(prompt, begun)
        calls = self.calls.exact if followed and self.calls is not None else self.calls
        return AnswerReader(self.reasoning, calls, offered, reasons=reasons, whole=whole, continues=continues)

    def begun_message(self, prompt: str) -> str:
        """In harmony, what the prompt has of the message that the answer goes on with; else nothing."""
        return prompt.rpartition(START)[2] if self.calls is HARMONY else ""

    def call_or_answer_reader(
        self, prompt: str, tools: Sequence[Mapping[str, Any]], whole: bool = False
    ) -> AnswerReader:
        """A reader for one answer to `prompt` whose grammar is `call_or_answer`."""
        offered = Offered(tools, self.new_id)
        if self.calls is HARMONY:
            return HarmonyReader(prompt, offered, whole=whole, formed=True)
        reasons = self.reasoning is not None and self.reasoning.opened_by(prompt)
        if self.calls is not None and self.calls.unmarked:
            calls = replace(self.calls.exact, opens=())  # an answer calls at its beginning or nowhere
            return AnswerReader(self.reasoning, calls, offered, reasons=reasons, whole=whole)
        return CallOrAnswerReader(self.reasoning, self.calls, offered, reasons=reasons, whole=whole)

    def forced_reader(self, tools: Sequence[Mapping[str, Any]], *, named: bool, whole: bool = False) -> AnswerReader:
        """A reader for one answer whose grammar makes it calls: the arguments of the only tool if `named`, or a list of
        objects with `name` and `parameters`."""
        calls = NAMED if named else LISTED
        return AnswerReader(None, calls, Offered(tools, self.new_id), whole=whole)
