"""Text of the user is UTF-8 with or without a mark; other encodings are named with the command that
converts them.
"""

import io
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from llmcli import text_input
from llmcli.errors import UserError

TEXT = "Grüße an 東京.\n"


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"plain", "plain"),
        (b"", ""),
        (b"\xef\xbb\xbf", ""),
        (b"\xef\xbb\xbfone\r\ntwo\r\n", "one\ntwo\n"),
        (b"one\rtwo\r", "one\rtwo\r"),
        (b"\r\n\r\r\n", "\n\r\n"),
        ("a\u2028b\x85c".encode(), "a\u2028b\x85c"),
        (b"a\x00b\x00", "a\x00b\x00"[:4]),
        (b"Name a\x00river.", "Name a\x00river."),
        ("\ufeff\ufeffx".encode(), "\ufeffx"),
    ],
)
def test_the_mark_is_removed_and_windows_line_ends_become_lf(raw: bytes, expected: str) -> None:
    if raw == b"a\x00b\x00":  # every second byte is NUL: UTF-16 without a mark
        with pytest.raises(UserError, match="UTF-16LE"):
            text_input.decode_text(raw, "x")
        return
    assert text_input.decode_text(raw, "x") == expected


def test_line_ends_are_kept_where_the_caller_needs_the_exact_text() -> None:
    raw = b"\xef\xbb\xbfone\r\ntwo"
    assert text_input.decode_text(raw, "x", keep_line_ends=True) == "one\r\ntwo"


@pytest.mark.parametrize(
    ("codec", "encoding"),
    [
        ("utf-16", "UTF-16"),
        ("utf-32", "UTF-32"),
        ("utf-16-le", "UTF-16LE"),
        ("utf-16-be", "UTF-16BE"),
    ],
)
def test_other_encodings_are_named_and_the_hint_converts_them(
    tmp_path: Path, codec: str, encoding: str
) -> None:
    file = tmp_path / "my prompt.txt"
    text = TEXT if codec in ("utf-16", "utf-32") else "Name a river.\n"
    file.write_bytes(text.encode(codec))
    with pytest.raises(UserError, match=f"is {encoding} text") as raised:
        text_input.read_text(file)
    hint = raised.value.hint
    assert f"iconv -f {encoding} -t UTF-8 '{file}' > utf8.txt" in hint
    if shutil.which("iconv"):
        command = hint.partition(": ")[2].partition(" > ")[0]
        done = subprocess.run(command, shell=True, capture_output=True, check=True)
        assert text_input.decode_text(done.stdout, "x") == text


def test_latin1_is_reported_with_the_byte_and_the_line(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(b"one\nCaf\xe9\n")
    with pytest.raises(UserError, match="byte 7 is 0xe9, in line 2") as raised:
        text_input.read_text(file)
    assert "iconv -f LATIN1" in raised.value.hint


def test_a_text_after_the_start_of_an_input_may_begin_with_any_character() -> None:
    assert text_input.decode_text("\ufeffx".encode(), "stdin", start=5) == "\ufeffx"


def test_endless_files_and_standard_input_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(text_input, "MAX_TEXT_BYTES", 1000)
    with pytest.raises(UserError, match="more than 1,000 bytes"):
        text_input.read_text(Path("/dev/zero"), max_bytes=1000)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"x" * 1001)))
    with pytest.raises(UserError, match="standard input has more than 1,000 bytes"):
        text_input.read_standard_input()


def test_a_tilde_is_a_home_folder_only_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/me")
    for typed, path in (
        ("~", "/me"),
        ("~/x.txt", "/me/x.txt"),
        ("./~x.txt", "~x.txt"),
        ("./~/x.txt", "~/x.txt"),
        ("a/~", "a/~"),
        ("x.txt", "x.txt"),
    ):
        assert text_input.expand_path(typed) == Path(path)
    with pytest.raises(RuntimeError):
        text_input.expand_path("~nobody-of-this-name/x")


def test_a_template_is_a_file_or_jinja_text(tmp_path: Path) -> None:
    file = tmp_path / "t.jinja"
    file.write_bytes(b"\xef\xbb\xbf{{ 1 }}\r\n")
    assert text_input.read_template(str(file)) == "{{ 1 }}\n"
    for jinja in ("{{ messages }}", "{{ 'x' }}" * 1000, "{{ '\x00' }}", "~{{ messages }}"):
        assert text_input.read_template(jinja) == jinja
    with pytest.raises(UserError, match="no template file"):
        text_input.read_template("nothing.jinja")


def test_unread_input_is_noticed_in_pipes_and_files_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "lines"
    file.write_text("one\n")
    reader, writer = os.pipe()
    with (
        os.fdopen(reader, "rb") as pipe,
        file.open("rb") as lines,
        Path(os.devnull).open("rb") as null,
    ):
        monkeypatch.setattr(sys, "stdin", pipe)
        assert not text_input.has_unread_input()
        os.write(writer, b"line\n")
        assert text_input.has_unread_input()
        os.close(writer)
        monkeypatch.setattr(sys, "stdin", lines)
        assert text_input.has_unread_input()
        lines.read()
        assert not text_input.has_unread_input()
        monkeypatch.setattr(sys, "stdin", null)
        assert not text_input.has_unread_input()
    monkeypatch.setattr(sys, "stdin", io.StringIO("x"))
    assert not text_input.has_unread_input()
