"""The tool calls of GLM 4.5 and later:
`<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`.

A forced call is written in the hermes format, because a JSON schema can constrain its arguments.
"""

from typing import ClassVar

from llmcli.api.tool_calls.base import ArgumentFormat
from llmcli.api.tool_calls.hermes import HermesCalls
from llmcli.api.tool_calls.tag_arguments import TagArguments


class GlmCalls(HermesCalls):
    """The function's name, then a key and a value for each argument, both between tags."""

    name: ClassVar[str] = "glm"
    order: ClassVar[int] = 1
    template_marks: ClassVar[tuple[str, ...]] = ("<arg_key>",)
    argument_format: ClassVar[ArgumentFormat | None] = TagArguments(
        first_call_pattern=r"<tool_call>\s*(?P<name>[\w.-]+)\s*(?=<arg_key>|</tool_call>)",
        argument_pattern=r"<arg_key>(?P<key>[^<>]+)</arg_key>\s*<arg_value>",
        value_closing="</arg_value>",
        call_end_pattern="(?=</tool_call>)",
        padding=" \t\r\n",
    )


FAMILIES = (GlmCalls(),)
