"""`<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`: Qwen3-Coder,
Nemotron 3.

A forced call is written in the hermes format, whose JSON can be constrained by a schema; these
models know both.
"""

from typing import ClassVar

from llmcli.api.tool_calls.base import Form
from llmcli.api.tool_calls.hermes import Hermes
from llmcli.api.tool_calls.tag_arguments import Tags


def tags(closes: str) -> Tags:
    """Return the inner tags; `outer_closing` is the pattern of the outer closing tag."""
    return Tags(
        begins=r"<[\w:]+>\s*<function=(?P<name>[^>\n]+)>",
        opens=r"<parameter=(?P<key>[^>\n]+)>",
        closes="</parameter>",
        ends=f"</function>|(?={closes})",
        around="\n",
        once=True,
        stops=("<parameter=", f"</function>{closes}"),
    )


class Coder(Hermes):
    """A tag for the function, and one for each argument."""

    name: ClassVar[str] = "coder"
    order: ClassVar[int] = 1
    marks: ClassVar[tuple[str, ...]] = ("<function=",)
    form: ClassVar[Form | None] = tags("</tool_call>")


FAMILIES = (Coder(),)
