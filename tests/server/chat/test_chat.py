"""The chat's client and terminal against a server that says what the test wants."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from longreach import cli
from longreach.chat.conversation import ChatClient, Finished, Reading, Words
from longreach.chat.errors import ChatError
from longreach.chat.messages import Conversation
from longreach.chat.terminal import Terminal, summary
from longreach.documents.pdf_child import read_pdf
from rich.console import Console
from typer.testing import CliRunner

MODELS = {"object": "list", "data": [{"id": "owl-7b", "object": "model", "max_model_len": 131072}]}


def chunk(**members: Any) -> str:
    return "data: " + json.dumps({"choices": []} | members) + "\n\n"


def words(**delta: str) -> str:
    return chunk(choices=[{"index": 0, "delta": delta, "finish_reason": None}])


ANSWER = [
    chunk(prompt_progress={"total": 100, "cache": 20, "processed": 60, "time_ms": 5, "eta_ms": None}),
    ": prefill 60/100\n\n",
    words(role="assistant", content=""),
    words(reasoning_content="Hm. "),
    words(content="The [bold]owl"),
    words(content=" flies."),
    chunk(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}]),
    chunk(
        usage={"prompt_tokens": 100, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 20}},
    ),
    "data: [DONE]\n\n",
]


class FakeServer:
    """Answers chats with `lines`, or with `refusal`; keeps what it was sent."""

    def __init__(self) -> None:
        self.lines: list[str] = ANSWER
        self.refusal: tuple[int, dict[str, Any]] | None = None
        self.models: tuple[int, Any] = (200, MODELS)
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[httpx2.Headers] = []
        self.closed = False
        self.ended: list[str] = []  # paths that were deleted

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        self.headers.append(request.headers)
        if request.url.path == "/v1/models":
            return httpx2.Response(self.models[0], json=self.models[1])
        if request.method == "DELETE":
            self.ended.append(request.url.path)
            return httpx2.Response(200, json={})
        assert request.url.path == "/v1/chat/completions"
        self.bodies.append(json.loads(request.content))
        if self.refusal is not None:
            return httpx2.Response(self.refusal[0], json=self.refusal[1])
        return httpx2.Response(200, stream=_Stream(self))


class _Stream(httpx2.SyncByteStream):
    def __init__(self, server: FakeServer) -> None:
        self._server = server

    def __iter__(self) -> Iterator[bytes]:
        for line in self._server.lines:
            if line == "break":
                raise httpx2.ReadError("reset")
            yield line.encode()

    def close(self) -> None:
        self._server.closed = True


@pytest.fixture
def server() -> FakeServer:
    """A server in this process."""
    return FakeServer()


def client(server: FakeServer, api_key: str | None = None) -> ChatClient:
    """A client of it; its clock ticks once a look."""
    ticks = iter(range(10**6))
    return ChatClient("http://test", api_key, httpx2.MockTransport(server), clock=lambda: float(next(ticks)))


def chat(server: FakeServer, *lines: str, **more: Any) -> tuple[str, Conversation]:
    """What a terminal shows after these lines, and the conversation."""
    typed = iter(lines)

    def read(_: str) -> str:
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    shown = io.StringIO()
    conversation = Conversation(more.pop("system", None))
    Terminal(client(server), conversation, Console(file=shown, width=200), read, **more).run()
    return shown.getvalue(), conversation


@pytest.mark.parametrize(("said", "shown"), [("A [bold] toy.", True), (None, False), (3, False)])
def test_what_the_server_says_of_its_model_is_shown(server: FakeServer, said: Any, shown: bool) -> None:
    server.models = (200, {"data": [MODELS["data"][0] | {"description": said}]})
    lines = chat(server)[0].splitlines()
    assert lines[:2] == (["owl-7b: /help for help", said] if shown else ["owl-7b: /help for help", ""])


def test_a_turn_is_told_as_it_comes(server: FakeServer) -> None:
    events = list(client(server, "a-key").ask([{"role": "user", "content": "Hi"}], max_tokens=9))
    assert events == [
        Reading(60, 20, 100),
        Words("Hm. ", reasoning=True),
        Words("The [bold]owl"),
        Words(" flies."),
        Finished("stop", 1.0, 2.0, 100, 20, 4),
    ]
    [body] = server.bodies
    assert body == {
        "model": "owl-7b",
        "messages": [{"role": "user", "content": "Hi"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_progress": True,
        "max_completion_tokens": 9,
    }
    assert {headers["authorization"] for headers in server.headers} == {"Bearer a-key"}


def test_the_numbers_of_a_turn() -> None:
    turn = Finished("length", 0.5, 2.5, 1_000_000, 900_000, 41)
    assert summary(turn) == (
        "first token 0.50 s · 20.0 tokens/s · prompt 1,000,000 tokens (900,000 cached) · answer 41 tokens "
        "· ended by length"
    )
    assert summary(Finished("stop", None, 1.0, 5, 0, 0)) == "prompt 5 tokens · answer 0 tokens"
    assert math.isclose(turn.tokens_per_second or 0, 20.0)


def test_turns_are_remembered_without_their_reasoning(server: FakeServer) -> None:
    shown, conversation = chat(server, "Hi", "", "And then?", system="Be brief.")
    assert [message["role"] for message in server.bodies[1]["messages"]] == ["system", "user", "assistant", "user"]
    assert conversation.sent[2] == {"role": "assistant", "content": "The [bold]owl flies."}
    assert shown.count("The [bold]owl flies.") == 2, "markup in an answer is text"
    assert "first token 1.00 s · 3.0 tokens/s" in shown


def test_clear_begins_anew_and_keeps_the_system_message(server: FakeServer) -> None:
    _, conversation = chat(server, "Hi", "/clear", system="Be brief.")
    assert conversation.sent == [{"role": "system", "content": "Be brief."}]


def test_a_file_stands_in_front_of_the_next_message_only(server: FakeServer, tmp_path: Path) -> None:
    book = tmp_path / "a book.txt"
    book.write_text("Call me Ishmael.")
    shown, _ = chat(server, f"/file {book}", "Who speaks?", "And then?")
    assert "a book.txt: 16 characters" in shown
    contents = [message["content"] for message in server.bodies[1]["messages"] if message["role"] == "user"]
    assert contents == ["Call me Ishmael.\n\nWho speaks?", "And then?"]


@pytest.mark.parametrize("written", ['"a b.txt"', "'a b.txt'", r"a\ b.txt", "a b.txt", '"a b.txt" c.txt'])
def test_paths_are_read_as_a_shell_reads_them(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str
) -> None:
    (tmp_path / "a b.txt").write_text("Call me Ishmael.")
    (tmp_path / "c.txt").write_text("Some years ago")
    monkeypatch.chdir(tmp_path)
    chat(server, f"/file {written}", "Who?")
    files = ["Call me Ishmael.", *(["Some years ago"] if "c.txt" in written else [])]
    assert server.bodies[0]["messages"][0]["content"] == "\n\n".join([*files, "Who?"])


def test_a_quote_without_its_end_is_told(server: FakeServer) -> None:
    assert "/file: No closing quotation" in chat(server, '/file "a b.txt')[0]


def test_files_that_cannot_be_used_are_named(server: FakeServer, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "bad").write_bytes(b"0123456789\xff\xfe")
    (tmp_path / "book.pdf").write_bytes(b"%PDF-1.7\n\xff")
    (tmp_path / "long").write_text("x" * 10**6)
    monkeypatch.setattr("longreach.chat.files.read_apart", read_pdf)
    monkeypatch.setattr("longreach.chat.files.MAX_FILE_BYTES", 10**6 - 1)
    lines = ["/file", *(f"/file {tmp_path}/{name}" for name in ("none", "bad", "book.pdf", "long", ""))]
    shown, conversation = chat(server, *lines)
    for words_ in (
        "needs a path",
        "No such file",
        "no UTF-8 text",
        "book.pdf' is a damaged PDF",
        "more than 999999 bytes",
        "is a folder; /folder joins the files in it",
    ):
        assert words_ in shown
    assert not conversation.files


def test_an_unknown_command_is_not_sent(server: FakeServer) -> None:
    shown, _ = chat(server, "/polciy dense")
    assert "there is no command '/polciy'; /help lists" in shown
    assert not server.bodies


def test_a_refused_message_is_taken_back(server: FakeServer) -> None:
    server.refusal = (400, {"error": {"message": "This model's maximum context length is 5 tokens."}})
    shown, conversation = chat(server, "Hi")
    assert "maximum context length is 5 tokens" in shown
    assert not conversation.messages


@pytest.mark.parametrize(
    ("end", "told"),
    [
        ("break", "the server went away: reset"),
        (chunk(error={"message": "The engine has stopped."}), "The engine has stopped."),
        ("data: [DONE]\n\n", "ended without an end"),
        ("", "ended without an end"),
    ],
)
def test_what_was_said_before_a_failure_is_kept(server: FakeServer, end: str, told: str) -> None:
    server.lines = [*ANSWER[:5], end]
    shown, conversation = chat(server, "Hi")
    assert told in shown
    assert conversation.messages[-1]["content"] == "The [bold]owl"


def test_ctrl_c_ends_the_answer_and_the_servers_work(server: FakeServer, monkeypatch: Any) -> None:
    plain: Callable[..., Any] = Console.print

    def interrupted(self: Console, *things: Any, **how: Any) -> None:
        plain(self, *things, **how)
        if things[:1] == (" flies.",):
            raise KeyboardInterrupt

    monkeypatch.setattr(Console, "print", interrupted)
    shown, conversation = chat(server, "Hi")
    assert "stopped" in shown
    assert "first token" not in shown
    assert conversation.messages[-1] == {"role": "assistant", "content": "The [bold]owl"}
    assert server.closed
    assert server.ended == [f"/v1/requests/{server.headers[-2]['idempotency-key']}"]


@pytest.mark.parametrize(
    ("models", "told"),
    [
        ((401, {"error": {"message": "This server needs an API key."}}), "needs an API key"),
        ((200, {"data": []}), "no OpenAI-compatible server"),
        ((200, ["x"]), "no OpenAI-compatible server"),
        ((404, "nothing"), "answered 404 without an error object"),
    ],
)
def test_what_is_no_such_server_is_told(server: FakeServer, models: tuple[int, Any], told: str) -> None:
    server.models = models
    with pytest.raises(ChatError, match=told):
        client(server)


def test_the_command_says_that_nobody_is_there() -> None:
    result = CliRunner().invoke(cli.app, ["chat", "http://127.0.0.1:9"])
    assert result.exit_code == 2
    assert "longreach: error: no OpenAI-compatible server answers at http://127.0.0.1:9" in result.stderr
    assert "start one with `longreach serve`" in result.stderr


def test_a_bar_is_shown_while_the_prompt_is_read(server: FakeServer) -> None:
    shown = io.StringIO()
    console = Console(file=shown, width=200, force_terminal=True)
    lines = iter(["Hi", "/quit"])
    Terminal(client(server), Conversation(), console, lambda _: next(lines)).run()
    assert "60/100 tokens" in shown.getvalue()
    assert shown.getvalue().index("60/100") < shown.getvalue().index("flies")


def test_a_policy_holds_for_the_messages_that_follow_it(server: FakeServer) -> None:
    lines = ["Hi", "/policy window:100:2", "And?", '/policy {"policy": "dynamic", "recall": 0.9}', "So?", "/policy"]
    shown, _ = chat(server, *lines)
    assert [body.get("attention") for body in server.bodies] == [
        None,
        "window:100:2",
        {"policy": "dynamic", "recall": 0.9},
    ]
    assert "{'policy': 'dynamic', 'recall': 0.9}" in shown


def test_a_policy_that_cannot_be_is_told_and_changes_nothing(server: FakeServer) -> None:
    shown, _ = chat(server, "/policy window:0", "/policy {", "/policy 4", "/policy dense:4", "Hi")
    for words_ in (
        "size: must be from 1 to 16777216",
        "not valid JSON",
        "a text such as window:4096:4",
        "0 parameters",
    ):
        assert words_ in shown
    assert "attention" not in server.bodies[0]


def test_a_turn_says_what_its_policy_left_out(server: FakeServer) -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 4}
    for kept, told in (
        (
            {"queries": 9, "mean": 0.914, "p5": 0.5, "min": 0.11},
            "12.5% of dense attention, kept 91.4% of its mass (least 11.0%)",
        ),
        (None, "12.5% of dense attention"),
    ):
        attention = {"policy": "window", "density": 0.125, "kept_mass": kept}
        server.lines = [*ANSWER[:-2], chunk(usage=usage | {"attention": attention}), ANSWER[-1]]
        shown, _ = chat(server, "Hi")
        assert f"answer 4 tokens · {told}\n" in shown
