"""`POST /v1/completions`: one or several prompts are continued."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from longreach.api.documentation.openapi import documented
from longreach.api.endpoints.receive import receive
from longreach.api.generation.answer import answer
from longreach.api.generation.completion_builder import CompletionBuilder, Echo
from longreach.api.generation.encode_prompts import encode_text
from longreach.api.generation.plan_answers import AnswerSpec, check_token_ids
from longreach.api.schema.answers.completions import Completion
from longreach.api.schema.requests.completions import CompletionRequest
from longreach.api.service.call import Call
from longreach.errors import InvalidRequestError
from longreach.policies.schemas import SCHEMAS

router = APIRouter()

# Beyond this, a prompt's log-probabilities are told in a stream alone, piece by piece, so that none has to be kept.
_MAX_WHOLE_SCORED = 65536


@router.post("/v1/completions", **documented(CompletionRequest, Completion, stream=True, nested=SCHEMAS))
async def create_completion(request: Request) -> Response:
    """Continue one or several prompts, in one answer or as a stream of events."""
    call = await receive(request, CompletionRequest)
    body = call.body
    prompts = [await _encode(call, prompt) for prompt in body.prompt]
    _check_scored(body, prompts)
    echoes = [await _echo(call, given, ids) for given, ids in zip(body.prompt, prompts, strict=True) if body.echo]
    grammar = await call.attend(call.service.compile_form(body, call.record.caller))
    choosing = body.candidates > body.n
    spec = AnswerSpec(
        prompts=prompts,
        param="prompt",
        max_tokens=body.max_tokens,
        choices=body.candidates,
        grammar=grammar,
        grammar_field=body.form_field,
        logprobs=0 if choosing and body.logprobs is None else body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
    )
    return await answer(call, CompletionBuilder(call, echoes), spec)


async def _encode(call: Call[CompletionRequest], prompt: str | list[int]) -> list[int]:
    if isinstance(prompt, str):
        answer = max(call.body.max_tokens, 1)
        return await encode_text(
            call, prompt, param="prompt", answer_tokens=answer, parse_special=call.body.parse_special
        )
    check_token_ids(prompt, call.engine.info, "prompt")
    return prompt


async def _echo(call: Call[CompletionRequest], given: str | list[int], ids: list[int]) -> Echo:
    """A prompt that is to be repeated. The text of token ids is found in a thread: there may be a million."""
    tokenizer = call.tokenizer

    def text() -> str:
        detokenizer = tokenizer.detokenizer()
        return "".join(map(detokenizer.push, ids)) + detokenizer.flush()

    return Echo(given if isinstance(given, str) else await call.service.reading.call(text), ids, tokenizer)


def _check_scored(body: CompletionRequest, prompts: list[list[int]]) -> None:
    scored = body.n * sum(map(len, prompts))
    if body.echo and body.logprobs is not None and not body.stream and scored > _MAX_WHOLE_SCORED:
        raise InvalidRequestError(
            f"`logprobs`: those of more than {_MAX_WHOLE_SCORED} prompt tokens, counted for each of `n` answers, are "
            "only sent with `stream: true`.",
            param="logprobs",
            code="invalid_value",
        )
