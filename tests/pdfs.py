"""Small PDFs for tests, written object by object (ISO 32000-1, section 7.5)."""

from __future__ import annotations

import io
import zlib
from collections.abc import Sequence


def pdf(*pages: str | bytes | None) -> bytes:
    """A PDF with these pages. A line of a page is a line of text. A page that is None is a drawing, as one that was
    scanned, and bytes are the object of its contents."""
    objects: list[bytes] = [b"", b"", b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica/Encoding/WinAnsiEncoding>>"]
    kids: list[int] = []
    for page in pages:
        drawn = b"0 0 9 9 re f" if page is None else _text(page.split("\n")) if isinstance(page, str) else page
        objects.append(drawn if isinstance(page, bytes) else stream(drawn))
        resources = b"<</Font<</F 3 0 R>>>>"
        kids.append(len(objects) + 1)
        objects.append(
            b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 612 792]/Resources%s/Contents %d 0 R>>" % (resources, len(objects))
        )
    objects[0] = b"<</Type/Catalog/Pages 2 0 R>>"
    listed = b" ".join(b"%d 0 R" % kid for kid in kids)
    objects[1] = b"<</Type/Pages/Count %d/Kids[%s]>>" % (len(kids), listed)
    return _file(objects)


def bomb(*pages: str) -> bytes:
    """A PDF whose first page, before these pages, is packed more often than anybody may ask for."""
    often = stream(_text(["x"])).replace(b"/FlateDecode", b"[%s]" % (b"/FlateDecode" * 17))
    return pdf(often, *pages)


def drawn_pages(pages: int, operators: int) -> bytes:
    """A PDF whose pages have no text and so many operators each."""
    return pdf(*[stream(b"BT ET " * operators)] * pages)


def endless() -> bytes:
    """A PDF of a page whose form draws itself several times, and so on."""
    form = (
        b"<</Type/XObject/Subtype/Form/BBox[0 0 9 9]/Resources<</XObject<</X 4 0 R>>>>/Length 18>>stream\n"
        b"/X Do /X Do /X Do \nendstream"
    )
    return _file(
        [
            b"<</Type/Catalog/Pages 2 0 R>>",
            b"<</Type/Pages/Count 1/Kids[3 0 R]>>",
            b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 9 9]/Resources<</XObject<</X 4 0 R>>>>/Contents 5 0 R>>",
            form,
            stream(b"/X Do"),
        ]
    )


def locked(data: bytes, password: str, algorithm: str = "RC4-128") -> bytes:
    """A PDF that opens with a password, or with none if that is empty."""
    from pypdf import PdfWriter

    writer, out = PdfWriter(clone_from=io.BytesIO(data)), io.BytesIO()
    writer.encrypt(password, "owner", algorithm=algorithm)
    writer.write(out)
    return out.getvalue()


def _text(lines: Sequence[str]) -> bytes:
    shown = [
        line.encode("cp1252").replace(b"\\", b"\\\\").replace(b"(", b"\\(").replace(b")", b"\\)") for line in lines
    ]
    return b"BT /F 12 Tf 14 TL 72 720 Td %s ET" % b" ".join(b"(%s) Tj T*" % line for line in shown)


def stream(content: bytes) -> bytes:
    """An object whose contents are packed."""
    packed = zlib.compress(content)
    return b"<</Filter/FlateDecode/Length %d>>stream\n%s\nendstream" % (len(packed), packed)


def _file(objects: Sequence[bytes]) -> bytes:
    out, places = bytearray(b"%PDF-1.7\n"), []
    for number, written in enumerate(objects, start=1):
        places.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (number, written)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    size, at = len(objects) + 1, len(out)
    out += b"xref\n0 %d\n0000000000 65535 f \n%strailer\n<</Size %d/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF\n" % (
        size,
        table,
        size,
        at,
    )
    return bytes(out)
