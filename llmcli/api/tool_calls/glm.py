"""`<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`: GLM 4.5 and
later.

A forced call is written in the hermes format.
"""

from typing import ClassVar

from llmcli.api.tool_calls.base import Form
from llmcli.api.tool_calls.hermes import Hermes
from llmcli.api.tool_calls.tag_arguments import Tags


class Glm(Hermes):
    """The name, then pairs of key and value."""

    name: ClassVar[str] = "glm"
    order: ClassVar[int] = 1
    marks: ClassVar[tuple[str, ...]] = ("<arg_key>",)
    form: ClassVar[Form | None] = Tags(
        begins=r"<tool_call>\s*(?P<name>[\w.-]+)\s*(?=<arg_key>|</tool_call>)",
        opens=r"<arg_key>(?P<key>[^<>]+)</arg_key>\s*<arg_value>",
        closes="</arg_value>",
        ends="(?=</tool_call>)",
        around=" \t\r\n",
    )


FAMILIES = (Glm(),)
