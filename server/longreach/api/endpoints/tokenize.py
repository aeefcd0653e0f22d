"""`POST /tokenize`, `POST /detokenize` and `GET /tokenizer_info`: what the model reads, without asking it."""

from __future__ import annotations

from collections.abc import Generator

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from longreach.api.documentation.openapi import documented
from longreach.api.endpoints.receive import receive
from longreach.api.generation.encode_prompts import encode_chat, encode_text
from longreach.api.generation.logprob_objects import token_text
from longreach.api.generation.plan_answers import check_token_ids
from longreach.api.http.respond import long_json_response
from longreach.api.schema.answers.tokenize import Detokenized, Tokenized, TokenizerInfo
from longreach.api.schema.requests.chat_turn import ChatTurn
from longreach.api.schema.requests.tokenize import DetokenizeRequest, TokenizeRequest
from longreach.api.service.service import Service
from longreach.text.tokenizer import Tokenizer

router = APIRouter()

_TOKENS_A_STEP = 4096

_REFUSALS = ("400", "404", "413", "415", "500", "503")


@router.post("/tokenize", **documented(TokenizeRequest, Tokenized, refusals=_REFUSALS))
async def tokenize(request: Request) -> Response:
    """The token ids of a text or of a chat."""
    call = await receive(request, TokenizeRequest)
    body, engine, tokenizer = call.body, call.engine, call.tokenizer
    if body.messages is not None:
        turn = ChatTurn(
            messages=body.messages,
            param="messages",
            tools=body.tools or [],
            variables=body.variables.values,
            variable_fields=body.variables.fields,
            opens_answer=body.opens_answer,
            continues=body.continues,
        )
        _, ids = await encode_chat(call, turn, special=body.add_special_tokens)
    else:
        ids = await encode_text(
            call,
            body.prompt or "",
            param="prompt",
            special=body.add_special_tokens is not False,
            parse_special=body.parse_special,
        )
    strings = None
    if body.return_token_strs:
        work = _strings(tokenizer, ids)
        strings = await call.attend(call.service.writing.run(work, caller=call.record.caller))
    told = Tokenized(count=len(ids), max_model_len=engine.info.max_model_len, tokens=ids, token_strs=strings)
    return await call.attend(long_json_response(told, call.service.writing, call.record.caller))


@router.post("/detokenize", **documented(DetokenizeRequest, Detokenized, refusals=_REFUSALS))
async def detokenize(request: Request) -> Response:
    """The text of token ids."""
    call = await receive(request, DetokenizeRequest)
    body, engine, tokenizer = call.body, call.engine, call.tokenizer
    check_token_ids(body.tokens, engine.info, "tokens")
    work = tokenizer.decoding(body.tokens)
    told = Detokenized(await call.attend(call.service.writing.run(work, caller=call.record.caller)))
    return await call.attend(long_json_response(told, call.service.writing, call.record.caller))


def _strings(tokenizer: Tokenizer, ids: list[int]) -> Generator[None, None, list[str]]:
    strings = []
    for number, token in enumerate(ids, start=1):
        strings.append(token_text(tokenizer.token_bytes(token)))
        if number % _TOKENS_A_STEP == 0:
            yield
    return strings


@router.get("/tokenizer_info", **documented(None, TokenizerInfo))
async def tokenizer_info(request: Request) -> Response:
    """What the tokenizer's files say, in vLLM's form: for clients that write prompts themselves."""
    service: Service = request.app.state.service
    _, tokenizer = service.require_ready()
    template = service.chat.template
    info = TokenizerInfo(
        tokenizer_class=str(tokenizer.config.get("tokenizer_class") or "PreTrainedTokenizerFast"),
        chat_template=template.source,
        bos_token=template.tokens.get("bos_token"),
        eos_token=template.tokens.get("eos_token"),
        unk_token=template.tokens.get("unk_token"),
        pad_token=template.tokens.get("pad_token"),
    )
    told = {**tokenizer.config, **msgspec.structs.asdict(info)}
    return await long_json_response(told, service.writing, request.state.record.caller)
