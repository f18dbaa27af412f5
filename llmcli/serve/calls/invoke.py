"""`<invoke name="…"><parameter name="…">…</parameter></invoke>` between tags: MiniMax M2, DeepSeek V3.2 and V4.

A value is JSON where it can be read as JSON, else text; DeepSeek says which. A forced call is written as hermes has it.
"""

import json
import re
from typing import Any, ClassVar

from llmcli.serve.calls import hermes
from llmcli.serve.calls.base import Call, Taken, calls, keyed, made, within
from llmcli.serve.calls.coder import value
from llmcli.serve.calls.hermes import Hermes


class MiniMax(Hermes):
    """Tags in a namespace; `prefix` stands before the names of the inner ones."""

    name: ClassVar[str] = "minimax"
    order: ClassVar[int] = 1
    prefix: ClassVar[str] = ""
    marks: ClassVar[tuple[str, ...]] = ("<minimax:tool_call>",)
    opens: ClassVar[tuple[str, ...]] = ("<minimax:tool_call>", hermes.OPENS)
    closes: ClassVar[tuple[str, ...]] = ("</minimax:tool_call>", hermes.CLOSES)
    begins: ClassVar[str] = keyed(r"<(?:minimax:)?tool_call>\s*")

    def take(self, text: str, over: bool) -> Taken | None:
        if text.startswith(hermes.OPENS):
            return super().take(text, over)
        opens, closes = next(pair for pair in zip(self.opens, self.closes, strict=True) if text.startswith(pair[0]))
        inner = within(text, opens, closes, over)
        if inner is None:
            return None
        if inner[0].lstrip().startswith("{"):  # as it is bound
            return Taken(calls(json.loads(inner[0])), inner[1])
        found = tuple(self._call(*one) for one in self._tags("invoke").findall(inner[0]))
        if not found:
            raise ValueError(text)
        return Taken(found, inner[1])

    def _tags(self, name: str) -> re.Pattern[str]:
        tag = re.escape(self.prefix) + name
        return re.compile(rf'<{tag} name="([^"\n]+)"([^>\n]*)>(.*?)</{tag}>', re.DOTALL)

    def _call(self, name: str, _: str, inner: str) -> Call:
        given = {key: _given(about, words) for key, about, words in self._tags("parameter").findall(inner)}
        return made(name, given)


class Dsml(MiniMax):
    """DeepSeek's markup."""

    name: ClassVar[str] = "dsml"
    prefix: ClassVar[str] = "｜DSML｜"
    marks: ClassVar[tuple[str, ...]] = ("｜DSML｜",)
    opens: ClassVar[tuple[str, ...]] = ("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>", hermes.OPENS)
    closes: ClassVar[tuple[str, ...]] = ("</｜DSML｜function_calls>", "</｜DSML｜tool_calls>", hermes.CLOSES)
    begins: ClassVar[str] = keyed(r"<(?:tool_call|｜DSML｜tool_calls|｜DSML｜function_calls)>\s*")


def _given(about: str, words: str) -> Any:
    return words if 'string="true"' in about else value(words.strip("\n") if not about else words)


FAMILIES = (MiniMax(), Dsml())
