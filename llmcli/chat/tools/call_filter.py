"""Separates tool calls from the text of an answer while it is generated."""

from llmcli.api.conversation.output_splitter import OutputSplitter
from llmcli.api.conversation.tool_call_stream import OutputPiece
from llmcli.api.conversation.tools import ToolSet
from llmcli.api.tool_calls.base import ToolCall, ToolCallFormat
from llmcli.runtime.text.reasoning import ThinkingPiece, ThinkingSplitter, ThinkingTags


class CallFilter:
    """Reads one answer. `calls`: its complete calls. `content`: its text without thinking and calls."""

    def __init__(
        self, opened: ThinkingTags | None, call_format: ToolCallFormat, tools: ToolSet
    ) -> None:
        self.calls = list[ToolCall]()
        self.content = ""
        self._thinking_splitter = ThinkingSplitter(opened)
        self._call_splitter = OutputSplitter(
            None, call_format, tools.names, tools.string_arguments, splits_thinking=False
        )

    def feed(self, text: str) -> str:
        """Add the next text of the answer. Return the text that can be shown now, without calls.
        Thinking stays in it, with its tags.
        """
        return self._show(self._thinking_splitter.feed(text))

    def finish(self) -> str:
        """Return the text that was held back, at the end of the answer."""
        shown = self._show(self._thinking_splitter.finish())
        return shown + self._take(self._call_splitter.finish())

    def _show(self, pieces: list[ThinkingPiece]) -> str:
        return "".join(
            piece.text if piece.is_thinking else self._take(self._call_splitter.feed(piece.text))
            for piece in pieces
        )

    def _take(self, pieces: list[OutputPiece]) -> str:
        text = "".join(piece.text for piece in pieces if piece.kind == "content")
        self.content += text
        self.calls += [piece.call for piece in pieces if piece.kind == "call_end" and piece.call]
        return text
