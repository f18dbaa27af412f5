"""The tool calls of MiniMax M2, and of DeepSeek V3.2 and V4: `<invoke name="…"><parameter
name="…">…</parameter></invoke>` between outer tags.

DeepSeek's tags tell whether a value is a string. A forced call is written in the hermes format,
because a JSON schema can constrain its arguments.
"""

from typing import ClassVar

from llmcli.api.tool_calls import hermes
from llmcli.api.tool_calls.base import ArgumentFormat, json_call_pattern
from llmcli.api.tool_calls.hermes import HermesCalls
from llmcli.api.tool_calls.tag_arguments import TagArguments


def invoke_tags(outer_names: str, prefix: str, padding: str) -> TagArguments:
    """Return the argument format for such tags. `outer_names`: a pattern for the names of the outer
    tags. `prefix`: the text before the names of the inner tags. `padding`: characters to remove
    around a value.
    """
    name = rf'<{prefix}invoke name="(?P<name>[^"\n]+)"[^>\n]*>'
    return TagArguments(
        first_call_pattern=rf"<(?:{outer_names})>\s*{name}",
        next_call_pattern=rf"\s*{name}",
        argument_pattern=(
            rf'<{prefix}parameter name="(?P<key>[^"\n]+)"'
            r'(?:(?P<text>[^>\n]*string="true")|[^>\n]*)[^>\n]*>'
        ),
        value_closing=f"</{prefix}parameter>",
        call_end_pattern=f"</{prefix}invoke>|(?=</(?:{outer_names})>)",
        padding=padding,
    )


class MiniMaxCalls(HermesCalls):
    """MiniMax's tags; the outer tag is `<minimax:tool_call>`."""

    name: ClassVar[str] = "minimax"
    order: ClassVar[int] = 1
    template_marks: ClassVar[tuple[str, ...]] = ("<minimax:tool_call>",)
    openings: ClassVar[tuple[str, ...]] = ("<minimax:tool_call>", hermes.OPENING)
    closings: ClassVar[tuple[str, ...]] = ("</minimax:tool_call>", hermes.CLOSING)
    first_call_pattern: ClassVar[str] = json_call_pattern(r"<(?:minimax:)?tool_call>\s*")
    argument_format: ClassVar[ArgumentFormat | None] = invoke_tags("minimax:tool_call", "", "\n")


class DsmlCalls(MiniMaxCalls):
    """DeepSeek's tags, whose names begin with `｜DSML｜`. White space around a value belongs to the
    value.
    """

    name: ClassVar[str] = "dsml"
    template_marks: ClassVar[tuple[str, ...]] = ("｜DSML｜",)
    openings: ClassVar[tuple[str, ...]] = (
        "<｜DSML｜function_calls>",
        "<｜DSML｜tool_calls>",
        hermes.OPENING,
    )
    closings: ClassVar[tuple[str, ...]] = (
        "</｜DSML｜function_calls>",
        "</｜DSML｜tool_calls>",
        hermes.CLOSING,
    )
    first_call_pattern: ClassVar[str] = json_call_pattern(
        r"<(?:tool_call|｜DSML｜tool_calls|｜DSML｜function_calls)>\s*"
    )
    argument_format: ClassVar[ArgumentFormat | None] = invoke_tags(
        "｜DSML｜function_calls|｜DSML｜tool_calls", "｜DSML｜", ""
    )


FAMILIES = (MiniMaxCalls(), DsmlCalls())
