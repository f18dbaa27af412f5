"""What stands between clients and a server recognizes answers, and which model has given them."""

import json
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from scripts.clients import recording_proxy
from scripts.clients.recording_proxy import Exchange

CHAT = {"model": "one", "choices": [{"message": {"content": "A long enough answer."}}]}
DELTAS = [
    {"model": "one", "choices": [{"delta": {"content": text}}]} for text in ("A long ", "enough ")
]
STREAM = b"".join(b"data: %b\n\n" % json.dumps(delta).encode() for delta in DELTAS)


def exchange(answer: bytes, began: float, ended: float, **fields: object) -> Exchange:
    path, request = str(fields.get("path", "/v1/chat/completions")), str(began).encode()
    return Exchange(path, request, began, ended, 200, bytearray(answer), is_whole=True)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (json.dumps(CHAT).encode(), "content: A long enough answer."),
        (STREAM + b"data: [DONE]\n\n", "content: A long enough "),
        (b'{"model": "one", "response": "A"}\n{"model": "one", "response": "b"}\n', "response: Ab"),
        (b'data: {"type": "x", "response": {"model": "one"}}\n\n', ""),
    ],
)
def test_the_text_and_the_model_of_an_answer_are_found_in_every_form(
    answer: bytes, text: str
) -> None:
    found = exchange(answer, 0, 1)
    assert (found.text, found.named_models) == (text, {"one"})
    assert recording_proxy.find_wrong_models([found], "one") == []
    assert recording_proxy.find_wrong_models([found], "two") == [
        "/v1/chat/completions was answered by one"
    ]


def test_quick_answers_of_each_path_are_chosen() -> None:
    text = json.dumps(CHAT).encode()
    slow, quick, second = exchange(text, 0, 9), exchange(text, 1, 2), exchange(text, 2, 4)
    other = exchange(text, 3, 8, path="/api/chat")
    short = exchange(b'{"content": "no"}', 4, 4)
    listing = exchange(text, 5, 5, path="/v1/models")
    chosen = recording_proxy.choose_texts([slow, quick, second, other, short, listing], 3)
    assert chosen == [quick, other, second]


def test_equal_requests_to_two_paths_are_two() -> None:
    text = json.dumps(CHAT).encode()
    first, second = exchange(text, 1, 2), exchange(text, 1, 3, path="/api/chat")
    assert recording_proxy.choose_texts([first, second], 3) == [first, second]


def test_times_of_both_are_counted_once() -> None:
    first = [exchange(b"", 0, 4), exchange(b"", 1, 2)]
    second = [exchange(b"", 3, 9), exchange(b"", 1.5, 2.5)]
    assert recording_proxy.overlap_seconds(first, second) == 2
    assert recording_proxy.overlap_seconds(first, []) == 0


def test_requests_and_answers_are_passed_on_and_kept() -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body.upper())

        def log_message(self, *_args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            with recording_proxy.watch(f"http://127.0.0.1:{server.server_address[1]}/v1") as (
                url,
                kept,
            ):
                with urllib.request.urlopen(f"{url}/x", b"hello") as answer:
                    assert answer.read() == b"HELLO"
        finally:
            server.shutdown()
            thread.join()
    (found,) = kept
    assert (found.path, found.request, bytes(found.answer)) == ("/v1/x", b"hello", b"HELLO")
    assert found.is_whole and found.ended >= found.began
