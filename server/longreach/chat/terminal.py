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

from longreach.chat.conversation import ChatClient, Finished, Reading, Words
from longreach.chat.document_commands import COMMANDS as DOCUMENT_COMMANDS
from longreach.chat.document_commands import DocumentCommands
from longreach.chat.errors import ChatError
from longreach.chat.files import FileText
from longreach.chat.markdown import MarkdownStream
from longreach.chat.messages import Conversation
from longreach.chat.paths import paths_of
from longreach.config import EMBEDDED_MODEL_NAME
from longreach.errors import quoted
from longreach.policies.parse import policy_of

COMMANDS = (
    "/file ",
    "/folder ",
    *DOCUMENT_COMMANDS,
    "/system ",
    "/temperature ",
    "/policy ",
    "/retry",
    "/save ",
    "/clear",
    "/help",
    "/quit",
)
HELP = """\
Files: the tab key completes a path, and quotes keep its blanks.
  /file PATH      put a text file or a PDF in front of the next message
  /folder PATH    put the files of a folder, such as a codebase, in front of it
Documents, which the server keeps and reads once:
  /upload PATH    keep a text file or a PDF, and put it in front of the next message
  /documents      list what is kept
  /use NAME       put a kept document, by its name or id, in front of the next message
  /forget NAME    delete a kept document
How it answers; each shows its value if it stands alone:
  /system TEXT    the system message; /system none for none
  /temperature T  0 for the likeliest words, up to 2; default for the model's own
  /policy P       the attention policy: window:4096:4, dynamic:0.95, dense, or JSON
Conversation:
  /retry          ask the last question again
  /save FILE      write the conversation into a new file: Markdown, or JSON if it ends in .json
  /clear          begin a new conversation
  /help           show this
  /quit           leave; so does Ctrl-D
Up and Down recall what was typed before. Ctrl-C ends the answer that is being written."""

# What the embedded model says to all that it does not find, and what that means.
_NOT_STATED = "Not stated."
_HABIT = (
    "The demonstration model says 'Not stated.' whenever it finds no answer, and the text may have one. It has 8M "
    "parameters. To serve another model: longreach serve MODEL"
)
_MOST_TEMPERATURE = 2.0


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
        temperature: float | None = None,
    ) -> None:
        self._client = client
        self._conversation = conversation
        self._console = console
        self._read = read
        self._max_tokens = max_tokens
        self._temperature = temperature
        self._policy: Any = None  # the server's default
        self._has_told_habit = False
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
        argument = argument.strip()
        plain = {"/clear": self._clear, "/help": lambda: self._note(HELP), "/retry": self._retry}
        with_argument = {
            "/file": lambda: self._attach(command, argument, self._conversation.attach),
            "/folder": lambda: self._attach(command, argument, self._conversation.attach_folder),
            "/system": lambda: self._set_system(argument),
            "/temperature": lambda: self._set_temperature(argument),
            "/policy": lambda: self._set_policy(argument),
            "/save": lambda: self._save(argument),
        }
        if not line:
            return
        if command in plain:
            if argument:
                raise ChatError(f"{command} takes nothing behind it")
            plain[command]()
        elif command in with_argument:
            with_argument[command]()
        elif self._documents.does(command, argument):
            return
        elif line.startswith("/"):
            raise ChatError(f"there is no command {quoted(command)}; /help lists those there are")
        else:
            self._conversation.say(line)
            self._turn()

    def _clear(self) -> None:
        self._conversation.clear()
        self._has_told_habit = False
        self._note("a new conversation")

    def _attach(self, command: str, argument: str, attach: Callable[[Path], FileText]) -> None:
        if not argument:
            raise ChatError(f"{command} needs a path: {command} {'book.txt' if command == '/file' else 'src'}")
        for path in paths_of(argument, command):
            self._note(f"{path.name or path}: {attach(path).told}, in front of the next message")

    def _set_system(self, text: str) -> None:
        if text:
            self._conversation.system = None if text == "none" else text
        shown = self._conversation.system
        self._note("there is no system message" if shown is None else f"the system message: {shown}")

    def _set_temperature(self, text: str) -> None:
        if text == "default":
            self._temperature = None
        elif text:
            try:
                given = float(text)
            except ValueError:
                given = -1.0
            if not 0 <= given <= _MOST_TEMPERATURE:
                raise ChatError(f"/temperature takes a number from 0 to {_MOST_TEMPERATURE:g}, or default")
            self._temperature = given
        self._note("the model's own temperature" if self._temperature is None else f"temperature {self._temperature:g}")

    def _retry(self) -> None:
        self._conversation.unanswer()
        self._turn()

    def _save(self, argument: str) -> None:
        if not argument:
            raise ChatError("/save needs a file: /save talk.md")
        paths = paths_of(argument, "/save")
        if len(paths) != 1:
            raise ChatError('/save takes one file; put quotes around a name with blanks: /save "my talk.md"')
        self._note(f"{self._conversation.save(paths[0])} messages are in {paths[0]}")

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

    def _turn(self) -> None:
        """Ask what was said last, and keep the answer."""
        answer = ""
        try:
            with contextlib.closing(
                self._client.ask(self._conversation.sent, self._max_tokens, self._policy, self._temperature)
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
            self._tell_habit(answer)
        else:
            self._conversation.unsay()

    def _tell_habit(self, answer: str) -> None:
        """Say once a conversation that the embedded model's refusal is no fact about somebody's text."""
        is_refusal = self._client.model == EMBEDDED_MODEL_NAME and answer.strip() == _NOT_STATED
        if is_refusal and not self._has_told_habit:
            self._has_told_habit = True
            self._note(_HABIT)

    def _shown(self, events: Iterator[Reading | Words | Finished]) -> Iterator[Reading | Words | Finished]:
        """Pass events on: a bar while the prompt is read, which goes away before the first word."""
        columns = (TextColumn("reading"), BarColumn(), TextColumn("{task.completed:,}/{task.total:,} tokens"))
        bar = Progress(*columns, TimeElapsedColumn(), console=self._console, transient=True)
        task: TaskID | None = None
        page = MarkdownStream(self._console) if self._console.is_terminal else None
        was_reasoning = False
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
                    if page is not None and was_reasoning and not event.reasoning:
                        self._console.print("\n")
                    was_reasoning = event.reasoning
                    self._show_words(event, page)
                elif isinstance(event, Finished) and page is not None:
                    page.end()
                yield event
        finally:
            if task is not None:
                bar.stop()
            if page is not None:
                page.end()

    def _show_words(self, words: Words, page: MarkdownStream | None) -> None:
        if page is not None and not words.reasoning:
            page.feed(words.text)
            return
        style = "dim" if words.reasoning else None
        self._console.print(words.text, end="", style=style, markup=False, highlight=False, soft_wrap=True)

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
