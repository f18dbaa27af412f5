"""`<|tool_call>call:name{key:<|"|>text<|"|>,other:3}<tool_call|>`: Gemma 4, and FunctionGemma with
its own marks.

Like JSON, but keys have no quotes, and strings are between marks and without escapes. A forced call
has JSON arguments, which a schema can constrain; those are read, too.
"""

from typing import ClassVar

from llmcli.api.tool_calls.base import Family, Form, Taken, within
from llmcli.api.tool_calls.brace_arguments import Braces


class Gemma(Family):
    """Gemma 4."""

    name: ClassVar[str] = "gemma"
    order: ClassVar[int] = 1
    marks: ClassVar[tuple[str, ...]] = ("<|tool_call>",)
    opens: ClassVar[tuple[str, ...]] = ("<|tool_call>",)
    closes: ClassVar[tuple[str, ...]] = ("<tool_call|>", '<|"|>')
    begins: ClassVar[str] = r"<\|tool_call>\s*call:(?P<name>[\w.-]+)\s*(?=\{\s*\")"
    form: ClassVar[Form | None] = Braces(
        r"<\|tool_call>\s*call:(?P<name>[\w.-]+)\s*(?=\{\s*[^\s\"])", '<|"|>'
    )

    def take(self, text: str, over: bool) -> Taken | None:
        # A call with a head is streamed: this text is unfinished, or not a call.
        inner = within(text, self.opens[0], self.closes[0], over=False)
        if inner is None and not over:
            return None
        raise ValueError(text)

    def frame(self, name: str) -> tuple[str, str]:
        return f"{self.opens[0]}call:{name}", self.closes[0]

    @property
    def around(self) -> tuple[str, str | None, str]:
        return "", "", ""


class FunctionGemma(Gemma):
    """Gemma 3 of 270 million parameters, trained for function calls."""

    name: ClassVar[str] = "functiongemma"
    marks: ClassVar[tuple[str, ...]] = ("<start_function_call>",)
    opens: ClassVar[tuple[str, ...]] = ("<start_function_call>",)
    closes: ClassVar[tuple[str, ...]] = ("<end_function_call>", "<escape>")
    begins: ClassVar[str] = r"<start_function_call>\s*call:(?P<name>[\w.-]+)\s*(?=\{\s*\")"
    form: ClassVar[Form | None] = Braces(
        r"<start_function_call>\s*call:(?P<name>[\w.-]+)\s*(?=\{\s*[^\s\"])", "<escape>"
    )


FAMILIES = (Gemma(), FunctionGemma())
