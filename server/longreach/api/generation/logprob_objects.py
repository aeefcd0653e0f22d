"""Log-probabilities as OpenAI's two endpoints show them.

There may be very many. Those of a chat are encoded as their tokens come, and the others by work for a `WorkPool`.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable

from longreach.api.schema.answers.chat import ChatLogprobs, TokenLogprob, TopLogprob
from longreach.api.schema.answers.completions import CompletionLogprobs
from longreach.api.schema.answers.usage import PromptLogprob, PromptLogprobs
from longreach.engine.updates import Logprob
from longreach.text.tokenizer import Tokenizer
from longreach.util.json_pieces import encoded

# Tokens of one step of such work.
_STEP = 256


def token_text(data: bytes) -> str:
    """A token's bytes as text; where they are no whole characters, in OpenAI's form `bytes:\\xe2\\x82`."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class TokenNames:
    """What log-probabilities call a token: its text, or with `as_ids` its id, as in `token_id:7`."""

    def __init__(self, tokenizer: Tokenizer, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def of(self, token: int) -> str:
        """The name of a token."""
        return f"token_id:{token}" if self._as_ids else token_text(self.bytes_of(token))

    def bytes_of(self, token: int) -> bytes:
        """The bytes of a token."""
        return self._tokenizer.token_bytes(token)


def completion_logprobs(
    names: TokenNames, scores: Iterable[tuple[int, Logprob | int]], top: int
) -> Generator[None, None, CompletionLogprobs]:
    """For `/v1/completions`: tokens with the places in the text where they begin; a bare id has no log-probability."""
    found = CompletionLogprobs([], [], [], [])
    for number, (offset, score) in enumerate(scores, start=1):
        if number % _STEP == 0:
            yield
        token = score if isinstance(score, int) else score.token
        found.tokens.append(names.of(token))
        found.text_offset.append(offset)
        if isinstance(score, int):
            found.token_logprobs.append(None)
            found.top_logprobs.append(None)
            continue
        found.token_logprobs.append(score.logprob)
        likeliest = zip(score.top_tokens[:top], score.top_logprobs[:top], strict=True)
        # As with OpenAI, the token itself is there even if it is not among the likeliest.
        named = {names.of(other): value for other, value in likeliest}
        found.top_logprobs.append(named | {found.tokens[-1]: score.logprob} if top else {})
    return found


def prompt_logprobs(names: TokenNames, scores: Iterable[Logprob], top: int) -> Generator[None, None, PromptLogprobs]:
    """A prompt's log-probabilities as vLLM shows them: the first token has none."""

    def one(score: Logprob) -> dict[str, PromptLogprob]:
        likeliest = [*zip(score.top_tokens[:top], score.top_logprobs[:top], strict=True)]
        ranked: dict[int, tuple[int | None, float]] = {}
        ranked |= {token: (rank, value) for rank, (token, value) in enumerate(likeliest, start=1)}
        ranked.setdefault(score.token, (None, score.logprob))
        return {
            str(token): PromptLogprob(value, rank, token_text(names.bytes_of(token)))
            for token, (rank, value) in ranked.items()
        }

    found: PromptLogprobs = [None]
    for number, score in enumerate(scores, start=1):
        found.append(encoded(one(score)))
        if number % _STEP == 0:
            yield
    return found


def chat_logprobs(names: TokenNames, scores: Iterable[tuple[int, Logprob]]) -> ChatLogprobs:
    """For `/v1/chat/completions`: each token's encoded, since it may be told several times."""

    def one(token: int, logprob: float) -> TopLogprob:
        return TopLogprob(names.of(token), logprob, list(names.bytes_of(token)))

    found = []
    for _, score in scores:
        own = one(score.token, score.logprob)
        likeliest = [one(*pair) for pair in zip(score.top_tokens, score.top_logprobs, strict=True)]
        found.append(encoded(TokenLogprob(own.token, own.logprob, own.bytes, likeliest)))
    return ChatLogprobs(found)
