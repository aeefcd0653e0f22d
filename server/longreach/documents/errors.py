"""What can be wrong with a document, as the HTTP answer that says it; the tree of errors is in `longreach.errors`."""

from __future__ import annotations

from longreach.errors import ApiError, quoted

# Clients send again after a 429 unasked; these last until somebody makes room.
_NO_RETRY = {"x-should-retry": "false"}
NONE_KEPT = "this server keeps no documents (--documents none)"


class DocumentNotFoundError(ApiError):
    """There is no such document of this owner."""

    status = 404
    type = "invalid_request_error"

    def __init__(self, reference: str, param: str | None = None) -> None:
        super().__init__(
            f"There is no document {quoted(reference)}. It may have expired, or have made room for others: "
            "GET /v1/documents lists those that are kept.",
            param=param,
            code="document_not_found",
        )


class DocumentTooLargeError(ApiError):
    """A document alone is larger than its owner, or the whole server, may keep."""

    status = 413
    type = "invalid_request_error"

    def __init__(self, num_bytes: int, most: int, flag: str) -> None:
        super().__init__(
            f"The document has {num_bytes} bytes or more; {most} are allowed ({flag}). Send a shorter one.",
            code="document_too_large",
        )


class DocumentQuotaError(ApiError):
    """An owner keeps as much as one key may, or all that is kept is pinned."""

    status = 429
    type = "rate_limit_error"

    def __init__(self, message: str, code: str = "document_quota_reached") -> None:
        super().__init__(message, code=code, headers=_NO_RETRY)
