"""Splits streamed text into thinking, content and tool calls.

A call's arguments are streamed (tool_call_stream.py) where the format allows it; otherwise the call
is reported once it is complete. Text that only looks like a call is content. Tags may be split over
any number of pieces.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from llmcli.api.forms.tool_call_stream import Calling, Heard, told
from llmcli.api.tool_calls.base import Digits, Family, digits
from llmcli.runtime.text.detokenizer import overlap
from llmcli.runtime.text.reasoning import TAGS, Splitter, Tags

# After this many false openings no more calls are searched for: each attempt may scan all that
# follows.
MISTAKEN = 64
NO_TEXTS: Mapping[str, frozenset[str]] = MappingProxyType({})


class Listener:
    """`opened`: the thinking tags at the end of the prompt. `family`: how the model writes calls;
    None without tools. `names`: the functions' names. `string_arguments`: for each function, the
    arguments that are strings by its schema. `digits` makes the digits of call ids.
    """

    def __init__(
        self,
        opened: Tags | None,
        family: Family | None,
        names: frozenset[str] = frozenset(),
        texts: Mapping[str, frozenset[str]] = NO_TEXTS,
        digits: Digits = digits,
    ) -> None:
        self._texts, self._digits = texts, digits
        self._splitter, self._family, self._names = Splitter(opened), family, names
        self._tags = opened  # the tags of this answer's thinking, once they are known
        self._buffer = ""
        self._call_stream: Calling | None = None
        self._false_openings = 0
        self._in_call = self._has_text = self._has_content = self._has_call = self._has_thinking = (
            False
        )

    def feed(self, text: str) -> list[Heard]:
        """Return the pieces that are certain after this text."""
        if self._family is None and self._splitter.talking and not self._has_thinking:
            return [Heard("content", text)] if text else []
        return [
            output
            for segment in self._splitter.feed(text)
            for output in self._classify(segment.thinking, segment.text)
        ]

    def finish(self) -> list[Heard]:
        """Return what was held back, at the end of the answer."""
        out = [
            output
            for segment in self._splitter.finish()
            for output in self._classify(segment.thinking, segment.text)
        ]
        out += self._read(over=True) if self._family else []
        remainder, self._buffer = self._buffer, ""
        if remainder.strip() or (remainder and not self._has_call):
            out.append(Heard("content", remainder))
        return out

    def _classify(self, thinking: bool, text: str) -> list[Heard]:
        if thinking:
            text = self._strip_tags(text)
            return [Heard("thinking", text)] if text else []
        if self._has_thinking and not self._has_text:  # blank lines after the thinking
            text = text.lstrip()
        if not text:
            return []
        self._has_text = True
        if self._family is None:
            self._has_content = True
            return [Heard("content", text)]
        self._buffer += text
        return self._read(over=False)

    def _strip_tags(self, text: str) -> str:
        """Remove the tags from thinking. The splitter never cuts a tag in two."""
        if self._tags is None:
            text = text.lstrip()
            self._tags = next(tags for tags in TAGS if text.startswith((tags.opens, tags.closes)))
            text = text.removeprefix(self._tags.opens)
        text = text.removesuffix(self._tags.closes)
        if not self._has_thinking:
            text = text.lstrip("\n")
        self._has_thinking = self._has_thinking or bool(text)
        return text

    def _read(self, over: bool) -> list[Heard]:
        family, out = self._family, []
        assert family
        while self._buffer or self._call_stream:
            if self._call_stream:
                calling = self._call_stream
                heard, self._buffer = calling.feed(self._buffer, over)
                out += heard
                if not calling.over:
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
            self._in_call = bool(remainder) and remainder.startswith(family.opens)
            words = said.rstrip()
            if words:
                self._has_content = True
                out.append(Heard("content", words))
            # White space is held back until the next text is known: before a call it is dropped.
            self._buffer = remainder if self._in_call else said[len(words) :] + remainder
            if not self._in_call:
                break
        return out

    def _parse_calls(self, family: Family, over: bool) -> list[Heard] | None:
        """Return the calls at the beginning of the held text, or content if there is no call; None
        if more text is needed.
        """
        calling = Calling(family, self._names, self._texts, self._digits)
        if begun := calling.begin(self._buffer):
            self._call_stream, self._has_call = calling, True
            self._buffer = begun[1]
            return begun[0]
        try:
            taken = family.take(self._buffer, over)
            if (
                taken
                and family.first
                and not self._names.issuperset(call.name for call in taken.calls)
            ):
                raise ValueError(self._buffer)
        except (ValueError, RecursionError):
            self._false_openings += 1
            first, self._buffer = self._buffer[:1], self._buffer[1:]
            self._in_call, self._has_content = False, True
            return [Heard("content", first)]
        if taken is None:
            return None
        self._in_call, self._has_call, self._buffer = False, True, self._buffer[taken.used :]
        calls = [replace(call, id=call.id or family.id(self._digits())) for call in taken.calls]
        return [heard for call in calls for heard in told(call)]

    def _opening(self, family: Family) -> int:
        """Return the position in the held text where a call begins or may begin; the text's length
        if there is none.
        """
        held = self._buffer
        if self._false_openings >= MISTAKEN:
            return len(held)
        if family.first:
            blank = len(held) - len(held.lstrip())
            begins = any(
                held[blank:].startswith(word) or word.startswith(held[blank:])
                for word in family.opens
            )
            return blank if begins and not self._has_content else len(held)
        position = min(
            (index for word in family.opens if (index := held.find(word)) >= 0), default=-1
        )
        return (
            position
            if position >= 0
            else len(held) - max(overlap(held, word) for word in family.opens)
        )
