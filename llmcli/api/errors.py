"""The exceptions of failed API requests, and their conversion to HTTP statuses and JSON error
objects. Error types are OpenAI's; for errors that OpenAI does not have, llama-server's.

This module does not depend on HTTP, because lines of a batch file and WebSocket messages fail with
the same error objects.
"""

from typing import Any, Literal

from llmcli.errors import UserError
from llmcli.runtime.constraint.base import UnsatisfiableConstraint
from llmcli.runtime.requests.beam_settings import TooManyBeams


class ServerBusy(UserError):
    """The server refuses a request because its queue is full. `waiting`: the number of running and
    waiting requests. `retry_after`: seconds after which the client may try again.
    """

    def __init__(self, waiting: int, retry_after: int) -> None:
        super().__init__(
            f"{waiting} requests are running or waiting",
            hint=f"retry in {retry_after} s, or start with a larger --max-waiting",
        )
        self.retry_after = retry_after


class ServerStopping(UserError):
    """The server refuses or ends a request because it is shutting down."""

    def __init__(self) -> None:
        super().__init__("the server is stopping", hint="start it again")


BUG_TEXT = "internal error; see the server's log"  # what a client reads about a bug


class AnswerFailed(UserError):
    """The model or the machine could not complete an answer; the request itself was valid."""


def answer_error(error: Exception) -> UserError:
    """Convert an error that ended an answer in the engine to the error that the client receives.
    UnsatisfiableConstraint (no token can continue the grammar) is returned unchanged, because the
    request caused it; it gets status 400. Any other error becomes AnswerFailed, which gets status
    500. The text of a bug is not for clients.
    """
    if isinstance(error, UnsatisfiableConstraint):
        return error
    text = str(error) if isinstance(error, UserError) else BUG_TEXT
    return AnswerFailed(text, hint="try again, or send another request")


INVALID_REQUEST = "invalid_request_error"
ERROR_TYPES = {
    400: INVALID_REQUEST,
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: INVALID_REQUEST,
    408: INVALID_REQUEST,
    409: INVALID_REQUEST,
    413: INVALID_REQUEST,
    415: INVALID_REQUEST,
    429: "rate_limit_error",
    500: "server_error",
    501: "not_supported_error",
    503: "unavailable_error",
}


# Anthropic's error types where they differ from OpenAI's.
ANTHROPIC_ERROR_TYPES = {413: "request_too_large", 500: "api_error", 503: "overloaded_error"}


class ApiError(UserError):
    """An error with all fields of OpenAI's error object.

    `status`: the HTTP status. `param`: the path of the wrong field. `type`: OpenAI's error type; by
    default that of the status. `more`: additional fields of the error object.
    """

    def __init__(
        self,
        message: str,
        status: int = 400,
        *,
        param: str | None = None,
        code: str | None = None,
        type: str | None = None,
        **more: Any,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.type, self.more = type or ERROR_TYPES[status], more


def unknown_model(name: str, names: tuple[str, ...]) -> ApiError:
    """Return the 404 error for a request whose `model` is not one of the served `names`."""
    message = f"the model {name[:100]!r} is not served here; available: {', '.join(names)}"
    return ApiError(message, 404, param="model", code="model_not_found")


def context_length_error(
    message: str, n_prompt_tokens: int, n_ctx: int, param: str | None = None
) -> ApiError:
    """Return the error for a prompt or text that is longer than the context, with the fields of
    llama-server's error object for this case.
    """
    return ApiError(
        message,
        param=param,
        code="context_length_exceeded",
        type="exceed_context_size_error",
        n_prompt_tokens=n_prompt_tokens,
        n_ctx=n_ctx,
    )


def as_api_error(error: Exception) -> ApiError:
    """Convert any error to an ApiError. A UserError of the engine, the chat template or a grammar is
    caused by the request, so it gets status 400. An error that is no UserError is a bug, and gets
    status 500 and no details.

    Hints are dropped, because they name command-line flags, which a client cannot set.
    """
    match error:
        case ApiError():
            return error
        case ServerBusy():
            return ApiError(str(error), 429, code="busy")
        case AnswerFailed():
            return ApiError(str(error), 500)
        case ServerStopping():
            return ApiError(str(error), 503)
        case TooManyBeams():
            return ApiError(
                f"{error}: ask for fewer, or start with a larger --parallel", param="beams"
            )
        case UserError():
            return ApiError(str(error))
    return ApiError(BUG_TEXT, 500)


def error_vendor(path: str) -> Literal["ollama", "Anthropic", "OpenAI"]:
    """Return the vendor whose format the errors of a path have."""
    if path.startswith("/api/"):
        return "ollama"
    return "Anthropic" if path.removeprefix("/v1").startswith("/messages") else "OpenAI"


def error_document(error: ApiError, path: str = "") -> dict[str, Any]:
    """Return the JSON error response in the format of the API that `path` belongs to. ollama's has
    only a message, Anthropic's has different error types, and all others have OpenAI's format.
    """
    vendor = error_vendor(path)
    if vendor == "ollama":
        return {"error": str(error)}
    fields = {
        "message": str(error),
        "type": error.type,
        "param": error.param,
        "code": error.code,
        **error.more,
    }
    if vendor == "Anthropic":
        return {
            "type": "error",
            "error": {**fields, "type": ANTHROPIC_ERROR_TYPES.get(error.status, error.type)},
        }
    return {"error": fields}
