"""From a turn of a conversation to what the engine is asked, and to what reads its answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from longreach.api.generation.call_grammar import Vocabulary, calls_question, strict_functions
from longreach.api.generation.call_schema import call_schema, counted
from longreach.api.generation.chat_answer import PartReader
from longreach.api.generation.compare_prompts import PromptText
from longreach.api.generation.encode_prompts import chat_spans, encode_chat
from longreach.api.generation.message_files import with_kept_files
from longreach.api.generation.place_document import of_request, placed, refuse_cut
from longreach.api.generation.plan_answers import AnswerSpec, tokens_left
from longreach.api.schema.requests.chat_turn import ChatTurn
from longreach.api.schema.requests.formats import NamedTool
from longreach.api.service.call import Call
from longreach.errors import InvalidRequestError
from longreach.text.answer_reader import AnswerReader


@dataclass(frozen=True)
class PreparedChat:
    """A turn that can be answered.

    Attributes:
        spec: what `answer` plans.
        reader: makes what reads one answer; each answer has its own.
    """

    spec: AnswerSpec
    reader: Callable[[], PartReader]


async def prepare_chat(
    call: Call[Any],
    turn: ChatTurn,
    *,
    limit: int | None,
    choices: int = 1,
    logprobs: int | None = None,
    special: bool | None = None,
    keep: int | None = None,
) -> PreparedChat:
    """Encode the prompt of a turn, compile the grammar of its answer, and choose what reads it.

    Arguments:
        limit: tokens that an answer may have; None for what the context has left.
        choices: answers that are wanted.
        logprobs: as in `AnswerSpec`.
        special, keep: as in `encode_chat`.

    Raises:
        InvalidRequestError: the model has no place for what the turn asks, or a grammar cannot be used.
        ApiError: as `encode_chat`.
    """
    chat = call.service.chat
    refuse_cut(call, ["truncate_prompt_tokens"] if keep is not None else [])
    asked = await with_kept_files(call, turn)
    turn = await placed(call, asked)
    text, prompt = await encode_chat(call, turn, answer_tokens=limit or 1, special=special, keep=keep)
    max_tokens = tokens_left(call, prompt, limit, turn.param)
    texts: list[PromptText | None] = []
    if (call.body.return_cache_usage or call.body.return_places) and keep is None:
        texts.append(PromptText(text, of_request(asked, turn, await chat_spans(call, turn, text))))
    reader, grammar = await call.attend(_form(call, turn, text))
    calls_or_answers = turn.forced is None and bool(turn.offered)
    spec = AnswerSpec(
        prompts=[prompt],
        texts=texts,
        param=turn.param,
        max_tokens=max_tokens,
        choices=choices,
        stops=chat.template.stops,
        grammar=grammar,
        grammar_field=turn.form_field if turn.form is not None and turn.forced is None else "tools",
        logprobs=logprobs,
        special=chat.format.reads_marks(bool(turn.offered)) and (grammar is None or calls_or_answers),
    )
    return PreparedChat(spec, reader)


async def _form(call: Call[Any], turn: ChatTurn, prompt: str) -> tuple[Callable[[], PartReader], str | None]:
    """How the answer is to be read, and the grammar that it has to follow."""
    service, caller = call.service, call.record.caller
    form, forced, whole = service.chat.format, turn.forced, not call.body.stream
    only_one = not turn.parallel_tool_calls
    if forced is not None:
        named = isinstance(turn.tool_choice, NamedTool)
        schema = call_schema(forced, named, turn.parallel_tool_calls)
        grammar = await service.grammars.compile("json_schema", schema, "tools", caller, counted(forced))
        functions = [{"function": function.model_dump(exclude_none=True)} for function in forced]
        return (lambda: PartReader(form.forced_reader(functions, named=named, whole=whole), only_one)), grammar
    if turn.offered and not form.has_tool_calls:
        raise InvalidRequestError(
            "`tools`: how this model writes calls is not known, since its chat template shows none of the formats that "
            "are; name one of them by --tool-call-format, or force a call by `tool_choice`.",
            param="tools",
            code="unsupported_value",
        )
    tools = [tool.model_dump(exclude_none=True) for tool in turn.offered]
    begun = turn.messages[-1].content or "" if turn.continues else None
    if _strict(call, turn) or (turn.form is not None and tools):
        grammar = await _calls_grammar(call, turn, prompt, begun)
    else:
        grammar = await service.compile_form(turn, caller)
    if grammar is not None and turn.form is not None:
        if tools:
            return (lambda: PartReader(form.call_or_answer_reader(prompt, tools, whole), only_one)), grammar
        return (lambda: PartReader(AnswerReader())), grammar
    followed = grammar is not None
    return (lambda: PartReader(form.reader(prompt, tools, whole, begun, followed=followed), only_one)), grammar


async def _calls_grammar(call: Call[Any], turn: ChatTurn, prompt: str, begun: str | None) -> str | None:
    """The grammar of an answer that may call functions.

    Only what was asked for is refused. Where `strict` is a protocol's default, functions that a grammar cannot follow
    are free, and so are all of them where the whole grammar cannot be compiled.
    """
    service, grammars = call.service, call.service.grammars
    info = call.engine.info
    vocabulary = Vocabulary.of(call.tokenizer.added_ids, info.eos_token_ids, info.vocab_size)

    async def compiled(strict: set[str]) -> str:
        question = calls_question(turn, service.chat.format, prompt, vocabulary, strict, begun)
        field = "tools" if turn.form is None else turn.form_field
        given = [turn.form, counted([tool.function for tool in turn.offered if tool.function.name in strict])]
        return await grammars.compile("calls", question, field, call.record.caller, given)

    strict, asked = _strict(call, turn), strict_functions(turn, asked=True)
    try:
        return await compiled(strict)
    except InvalidRequestError:
        if strict == asked:
            raise
    return await compiled(asked) if asked or turn.form is not None else None


def _strict(call: Call[Any], turn: ChatTurn) -> set[str]:
    """The functions whose schemas are followed. A protocol's default gives way to fields that no grammar goes with."""
    body = call.body
    return strict_functions(turn, asked=bool(body.allowed_token_ids or body.bad_words or body.ignore_eos))
