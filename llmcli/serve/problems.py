"""Errors of requests: OpenAI's error objects and statuses, with llama-server's types where OpenAI
has none.

Free of HTTP: lines of a batch and messages of a WebSocket fail in the same words.
"""

from typing import Any

from llmcli.runtime.search import TooManyBeams
from llmcli.serve.bridge import Busy, Failed, Stopping
from quant.errors import Refusal

WRONG = "invalid_request_error"
TYPES = {
    400: WRONG,
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: WRONG,
    408: WRONG,
    413: WRONG,
    415: WRONG,
    429: "rate_limit_error",
    500: "server_error",
    501: "not_supported_error",
    503: "unavailable_error",
}


ANTHROPIC = {413: "request_too_large", 500: "api_error", 503: "overloaded_error"}


class Problem(Refusal):
    """A request that cannot be answered. `param`: the field to blame; `more`: further fields of the
    error object.
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
        self.type, self.more = type or TYPES[status], more


def unknown_model(name: str, names: tuple[str, ...]) -> Problem:
    """The request names a model that is not served here."""
    told = f"the model {name[:100]!r} is not served here; there is {', '.join(names)}"
    return Problem(told, 404, param="model", code="model_not_found")


def problem(error: Refusal) -> Problem:
    """Any refusal as a Problem: what the engine, a template or a grammar refuses is the request's
    mistake (400).

    Hints are flags of another command line than the server's: where one helps, it is told in the
    server's words.
    """
    match error:
        case Problem():
            return error
        case Busy():
            return Problem(str(error), 429, code="busy")
        case Failed():
            return Problem(str(error), 500)
        case Stopping():
            return Problem(str(error), 503)
        case TooManyBeams():
            return Problem(
                f"{error}: ask for fewer, or start with a larger --parallel", param="beams"
            )
    return Problem(str(error))


def document(error: Problem, path: str = "") -> dict[str, Any]:
    """The error document in the form of a path: ollama's has only a message, Anthropic's a type of
    its own.
    """
    if path.startswith("/api/"):
        return {"error": str(error)}
    about = {
        "message": str(error),
        "type": error.type,
        "param": error.param,
        "code": error.code,
        **error.more,
    }
    if path.removeprefix("/v1").startswith("/messages"):
        return {
            "type": "error",
            "error": {**about, "type": ANTHROPIC.get(error.status, error.type)},
        }
    return {"error": about}
