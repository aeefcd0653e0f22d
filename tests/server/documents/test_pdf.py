"""PDFs become text, page by page; each that cannot be read says why, and none takes more time than it may."""

from __future__ import annotations

import signal

import pytest
from longreach.documents.pdf import PdfError, PdfText, is_pdf
from longreach.documents.pdf_child import read_pdf
from longreach.documents.pdf_process import OUT_OF_MEMORY, outcome

from tests.pdfs import bomb, endless, locked, pdf

OWL = pdf("The owl's key (old) is 4071.\nIt is \u201cred\u201d.", None, "A lantern.  ")
FOUND = PdfText(
    "[page 1]\nThe owl's key (old) is 4071.\nIt is \u201cred\u201d.\n\n[page 2: no text]\n\n[page 3]\nA lantern.\n",
    3,
    1,
)
MOST = 1 << 20


def test_each_page_stands_behind_its_number() -> None:
    assert read_pdf(OWL, MOST) == FOUND
    assert read_pdf(b"\n\n" + OWL, MOST) == FOUND, "what stands before the header is skipped"


def test_a_pdf_that_opens_without_a_password_is_read() -> None:
    assert read_pdf(locked(OWL, ""), MOST) == FOUND


@pytest.mark.parametrize(
    ("data", "code", "says"),
    [
        (locked(OWL, "secret"), "encrypted_pdf", "save a copy without one, as `qpdf --decrypt a.pdf b.pdf` does"),
        (OWL[:300], "damaged_pdf", "is a damaged PDF (PdfStreamError); mend it"),
        (b"", "damaged_pdf", "EmptyFileError"),
        (pdf(None, None), "no_text_in_pdf", "has no text in it: its pages were scanned, or are empty. OCR it first"),
        (pdf(), "no_text_in_pdf", "OCR it first"),
        (endless(), "no_text_in_pdf", "OCR it first"),
        (bomb(), "pdf_too_large", "unpack to more than can be read"),
        (pdf("x" * 900, "x" * 900), "pdf_too_large", "more than 1000 bytes of text"),
    ],
)
def test_what_cannot_be_read_says_why_and_what_to_do(data: bytes, code: str, says: str) -> None:
    with pytest.raises(PdfError) as error:
        read_pdf(data, 1000)
    assert (error.value.code, says in str(error.value)) == (code, True), str(error.value)


def test_a_page_that_cannot_be_read_says_so_among_those_that_can() -> None:
    found = read_pdf(bomb("A lantern."), MOST)
    assert found == PdfText("[page 1: cannot be read]\n\n[page 2]\nA lantern.\n", 2, 1)


def test_a_limit_says_something_of_the_file_and_a_stop_does_not() -> None:
    for status in (OUT_OF_MEMORY, -signal.SIGXCPU, -signal.SIGKILL):
        with pytest.raises(PdfError, match="send a part of it"):
            outcome(status, b"")
    for status in (1, -signal.SIGTERM):
        with pytest.raises(RuntimeError, match=f"ended with status {status}"):
            outcome(status, b"")


def test_a_pdf_is_known_by_its_first_bytes_or_by_its_media_type() -> None:
    assert is_pdf(b"%PDF-1.7")
    assert is_pdf(bytearray(), "Application/PDF; a=b")
    assert not is_pdf(b"The %PDF-", "text/plain")
