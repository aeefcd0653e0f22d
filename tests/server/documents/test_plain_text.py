"""What is a text, and how a document stands in a message."""

from __future__ import annotations

import pytest
from longreach.documents.plain_text import NotTextError, TextDecoder, text_of
from longreach.documents.wrapping import about, closing, opening, wrapped


def in_pieces(data: bytes, size: int) -> str:
    decoder = TextDecoder()
    return "".join(decoder.feed(data[at : at + size]) for at in range(0, len(data), size)) + decoder.end()


@pytest.mark.parametrize("size", [1, 2, 3, 1000])
def test_pieces_are_the_text_wherever_they_are_cut(size: int) -> None:
    text = "Grüße 🦉\r\n日本" * 4
    assert in_pieces(text.encode(), size) == text
    assert in_pieces(b"\xef\xbb\xbf" + text.encode(), size) == text, "without the byte order mark"
    assert in_pieces(b"ab", size) == "ab"
    assert in_pieces(b"", size) == ""


@pytest.mark.parametrize(
    ("data", "media_type", "why"),
    [
        (b"\x89PNG\r\n\x1a\n", None, "is an image"),
        (b"x", "IMAGE/webp", "is an image"),
        (b"\x00\x00\x00 ftypmp42", "video/mp4", "has a NUL character"),
        (b"PK\x03\x04....", None, "is an archive"),
        (b"\xff\xfea\x00b\x00", None, "is text in UTF-16; send it in UTF-8"),
        (b"0123456789\xe9t", None, "is no UTF-8 text: byte 10 is none"),
        (b"\xef\xbb\xbf0123\xc3", None, "is no UTF-8 text: byte 7 is none"),
        (b"a\x00b", None, "has a NUL character"),
    ],
)
def test_what_is_no_text_is_named_with_a_cure(data: bytes, media_type: str | None, why: str) -> None:
    with pytest.raises(NotTextError) as error:
        text_of(data, "a.bin", media_type)
    assert why in str(error.value)
    assert "'a.bin'" in str(error.value)


@pytest.mark.parametrize("media_type", ["video/mp2t", "image/svg+xml", "application/octet-stream", "text/html"])
def test_code_is_text_whatever_its_media_type_is(media_type: str) -> None:
    assert text_of(b"<svg/>", "a.ts", media_type) == "<svg/>"


def test_a_byte_that_is_no_text_is_found_where_it_is_however_the_bytes_come() -> None:
    for size in (1, 4, 7):
        with pytest.raises(NotTextError, match="byte 14 is none"):
            in_pieces("Grüße 日本".encode() + b"\xff.", size)


def test_the_text_begins_behind_what_the_name_alone_decides() -> None:
    assert wrapped("TEXT", 'a "b" <c>') == '<document name="a &quot;b&quot; &lt;c&gt;">\nTEXT\n</document>'
    assert wrapped("TEXT") == opening() + "TEXT" + closing() == "<document>\nTEXT\n</document>"
    assert about("a<b", "c<d") == "\n<title>a&lt;b</title>\n<context>\nc<d\n</context>"
    assert about() == ""
