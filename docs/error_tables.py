"""Write the tables of docs/errors.md from the server's source: every code of an error, its status and its message.

    python docs/error_tables.py            # writes the page
    python docs/error_tables.py --check    # changes nothing, fails if the page is not what the code says

Codes, statuses and messages are read from the source. What to do about each code stands here, and a code without a
line here, or a line without a code, ends the script.
"""

from __future__ import annotations

import ast
import http
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import generated_page
from longreach import errors
from longreach.documents import errors as document_errors

PAGE = Path(__file__).resolve().parent / "errors.md"
SOURCE = PAGE.parents[1] / "server" / "longreach"
BEGIN, END = "<!-- errors -->\n", "<!-- end -->\n"

# What a client or an operator does about each code.
CURES = {
    "ambiguous_document": "Refer to the document by its id.",
    "body_too_large": "Send a shorter body, or raise `--max-body-bytes`.",
    "busy_drawing": "Send the request again after `Retry-After`.",
    "cancelled": "Send a new request with another `Idempotency-Key`.",
    "context_length_exceeded": "Shorten the prompt or `max_tokens`, or raise `--max-model-len`.",
    "damaged_pdf": "Save the PDF anew, or send its text.",
    "deadline_cannot_be_met": "Allow more time, or ask another server.",
    "deadline_exceeded": "Send the request again with more time. What was read stays cached.",
    "document_not_found": "Upload the document again; `GET /v1/documents` lists those that are kept.",
    "document_of_another_tokenizer": "Upload the document again.",
    "document_quota_reached": "Delete documents of this key, or raise the limit that the message names.",
    "document_too_large": "Send a shorter document, or raise the limit that the message names.",
    "document_uploading": "Wait for the end of the upload.",
    "documents_pinned": "Unpin or delete documents.",
    "drawing_failed": "Send the request again after `Retry-After`, or ask for a shorter prompt's mask.",
    "encrypted_pdf": "Save the PDF without its password.",
    "engine_dead": "Look into the server's log. Do not send the same request again without looking.",
    "engine_restarting": "Send the request again after `Retry-After`.",
    "engine_stalled": "Send the request again after `Retry-After`; the server replaces an engine that stays silent.",
    "events_dropped": "Ask for the answer from its beginning.",
    "events_not_held": "Send the request without `Last-Event-ID`.",
    "expectation_failed": "Leave the header `Expect` out.",
    "grammar_not_compiled": "Send the request again after `Retry-After`.",
    "grammar_queue_full": "Send the request again after `Retry-After`.",
    "grammar_timeout": "Send the request again after `Retry-After`.",
    "grammar_too_complex": "Write a simpler grammar, or raise `--max-grammar-seconds`.",
    "grammar_too_large": "Write a shorter grammar, or raise `--max-grammar-bytes`.",
    "host_not_allowed": "Name the host with `--allowed-hosts`.",
    "idempotency_key_reused": "Send the same body to the same URL, or take another key.",
    "internal_error": "Find the request id in the server's log, which has the cause.",
    "invalid_api_key": "Send a valid key in one of the two headers.",
    "invalid_grammar": "Correct the grammar or the schema of the field that the message names.",
    "invalid_host": "Send one `Host` header.",
    "invalid_http": "Send valid HTTP/1.1. The message says what is wrong.",
    "invalid_json": "Correct the JSON at the place that the message names.",
    "invalid_multipart": "Correct the form; clients such as curl (`-F`) write valid ones.",
    "invalid_target": "Ask for a path of this server.",
    "invalid_type": "Give the field the type that the message names.",
    "invalid_value": "Give the field a value that the message allows.",
    "item_not_found": "Send the item itself.",
    "loading": "Send the request again after `Retry-After`, or wait for `/ready`.",
    "method_not_allowed": "Use a method of the header `Allow`.",
    "missing_required_parameter": "Add the field.",
    "model_not_found": "Ask for a model of `/v1/models`, or start the server with `--served-model-name`.",
    "no_replica": "Send the request again after `Retry-After`.",
    "no_text_in_pdf": "The pages are pictures. Send the PDF through a text recognition (OCR) first.",
    "not_found": "Correct the path; the [endpoints](api.md#endpoints) are listed.",
    "not_text": "Send text in UTF-8.",
    "pdf_not_read": "Send the request again after `Retry-After`.",
    "pdf_queue_full": "Send the request again after `Retry-After`.",
    "pdf_timeout": "Send the request again after `Retry-After`.",
    "pdf_too_large": "Split the PDF, or send its text.",
    "previous_response_not_found": "Send the whole conversation; responses are kept for `--responses-store-days`.",
    "queue_full": "Send the request again after `Retry-After`.",
    "replica_lost": "Look into the log of the replica. Do not send the same request again without looking.",
    "request_not_found": "Send the request itself again.",
    "request_timeout": "Send faster, or raise `--body-timeout` or `--header-timeout`.",
    "response_not_found": "Send the whole conversation; responses are kept for `--responses-store-days`.",
    "shutting_down": "Send the request to another server, or again once this one is back.",
    "slow_reader": "Read the answer faster.",
    "store_failed": "Look into the server's log; the disk or the file has failed.",
    "store_in_use": "Send the request again after `Retry-After`, or end the other server.",
    "thread_not_found": "Send the whole conversation; Anthropic's SDKs do so by themselves.",
    "too_many_bytes": "Send the request again after `Retry-After`, or raise `--max-total-body-bytes`.",
    "too_many_connections": "Send the request again after `Retry-After`, or raise `--max-connections`.",
    "too_much_text": "Send the request again after `Retry-After`.",
    "unbroken_text": "Break the text: it has more than 512 Ki letters or digits in a row.",
    "unknown_parameter": "Leave the field out.",
    "unsupported_content_encoding": "Send the body uncompressed.",
    "unsupported_file": "Send the file as text.",
    "unsupported_media_type": "Send the `Content-Type` that the message names.",
    "unsupported_value": "Leave the field out, or take a value that the message names.",
}  # fmt: skip
# Errors that HTTP itself knows, whose status is not written beside the code.
_STATUSES = {"not_found": 404, "method_not_allowed": 405}
# Functions that make an error of a field, with the place of the code among their arguments; methods have it second.
_HELPERS = {"invalid": 1, "_invalid": 2, "_refused": 2}
_WORD = re.compile(r"[a-z]{3}")
Kinds = dict[str, type[errors.ApiError]]
_MOST_MESSAGES = 2  # codes with more of them name a field, and each field has its own words


@cache
def codes() -> dict[tuple[int, str], list[str]]:
    """The messages of all statuses and codes of error objects, as far as they are written where the code is given."""
    kinds: Kinds = {
        name: kind
        for module in (errors, document_errors)
        for name, kind in vars(module).items()
        if isinstance(kind, type) and issubclass(kind, errors.ApiError)
    }
    found: dict[tuple[int, str], list[str]] = {}
    for file in sorted(SOURCE.rglob("*.py")):
        tree = ast.parse(file.read_text())
        assigned = list(_texts(tree))
        for node, owner in _nodes(tree, None):
            for code, call in _codes_in(node, kinds):
                status = _status(call, owner, kinds) or _STATUSES.get(code, 400)
                messages = found.setdefault((status, code), [])
                if call is not None and call.args and (message := _message(call, assigned)) is not None:
                    messages.append(message)
    return found


def _nodes(tree: ast.AST, owner: str | None) -> Iterator[tuple[ast.AST, str | None]]:
    """All nodes below one, each with the class around it."""
    owner = tree.name if isinstance(tree, ast.ClassDef) else owner
    yield tree, owner
    for child in ast.iter_child_nodes(tree):
        yield from _nodes(child, owner)


def _codes_in(node: ast.AST, kinds: Kinds) -> Iterator[tuple[str, ast.Call | None]]:
    """Codes that a node gives to an error, with the call of the error that it gives them in."""
    call, given = None, list[ast.AST | None]()
    if isinstance(node, ast.Call):
        name = _called(node)
        given += [keyword.value for keyword in node.keywords if keyword.arg == "code"]
        call = node if name in kinds or (name == "__init__" and given) else None
        if name in _HELPERS and isinstance(node.func, ast.Name):
            given += node.args[_HELPERS[name] :][:1]
        elif name == "_invalid":
            given += node.args[1:2]
    elif isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == "code":
        given.append(node.value)
    elif isinstance(node, ast.ClassDef):
        members = [member for member in node.body if isinstance(member, ast.Assign)]
        given += [member.value for member in members if getattr(member.targets[0], "id", "") == "code"]
    elif isinstance(node, ast.FunctionDef) and node.args.defaults:
        arguments = zip(node.args.args[-len(node.args.defaults) :], node.args.defaults, strict=True)
        given += [default for argument, default in arguments if argument.arg == "code"]
    elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple) and isinstance(node.targets[0], ast.Tuple):
        pairs = zip(node.targets[0].elts, node.value.elts, strict=False)
        given += [value for target, value in pairs if getattr(target, "id", "") == "code"]
    for code in given:
        if isinstance(code, ast.Constant) and isinstance(code.value, str):
            yield code.value, call


def _called(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")


def _status(call: ast.Call | None, owner: str | None, kinds: Kinds) -> int | None:
    """The status of the error that a call makes; without a call, that of the class around it."""
    if call is not None:
        for keyword in call.keywords:
            if keyword.arg == "status" and isinstance(keyword.value, ast.Constant):
                return int(str(keyword.value.value))
    kind = kinds.get("" if call is None else _called(call)) or kinds.get(owner or "")
    return kind.status if kind is not None else None


def _texts(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """Line, name and text of each assignment of a text to a name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            text = _text(node.value)
            if text is not None:
                yield node.lineno, node.targets[0].id, text


def _message(call: ast.Call, assigned: list[tuple[int, str, str]]) -> str | None:
    """The first argument of a call, or the text that its name was given last before it; None for other expressions."""
    first = call.args[0]
    if not isinstance(first, ast.Name):
        return _text(first)
    before = [text for line, name, text in sorted(assigned) if name == first.id and line < call.lineno]
    return before[-1] if before else None


def _text(node: ast.AST) -> str | None:
    """A text as it is written in the source, with an ellipsis for each value in it."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        parts = (value.value if isinstance(value, ast.Constant) else "…" for value in node.values)
        return re.sub("…+", "…", "".join(map(str, parts)))
    return None


def render(page: str) -> str:
    """The page with its tables made anew.

    Raises:
        ValueError: the page has no markers; a code has no line in `CURES`, or a line no code.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"page: needs the lines {BEGIN.strip()} and {END.strip()}")
    found = codes()
    known = {code for _, code in found}
    if known != CURES.keys():
        odd = ", ".join(sorted(known ^ CURES.keys()))
        raise ValueError(f"CURES in docs/error_tables.py and the server's source differ in: {odd}")
    return before + begin + "\n" + "\n".join(_tables(found)) + "\n" + end + after


def _tables(found: dict[tuple[int, str], list[str]]) -> Iterator[str]:
    for status in sorted({status for status, _ in found}):
        phrase = http.HTTPStatus(status).phrase
        yield from (f"## {status} {phrase}", "", "| code | message | what to do |", "|---|---|---|")
        for (its, code), messages in sorted(found.items()):
            if its == status:
                shown = list(dict.fromkeys(message for message in messages if _WORD.search(message)))
                if not 0 < len(shown) <= _MOST_MESSAGES:
                    shown = ["(names the field and the reason)" if status == 400 else "(names the reason)"]
                yield "| " + " | ".join((f"`{code}`", "<br>".join(shown).replace("|", r"\|"), CURES[code])) + " |"
        yield ""


def main() -> None:
    """Write the page, or with --check compare it."""
    generated_page.main(PAGE, render, __file__, "the server's source says")


if __name__ == "__main__":
    main()
