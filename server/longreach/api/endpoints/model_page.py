"""The list of models in the form of Anthropic's protocol, for clients that name its version."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from starlette.datastructures import QueryParams

from longreach.api.schema.answers.messages import ModelInfo, ModelPage
from longreach.errors import InvalidRequestError, quoted

_DEFAULT_LIMIT = 20
_MOST = 1000


def model_info(name: str, created: int, max_model_len: int) -> ModelInfo:
    """The model under one of its names; `created` is in seconds since 1970."""
    at = datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return ModelInfo(
        id=name, display_name=name, created_at=at, max_input_tokens=max_model_len - 1, max_tokens=max_model_len - 1
    )


def model_page(models: Sequence[ModelInfo], query: QueryParams) -> ModelPage:
    """The models that a query wants: `limit` of them, behind `after_id` or before `before_id`.

    Raises:
        InvalidRequestError: a parameter is no number of models, or names none.
    """
    found = [*models]
    limit = _limit(query.get("limit"))
    if (after := query.get("after_id")) is not None:
        found = found[_place(models, "after_id", after) + 1 :]
    if (before := query.get("before_id")) is not None:
        found = found[: max(0, _place(models, "before_id", before) - len(models) + len(found))]
        page = found[-limit:]
    else:
        page = found[:limit]
    return ModelPage(
        data=page,
        has_more=len(page) < len(found),
        first_id=page[0].id if page else None,
        last_id=page[-1].id if page else None,
    )


def _limit(given: str | None) -> int:
    if given is None:
        return _DEFAULT_LIMIT
    if not (given.isascii() and given.isdecimal() and len(given) < 8 and 1 <= int(given) <= _MOST):
        raise _refused("limit", f"must be an integer from 1 to {_MOST}, got {quoted(given)}")
    return int(given)


def _place(models: Sequence[ModelInfo], name: str, model_id: str) -> int:
    for number, model in enumerate(models):
        if model.id == model_id:
            return number
    raise _refused(name, f"no model has the id {quoted(model_id)}")


def _refused(name: str, why: str) -> InvalidRequestError:
    return InvalidRequestError(f"`{name}`: {why}.", param=name, code="invalid_value")
