"""Bodies with files, however they are cut into pieces."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from longreach.api.http.multipart import MultipartReader, PartHead
from longreach.errors import InvalidRequestError, MediaTypeError

BODY = (
    b'skipped\r\n--b-1\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nuser_data\r\n'
    b'--b-1 \t\r\ncontent-disposition:form-data; NAME=file; filename="a \\"b\\" %22c%22; gr\xc3\xbcn.md"\r\n'
    b"Content-Type: text/markdown\r\n\r\n\r\n--b-2\r\n--b- 1\r\n\r\n--b-1"
    b'\r\nContent-Disposition: form-data; name="empty"\r\n\r\n\r\n--b-1--'
)
PARTS = [
    (PartHead("purpose"), b"user_data"),
    (PartHead("file", 'a "b" "c"; grün.md', "text/markdown"), b"\r\n--b-2\r\n--b- 1\r\n"),
    (PartHead("empty"), b""),
]


def read(body: bytes, size: int = 10**6, boundary: str = "b-1") -> list[tuple[PartHead, bytes]]:
    async def stream() -> AsyncIterator[bytes]:
        for at in range(0, len(body), size):
            yield body[at : at + size]

    async def parts() -> list[tuple[PartHead, bytes]]:
        reader, found = MultipartReader(f'multipart/form-data; boundary="{boundary}"', stream()), []
        while (head := await reader.next_part()) is not None:
            found.append((head, b"".join([piece async for piece in reader.chunks()])))
        return found

    return asyncio.run(parts())


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 11, 10**6])
def test_parts_are_found_wherever_the_body_is_cut(size: int) -> None:
    assert read(BODY, size) == PARTS


def test_a_part_that_nobody_reads_is_passed_over() -> None:
    async def names() -> list[str]:
        async def stream() -> AsyncIterator[bytes]:
            yield BODY

        reader, found = MultipartReader("multipart/form-data; boundary=b-1", stream()), []
        while (head := await reader.next_part()) is not None:
            found.append(head.name)
        return found

    assert asyncio.run(names()) == ["purpose", "file", "empty"]


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "ends before its last boundary"),
        (BODY[:-2], "ends before its last boundary"),
        (b"--b-1x\r\n\r\n\r\n--b-1--", "behind a boundary"),
        (b"--b-1\r\nContent-Type: text/plain\r\n\r\n\r\n--b-1--", "no `Content-Disposition"),
        (b'--b-1\r\nContent-Disposition: attachment; name="a"\r\n\r\n\r\n--b-1--', "no `Content-Disposition"),
        (b"--b-1\r\n" + b"a" * 9000, "more than 8192 bytes"),
        (b"--b-1\r\n\xff\r\n\r\n\r\n--b-1--", "no UTF-8"),
        (
            b"--b-1\r\nContent-Disposition: form-data; name=a\r\nContent-Transfer-Encoding: base64\r\n\r\n\r\n--b-1--",
            "Content-Transfer-Encoding",
        ),
    ],
)
def test_what_is_no_such_body_is_refused(body: bytes, why: str) -> None:
    with pytest.raises(InvalidRequestError, match=why) as error:
        read(body)
    assert error.value.code == "invalid_multipart"


@pytest.mark.parametrize(
    "kind", ["multipart/form-data", "multipart/mixed; boundary=x", "text/plain", "multipart/form-data; boundary=a\x01"]
)
def test_another_kind_of_body_is_named(kind: str) -> None:
    async def nothing() -> AsyncIterator[bytes]:
        yield b""

    with pytest.raises(MediaTypeError, match="multipart/form-data"):
        MultipartReader(kind, nothing())
