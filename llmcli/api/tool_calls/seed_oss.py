"""`<seed:tool_call><function=name><parameter=key>value</parameter></function></seed:tool_call>`:
Seed-OSS.

A forced call is written in the hermes format.
"""

from typing import ClassVar

from llmcli.api.tool_calls import hermes
from llmcli.api.tool_calls.base import Form, keyed
from llmcli.api.tool_calls.qwen3_coder import Coder, tags

OPENS, CLOSES = "<seed:tool_call>", "</seed:tool_call>"


class Seed(Coder):
    """Qwen3-Coder's tags inside other outer tags."""

    name: ClassVar[str] = "seed"
    order: ClassVar[int] = 0  # before coder, whose mark is in this template, too
    marks: ClassVar[tuple[str, ...]] = (OPENS,)
    opens: ClassVar[tuple[str, ...]] = (OPENS, hermes.OPENS)
    closes: ClassVar[tuple[str, ...]] = (CLOSES, hermes.CLOSES)
    begins: ClassVar[str] = keyed(r"<(?:seed:)?tool_call>\s*")
    form: ClassVar[Form | None] = tags(CLOSES)


FAMILIES = (Seed(),)
