"""The commands of the chat that have to do with kept documents."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from longreach.chat.errors import ChatError
from longreach.chat.kept_documents import KeptDocument, KeptDocuments
from longreach.chat.paths import paths_of

COMMANDS = ("/upload ", "/documents", "/use ", "/forget ")


class Waiting(Protocol):
    """A conversation, whose next message begins with `documents`."""

    documents: list[KeptDocument]


class DocumentCommands:
    """Lists, uploads, uses and forgets the documents of one server."""

    def __init__(self, kept: KeptDocuments, conversation: Waiting, console: Console) -> None:
        self._kept = kept
        self._conversation = conversation
        self._console = console

    def does(self, command: str, argument: str) -> bool:
        """Do what a command says; False if it is none of these.

        Raises:
            ChatError: it cannot be done.
        """
        if command == "/documents":
            self._list()
        elif command not in (name.strip() for name in COMMANDS):
            return False
        elif not argument:
            wanted = "a path: /upload book.txt" if command == "/upload" else f"a name or an id: {command} book.txt"
            raise ChatError(f"{command} needs {wanted}")
        elif command == "/upload":
            self._upload(argument)
        elif command == "/use":
            self._use(self._kept.find(argument))
        else:
            document = self._kept.find(argument)
            self._kept.forget(document)
            waiting = self._conversation.documents
            waiting[:] = [one for one in waiting if one.id != document.id]
            self._note(f"{document.shown} is forgotten")
        return True

    def _list(self) -> None:
        documents = self._kept.all()
        if not documents:
            self._note("no documents are kept; /upload PATH keeps one")
            return
        table = Table.grid(padding=(0, 2))
        names: set[str | None] = {None}
        for document in documents:
            # The newest of a name is what the name means; the others have their ids.
            reference = document.id if document.name in names else document.shown
            names.add(document.name)
            table.add_row(*(Text(cell, style="dim", overflow="fold") for cell in (reference, *_told(document))))
        self._console.print(table)

    def _use(self, document: KeptDocument) -> None:
        self._conversation.documents.append(document)
        told = ", ".join(part for part in _told(document) if part)
        self._note(f"{document.shown}: {told}, in front of the next message")

    def _upload(self, argument: str) -> None:
        for path in paths_of(argument, "/upload"):
            document, was_sent = self._sent(path)
            if not was_sent:
                self._note(f"{path.name} is kept already")
            self._use(document)

    def _sent(self, path: Path) -> tuple[KeptDocument, bool]:
        columns = (TextColumn("sending"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        hidden = not self._console.is_terminal
        with Progress(*columns, console=self._console, transient=True, disable=hidden) as progress:
            task = progress.add_task("sending", total=None)
            return self._kept.upload(path, lambda sent, size: progress.update(task, completed=sent, total=size))

    def _note(self, text: str) -> None:
        self._console.print(text, style="dim", markup=False, highlight=False, soft_wrap=True)


def _told(document: KeptDocument) -> tuple[str, str, str]:
    """A document's size, what is done with it now, and until when it is kept."""
    size = f"{document.bytes:,} bytes" if document.tokens is None else f"{document.tokens:,} tokens"
    state = "" if document.state == "ready" else document.state
    if document.expires is None:
        return size, state, ""
    return size, state, f"until {datetime.fromtimestamp(document.expires).astimezone():%Y-%m-%d}"
