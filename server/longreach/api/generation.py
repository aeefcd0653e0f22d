"""One generation: tokens from the engine become text, up to the end or a stop string. Knows nothing of HTTP shapes."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from longreach.api.record import RequestRecord
from longreach.api.service import Engine
from longreach.engine.errors import RequestFailedError
from longreach.engine.messages import FinishReason, Generate
from longreach.text.stop import StopStrings
from longreach.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class TextDelta:
    """Text that became certain; the last one of a generation has the `finish_reason`."""

    text: str
    finish_reason: FinishReason | None = None


async def generate_text(
    engine: Engine, tokenizer: Tokenizer, request: Generate, stops: list[str], record: RequestRecord
) -> AsyncGenerator[TextDelta, None]:
    """Run `request` and yield its text; exactly the last delta has a finish reason.

    A stop string ends the text before it and cancels what the engine still has. It is looked for in the text of the
    tokens after the first `min_tokens`. The token that ended the answer is counted and is no text. Closing the
    generator early cancels the request.

    Raises:
        EngineError: as `EngineClient.generate`.
    """
    detokenizer = tokenizer.detokenizer()
    matcher = StopStrings(stops)
    async with contextlib.aclosing(engine.generate(request)) as updates:
        async for update in updates:
            record.computed_tokens, record.cached_tokens = update.computed, update.cached
            text = ""
            for i, token in enumerate(update.tokens):
                record.add_token()
                if update.finish_reason == "stop" and i == len(update.tokens) - 1:
                    break
                piece = detokenizer.push(token)
                text += matcher.push(piece) if record.output_tokens > request.min_tokens else piece
                if matcher.matched:
                    yield TextDelta(text, "stop")
                    return
            if update.finish_reason is not None:
                text += matcher.push(detokenizer.flush())
                yield TextDelta(text + matcher.flush(), "stop" if matcher.matched else update.finish_reason)
                return
            if text:
                yield TextDelta(text)
    raise RequestFailedError("the engine's updates ended without a finish reason", "internal")
