"""What the chat's commands do to the conversation and to what is sent; and how answers look in a terminal."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from longreach.chat.errors import ChatError
from longreach.chat.files import read_folder
from longreach.chat.markdown import MarkdownStream, ended_blocks
from longreach.chat.terminal import COMMANDS, HELP
from longreach.documents.pdf_child import read_pdf
from rich.console import Console

from tests.pdfs import pdf
from tests.server.chat.test_chat import ANSWER, MODELS, FakeServer, chat, words


@pytest.fixture
def server() -> FakeServer:
    return FakeServer()


def test_help_names_every_command() -> None:
    assert [name for name in COMMANDS if f"  {name.strip()}" not in HELP] == []
    assert max(map(len, HELP.splitlines())) <= 100


def test_retry_asks_the_last_question_again(server: FakeServer) -> None:
    shown, conversation = chat(server, "/retry", "Hi", "/temperature 0.5", "/retry")
    assert "there is no answer yet" in shown
    first, second = (body["messages"] for body in server.bodies)
    assert first == second == [{"role": "user", "content": "Hi"}]
    assert ("temperature" in server.bodies[0], server.bodies[1]["temperature"]) == (False, 0.5)
    assert [one["role"] for one in conversation.messages] == ["user", "assistant"]


def test_the_temperature_is_a_number_or_the_models_own(server: FakeServer) -> None:
    wrong = ("/temperature hot", "/temperature 3", "/temperature nan")
    shown, _ = chat(server, "/temperature", *wrong, "Hi", "/temperature default", "Hi", temperature=0.0)
    assert "temperature 0\n" in shown
    assert shown.count("takes a number from 0 to 2, or default") == 3
    assert [body.get("temperature") for body in server.bodies] == [0.0, None]


def test_the_system_message_is_what_was_said_last(server: FakeServer) -> None:
    shown, _ = chat(server, "/system", "/system Be brief.", "Hi", "/clear", "Hi", "/system none", "And?")
    assert "there is no system message" in shown
    systems = [[m["content"] for m in body["messages"] if m["role"] == "system"] for body in server.bodies]
    assert systems == [["Be brief."], ["Be brief."], []]


def test_a_conversation_is_saved_once_as_markdown_or_json(server: FakeServer, tmp_path: Path) -> None:
    lines = [f'/save "{tmp_path}/my {kind}"' for kind in ("talk.md", "talk.md", "talk.json")]
    shown, conversation = chat(server, "/save", lines[0], "/system Be brief.", "Hi", *lines, f"/save {tmp_path}/a b")
    assert (tmp_path / "my talk.md").read_text() == (
        "## System\n\nBe brief.\n\n## You\n\nHi\n\n## Model\n\nThe [bold]owl flies.\n"
    )
    assert json.loads((tmp_path / "my talk.json").read_text()) == {"messages": conversation.sent}
    for told in ("/save needs a file", "no messages yet", "2 messages are in", "is there already", "put quotes around"):
        assert told in shown, told


def test_a_pdf_stands_in_front_of_the_next_message(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longreach.chat.files.read_apart", read_pdf)
    (tmp_path / "owl.pdf").write_bytes(pdf("The owl's key is 4071.", None))
    shown, _ = chat(server, f"/file {tmp_path}/owl.pdf", "Which?")
    assert "owl.pdf: 2 pages, 1 of them without text, 51 characters" in shown
    sent = server.bodies[0]["messages"][0]["content"]
    assert sent == "[page 1]\nThe owl's key is 4071.\n\n[page 2: no text]\n\n\nWhich?"


def test_a_folder_is_joined_under_its_paths(server: FakeServer, tmp_path: Path) -> None:
    app = tmp_path / "my app"
    for path, data in {
        "src/main.py": b"KEY = 4071\n\n",
        "src/b.py": "\ufeffGrüße".encode(),
        "README": "Grüße".encode("cp1252"),
        ".env": b"A=1",
        "empty": b"",
        "logo": b"\x89PNG\0",
        "book.pdf": pdf("x"),
        "uv.lock": b"x",
        "go.sum": b"x",
        "large": b"x" * 1_000_001,
        "node_modules/a/b.js": b"x",
        "src/.git/config": b"x",
    }.items():
        (app / path).parent.mkdir(parents=True, exist_ok=True)
        (app / path).write_bytes(data)
    (app / "link").symlink_to(app)
    found = read_folder(app)
    assert found.text == (
        "=== my app/.env ===\nA=1\n\n=== my app/README ===\nGrüße\n\n=== my app/empty ===\n\n\n"
        "=== my app/src/b.py ===\nGrüße\n\n=== my app/src/main.py ===\nKEY = 4071\n\n"
    )
    assert found.told.endswith(
        "left out: 2 binary files, 1 files over 1 MB, 1 hidden folders, 1 links, 2 lock files, 1 node_modules"
    )
    shown, _ = chat(server, f'/folder "{app}"', "Which?", f"/folder {tmp_path}/none", f'/folder "{app}/README"')
    assert server.bodies[0]["messages"][0]["content"] == f"{found.text}\n\nWhich?"
    assert "my app: 5 files" in shown
    assert "none' is no folder" in shown
    assert "/file takes a single file" in shown
    (tmp_path / "bare/.git").mkdir(parents=True)
    with pytest.raises(ChatError, match=r"there is no text in .*; left out: 1 hidden folders"):
        read_folder(tmp_path / "bare")


def test_not_stated_is_told_to_be_a_habit_once_a_conversation(server: FakeServer) -> None:
    server.models = (200, {"data": [MODELS["data"][0] | {"id": "longreach-default"}]})
    server.lines = [words(content="Not stated."), *ANSWER[-3:]]
    shown, _ = chat(server, "Hi", "And?", "/clear", "Hi")
    assert shown.count("whenever it finds no answer, and the text may have one") == 2
    server.models = (200, MODELS)
    assert "whenever" not in chat(server, "Hi")[0], "of another model it is an answer"


def test_a_block_has_ended_at_an_empty_line_outside_of_code() -> None:
    assert ended_blocks("One\ntwo") == ("", "One\ntwo")
    assert ended_blocks("One\n\ntwo") == ("One\n\n", "two")
    assert ended_blocks("One\n\n```\na\n\nb\n") == ("One\n\n", "```\na\n\nb\n")
    assert ended_blocks("```\na\n\n````py\n```\n\nc") == ("```\na\n\n````py\n```\n\n", "c")


def test_markdown_is_shown_as_it_comes_and_once() -> None:
    text = "# Keys\n\nThe **owl** has `4071`.\n\n```python\nkey = 4071\n\nprint(key)\n```\n\n1. one\n2. two\n"
    shown = io.StringIO()
    console = Console(file=shown, width=60, force_terminal=True, color_system=None, force_interactive=False)
    page = MarkdownStream(console)
    for at in range(0, len(text), 3):
        page.feed(text[at : at + 3])
    page.end()
    page.end()
    lines = shown.getvalue()
    for told in ("Keys", "The owl has 4071.", "print(key)", " 2 two"):
        assert lines.count(told) == 1, lines
    assert "**" not in lines
