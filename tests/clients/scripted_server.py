"""The server that the programs talk to: `python -m tests.clients.scripted_server PORT FOLDER [SETTING=VALUE ...]`.

Its HTTP side, template, tokenizer and parsers are the real ones; the engine is the tests' and plays `scripted_model`.
FOLDER is where the model's files are put together: the embedded model's tokenizer with ChatML's two special tokens.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import msgspec
import tokenizers
import uvloop
from longreach.api.server import configure_logging, serve
from longreach.api.service.output_pipe import unblocked_output
from longreach.config import load_settings
from longreach.engine.messages import EngineConfig, Generate
from longreach.engine.updates import Update

from tests.clients.conversation import Conversation
from tests.clients.scripted_model import answer
from tests.server.api.fake_engine import EchoEngine, started

ROOT = Path(__file__).parents[2]
MODEL = "longreach-scripted"
MAX_MODEL_LEN = 1 << 20  # an agent's first prompt has a hundred thousand tokens of a tokenizer as small as this one
START, END = "<|im_start|>", "<|im_end|>"
PREFILL_CHUNK = 4096
# A prompt of so many tokens, without tools, is read so slowly that a keep-alive comes before its answer.
LONG_PROMPT, LONG_SECONDS = 6000, 12.0


class PlayingEngine(EchoEngine):
    """The tests' engine with a scripted model, which takes its time for long prompts."""

    def __init__(self, folder: Path) -> None:
        self._backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        start, end = self._backend.token_to_id(START), self._backend.token_to_id(END)
        assert start is not None
        assert end is not None
        self._start = start
        info = started(MAX_MODEL_LEN, self._backend.get_vocab_size())
        super().__init__(msgspec.structs.replace(info, eos_token_ids=[end]), PREFILL_CHUNK)
        self.answer = self._play

    async def generate(self, request: Generate) -> AsyncGenerator[Update, None]:
        """As `EngineClient.generate`."""
        waits = len(request.prompt) > LONG_PROMPT and not self._read(request).tools
        async for update in super().generate(request):
            yield update
            if waits:
                waits = False
                await asyncio.sleep(LONG_SECONDS)

    def _read(self, request: Generate) -> Conversation:
        return Conversation.read(
            request.prompt, self._start, lambda ids: self._backend.decode(list(ids), skip_special_tokens=False)
        )

    def _play(self, request: Generate) -> list[int]:
        conversation = self._read(request)
        is_completion = not conversation.messages and request.grammar is None
        text = " 48213." if is_completion else answer(conversation, request.grammar)
        return self._backend.encode(text, add_special_tokens=False).ids


def make_model(folder: Path) -> None:
    """Write the files that a server without weights reads."""
    embedded = ROOT / "server" / "longreach" / "default_model"
    folder.mkdir(parents=True, exist_ok=True)
    backend = tokenizers.Tokenizer.from_file(str(embedded / "tokenizer.json"))
    backend.add_special_tokens([START, END])
    backend.save(str(folder / "tokenizer.json"))
    described = json.loads((embedded / "tokenizer_config.json").read_text())
    described |= {"eos_token": END, "model_max_length": MAX_MODEL_LEN, "extra_special_tokens": [START]}
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    config = json.loads((embedded / "config.json").read_text())
    config |= {"vocab_size": backend.get_vocab_size(), "eos_token_id": backend.token_to_id(END)}
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": MAX_MODEL_LEN}))
    shutil.copy(Path(__file__).parent / "model" / "chat_template.jinja", folder / "chat_template.jinja")


async def main(port: str, folder: str, *settings: str) -> int:
    """Serve until the end; return the exit status."""
    make_model(Path(folder))

    async def start(config: EngineConfig) -> EchoEngine:
        return PlayingEngine(Path(folder))

    configure_logging("info")
    extra = dict(setting.split("=", 1) for setting in settings)
    return await serve(load_settings(model=folder, port=port, served_model_name=MODEL, **extra), start)


if __name__ == "__main__":
    with unblocked_output(buffer_bytes=1 << 16):
        status = uvloop.run(main(*sys.argv[1:]))
    sys.exit(status)
