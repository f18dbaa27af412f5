"""Splits the text of an answer into thinking, content and tool calls while it is generated.

Where the format of calls allows it, a call's arguments are streamed (tool_call_stream.py).
Otherwise a call is reported once it is complete. Text that begins like a call but is none becomes
content. A tag may arrive in several pieces of text.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from llmcli.api.forms.tool_call_stream import OutputPiece, ToolCallStream, complete_call_pieces
from llmcli.api.tool_calls.base import MakeDigits, ToolCallFormat, random_digits
from llmcli.runtime.text.detokenizer import overlap_length
from llmcli.runtime.text.reasoning import THINKING_TAGS, ThinkingSplitter, ThinkingTags

# After this many openings that began no call, the splitter stops looking for calls, because each
# attempt may scan the whole remaining text.
MAX_FALSE_OPENINGS = 64
NO_STRING_ARGUMENTS: Mapping[str, frozenset[str]] = MappingProxyType({})


class OutputSplitter:
    """Splits the text of one answer.

    `opened`: the thinking tags at the end of the prompt. `family`: the format of tool calls; None
    without tools. `names`: the names of the functions. `string_arguments`: for each function, the
    arguments that are strings by its schema. `digits`: returns the digits of a new call id.
    """

    def __init__(
        self,
        opened: ThinkingTags | None,
        family: ToolCallFormat | None,
        names: frozenset[str] = frozenset(),
        string_arguments: Mapping[str, frozenset[str]] = NO_STRING_ARGUMENTS,
        digits: MakeDigits = random_digits,
    ) -> None:
        self._texts, self._digits = string_arguments, digits
        self._splitter, self._family, self._names = ThinkingSplitter(opened), family, names
        self._tags = opened  # the thinking tags of this answer; None until they are known
        self._buffer = ""
        self._call_stream: ToolCallStream | None = None
        self._false_openings = 0
        self._in_call = self._has_text = self._has_content = self._has_call = self._has_thinking = (
            False
        )

    def feed(self, text: str) -> list[OutputPiece]:
        """Return the pieces that can be classified after this text."""
        if self._family is None and self._splitter.is_replying and not self._has_thinking:
            return [OutputPiece("content", text)] if text else []
        return [
            output
            for segment in self._splitter.feed(text)
            for output in self._classify(segment.is_thinking, segment.text)
        ]

    def finish(self) -> list[OutputPiece]:
        """Return the pieces that were held back. Call it at the end of the answer."""
        out = [
            output
            for segment in self._splitter.finish()
            for output in self._classify(segment.is_thinking, segment.text)
        ]
        out += self._read(over=True) if self._family else []
        remainder, self._buffer = self._buffer, ""
        if remainder.strip() or (remainder and not self._has_call):
            out.append(OutputPiece("content", remainder))
        return out

    def _classify(self, thinking: bool, text: str) -> list[OutputPiece]:
        if thinking:
            text = self._strip_tags(text)
            return [OutputPiece("thinking", text)] if text else []
        if self._has_thinking and not self._has_text:  # remove blank lines after the thinking
            text = text.lstrip()
        if not text:
            return []
        self._has_text = True
        if self._family is None:
            self._has_content = True
            return [OutputPiece("content", text)]
        self._buffer += text
        return self._read(over=False)

    def _strip_tags(self, text: str) -> str:
        """Return a thinking text without its tags. A tag is never split over two texts here."""
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

    def _read(self, over: bool) -> list[OutputPiece]:
        family, out = self._family, []
        assert family
        while self._buffer or self._call_stream:
            if self._call_stream:
                calling = self._call_stream
                heard, self._buffer = calling.feed(self._buffer, over)
                out += heard
                if not calling.has_ended:
                    break
                self._call_stream, self._in_call = None, False
                continue
            if self._in_call:
                pieces = self._parse_calls(family, over)
                if pieces is None:
                    break
                out += pieces
                continue
            at = self._opening(family)
            said, remainder = self._buffer[:at], self._buffer[at:]
            self._in_call = bool(remainder) and remainder.startswith(family.openings)
            words = said.rstrip()
            if words:
                self._has_content = True
                out.append(OutputPiece("content", words))
            # White space is held back until the following text is known, because it is dropped
            # before a call.
            self._buffer = remainder if self._in_call else said[len(words) :] + remainder
            if not self._in_call:
                break
        return out

    def _parse_calls(self, family: ToolCallFormat, over: bool) -> list[OutputPiece] | None:
        """Return the pieces of the call at the beginning of the held text, or a piece of content if
        there is no call; None if more text is needed to decide.
        """
        calling = ToolCallStream(family, self._names, self._texts, self._digits)
        if begun := calling.begin(self._buffer):
            self._call_stream, self._has_call = calling, True
            self._buffer = begun[1]
            return begun[0]
        try:
            taken = family.parse(self._buffer, over)
            if (
                taken
                and family.starts_answer
                and not self._names.issuperset(call.name for call in taken.calls)
            ):
                raise ValueError(self._buffer)
        except (ValueError, RecursionError):
            self._false_openings += 1
            first, self._buffer = self._buffer[:1], self._buffer[1:]
            self._in_call, self._has_content = False, True
            return [OutputPiece("content", first)]
        if taken is None:
            return None
        self._in_call, self._has_call, self._buffer = (
            False,
            True,
            self._buffer[taken.n_characters :],
        )
        calls = [
            replace(call, id=call.id or family.make_id(self._digits())) for call in taken.calls
        ]
        return [heard for call in calls for heard in complete_call_pieces(call)]

    def _opening(self, family: ToolCallFormat) -> int:
        """Return the position in the held text where a call begins or may begin. If there is no
        such position, return the text's length.
        """
        held = self._buffer
        if self._false_openings >= MAX_FALSE_OPENINGS:
            return len(held)
        if family.starts_answer:
            blank = len(held) - len(held.lstrip())
            begins = any(
                held[blank:].startswith(word) or word.startswith(held[blank:])
                for word in family.openings
            )
            return blank if begins and not self._has_content else len(held)
        position = min(
            (index for word in family.openings if (index := held.find(word)) >= 0), default=-1
        )
        return (
            position
            if position >= 0
            else len(held) - max(overlap_length(held, word) for word in family.openings)
        )
