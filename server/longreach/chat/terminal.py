"""The conversation at the terminal: what is typed, what is shown, and the few commands between."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
from pydantic import ValidationError
from pydantic_core import PydanticCustomError
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from longreach.chat.conversation import ChatClient, Finished, Message, Reading, Words
from longreach.chat.document_commands import COMMANDS as DOCUMENT_COMMANDS
from longreach.chat.document_commands import DocumentCommands
from longreach.chat.errors import ChatError
from longreach.chat.kept_documents import KeptDocument
from longreach.chat.paths import paths_of
from longreach.errors import quoted
from longreach.policies.parse import policy_of

COMMANDS = ("/file ", *DOCUMENT_COMMANDS, "/policy ", "/clear", "/help", "/quit")
HELP = """\
/file PATH   put a text file in front of the next message; the tab key completes the path
/upload PATH let the server keep a text file, which it reads once, and put it in front of the next message
/documents   list what the server keeps
/use NAME    put a kept document, by its name or id, in front of the next message
/forget NAME delete a kept document from the server
/policy P    attention policy: window:4096:4, dynamic:0.95, dense, or JSON; alone: show it
/clear       begin a new conversation
/help        show this
/quit        leave; so does Ctrl-D
Up and Down recall what was typed before. Ctrl-C ends the answer that is being written."""

MAX_FILE_BYTES = 32 * 2**20


class Conversation:
    """Messages so far, and the files and kept documents that wait for the next one."""

    def __init__(self, system: str | None = None) -> None:
        self._system = system
        self.messages: list[Message] = []
        self.files: list[str] = []
        self.documents: list[KeptDocument] = []
        self.clear()

    def clear(self) -> None:
        """Begin anew."""
        self.messages = [] if self._system is None else [{"role": "system", "content": self._system}]
        self.files, self.documents = [], []

    def attach(self, path: Path) -> int:
        """Read a text file for the next message; the number of its characters.

        Raises:
            ChatError: it cannot be read, is no UTF-8 text, or is too long for a request.
        """
        shown = quoted(str(path), 256)
        try:
            if path.stat().st_size > MAX_FILE_BYTES:
                raise ChatError(f"{shown} has more than {MAX_FILE_BYTES} bytes")
            with path.open("rb") as file:
                if file.read(5) == b"%PDF-":
                    raise ChatError(f"{shown} is a PDF, not plain text; export it as text first")
            text = path.read_text("utf-8")
        except UnicodeDecodeError:
            raise ChatError(f"{shown} is no UTF-8 text") from None
        except OSError as error:
            raise ChatError(f"{shown}: {error.strerror}") from None
        self.files.append(text)
        return len(text)

    def say(self, text: str) -> None:
        """Add a message, behind the kept documents and the files that wait for it."""
        content: Any = "\n\n".join([*self.files, text])
        if self.documents:
            named = [{"type": "file", "file": {"file_id": document.id}} for document in self.documents]
            content = [*named, {"type": "text", "text": content}]
        self.messages.append({"role": "user", "content": content})
        self.files, self.documents = [], []

    def unsay(self) -> None:
        """Take back a message that was not answered."""
        self.messages.pop()

    def answered(self, text: str) -> None:
        """Add an answer."""
        self.messages.append({"role": "assistant", "content": text})


class Terminal:
    """Reads lines, does what they say, and shows the answers.

    `read` gives the next line and raises EOFError at the end.
    """

    def __init__(
        self,
        client: ChatClient,
        conversation: Conversation,
        console: Console,
        read: Callable[[str], str] = input,
        max_tokens: int | None = None,
    ) -> None:
        self._client = client
        self._conversation = conversation
        self._console = console
        self._read = read
        self._max_tokens = max_tokens
        self._policy: Any = None  # the server's default
        self._documents = DocumentCommands(client.documents, conversation, console)

    def run(self) -> None:
        """Go on until `/quit` or the end of what is read."""
        self._console.print(f"{self._client.model}: /help for help", style="dim", markup=False, highlight=False)
        if self._client.description is not None:
            self._console.print(self._client.description, markup=False, highlight=False)
        while True:
            try:
                line = self._read("> ").strip()
            except (EOFError, KeyboardInterrupt):
                self._console.print()
                return
            if line == "/quit":
                return
            try:
                self._do(line)
            except ChatError as error:
                self._console.print(str(error), style="red", markup=False, highlight=False)

    def _do(self, line: str) -> None:
        command, _, argument = line.partition(" ")
        if not line:
            return
        if command == "/clear":
            self._conversation.clear()
            self._note("a new conversation")
        elif command == "/help":
            self._note(HELP)
        elif command == "/file":
            if not argument.strip():
                raise ChatError("/file needs a path: /file book.txt")
            for path in paths_of(argument.strip(), command):
                self._note(f"{path.name}: {self._conversation.attach(path)} characters, in front of the next message")
        elif self._documents.does(command, argument.strip()):
            return
        elif command == "/policy":
            self._set_policy(argument.strip())
        elif line.startswith("/"):
            raise ChatError(f"there is no command {quoted(command)}; /help lists those there are")
        else:
            self._turn(line)

    def _set_policy(self, text: str) -> None:
        if not text:
            self._note("the server's default" if self._policy is None else str(self._policy))
            return
        policy: Any = text
        if text.startswith("{"):
            try:
                policy = orjson.loads(text)
            except orjson.JSONDecodeError as error:
                raise ChatError(f"/policy: this is not valid JSON: {error}") from None
        try:
            policy_of(policy)
        except ValidationError as error:
            problem = error.errors()[0]
            raise ChatError(f"/policy: {'.'.join(map(str, problem['loc']))}: {problem['msg']}") from None
        except PydanticCustomError as error:
            raise ChatError(f"/policy: {error.message()}") from None
        self._policy = policy
        self._note(f"from the next message on: {text}")

    def _turn(self, line: str) -> None:
        self._conversation.say(line)
        answer = ""
        try:
            with contextlib.closing(
                self._client.ask(self._conversation.messages, self._max_tokens, self._policy)
            ) as events:
                for event in self._shown(events):
                    if isinstance(event, Words) and not event.reasoning:
                        answer += event.text
                    elif isinstance(event, Finished):
                        self._console.print()
                        self._note(summary(event))
        except KeyboardInterrupt:
            self._console.print()
            self._note("stopped")
        except ChatError:
            if not answer:
                self._conversation.unsay()
                raise
            self._console.print()
            self._conversation.answered(answer)
            raise
        if answer:
            self._conversation.answered(answer)
        else:
            self._conversation.unsay()

    def _shown(self, events: Iterator[Reading | Words | Finished]) -> Iterator[Reading | Words | Finished]:
        """Pass events on: a bar while the prompt is read, which goes away before the first word."""
        columns = (TextColumn("reading"), BarColumn(), TextColumn("{task.completed:,}/{task.total:,} tokens"))
        bar = Progress(*columns, TimeElapsedColumn(), console=self._console, transient=True)
        task: TaskID | None = None
        try:
            for event in events:
                if isinstance(event, Reading) and self._console.is_terminal:
                    if task is None:
                        bar.start()
                        task = bar.add_task("reading", total=event.total)
                    bar.update(task, completed=event.processed, total=event.total)
                elif task is not None:
                    bar.stop()
                if isinstance(event, Words):
                    style = "dim" if event.reasoning else None
                    self._console.print(event.text, end="", style=style, markup=False, highlight=False, soft_wrap=True)
                yield event
        finally:
            if task is not None:
                bar.stop()

    def _note(self, text: str) -> None:
        self._console.print(text, style="dim", markup=False, highlight=False, soft_wrap=True)


def summary(turn: Finished) -> str:
    """A turn's numbers in one line."""
    parts = []
    if turn.first_token is not None:
        parts.append(f"first token {turn.first_token:.2f} s")
    if turn.tokens_per_second is not None:
        parts.append(f"{turn.tokens_per_second:.1f} tokens/s")
    cached = f" ({turn.cached_tokens:,} cached)" if turn.cached_tokens else ""
    parts += [f"prompt {turn.prompt_tokens:,} tokens{cached}", f"answer {turn.completion_tokens:,} tokens"]
    if turn.attention is not None:
        told = turn.attention
        kept = (
            "" if told.kept_mean is None else f", kept {told.kept_mean:.1%} of its mass (least {told.kept_least:.1%})"
        )
        parts.append(f"{told.density:.1%} of dense attention{kept}")
    if turn.finish_reason != "stop":
        parts.append(f"ended by {turn.finish_reason}")
    return " · ".join(parts)
