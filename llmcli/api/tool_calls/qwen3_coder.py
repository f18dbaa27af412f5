"""The tool calls of Qwen3-Coder and Nemotron 3:
`<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`.

A forced call is written in the hermes format, because a JSON schema can constrain its arguments.
These models can write both formats.
"""

from typing import ClassVar

from llmcli.api.tool_calls.base import ArgumentFormat
from llmcli.api.tool_calls.hermes import HermesCalls
from llmcli.api.tool_calls.tag_arguments import TagArguments


def function_tags(outer_closing: str) -> TagArguments:
    """Return the argument format for such tags. `outer_closing`: the closing tag of the outer pair
    of tags.
    """
    return TagArguments(
        first_call_pattern=r"<[\w:]+>\s*<function=(?P<name>[^>\n]+)>",
        argument_pattern=r"<parameter=(?P<key>[^>\n]+)>",
        value_closing="</parameter>",
        call_end_pattern=f"</function>|(?={outer_closing})",
        padding="\n",
        pads_once=True,
        value_stops=("<parameter=", f"</function>{outer_closing}"),
    )


class QwenCoderCalls(HermesCalls):
    """A call is a tag with the function's name, which contains a tag for each argument."""

    name: ClassVar[str] = "coder"
    order: ClassVar[int] = 1
    template_marks: ClassVar[tuple[str, ...]] = ("<function=",)
    argument_format: ClassVar[ArgumentFormat | None] = function_tags("</tool_call>")


FAMILIES = (QwenCoderCalls(),)
