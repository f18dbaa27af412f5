"""OpenAI's lists of objects, from which a client reads one page after another."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from starlette.requests import Request

from llmcli.api.errors import ApiError


class ListedObject(Protocol):
    """An object of a list. `id`: by which a client asks for the objects after it."""

    @property
    def id(self) -> str: ...


Listed = TypeVar("Listed", bound=ListedObject)


def read_choice(request: Request, name: str, choices: tuple[str, ...]) -> str:
    """Return a parameter of the query that has one of these values, or "". Raises ApiError."""
    value: str = request.query_params.get(name, "")
    if value and value not in choices:
        raise ApiError(f"{name} must be one of {', '.join(choices)}", param=name)
    return value


def read_page(
    request: Request,
    objects: Sequence[Listed],
    to_document: Callable[[Listed], dict[str, Any]],
    limit: int,
    max_limit: int,
) -> dict[str, Any]:
    """Return the page of a list that a request asks for with `limit`, `after` and `order`.
    `objects`: all objects, the oldest first. `limit`: the number of objects by default. Raises
    ApiError for a wrong parameter.
    """
    text = request.query_params.get("limit", str(limit))
    if not (text.isascii() and text.isdigit() and len(text) < 10 and 1 <= int(text) <= max_limit):
        raise ApiError(f"limit must be 1 to {max_limit}", param="limit")
    if read_choice(request, "order", ("asc", "desc")) != "asc":
        objects = objects[::-1]
    if after := request.query_params.get("after"):
        position = next((n for n, item in enumerate(objects) if item.id == after), None)
        if position is None:
            raise ApiError(f"there is no {after[:100]} to list after", param="after")
        objects = objects[position + 1 :]
    page = objects[: int(text)]
    return {
        "object": "list",
        "data": [to_document(item) for item in page],
        "first_id": page[0].id if page else None,
        "last_id": page[-1].id if page else None,
        "has_more": len(page) < len(objects),
    }
