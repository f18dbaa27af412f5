"""Splits the text of an answer into thinking, content and tool calls while it is generated.

The arguments of a call are streamed if its format allows this (tool_call_stream.py); otherwise the
call is returned when it is complete. A tag may be split over several texts. A text that begins like
a call, but turns out not to be a call, becomes content.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from llmcli.api.conversation.tool_call_stream import (
    OutputPiece,
    ToolCallStream,
    complete_call_pieces,
)
from llmcli.api.tool_calls.base import MakeDigits, ToolCallFormat, random_digits
from llmcli.runtime.text.detokenizer import overlap_length
from llmcli.runtime.text.reasoning import (
    THINKING_TAGS,
    ThinkingPiece,
    ThinkingSplitter,
    ThinkingTags,
)

# After this many opening marks without a call, the splitter stops looking for calls, because each
# attempt may scan the whole remaining text.
MAX_FALSE_OPENINGS = 64
NO_STRING_ARGUMENTS: Mapping[str, frozenset[str]] = MappingProxyType({})


class ReplyOnly:
    """A splitter of thinking for which the whole answer is the reply."""

    is_replying = True

    def feed(self, text: str) -> list[ThinkingPiece]:
        """Return the text as reply."""
        return [ThinkingPiece(False, text)] if text else []

    def finish(self) -> list[ThinkingPiece]:
        """Return no text, because none is held back."""
        return []


class OutputSplitter:
    """Splits the text of one answer.

    - `opened_tags`: the thinking tags whose opening tag ends the prompt, or None.
    - `call_format`: the format of tool calls; None: without tools, no calls are looked for.
    - `names`: the names of the functions.
    - `string_arguments`: for each function, the arguments that its schema declares as strings.
    - `make_digits`: returns the digits of a new call id.
    - `splits_thinking`: if false, thinking and its tags are content.
    """

    def __init__(
        self,
        opened_tags: ThinkingTags | None,
        call_format: ToolCallFormat | None,
        names: frozenset[str] = frozenset(),
        string_arguments: Mapping[str, frozenset[str]] = NO_STRING_ARGUMENTS,
        make_digits: MakeDigits = random_digits,
        splits_thinking: bool = True,
    ) -> None:
        self._string_arguments, self._make_digits = string_arguments, make_digits
        self._splitter, self._call_format, self._names = (
            ThinkingSplitter(opened_tags) if splits_thinking else ReplyOnly(),
            call_format,
            names,
        )
        self._tags = opened_tags  # the thinking tags of this answer; None until they are known
        self._buffer = ""
        self._call_stream: ToolCallStream | None = None
        self._false_openings = 0
        self._in_call = self._has_text = self._has_content = self._has_call = self._has_thinking = (
            False
        )

    def feed(self, text: str) -> list[OutputPiece]:
        """Append a text to the answer. Return the pieces that are certain now. A text that may be
        the beginning of a tag or a call is stored until more text arrives.
        """
        if self._call_format is None and self._splitter.is_replying and not self._has_thinking:
            return [OutputPiece("content", text)] if text else []
        return [
            output
            for segment in self._splitter.feed(text)
            for output in self._classify(segment.is_thinking, segment.text)
        ]

    def finish(self) -> list[OutputPiece]:
        """Return the pieces of the text that was stored. Call it at the end of the answer."""
        out = [
            output
            for segment in self._splitter.finish()
            for output in self._classify(segment.is_thinking, segment.text)
        ]
        out += self._read_buffer(is_last=True) if self._call_format else []
        remainder, self._buffer = self._buffer, ""
        if remainder.strip() or (remainder and not self._has_call):
            out.append(OutputPiece("content", remainder))
        return out

    def _classify(self, is_thinking: bool, text: str) -> list[OutputPiece]:
        """Return the pieces for a text that is thinking, or for a text of the reply, which may
        contain calls.
        """
        if is_thinking:
            text = self._strip_tags(text)
            return [OutputPiece("thinking", text)] if text else []
        if self._has_thinking and not self._has_text:  # remove blank lines after the thinking
            text = text.lstrip()
        if not text:
            return []
        self._has_text = True
        if self._call_format is None:
            self._has_content = True
            return [OutputPiece("content", text)]
        self._buffer += text
        return self._read_buffer(is_last=False)

    def _strip_tags(self, text: str) -> str:
        """Return a thinking text without its tags. ThinkingSplitter has already joined the parts of
        a tag.
        """
        if self._tags is None:
            text = text.lstrip()
            self._tags = next(
                tags for tags in THINKING_TAGS if text.startswith((tags.opening, tags.closing))
            )
            text = text.removeprefix(self._tags.opening)
        text = text.removesuffix(self._tags.closing)
        if not self._has_thinking:
            text = text.lstrip("\n")
        self._has_thinking = self._has_thinking or bool(text)
        return text

    def _read_buffer(self, is_last: bool) -> list[OutputPiece]:
        """Return the pieces that are certain in the buffer, and remove them from it. `is_last`: no
        more text follows.
        """
        call_format, out = self._call_format, []
        assert call_format
        while self._buffer or self._call_stream:
            if self._call_stream:
                stream = self._call_stream
                streamed, self._buffer = stream.feed(self._buffer, is_last)
                out += streamed
                if not stream.has_ended:
                    break
                self._call_stream, self._in_call = None, False
                continue
            if self._in_call:
                pieces = self._parse_calls(call_format, is_last)
                if pieces is None:
                    break
                out += pieces
                continue
            position = self._find_opening(call_format)
            before, remainder = self._buffer[:position], self._buffer[position:]
            self._in_call = bool(remainder) and remainder.startswith(call_format.openings)
            content = before.rstrip()
            if content:
                self._has_content = True
                out.append(OutputPiece("content", content))
            # White space is held back until the following text is known, because it is dropped
            # before a call.
            self._buffer = remainder if self._in_call else before[len(content) :] + remainder
            if not self._in_call:
                break
        return out

    def _parse_calls(self, call_format: ToolCallFormat, is_last: bool) -> list[OutputPiece] | None:
        """Parse calls at the beginning of the buffer, and remove them from it. Return their pieces,
        or the buffer's first character as content if no call begins there. Return None if more text
        is needed to decide.
        """
        stream = ToolCallStream(call_format, self._names, self._string_arguments, self._make_digits)
        if begin_result := stream.begin(self._buffer):
            self._call_stream, self._has_call = stream, True
            self._buffer = begin_result[1]
            return begin_result[0]
        try:
            parsed = call_format.parse(self._buffer, is_last)
            if (
                parsed
                and call_format.starts_answer
                and not self._names.issuperset(call.name for call in parsed.calls)
            ):
                raise ValueError(self._buffer)
        except (ValueError, RecursionError):
            self._false_openings += 1
            first, self._buffer = self._buffer[:1], self._buffer[1:]
            self._in_call, self._has_content = False, True
            return [OutputPiece("content", first)]
        if parsed is None:
            return None
        self._in_call, self._has_call, self._buffer = (
            False,
            True,
            self._buffer[parsed.n_characters :],
        )
        calls = [
            replace(call, id=call.id or call_format.make_id(self._make_digits()))
            for call in parsed.calls
        ]
        return [piece for call in calls for piece in complete_call_pieces(call)]

    def _find_opening(self, call_format: ToolCallFormat) -> int:
        """Return the position in the buffer where a call begins or may begin; without a call, the
        length of the buffer.
        """
        buffer = self._buffer
        if self._false_openings >= MAX_FALSE_OPENINGS:
            return len(buffer)
        if call_format.starts_answer:
            blank = len(buffer) - len(buffer.lstrip())
            begins = any(
                buffer[blank:].startswith(opening) or opening.startswith(buffer[blank:])
                for opening in call_format.openings
            )
            return blank if begins and not self._has_content else len(buffer)
        position = min(
            (index for opening in call_format.openings if (index := buffer.find(opening)) >= 0),
            default=-1,
        )
        return (
            position
            if position >= 0
            else len(buffer)
            - max(overlap_length(buffer, opening) for opening in call_format.openings)
        )
