"""Bodies of multipart/form-data, however they are cut, compared with Python's e-mail parser."""

import email
import email.policy
import random

import httpx2 as httpx
import pytest

from llmcli.api.errors import ApiError
from llmcli.serve.http.multipart import MultipartReader

Parts = list[tuple[str, str | None, bytes]]


def read(content_type: str, *chunks: bytes) -> Parts:
    """Return the name, the file name and the bytes of every part."""
    reader = MultipartReader(content_type)
    parts: Parts = []
    is_new = True
    for chunk in chunks:
        for piece in reader.feed(chunk):
            if is_new:
                parts.append((piece.name, piece.filename, b""))
            name, filename, raw = parts[-1]
            assert (piece.name, piece.filename) == (name, filename)
            parts[-1] = name, filename, raw + piece.raw
            is_new = piece.is_last
    reader.finish()
    assert is_new
    return parts


def encode(raw: bytes, **fields: str) -> tuple[str, bytes]:
    """Return the content type and the body with a file and fields, as httpx sends them."""
    request = httpx.Request(
        "POST", "http://x", data=fields, files={"file": ("a b.jsonl", raw, "text/plain")}
    )
    return request.headers["content-type"], request.read()


def test_a_body_may_be_cut_anywhere() -> None:
    content_type, body = encode(b"\r\n--x\r\n\r\n--", purpose="batch", note="\r\n")
    expected = [
        ("purpose", None, b"batch"),
        ("note", None, b"\r\n"),
        ("file", "a b.jsonl", b"\r\n--x\r\n\r\n--"),
    ]
    assert read(content_type, body) == expected
    assert read(content_type, *(bytes([byte]) for byte in body)) == expected
    for cut in range(len(body)):
        assert read(content_type, body[:cut], body[cut:]) == expected


def test_random_bodies_are_read_as_by_the_e_mail_parser() -> None:
    draw = random.Random(7)
    for _ in range(200):
        raw = b"".join(
            draw.choice([b"\r", b"\n", b"--", b"\r\n--b", b"x", b"-", b"\r\n"]) for _ in range(20)
        )
        boundary = f"b{draw.randrange(10**6)}x"
        head = f'Content-Type: multipart/form-data; boundary="{boundary}"'
        body = (
            f'preamble\r\n--{boundary}\r\nX: y\r\ncontent-disposition: form-data; name="file"'
            f'; filename="f"\r\n\r\n'
        ).encode()
        body += raw + f"\r\n--{boundary}--\r\nepilogue".encode()
        message = email.message_from_bytes(
            f"{head}\r\n\r\n".encode() + body, policy=email.policy.HTTP
        )
        (part,) = message.iter_parts()  # type: ignore[attr-defined]
        # the e-mail parser reads other line ends as ends of lines, too
        if part.get_payload(decode=True) == raw:
            cut = draw.randrange(len(body))
            content_type = head.partition(": ")[2]
            assert read(content_type, body[:cut], body[cut:]) == [("file", "f", raw)]


@pytest.mark.parametrize(
    ("parameters", "filename"),
    [
        ('; name="file"; filename="a\\"b"', 'a"b'),
        ('; name="file"; filename="a%22b"', 'a"b'),
        ('; filename="x"; NAME="file"', "x"),
        ("; name=file; filename=x", "x"),
        ('; name="file"; filename=""', ""),
        ('; name="file"', None),
        ('; name="file"; filename="日本"', "日本"),
    ],
)
def test_names_are_unescaped(parameters: str, filename: str | None) -> None:
    body = f"--b\r\nContent-Disposition: form-data{parameters}\r\n\r\n1\r\n--b--".encode()
    assert read("multipart/form-data; boundary=b", body) == [("file", filename, b"1")]


def test_memory_is_that_of_a_piece() -> None:
    reader = MultipartReader("multipart/form-data; boundary=b")
    list(reader.feed(b'--b\r\ncontent-disposition: form-data; name="file"\r\n\r\n'))
    for _ in range(100):
        assert sum(len(piece.raw) for piece in reader.feed(b"x" * 100_000)) > 99_000
        assert len(reader._buffer) < 10


def test_a_text_before_the_first_part_is_not_kept() -> None:
    reader = MultipartReader("multipart/form-data; boundary=b")
    for _ in range(100):
        assert list(reader.feed(b"x" * 100_000)) == []
        assert len(reader._buffer) < 10
    with pytest.raises(ApiError):
        reader.finish()
