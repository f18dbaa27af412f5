"""MarkdownStream: splits arriving Markdown into blocks, and never writes control characters."""

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


class BracketRenderer:
    """Renders a block in brackets, and a line of code after its language and a bar."""

    color = False

    def markdown(self, text: str) -> str:
        return f"[{text}]\n"

    def code(self, line: str, language: str) -> str:
        return f"{language}|{line}\n"


def render(pieces: list[str]) -> str:
    stream = MarkdownStream(BracketRenderer())
    return "".join(stream.feed(piece) for piece in pieces) + stream.finish()


def test_a_text_is_split_into_blocks() -> None:
    assert (
        render([TEXT])
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


def test_the_output_does_not_depend_on_the_pieces_in_which_the_text_arrives() -> None:
    expected, rng = render([TEXT]), random.Random(5)
    assert render(list(TEXT)) == expected
    for _ in range(50):
        cuts = sorted(rng.sample(range(1, len(TEXT)), 4))
        assert (
            render([TEXT[a:b] for a, b in zip([0, *cuts], [*cuts, None], strict=True)]) == expected
        )


@pytest.mark.parametrize(
    ("text", "expected"),
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
def test_a_block_is_rendered_as_soon_as_it_is_complete(text: str, expected: str) -> None:
    assert MarkdownStream(BracketRenderer()).feed(text) == expected


def test_no_line_of_a_random_text_is_lost() -> None:
    rng = random.Random(11)
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
        lines = [rng.choice(starts) + rng.choice(["", f"w{n}"]) for n in range(rng.randint(0, 12))]
        out = re.sub(r"^\w*\|", "", render(["\n".join(lines)]), flags=re.MULTILINE)
        assert re.findall(r"w\d+", out) == re.findall(r"w\d+", "\n".join(lines))


def test_control_characters_in_markdown_are_escaped() -> None:
    markdown = (
        "\x1b[2J **bold \x1b]0;owned\x07** `code\x9b` &#x202E; &#27;[2J [a\x1b[A](http://x/\u202e) <http://y/\x1b>\r\n\n"
        "<img onerror=1> ![pic\x1b](file:///etc)\n\n<script>\n\x1b[2J\n</script>\n\n```\x1b[2J\n\x1b[2J\u2066\n```\n"
    )
    stream = MarkdownStream(UI())
    out = "".join(stream.feed(char) for char in markdown) + stream.finish()
    plain = SGR.sub("", out)
    assert all(char.isprintable() or char in "\n\t" for char in plain)
    assert not set(plain) & set("\u202e\u2066\x1b\x9b\r\x07")
    for expected in (
        "bold",
        "<img onerror=1>",
        "![pic␛](file:///etc)",
        "<script>",
        "</script>",
        "␛[2J",
        "http://x/",
    ):
        assert expected in plain


def test_line_breaks_in_a_paragraph_are_kept() -> None:
    verse = "Roses are red,\nviolets are blue"
    assert SGR.sub("", UI(color=False).markdown(verse)) == verse + "\n"


def test_random_text_is_rendered_without_control_characters() -> None:
    rng = random.Random(2)
    marks = ["```\n", "](", "\n", "\n\n", "- ", "1. ", "~~~", "&#", "![", "\t", *"*_`[)<>|#;x"]
    for _ in range(150):
        text = "".join(rng.choice(marks) for _ in range(rng.randint(1, 30)))
        stream = MarkdownStream(UI())
        out = "".join(stream.feed(char) for char in text) + stream.finish()
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
def test_a_terminal_shows_rendered_markdown_and_dimmed_thinking(
    thinking: str, color: str, begins: str
) -> None:
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
    plain = SGR.sub("", out)
    assert re.match(begins, out, re.DOTALL), out
    assert plain.endswith("Four and five\n\n␛[2Jsix\n")
    assert "**" not in plain
    assert set(re.findall(r"\x1b.", out)) == {"\x1b["}
    if color == "plain":
        assert set(SGR.findall(out)) <= {
            "\x1b[1m",
            "\x1b[3m",
            "\x1b[0m",
        }  # bold and italic are not colors
