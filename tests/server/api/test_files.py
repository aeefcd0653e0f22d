"""`/v1/files` as OpenAI's client sees it, and as Anthropic's does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import openai
import pytest
from longreach.text.tokenizer import Tokenizer

from tests.server.api.anthropic_client import TEMPLATE
from tests.server.api.conftest import MODEL, LiveServer, openai_client
from tests.server.api.test_chat import prompt_of

OWL = "Grüße: the owl's key is 4071.\n" * 3
ANTHROPIC = {"anthropic-version": "2023-06-01"}


@pytest.fixture(scope="module")
def live(make_server: Callable[..., LiveServer]) -> Iterator[LiveServer]:
    with make_server(template=TEMPLATE, max_model_len=4096) as server:
        yield server


@pytest.fixture
def empty(live: LiveServer) -> LiveServer:
    """The server without a file."""
    for file in live.openai.files.list():
        live.openai.files.delete(file.id)
    return live


def put(live: LiveServer, name: str = "owl.md", text: str = OWL, **fields: Any) -> Any:
    return live.openai.files.create(file=(name, text.encode()), purpose="user_data", **fields)


def post(live: LiveServer, *parts: tuple[str, Any], headers: dict[str, str] | None = None) -> httpx2.Response:
    """A form whose parts come in this order."""
    return live.http.post("/v1/files", files=parts, headers=headers)


FILE = ("file", ("owl.md", OWL.encode(), "text/markdown"))
PURPOSE = ("purpose", (None, "user_data"))
ANCHOR = ("expires_after[anchor]", (None, "created_at"))


def test_a_file_is_created_retrieved_read_and_deleted_by_openais_client(empty: LiveServer) -> None:
    client = empty.openai.files
    made = put(empty)
    assert made.to_dict() == {
        "id": made.id,
        "object": "file",
        "bytes": len(OWL.encode()),
        "created_at": made.created_at,
        "filename": "owl.md",
        "purpose": "user_data",
        "status": made.status,
        "expires_at": made.expires_at,
        "status_details": None,
    }
    assert made.id.startswith("file-")
    assert client.retrieve(made.id).id == made.id
    assert client.content(made.id).read() == OWL.encode()
    assert [file.id for file in client.list()] == [made.id]
    deleted = client.delete(made.id)
    assert (deleted.id, deleted.deleted, deleted.object) == (made.id, True, "file")
    for use in (client.retrieve, client.content, client.delete):
        with pytest.raises(openai.NotFoundError, match="There is no document"):
            use(made.id)


def test_a_file_is_named_in_a_message_and_is_a_document_under_another_id(
    empty: LiveServer, tokenizer: Tokenizer
) -> None:
    made = put(empty)
    file: Any = {"type": "file", "file": {"file_id": made.id}}
    content: Any = [file, {"type": "text", "text": "Which?"}]
    empty.openai.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": content}], max_tokens=1)
    assert f'<document name="owl.md">\n{OWL}\n</document>\nWhich?' in prompt_of(empty, tokenizer)
    document_id = made.id.replace("file-", "doc-")
    assert empty.http.get(f"/v1/documents/{document_id}").json()["name"] == "owl.md"
    assert empty.http.get(f"/v1/documents/{made.id}").json()["id"] == document_id
    assert empty.openai.files.retrieve(document_id).id == made.id


def test_what_is_read_ahead_is_what_a_chat_with_the_file_begins_with(empty: LiveServer) -> None:
    made = put(empty, "ahead.md", OWL * 5)
    file: Any = {"type": "file", "file": {"file_id": made.id}}
    content: Any = [file, {"type": "text", "text": "Which?"}]
    empty.http.post("/v1/documents", json={"text": "Waits.", "wait": True})  # what came before has been read by now
    read = [request.prompt for request in empty.engine.requests]
    empty.openai.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": content}], max_tokens=1)
    asked = empty.engine.requests[-1].prompt
    assert any(len(prompt) > len(asked) // 2 and asked[: len(prompt)] == prompt for prompt in read)


def test_lists_have_pages_an_order_and_a_purpose(empty: LiveServer) -> None:
    ids = [put(empty, f"{number}.md").id for number in range(3)]
    empty.http.post("/v1/documents", json={"token_ids": [5, 6]})  # no text, and so no file
    other = empty.openai.files.create(file=("a.py", b"print()"), purpose="assistants").id
    files = empty.openai.files
    assert [file.id for file in files.list()] == [other, *reversed(ids)]
    assert [file.id for file in files.list(order="asc", limit=2)] == [*ids, other], "page by page"
    page = files.list(order="asc", limit=2)
    assert ([file.id for file in page.data], page.has_more) == (ids[:2], True)
    assert [file.id for file in files.list(after=ids[2]).data] == [ids[1], ids[0]]
    assert [file.id for file in files.list(purpose="assistants")] == [other]
    assert files.list(purpose="batch").data == []


def test_a_file_expires_as_its_form_says_wherever_the_field_stands(empty: LiveServer) -> None:
    made = put(empty, expires_after={"anchor": "created_at", "seconds": 3600})
    assert made.expires_at == made.created_at + 3600
    seconds = ("expires_after[seconds]", (None, "7200"))
    late = post(empty, ("file", ("late.md", b"Late.")), ANCHOR, seconds, ("purpose", (None, "assistants"))).json()
    assert (late["expires_at"], late["purpose"]) == (late["created_at"] + 7200, "assistants")


REFUSED: list[tuple[list[tuple[str, Any]], str, str, str]] = [
    ([FILE], "purpose", "missing_required_parameter", "user_data"),
    ([PURPOSE], "file", "missing_required_parameter", "required"),
    ([PURPOSE, ("file", (None, "text"))], "file", "invalid_type", "a file with a name"),
    ([FILE, PURPOSE, FILE], "file", "invalid_value", "twice"),
    ([PURPOSE, PURPOSE, FILE], "purpose", "invalid_value", "twice"),
    ([("purpose", (None, "fine-tune")), FILE], "purpose", "unsupported_value", "nothing is trained here"),
    ([FILE, ("purpose", (None, "batch"))], "purpose", "unsupported_value", "service_tier: flex"),
    ([PURPOSE, ("owner", (None, "me")), FILE], "owner", "unknown_parameter", "Unrecognized"),
    ([PURPOSE, ANCHOR, FILE], "", "invalid_value", "both `anchor` and `seconds`"),
    (
        [PURPOSE, ANCHOR, ("expires_after[seconds]", (None, "60")), FILE],
        "expires_after[seconds]",
        "invalid_value",
        "from 3600 to 2592000",
    ),
    ([PURPOSE, ("file", ("a.pdf", b"x", "application/pdf"))], "file", "damaged_pdf", "'a.pdf' is a damaged PDF"),
    ([PURPOSE, ("file", ("a.txt", b"\x89PNG\r\n\x1a\n"))], "file", "not_text", "is an image"),
    ([PURPOSE, ("file", ("a.txt", b"\xff"))], "file", "not_text", "no UTF-8 text"),
    ([PURPOSE, ("file", ("a.txt", b""))], "file", "invalid_value", "no text"),
    ([PURPOSE, ("file", ("a\nb.txt", b"x"))], "file", "invalid_value", "control characters"),
    ([PURPOSE, ("file", ("a" * 257, b"x"))], "file", "invalid_value", "at most 256"),
]


@pytest.mark.parametrize(("parts", "param", "code", "why"), REFUSED, ids=[f"{r[1]}-{r[3]}" for r in REFUSED])
def test_what_is_refused_is_named_and_leaves_nothing(
    empty: LiveServer, parts: list[tuple[str, Any]], param: str, code: str, why: str
) -> None:
    answer = post(empty, *parts)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"] or "", error["code"]) == (400, param, code), error
    assert why in error["message"]
    assert empty.openai.files.list().data == []


def test_a_form_that_is_wrong_leaves_a_file_that_was_there(empty: LiveServer) -> None:
    made = put(empty)
    assert post(empty, FILE, ("purpose", (None, "evals"))).status_code == 400
    assert [file.id for file in empty.openai.files.list()] == [made.id]


def test_other_kinds_of_bodies_are_named(live: LiveServer) -> None:
    answer = live.http.post("/v1/files", json={"file": "text"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type")
    cut = live.http.post(
        "/v1/files",
        content=b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.txt"\r\n\r\nGone in the mi',
        headers={"content-type": "multipart/form-data; boundary=b"},
    )
    assert (cut.status_code, cut.json()["error"]["code"]) == (400, "invalid_multipart")
    assert "a.txt" not in [file.filename for file in live.openai.files.list()]


def test_a_text_that_is_a_page_is_not_shown_as_one(empty: LiveServer) -> None:
    made = empty.openai.files.create(file=("a.html", b"<script>alert(1)</script>", "text/html"), purpose="user_data")
    headers = empty.http.get(f"/v1/files/{made.id}/content").headers
    assert headers["content-type"] == "text/plain; charset=utf-8"
    assert (headers["x-content-type-options"], headers["content-disposition"]) == ("nosniff", "attachment")


def test_anthropics_clients_read_their_own_objects(empty: LiveServer) -> None:
    made = post(empty, FILE, headers=ANTHROPIC).json()
    assert made == {
        "id": made["id"],
        "type": "file",
        "filename": "owl.md",
        "mime_type": "text/markdown",
        "size_bytes": len(OWL.encode()),
        "created_at": made["created_at"],
        "downloadable": True,
    }
    assert made["created_at"].endswith("Z")
    ids = [made["id"], *(put(empty, f"{number}.md").id for number in range(3))]

    def get(path: str = "", **params: Any) -> Any:
        return empty.http.get(f"/v1/files{path}", params=params, headers=ANTHROPIC).json()

    assert get(f"/{made['id']}") == made
    newest = get(limit=2)
    assert [file["id"] for file in newest["data"]] == [ids[3], ids[2]]
    assert (newest["first_id"], newest["last_id"], newest["has_more"]) == (ids[3], ids[2], True)
    behind = get(limit=5, after_id=ids[2])
    assert ([file["id"] for file in behind["data"]], behind["has_more"]) == ([ids[1], ids[0]], False)
    before = get(limit=2, before_id=ids[0])
    assert ([file["id"] for file in before["data"]], before["has_more"]) == ([ids[2], ids[1]], True)
    assert get(limit=0)["error"]["param"] == "limit"
    assert get(after_id=ids[0], before_id=ids[1])["error"]["param"] == "before_id"
    gone = empty.http.delete(f"/v1/files/{made['id']}", headers=ANTHROPIC)
    assert gone.json() == {"id": made["id"], "type": "file_deleted"}
    missing = get(f"/{made['id']}")
    assert (missing["type"], missing["error"]["type"]) == ("error", "not_found_error")
    refused = post(empty, ("file", ("a.pdf", b"%PDF-1.7")), headers=ANTHROPIC).json()
    assert (refused["type"], refused["error"]["code"]) == ("error", "damaged_pdf")


def test_another_keys_files_are_as_if_there_were_none(make_server: Callable[..., LiveServer]) -> None:
    with make_server(api_key="ann:first-key-0001,bob:second-key-0002", template=TEMPLATE) as server:
        ann, bob = (openai_client(server.url, 20, key) for key in ("first-key-0001", "second-key-0002"))
        with ann, bob:
            made = ann.files.create(file=("owl.md", OWL.encode()), purpose="user_data")
            assert bob.files.list().data == []
            part: Any = {"type": "file", "file": {"file_id": made.id}}
            messages: Any = [{"role": "user", "content": [part]}]
            for use in (
                lambda: bob.files.retrieve(made.id),
                lambda: bob.files.content(made.id),
                lambda: bob.files.delete(made.id),
                lambda: bob.chat.completions.create(model=MODEL, messages=messages),
            ):
                with pytest.raises(openai.NotFoundError):
                    use()
            assert ann.files.retrieve(made.id).id == made.id
