"""`POST /v1/completions`: one or several prompts are continued."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from longreach.api.documentation.openapi import documented
from longreach.api.endpoints.answer_once import answer_once
from longreach.api.generation.answer import answer
from longreach.api.generation.compare_prompts import PromptText
from longreach.api.generation.completion_builder import CompletionBuilder, Echo
from longreach.api.generation.encode_prompts import encode_text
from longreach.api.generation.place_document import refuse_cut
from longreach.api.generation.plan_answers import AnswerSpec, check_scored, check_token_ids, check_told_again
from longreach.api.schema.answers.completions import Completion
from longreach.api.schema.requests.completions import CompletionRequest
from longreach.api.service.call import Call
from longreach.api.service.encode import TextEncoder, last_tokens
from longreach.errors import InvalidRequestError
from longreach.policies.schemas import SCHEMAS
from longreach.text.prompt_places import Place, Span

router = APIRouter()


@router.post(
    "/v1/completions", **documented(CompletionRequest, Completion, stream=True, identified=True, nested=SCHEMAS)
)
async def create_completion(request: Request) -> Response:
    """Continue one or several prompts, in one answer or as a stream of events."""
    return await answer_once(request, CompletionRequest, _complete)


async def _complete(call: Call[CompletionRequest]) -> Response:
    body = call.body
    prompts = await prompts_of(call)
    of_echo = body.logprobs if body.echo else None
    check_scored(None if body.stream else of_echo, prompts, "logprobs", body.n)
    check_scored(body.prompt_logprobs, prompts, "prompt_logprobs", body.n)
    again = [name for name in ("echo", "return_token_ids") if getattr(body, name)]
    check_told_again([] if body.stream else again, prompts, body.n)
    echoes = [await _echo(call, given, ids) for given, ids in zip(body.prompt, prompts, strict=True) if body.echo]
    grammar = await call.attend(call.service.compile_form(body, call.record.caller))
    choosing = body.candidates > body.n
    if choosing and body.return_places:
        raise InvalidRequestError(
            "`return_places`: cannot be set with `best_of`, whose answers are chosen among when all are there.",
            param="return_places",
            code="invalid_value",
        )
    spec = AnswerSpec(
        prompts=prompts,
        texts=[_text(call, given) for given in body.prompt],
        param="prompt",
        max_tokens=body.limit,
        choices=body.candidates,
        grammar=grammar,
        grammar_field=body.form_field,
        logprobs=0 if choosing and body.logprobs is None else body.logprobs,
        prompt_logprobs=max((top for top in (of_echo, body.prompt_logprobs) if top is not None), default=None),
        scores_end=True,
    )
    return await answer(call, CompletionBuilder(call, echoes), spec)


async def prompts_of(call: Call[CompletionRequest]) -> list[list[int]]:
    """The token ids of each prompt, behind those of the document that it begins with, if it does.

    Raises:
        ApiError: one cannot be used.
        ClientGoneError: the caller went away.
    """
    refuse_cut(call, [name for name in ("echo", "truncate_prompt_tokens") if getattr(call.body, name)])
    first = await _document(call)
    return [[*first, *await _encode(call, prompt, len(first))] for prompt in call.body.prompt]


async def _document(call: Call[CompletionRequest]) -> list[int]:
    """The token ids of the document that the prompts begin with, if there is one."""
    if call.document is None:
        return []
    body = call.body
    encoder = TextEncoder(call.service, call.tokenizer, call.engine.info, call.record.caller)
    special = body.add_special_tokens is not False
    return await call.attend(
        call.document.before_prompt(encoder, param="document", special=special, parse_special=body.parse_special)
    )


async def _encode(call: Call[CompletionRequest], prompt: str | list[int], before: int) -> list[int]:
    """The token ids of a prompt, behind so many of a document."""
    body, info = call.body, call.engine.info
    answer = max(body.limit or 0, 1)
    if isinstance(prompt, str):
        return await encode_text(
            call,
            prompt,
            param="prompt",
            answer_tokens=answer,
            special=body.add_special_tokens is not False and call.document is None,
            parse_special=body.parse_special,
            keep=body.truncate_prompt_tokens,
            before=before,
        )
    check_token_ids(prompt, info, "prompt")
    return last_tokens(prompt, body.truncate_prompt_tokens, info.max_model_len - answer)


def _text(call: Call[CompletionRequest], given: str | list[int]) -> PromptText | None:
    """What the tokens of a prompt were made of, if all of it was a text."""
    if not isinstance(given, str) or call.body.truncate_prompt_tokens is not None:
        return None
    if call.document is not None:
        kept = call.document.text
        spans = [Span(0, len(kept), Place("document")), Span(len(kept), len(kept) + len(given), Place("prompt"))]
        return PromptText(kept + given, spans) if call.document.document.kind == "text" else None
    return PromptText(given, [Span(0, len(given), Place("prompt"))])


async def _echo(call: Call[CompletionRequest], given: str | list[int], ids: list[int]) -> Echo:
    """A prompt that is to be repeated. The text of token ids is found in a thread: there may be a million.

    Of a prompt that may have been cut, what is left is repeated.
    """
    tokenizer, writing = call.tokenizer, call.service.writing
    if isinstance(given, str) and call.body.truncate_prompt_tokens is None:
        return Echo(given, ids, tokenizer)
    return Echo(await call.attend(writing.run(tokenizer.decoding(ids), caller=call.record.caller)), ids, tokenizer)
