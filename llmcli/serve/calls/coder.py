"""`<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`: Qwen3-Coder,
Nemotron 3.

A forced call is written as hermes has it, whose JSON a schema can hold; these models have seen
both.
"""

from typing import ClassVar

from llmcli.serve.calls.base import Form
from llmcli.serve.calls.hermes import Hermes
from llmcli.serve.calls.tags import Tags


def tags(closes: str) -> Tags:
    """The inner tags, `closes` being the outer one behind them."""
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
    """Tags for the function and for each argument."""

    name: ClassVar[str] = "coder"
    order: ClassVar[int] = 1
    marks: ClassVar[tuple[str, ...]] = ("<function=",)
    form: ClassVar[Form | None] = tags("</tool_call>")


FAMILIES = (Coder(),)
