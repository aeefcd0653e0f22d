"""A server whose model is computed by two ranks: the same answers, and another engine when a rank is lost."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import httpx2
import tokenizers
from longreach.config import EMBEDDED_MODEL, EMBEDDED_MODEL_NAME
from longreach.engine.messages import EngineConfig, Generate, Sampling
from longreach.engine.startup.build import build_engine
from longreach.engine.updates import Updates

from tests.server.load.process import ServerProcess, eventually

PROMPT = "The keeper of the lantern walks along the river. The pass key for the silver lantern is 4071. " * 20


def answer_of_one_rank(max_tokens: int) -> str:
    tokenizer = tokenizers.Tokenizer.from_file(str(EMBEDDED_MODEL / "tokenizer.json"))
    engine, _ = build_engine(EngineConfig(model=str(EMBEDDED_MODEL), device="cpu", kv_cache_bytes=1 << 26))
    prompt = tokenizer.encode(PROMPT).ids
    engine.submit(Generate(request_id="a", prompt=prompt, max_tokens=max_tokens, sampling=Sampling(temperature=0)))
    tokens: list[int] = []
    while engine.has_work:
        for news in engine.step():
            assert isinstance(news, Updates)
            tokens += [token for update in news.updates for token in update.tokens]
    return tokenizer.decode(tokens)


def ask(client: httpx2.Client, **fields: Any) -> str:
    body = {"model": EMBEDDED_MODEL_NAME, "prompt": PROMPT, "temperature": 0, "ignore_eos": True, **fields}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def children(pid: int) -> list[int]:
    """The processes of a process, with their command lines."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            status = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(status[1]) == pid and status[0] != "Z":
                found.append(int(folder.name))
    return found


def ranks_of(server: ServerProcess) -> list[int]:
    """The processes that the server's engine has started."""
    return [child for engine in server.engines() for child in children(engine)]


def test_answers_are_those_of_one_rank_and_a_lost_rank_is_replaced() -> None:
    flags = ["--tensor-parallel-size", "2", "--device", "cpu", "--max-model-len", "4096", "--kv-cache-memory", "32MiB"]
    with ServerProcess(*flags) as server:
        server.until_ready()
        with httpx2.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=60) as client:
            expected = answer_of_one_rank(32)
            assert ask(client, max_tokens=32) == expected
            [rank] = ranks_of(server)
            events = []
            body = {"model": EMBEDDED_MODEL_NAME, "prompt": PROMPT, "max_tokens": 200, "stream": True}
            with client.stream("POST", "/v1/completions", json=body | {"ignore_eos": True}) as stream:
                for line in stream.iter_lines():
                    if line.startswith("data: {"):
                        events.append(json.loads(line[6:]))
                        if len(events) == 3:
                            os.kill(rank, signal.SIGKILL)
            assert events[-1]["choices"][0]["finish_reason"] == "length", "the next engine has gone on"
            assert re.search(r"rank 1 has ended|a step failed on one rank|rank 1 cannot be reached", server.log)
            eventually(lambda: server.probe("/ready") == 200, 60, "another engine")
            assert ranks_of(server) not in ([], [rank])
            assert ask(client, max_tokens=32) == expected
        everybody = [*server.engines(), *ranks_of(server)]
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0
        deadline = time.monotonic() + 10
        while any(Path(f"/proc/{pid}").exists() for pid in everybody):
            assert time.monotonic() < deadline, "a process is left"
            time.sleep(0.05)
