"""The main job, end to end: the real command, the embedded model, prompts of book length, unmodified clients."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pydoc_data.topics import topics

import httpx2 as httpx
import openai
import pytest

from tests.pairwise import at_length

BOOK = "\n".join(topics.values())
FACT = "\nThe pass key for the {name} is {key}.\n"
QUESTION = "\nWhat is the pass key for the {name}?\nAnswer:"


def book_with_fact(name: str, key: str, length: int, depth: float, start: int = 0) -> str:
    """`length` characters of a book with one fact hidden at `depth` of it, and the question at the end."""
    text = BOOK[start : start + length]
    cut = text.rfind("\n", 0, int(depth * length) + 1) + 1
    return text[:cut] + FACT.format(name=name, key=key) + text[cut:] + QUESTION.format(name=name)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The address of `longreach serve`, started as a user starts it, on a free port."""
    command = [sys.executable, "-m", "longreach", "serve", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        lines: list[str] = []
        ready = None
        for line in server.stderr:
            lines.append(line)
            if match := re.search(r"ready: (http://\S+)", line):
                ready = match[1]
                break
        assert ready, "".join(lines)
        # Keep reading, or the server blocks once the pipe is full.
        drain = threading.Thread(target=lambda: lines.extend(server.stderr or []), daemon=True)
        drain.start()
        yield ready
        server.terminate()
        assert server.wait(30) == 0, "".join(lines)
        drain.join(5)
        assert not [line for line in lines if "Traceback" in line], "".join(lines)
        assert not [line for line in lines if "pass key" in line and "curl" not in line], "a prompt was logged"


@pytest.fixture(scope="module")
def model(url: str) -> str:
    """The name of the served model."""
    return httpx.get(f"{url}/v1/models").json()["data"][0]["id"]


def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=240)


def post(url: str, body: dict, timeout: float = 240) -> dict:
    return httpx.post(f"{url}/v1/completions", json=body, timeout=timeout).json()


def test_a_long_prompt_streams_an_answer_with_the_fact(url: str, model: str) -> None:
    """Of 16K tokens, or of 8K where the playground's example is read at its length."""
    length, tokens = (70_000, 16_384) if at_length("the main job") else (36_000, 8_192)
    prompt = book_with_fact("silver lantern", "48213", length, depth=0.4)
    stream = client(url).completions.create(
        model=model,
        prompt=prompt,
        max_tokens=16,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "48213" in "".join(choice.text for chunk in chunks for choice in chunk.choices)
    assert len([chunk for chunk in chunks if chunk.choices]) > 1, "the answer came in one piece"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens > tokens


def test_eight_clients_at_once_get_what_each_gets_alone(url: str, model: str) -> None:
    names = [
        "silver lantern",
        "old bridge",
        "night train",
        "blue harbor",
        "tall tower",
        "third door",
        "red barn",
        "well",
    ]
    prompts = [
        book_with_fact(name, str(10_000 + 7919 * i), 3_000 + 900 * i, depth=i / 8, start=5_000 * i)
        for i, name in enumerate(names)
    ]
    # Free text goes on for its full length, so that more than a few confident tokens are compared.
    prompts[3] = prompts[3].removesuffix(QUESTION.format(name=names[3]))

    def ask(prompt: str) -> dict:
        return post(url, {"model": model, "prompt": prompt, "max_tokens": 24, "temperature": 0})

    async def together() -> list[dict]:
        return await asyncio.gather(*(asyncio.to_thread(ask, prompt) for prompt in prompts))

    alone = [ask(prompt) for prompt in prompts]
    crowd = asyncio.run(together())
    assert [r["choices"][0]["text"] for r in crowd] == [r["choices"][0]["text"] for r in alone]
    assert [r["usage"]["total_tokens"] for r in crowd] == [r["usage"]["total_tokens"] for r in alone]
    # The crowd asks what was asked before: all full pages but the last token's are taken over.
    assert all(r["usage"]["prompt_tokens_details"]["cached_tokens"] > r["usage"]["prompt_tokens"] - 129 for r in crowd)
    assert alone[3]["usage"]["completion_tokens"] == 24


def test_a_prompt_longer_than_fits_is_refused_and_the_next_request_works(url: str, model: str) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length is") as refused:
        client(url).completions.create(model=model, prompt=BOOK * 2, max_tokens=16)
    assert refused.value.code == "context_length_exceeded"
    answer = client(url).completions.create(model=model, prompt="The next request", max_tokens=2)
    assert answer.usage is not None
    assert answer.usage.completion_tokens in (1, 2)


@pytest.mark.parametrize(
    ("body", "status", "code", "says"),
    [
        ('{"prompt": "a",', 400, None, "JSON"),
        ('{"model": "MODEL", "prompt": 7}', 400, None, "prompt"),
        ('{"model": "MODEL", "prompt": "a", "max_tokens": "7"}', 400, None, "max_tokens"),
        ('{"model": "MODEL", "prompt": "a", "max_tokens": -2}', 400, None, "max_tokens"),
        ('{"model": "MODEL", "prompt": "a", "temperature": NaN}', 400, None, ""),
        ('{"model": "no-such-model", "prompt": "a"}', 404, "model_not_found", "no-such-model"),
        ('{"model": "MODEL", "prompt": "a", "temprature": 1}', 400, None, "temprature"),
    ],
)
def test_each_mistake_has_its_own_clear_error(
    url: str, model: str, body: str, status: int, code: str | None, says: str
) -> None:
    headers = {"Content-Type": "application/json"}
    response = httpx.post(f"{url}/v1/completions", content=body.replace("MODEL", model), headers=headers)
    error = response.json()["error"]
    assert response.status_code == status, error
    assert set(error) >= {"message", "type", "param", "code"}
    assert says in error["message"]
    if code:
        assert error["code"] == code


def test_clients_that_leave_are_not_worked_for(url: str, model: str) -> None:
    """Two prompts of the greatest length take minutes; a flexible request is answered once both have left."""
    address = httpx.URL(url)
    largest = httpx.get(f"{url}/v1/models").json()["data"][0]["max_model_len"]
    connections = [socket.create_connection((address.host, address.port), timeout=60) for _ in range(2)]
    for token, connection in enumerate(connections, start=5):
        prompt = [token] * (largest - 16)
        body = json.dumps({"model": model, "prompt": prompt, "max_tokens": 16, "stream": True}).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}"
        )
        connection.sendall(head.encode() + b"\r\n\r\n" + body)
        assert connection.recv(100).startswith(b"HTTP/1.1 200")  # headers at once, long before the first token
    # A short one passes them, although it came last.
    assert post(url, {"model": model, "prompt": "Now", "max_tokens": 2}, timeout=20)["choices"]
    with pytest.raises(httpx.ReadTimeout):
        post(url, {"model": model, "prompt": "Next", "max_tokens": 2, "service_tier": "flex"}, timeout=3)
    for connection in connections:
        connection.close()
    answer = post(url, {"model": model, "prompt": "Next", "max_tokens": 2, "service_tier": "flex"}, timeout=20)
    assert answer["choices"][0]["finish_reason"] in ("length", "stop")
