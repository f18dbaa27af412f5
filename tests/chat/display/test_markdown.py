"""Markdown drawn while it arrives: the same in any pieces, and nothing but text and colors."""

import random
import re
import sys
from pathlib import Path

import pexpect
import pytest

from llmcli.chat.display.markdown import MarkdownStream
from llmcli.ui import UI

ROOT = Path(__file__).parents[3]
TEXT = """# Title
One *two*.
Three.

1. First
   ```python
   code
   ```
2. Second
   - nested

3. Third

After.
- a
- b
~~~~python
def f():
    return "```"

~~~
~~~~
| a | b |
|---|---|
| 1 | 2 |

> quote
End"""
SGR = re.compile(r"\x1b\[[0-9;]*m")


class Echo:
    """Draws a piece between brackets, a line of code after a bar."""

    color = False

    def markdown(self, text: str) -> str:
        return f"[{text}]\n"

    def code(self, line: str, language: str) -> str:
        return f"{language}|{line}\n"


def drawn(pieces: list[str]) -> str:
    blocks = MarkdownStream(Echo())
    return "".join(blocks.feed(piece) for piece in pieces) + blocks.finish()


def test_a_text_is_cut_where_its_pieces_end() -> None:
    assert (
        drawn([TEXT])
        == """[# Title]

[One *two*.
Three.]

[1. First
   ```python
   code
   ```]
[2. Second
   - nested]

[3. Third]

[After.]
[- a]
[- b]
~~~~python
python|def f():
python|    return "```"
python|
python|~~~
~~~~

[| a | b |
|---|---|
| 1 | 2 |]

[> quote
End]
"""
    )


def test_every_way_of_cutting_the_stream_gives_the_same() -> None:
    whole, dice = drawn([TEXT]), random.Random(5)
    assert drawn(list(TEXT)) == whole
    for _ in range(50):
        cuts = sorted(dice.sample(range(1, len(TEXT)), 4))
        assert drawn([TEXT[a:b] for a, b in zip([0, *cuts], [*cuts, None], strict=True)]) == whole


@pytest.mark.parametrize(
    ("so_far", "shown"),
    [
        ("One", ""),
        ("One\n", ""),
        ("One\n\n", "[One]\n"),
        ("# T\n", "[# T]\n"),
        ("- a\n- b", ""),
        ("- a\n- b\n", "[- a]\n"),
        ("```c\nint", "```c\n"),
        ("```c\nint x;\n", "```c\nc|int x;\n"),
    ],
)
def test_a_piece_is_shown_as_soon_as_it_is_whole(so_far: str, shown: str) -> None:
    assert MarkdownStream(Echo()).feed(so_far) == shown


def test_no_line_is_lost() -> None:
    dice = random.Random(11)
    starts = [
        "",
        "- ",
        "1. ",
        "# ",
        "```",
        "```py",
        "~~~",
        "    ",
        "  ",
        "> ",
        "| ",
        "<div>",
        "***",
        "---",
        "\t",
    ]
    for _ in range(400):
        lines = [
            dice.choice(starts) + dice.choice(["", f"w{n}"]) for n in range(dice.randint(0, 12))
        ]
        out = re.sub(r"^\w*\|", "", drawn(["\n".join(lines)]), flags=re.MULTILINE)
        assert re.findall(r"w\d+", out) == re.findall(r"w\d+", "\n".join(lines))


def test_a_models_markdown_is_text_and_colours_and_nothing_else() -> None:
    evil = (
        "\x1b[2J **bold \x1b]0;owned\x07** `code\x9b` &#x202E; &#27;[2J [a\x1b[A](http://x/\u202e) <http://y/\x1b>\r\n\n"
        "<img onerror=1> ![pic\x1b](file:///etc)\n\n<script>\n\x1b[2J\n</script>\n\n```\x1b[2J\n\x1b[2J\u2066\n```\n"
    )
    blocks = MarkdownStream(UI())
    out = "".join(blocks.feed(char) for char in evil) + blocks.finish()
    plain = SGR.sub("", out)
    assert all(char.isprintable() or char in "\n\t" for char in plain)
    assert not set(plain) & set("\u202e\u2066\x1b\x9b\r\x07")
    for kept in (
        "bold",
        "<img onerror=1>",
        "![pic␛](file:///etc)",
        "<script>",
        "</script>",
        "␛[2J",
        "http://x/",
    ):
        assert kept in plain


def test_lines_end_where_the_writer_ended_them() -> None:
    verse = "Roses are red,\nviolets are blue"
    assert SGR.sub("", UI(color=False).markdown(verse)) == verse + "\n"


def test_any_text_can_be_drawn() -> None:
    dice = random.Random(2)
    marks = ["```\n", "](", "\n", "\n\n", "- ", "1. ", "~~~", "&#", "![", "\t", *"*_`[)<>|#;x"]
    for _ in range(150):
        text = "".join(dice.choice(marks) for _ in range(dice.randint(1, 30)))
        blocks = MarkdownStream(UI())
        out = "".join(blocks.feed(char) for char in text) + blocks.finish()
        assert all(char.isprintable() or char in "\n\t" for char in SGR.sub("", out))


PROGRAM = """
import sys
from llmcli.chat.display.answer_formatter import open_formatter
from llmcli.chat.display.stream_writer import StreamWriter
from llmcli.chat.display.display_settings import DisplaySettings
from llmcli.types import Event
from llmcli.ui import UI
display = DisplaySettings(markdown=True, thinking=sys.argv[1])
stream = StreamWriter(formatter=open_formatter(display, UI(color=sys.argv[2] == "color")))
stream.begin_answer(None)
for char in "<think>Hm.</think>\\n\\n**Four** and `five`\\n\\n\\x1b[2J*six*":
    stream.write_event(Event(1, None, char))
stream.write_event(Event(1, None, "", "stop"))
stream.close()
"""


@pytest.mark.parametrize(
    ("thinking", "color", "begins"),
    [
        ("show", "color", r"\x1b\[2m<think>\x1b\[0m.*\x1b\[2m</think>\x1b\[0m\n\n\x1b\[1mFour"),
        (
            "fold",
            "color",
            r"\x1b\[2m\(thinking\x1b\[0m\x1b\[2m for \d+ tokens, .*\)\x1b\[0m\n\x1b\[1mFour",
        ),
        ("hide", "color", r"\x1b\[1mFour"),
        ("hide", "plain", r"\x1b\[1mFour"),
        ("show", "plain", r"<think>Hm\.</think>\n\n\x1b\[1mFour"),
    ],
)
def test_a_terminal_shows_it_drawn_and_dimmed(thinking: str, color: str, begins: str) -> None:
    child = pexpect.spawn(
        sys.executable,
        ["-c", PROGRAM, thinking, color],
        cwd=str(ROOT),
        dimensions=(24, 80),
        timeout=120,
        encoding="utf-8",
        env={"TERM": "xterm-256color", "PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
    )
    child.expect(pexpect.EOF)
    child.close()
    out = str(child.before).replace("\r\n", "\n")
    assert child.exitstatus == 0, out
    said = SGR.sub("", out)
    assert re.match(begins, out, re.DOTALL), out
    assert said.endswith("Four and five\n\n␛[2Jsix\n")
    assert "**" not in said
    assert set(re.findall(r"\x1b.", out)) == {"\x1b["}
    if color == "plain":
        assert set(SGR.findall(out)) <= {
            "\x1b[1m",
            "\x1b[3m",
            "\x1b[0m",
        }  # bold and italic are no colours
