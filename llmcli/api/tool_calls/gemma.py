"""The tool calls of Gemma 4: `<|tool_call>call:name{key:<|"|>text<|"|>,other:3}<tool_call|>`.
FunctionGemma uses other marks.

The arguments are like JSON, but keys have no quotes, and strings are between marks and have no
escapes. A forced call has JSON arguments instead, because a JSON schema can constrain them. Both
kinds of arguments are parsed.
"""

from typing import ClassVar

from llmcli.api.tool_calls.base import ArgumentFormat, ParsedCalls, ToolCallFormat, text_between
from llmcli.api.tool_calls.brace_arguments import BraceArguments


class GemmaCalls(ToolCallFormat):
    """A call is the function's name after `call:`, then its arguments in braces, between two
    marks.
    """

    name: ClassVar[str] = "gemma"
    order: ClassVar[int] = 1
    template_marks: ClassVar[tuple[str, ...]] = ("<|tool_call>",)
    openings: ClassVar[tuple[str, ...]] = ("<|tool_call>",)
    closings: ClassVar[tuple[str, ...]] = ("<tool_call|>", '<|"|>')
    first_call_pattern: ClassVar[str] = r"<\|tool_call>\s*call:(?P<name>[\w.-]+)\s*(?=\{\s*\")"
    argument_format: ClassVar[ArgumentFormat | None] = BraceArguments(
        r"<\|tool_call>\s*call:(?P<name>[\w.-]+)\s*(?=\{\s*[^\s\"])", '<|"|>'
    )

    def parse(self, text: str, is_last: bool) -> ParsedCalls | None:
        # A call with a recognized head is streamed and does not reach this method. So this text is
        # incomplete or not a call.
        inner = text_between(text, self.openings[0], self.closings[0], is_last=False)
        if inner is None and not is_last:
            return None
        raise ValueError(text)

    def forced_frame(self, name: str) -> tuple[str, str]:
        return f"{self.openings[0]}call:{name}", self.closings[0]

    @property
    def wrappers(self) -> tuple[str, str | None, str]:
        return "", "", ""


class FunctionGemmaCalls(GemmaCalls):
    """The calls of FunctionGemma, a model of 270 million parameters that is trained for function
    calls.
    """

    name: ClassVar[str] = "functiongemma"
    template_marks: ClassVar[tuple[str, ...]] = ("<start_function_call>",)
    openings: ClassVar[tuple[str, ...]] = ("<start_function_call>",)
    closings: ClassVar[tuple[str, ...]] = ("<end_function_call>", "<escape>")
    first_call_pattern: ClassVar[str] = (
        r"<start_function_call>\s*call:(?P<name>[\w.-]+)\s*(?=\{\s*\")"
    )
    argument_format: ClassVar[ArgumentFormat | None] = BraceArguments(
        r"<start_function_call>\s*call:(?P<name>[\w.-]+)\s*(?=\{\s*[^\s\"])", "<escape>"
    )


FAMILIES = (GemmaCalls(), FunctionGemmaCalls())
