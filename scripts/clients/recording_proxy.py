"""A recording proxy between a client and a server, which shows which model gave each answer."""

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

# paths whose answers have text of a model
TEXT_PATHS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"),
    *("/api/chat", "/api/generate", "/completion", "/chat/completions"),
)
# fields of answers that hold such text, in all APIs
TEXT_FIELDS = frozenset(
    (
        *("content", "text", "delta", "response", "arguments", "partial_json"),
        *("reasoning_content", "thinking"),
    )
)
MIN_TEXT_CHARS = 20  # shorter texts can be equal by chance
SECONDS = 600.0  # time limit of an answer
OWN_HEADERS = frozenset(
    ("host", "connection", "accept-encoding", "content-length", "transfer-encoding")
)


@dataclass(slots=True)
class Exchange:
    """A request and its answer. `began`, `ended`: `time.monotonic()`. `is_whole`: the client has
    read all of the answer.
    """

    path: str
    request: bytes
    began: float
    ended: float = 0.0
    status: int = 0
    answer: bytearray = field(default_factory=bytearray)
    is_whole: bool = False

    @property
    def documents(self) -> list[Any]:
        """The JSON objects of the answer: one, or those of the lines of a stream."""
        return list(_parse_documents(bytes(self.answer)))

    @property
    def named_models(self) -> set[str]:
        """The models that the answer names as its own."""
        found = set()
        for document in self.documents:
            parts = (document, document.get("response"), document.get("message"))
            models = [part.get("model") for part in parts if isinstance(part, dict)]
            found |= {model for model in models if isinstance(model, str)}
        return found

    @property
    def text(self) -> str:
        """The text of the answer. Equal for equal answers to one request."""
        texts: dict[str, str] = {}
        for document in self.documents:
            for name, part in _find_texts(document):
                texts[name] = texts.get(name, "") + part
        return "\n".join(f"{name}: {text}" for name, text in sorted(texts.items()))


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing about a client that has closed its connection."""


@contextmanager
def watch(url: str) -> Iterator[tuple[str, list[Exchange]]]:
    """Forward requests to the server at `url`. Yield the URL for clients, and the list of exchanges
    so far.
    """
    address = urlsplit(url)
    exchanges: list[Exchange] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._pass_on()

        do_POST = do_DELETE = do_GET

        def log_message(self, *_args: Any) -> None:
            pass

        def _pass_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            exchange = Exchange(self.path, body, time.monotonic())
            exchanges.append(exchange)
            connection = HTTPConnection(address.hostname or "", address.port, timeout=SECONDS)
            try:
                self._copy_answer(connection, exchange)
            except OSError:  # one of the two has closed its connection
                self.close_connection = True
            finally:
                connection.close()
                exchange.ended = time.monotonic()

        def _copy_answer(self, connection: HTTPConnection, exchange: Exchange) -> None:
            headers = {k: v for k, v in self.headers.items() if k.lower() not in OWN_HEADERS}
            connection.request(self.command, self.path, exchange.request or None, headers)
            answer = connection.getresponse()
            exchange.status = answer.status
            self.send_response_only(answer.status, answer.reason)
            for name, value in answer.getheaders():
                if name.lower() not in OWN_HEADERS:
                    self.send_header(name, value)
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            while part := answer.read1(1 << 16):
                exchange.answer += part
                self.wfile.write(b"%x\r\n%b\r\n" % (len(part), part))
            self.wfile.write(b"0\r\n\r\n")
            exchange.is_whole = True

    with _Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}{address.path}", exchanges
        finally:
            server.shutdown()
            thread.join()


def ask(url: str, exchange: Exchange) -> Exchange:
    """Send the request of an exchange to another server, and return the exchange with it. `url`:
    the server's root.
    """
    address = urlsplit(url)
    again = Exchange(exchange.path, exchange.request, time.monotonic())
    connection = HTTPConnection(address.hostname or "", address.port, timeout=SECONDS)
    connection.request("POST", again.path, again.request, {"content-type": "application/json"})
    answer = connection.getresponse()
    again.status = answer.status
    again.answer += answer.read()
    connection.close()
    return again


def find_wrong_models(exchanges: Sequence[Exchange], model: str) -> list[str]:
    """Return a sentence for each answer that names another model than `model`."""
    return [
        f"{exchange.path} was answered by {', '.join(sorted(exchange.named_models))}"
        for exchange in exchanges
        if exchange.status == 200 and exchange.named_models - {model}
    ]


def choose_texts(exchanges: Sequence[Exchange], count: int) -> list[Exchange]:
    """Return up to `count` exchanges with text of a model, those that took the shortest time, and
    of each path before a second one of any. Each has another path or request.
    """
    quick = sorted(exchanges, key=lambda exchange: exchange.ended - exchange.began)
    distinct = {
        (exchange.path, exchange.request): exchange
        for exchange in reversed(quick)
        if exchange.status == 200
        and exchange.is_whole
        and exchange.path.split("?")[0] in TEXT_PATHS
        and len(exchange.text) >= MIN_TEXT_CHARS
    }
    ranked: list[tuple[int, Exchange]] = []
    n_of_path: Counter[str] = Counter()
    for exchange in reversed(distinct.values()):
        ranked.append((n_of_path[exchange.path], exchange))
        n_of_path[exchange.path] += 1
    return [exchange for _, exchange in sorted(ranked, key=lambda pair: pair[0])][:count]


def overlap_seconds(first: Sequence[Exchange], second: Sequence[Exchange]) -> float:
    """Return for how many seconds requests of both lists were answered at once."""
    ends = [
        (moment, change, index)
        for index, exchanges in enumerate((first, second))
        for exchange in exchanges
        for moment, change in ((exchange.began, 1), (exchange.ended, -1))
    ]
    running, seconds, last = [0, 0], 0.0, 0.0
    for moment, change, index in sorted(ends):
        seconds += (moment - last) * all(running)
        running[index] += change
        last = moment
    return seconds


def _parse_documents(body: bytes) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of an answer: the whole, or one a line of a stream."""
    for part in (body, *body.splitlines()):
        try:
            document = json.loads(part.removeprefix(b"data:"))
        except ValueError:
            continue
        if isinstance(document, dict):
            yield document
        if part is body:
            return


def _find_texts(value: Any) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of every text field in a JSON value."""
    if isinstance(value, list):
        for item in value:
            yield from _find_texts(item)
    elif isinstance(value, dict):
        for name, item in value.items():
            if isinstance(item, str):
                if name in TEXT_FIELDS:
                    yield name, item
            else:
                yield from _find_texts(item)
