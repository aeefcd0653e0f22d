"""The messages of a conversation, and what waits for the next one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from longreach.chat.conversation import Message
from longreach.chat.errors import ChatError
from longreach.chat.files import FileText, read_file, read_folder
from longreach.chat.kept_documents import KeptDocument
from longreach.errors import quoted

_SPEAKERS = {"system": "System", "user": "You", "assistant": "Model"}


class Conversation:
    """Messages so far, and the files and kept documents that wait for the next one."""

    def __init__(self, system: str | None = None) -> None:
        self.system = system
        self.messages: list[Message] = []
        self.files: list[str] = []
        self.documents: list[KeptDocument] = []
        self.clear()

    def clear(self) -> None:
        """Begin anew."""
        self.messages = []
        self.files, self.documents = [], []

    @property
    def sent(self) -> list[Message]:
        """What a request has: the system message, if there is one, and the messages."""
        return [*([] if self.system is None else [{"role": "system", "content": self.system}]), *self.messages]

    def attach(self, path: Path) -> FileText:
        """Read a text file or a PDF for the next message.

        Raises:
            ChatError: as `read_file`.
        """
        found = read_file(path)
        self.files.append(found.text)
        return found

    def attach_folder(self, path: Path) -> FileText:
        """Read the files of a folder for the next message.

        Raises:
            ChatError: as `read_folder`.
        """
        found = read_folder(path)
        self.files.append(found.text)
        return found

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

    def unanswer(self) -> None:
        """Take back the last answer.

        Raises:
            ChatError: there is none.
        """
        if not self.messages or self.messages[-1]["role"] != "assistant":
            raise ChatError("/retry: there is no answer yet")
        self.messages.pop()

    def answered(self, text: str) -> None:
        """Add an answer."""
        self.messages.append({"role": "assistant", "content": text})

    def save(self, path: Path) -> int:
        """Write the conversation into a new file: as JSON if its name ends in `.json`, else as Markdown. The number of
        its messages.

        Raises:
            ChatError: there is such a file, it cannot be written, or there is nothing to write.
        """
        if not self.messages:
            raise ChatError("/save: there are no messages yet")
        if path.suffix == ".json":
            written = json.dumps({"messages": self.sent}, ensure_ascii=False, indent=1) + "\n"
        else:
            written = "\n".join(f"## {_SPEAKERS[one['role']]}\n\n{_shown(one['content'])}\n" for one in self.sent)
        shown = quoted(str(path), 256)
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(written)
        except FileExistsError:
            raise ChatError(f"{shown} is there already; give another name") from None
        except OSError as error:
            raise ChatError(f"{shown}: {error.strerror}") from None
        return len(self.messages)


def _shown(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] if part["type"] == "text" else f"[{part['file']['file_id']}]" for part in content)
