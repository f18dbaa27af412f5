"""Separates tool calls from the text of an answer while it is generated."""

from llmcli.api.conversation.output_splitter import OutputSplitter
from llmcli.api.conversation.tool_call_stream import OutputPiece
from llmcli.api.conversation.tools import ToolSet
from llmcli.api.tool_calls.base import ToolCall, ToolCallFormat
from llmcli.runtime.text.reasoning import (
    THINKING_TAGS,
    ThinkingPiece,
    ThinkingSplitter,
    ThinkingTags,
)


class CallFilter:
    """Reads one answer. `calls`: its complete calls. `thinking`: with its tags. `content`: the text
    without calls.
    """

    def __init__(
        self, opened: ThinkingTags | None, call_format: ToolCallFormat, tools: ToolSet
    ) -> None:
        self.calls = list[ToolCall]()
        self.thinking = opened.opening if opened else ""
        self.content = ""
        self._thinking_splitter = ThinkingSplitter(opened)
        self._call_splitter = OutputSplitter(
            None, call_format, tools.names, tools.string_arguments, splits_thinking=False
        )

    @property
    def plain_thinking(self) -> str:
        """The thinking without its tags."""
        text = self.thinking.strip()
        for tags in THINKING_TAGS:
            text = text.removeprefix(tags.opening).removesuffix(tags.closing)
        return text.strip()

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
        shown = ""
        for piece in pieces:
            if piece.is_thinking:
                self.thinking += piece.text
                shown += piece.text
            else:
                # calls of some models are recognized at the start of the reply only
                starts_reply = not self.content and not self.calls and not piece.text.strip()
                shown += piece.text if starts_reply else self._feed_reply(piece.text)
        return shown

    def _feed_reply(self, text: str) -> str:
        if not self.content and not self.calls:
            blank = text[: len(text) - len(text.lstrip())]
            return blank + self._take(self._call_splitter.feed(text.lstrip()))
        return self._take(self._call_splitter.feed(text))

    def _take(self, pieces: list[OutputPiece]) -> str:
        text = "".join(piece.text for piece in pieces if piece.kind == "content")
        self.content += text
        self.calls += [piece.call for piece in pieces if piece.kind == "call_end" and piece.call]
        return text
