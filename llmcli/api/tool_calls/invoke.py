"""`<invoke name="…"><parameter name="…">…</parameter></invoke>` between tags: MiniMax M2, DeepSeek
V3.2 and V4.

DeepSeek marks each value that is a string. A forced call is written in the hermes format.
"""

from typing import ClassVar

from llmcli.api.tool_calls import hermes
from llmcli.api.tool_calls.base import Form, keyed
from llmcli.api.tool_calls.hermes import Hermes
from llmcli.api.tool_calls.tag_arguments import Tags


def tags(outer: str, prefix: str, around: str) -> Tags:
    """Return the inner tags. `outer_names` is the pattern of the outer tags' names, `prefix`
    precedes the inner names, `padding` is removed around a value.
    """
    name = rf'<{prefix}invoke name="(?P<name>[^"\n]+)"[^>\n]*>'
    return Tags(
        begins=rf"<(?:{outer})>\s*{name}",
        goes_on=rf"\s*{name}",
        opens=(
            rf'<{prefix}parameter name="(?P<key>[^"\n]+)"'
            r'(?:(?P<text>[^>\n]*string="true")|[^>\n]*)[^>\n]*>'
        ),
        closes=f"</{prefix}parameter>",
        ends=f"</{prefix}invoke>|(?=</(?:{outer})>)",
        around=around,
    )


class MiniMax(Hermes):
    """Tags in a namespace."""

    name: ClassVar[str] = "minimax"
    order: ClassVar[int] = 1
    marks: ClassVar[tuple[str, ...]] = ("<minimax:tool_call>",)
    opens: ClassVar[tuple[str, ...]] = ("<minimax:tool_call>", hermes.OPENS)
    closes: ClassVar[tuple[str, ...]] = ("</minimax:tool_call>", hermes.CLOSES)
    begins: ClassVar[str] = keyed(r"<(?:minimax:)?tool_call>\s*")
    form: ClassVar[Form | None] = tags("minimax:tool_call", "", "\n")


class Dsml(MiniMax):
    """DeepSeek's markup, in which white space around a value belongs to it."""

    name: ClassVar[str] = "dsml"
    marks: ClassVar[tuple[str, ...]] = ("｜DSML｜",)
    opens: ClassVar[tuple[str, ...]] = (
        "<｜DSML｜function_calls>",
        "<｜DSML｜tool_calls>",
        hermes.OPENS,
    )
    closes: ClassVar[tuple[str, ...]] = (
        "</｜DSML｜function_calls>",
        "</｜DSML｜tool_calls>",
        hermes.CLOSES,
    )
    begins: ClassVar[str] = keyed(r"<(?:tool_call|｜DSML｜tool_calls|｜DSML｜function_calls)>\s*")
    form: ClassVar[Form | None] = tags("｜DSML｜function_calls|｜DSML｜tool_calls", "｜DSML｜", "")


FAMILIES = (MiniMax(), Dsml())
