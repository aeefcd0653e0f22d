"""Log-probabilities as OpenAI's two endpoints show them."""

from __future__ import annotations

from collections.abc import Iterable

from longreach.api.schema.answers.chat import ChatLogprobs, TokenLogprob, TopLogprob
from longreach.api.schema.answers.completions import CompletionLogprobs
from longreach.engine.messages import Logprob
from longreach.text.tokenizer import Tokenizer


def token_text(data: bytes) -> str:
    """A token's bytes as text; where they are no whole characters, in OpenAI's form `bytes:\\xe2\\x82`."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def completion_logprobs(
    tokenizer: Tokenizer, scores: Iterable[tuple[int, Logprob | int]], top: int
) -> CompletionLogprobs:
    """For `/v1/completions`: tokens with the places in the text where they begin; a bare id has no log-probability."""
    found = CompletionLogprobs([], [], [], [])
    for offset, score in scores:
        token = score if isinstance(score, int) else score.token
        found.tokens.append(token_text(tokenizer.token_bytes(token)))
        found.text_offset.append(offset)
        if isinstance(score, int):
            found.token_logprobs.append(None)
            found.top_logprobs.append(None)
            continue
        found.token_logprobs.append(score.logprob)
        likeliest = zip(score.top_tokens[:top], score.top_logprobs[:top], strict=True)
        # As with OpenAI, the token itself is there even if it is not among the likeliest.
        named = {token_text(tokenizer.token_bytes(other)): value for other, value in likeliest}
        found.top_logprobs.append(named | {found.tokens[-1]: score.logprob} if top else {})
    return found


def chat_logprobs(tokenizer: Tokenizer, scores: Iterable[tuple[int, Logprob]]) -> ChatLogprobs:
    """For `/v1/chat/completions`."""

    def one(token: int, logprob: float) -> TopLogprob:
        data = tokenizer.token_bytes(token)
        return TopLogprob(token_text(data), logprob, list(data))

    found = []
    for _, score in scores:
        own = one(score.token, score.logprob)
        likeliest = [one(*pair) for pair in zip(score.top_tokens, score.top_logprobs, strict=True)]
        found.append(TokenLogprob(own.token, own.logprob, own.bytes, likeliest))
    return ChatLogprobs(found)
