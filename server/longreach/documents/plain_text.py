"""What is taken as a document: plain text in UTF-8, whatever its name says that it is.

A file of another kind is known by its media type, by its first bytes, or by bytes that are no text. It is refused by
name, with what the caller can do. PDFs are read by `longreach.documents.pdf`.
"""

from __future__ import annotations

import codecs

from longreach.errors import quoted

# So many bytes of a file tell its kind.
HEAD_BYTES = 8

_IMAGE = "an image, and this server reads text alone; describe it in words, or send the text that it shows"
_ARCHIVE = "an archive (DOCX, XLSX, EPUB and ZIP files are), which is not opened here; send the text in it"

_HEADS = (
    (b"PK\x03\x04", _ARCHIVE),
    (b"\x1f\x8b", _ARCHIVE),
    (b"\x89PNG", _IMAGE),
    (b"\xff\xd8\xff", _IMAGE),
    (b"GIF87a", _IMAGE),
    (b"GIF89a", _IMAGE),
    (b"\xff\xfe", "text in UTF-16; send it in UTF-8"),
    (b"\xfe\xff", "text in UTF-16; send it in UTF-8"),
)
# By their media types. Those of sound and video are not believed: programs take TypeScript (.ts) for a video.
_TYPES = {"application/zip": _ARCHIVE}
_IMAGE_OF_TEXT = "image/svg+xml"


class NotTextError(Exception):
    """Something is no plain text; the message says what it is, and what to send in its place."""


class TextDecoder:
    """Makes text of a file's bytes as they come.

    `name` stands in errors. A byte order mark of UTF-8 is no part of the text.
    """

    def __init__(self, name: str | None = None, media_type: str | None = None) -> None:
        self._shown = "the file" if not name else quoted(name)
        self._head: bytes | None = b""  # None once it has been looked at
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._bytes = 0
        kind = (media_type or "").partition(";")[0].strip().lower()
        why = _IMAGE if kind.startswith("image/") and kind != _IMAGE_OF_TEXT else _TYPES.get(kind)
        if why is not None:
            raise NotTextError(f"{self._shown} is {why}")

    def feed(self, data: bytes | memoryview) -> str:
        """The text that these bytes complete.

        Raises:
            NotTextError: they are no text.
        """
        piece = bytes(data)
        if self._head is not None:
            self._head += piece
            if len(self._head) < HEAD_BYTES:
                return ""
            piece = self._begun()
        return self._decoded(piece, final=False)

    def end(self) -> str:
        """The rest of the text.

        Raises:
            NotTextError: it ends within a character, or is no text.
        """
        return self._decoded(self._begun() if self._head is not None else b"", final=True)

    def _begun(self) -> bytes:
        head, self._head = self._head or b"", None
        for mark, why in _HEADS:
            if head.startswith(mark):
                raise NotTextError(f"{self._shown} is {why}")
        without_mark = head.removeprefix(codecs.BOM_UTF8)
        self._bytes += len(head) - len(without_mark)
        return without_mark

    def _decoded(self, piece: bytes, *, final: bool) -> str:
        pending = len(self._decoder.getstate()[0])
        try:
            text = self._decoder.decode(piece, final)
        except UnicodeDecodeError as error:
            at = self._bytes - pending + error.start
            raise NotTextError(f"{self._shown} is no UTF-8 text: byte {at} is none; save it as UTF-8") from None
        if "\0" in text:
            raise NotTextError(f"{self._shown} is no text, since it has a NUL character; send plain text")
        self._bytes += len(piece)
        return text


def text_of(data: bytes, name: str | None = None, media_type: str | None = None) -> str:
    """The text of a whole file.

    Raises:
        NotTextError: it is no plain text.
    """
    decoder = TextDecoder(name, media_type)
    return decoder.feed(data) + decoder.end()
