"""A damaged or hostile TOML file is one error with the file's name, and never a hang."""

import re
import time
from pathlib import Path

import pytest

from llmcli.catalog import toml_file
from llmcli.errors import UserError


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = " + "[" * 100_000, "nested too deeply"),
        ("x = " + "[" * 40 + "]" * 40, "nested too deeply"),
        ("x = " + "{a=" * 5_000, "nested too deeply"),
        ("x = " + "1" * 5_000, "Exceeds the limit"),
        ("x = 0x" + "f" * 5_000, "an integer has more than 64 bits"),
        (".".join("a" * 200_000) + " = 1", "line 1 has 199,999 dots"),
        ("[" + ".".join("a" * 9_000) + "]\n" + "b = 1\n" * 100_000, "dots, which are too many"),
        (".".join("a" * 5_000) + " = 1", "nested too deeply"),
        ("x = 1\nx = 2\n", "Cannot overwrite a value (at line 2"),
        ("x = 1\r\nx\r\n", "at line 2"),
    ],
)
def test_a_damaged_file_is_one_error_that_names_it(text: str, message: str) -> None:
    began = time.process_time()
    with pytest.raises(UserError, match=re.escape(message)) as raised:
        toml_file.parse_toml(Path("models.toml"), text)
    assert str(raised.value).startswith("models.toml: ")
    assert raised.value.hint
    assert len(str(raised.value)) < 300
    assert time.process_time() - began < 20


def test_a_file_with_a_mark_and_windows_line_ends_is_read(tmp_path: Path) -> None:
    file = tmp_path / "models.toml"
    file.write_bytes(b"\xef\xbb\xbf[models.a]\r\nx = 1\r\n")
    text = toml_file.read_toml_text(file)
    assert text == "[models.a]\r\nx = 1\r\n"
    assert toml_file.parse_toml(file, text) == {"models": {"a": {"x": 1}}}


def test_a_file_in_utf16_is_named(tmp_path: Path) -> None:
    file = tmp_path / "models.toml"
    file.write_bytes("[models.a]\nx = 1\n".encode("utf-16"))
    with pytest.raises(UserError, match=r"models\.toml is UTF-16 text"):
        toml_file.read_toml_text(file)


def test_an_endless_file_is_refused() -> None:
    with pytest.raises(UserError, match="more than 1,048,576 bytes"):
        toml_file.read_toml_text(Path("/dev/zero"))
