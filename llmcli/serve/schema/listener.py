"""Splits an answer's text, as it comes, into thinking, talk and calls of functions.

A call is told while its arguments come (calling.py) where its family's way of writing allows it,
otherwise once it is whole. Text that only looks like a call is talk. Tags may be split over any
number of pieces.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from llmcli.runtime.text import overlap
from llmcli.runtime.thinking import TAGS, Splitter, Tags
from llmcli.serve.calls.base import Digits, Family, digits
from llmcli.serve.schema.calling import Calling, Heard, told

# openings that began no call; then none is looked for: each may cost a look at all that follows
MISTAKEN = 64
NO_TEXTS: Mapping[str, frozenset[str]] = MappingProxyType({})


class Listener:
    """`opened`: the thinking tags that the prompt ends with. `family`: how the model writes calls;
    None: it has no functions. `names`: of its functions; `texts`: by function, the arguments that
    are text by their schemas. `digits` are for the ids of its calls.
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
        self._tags = opened  # those of this answer's thinking, once they are known
        self._held = ""
        self._calling: Calling | None = None
        self._mistaken = 0
        self._inside = self._begun = self._spoke = self._called = self._thought = False

    def feed(self, text: str) -> list[Heard]:
        """What this text makes certain."""
        if self._family is None and self._splitter.talking and not self._thought:
            return [Heard("said", text)] if text else []
        return [
            one
            for piece in self._splitter.feed(text)
            for one in self._heard(piece.thinking, piece.text)
        ]

    def finish(self) -> list[Heard]:
        """What was held back, at the answer's end."""
        out = [
            one
            for piece in self._splitter.finish()
            for one in self._heard(piece.thinking, piece.text)
        ]
        out += self._read(over=True) if self._family else []
        rest, self._held = self._held, ""
        if rest.strip() or (rest and not self._called):
            out.append(Heard("said", rest))
        return out

    def _heard(self, thinking: bool, text: str) -> list[Heard]:
        if thinking:
            text = self._untagged(text)
            return [Heard("thought", text)] if text else []
        if self._thought and not self._begun:  # the blank lines behind the thinking
            text = text.lstrip()
        if not text:
            return []
        self._begun = True
        if self._family is None:
            self._spoke = True
            return [Heard("said", text)]
        self._held += text
        return self._read(over=False)

    def _untagged(self, text: str) -> str:
        """Thinking without its tags: the splitter gives each of them whole."""
        if self._tags is None:
            text = text.lstrip()
            self._tags = next(tags for tags in TAGS if text.startswith((tags.opens, tags.closes)))
            text = text.removeprefix(self._tags.opens)
        text = text.removesuffix(self._tags.closes)
        if not self._thought:
            text = text.lstrip("\n")
        self._thought = self._thought or bool(text)
        return text

    def _read(self, over: bool) -> list[Heard]:
        family, out = self._family, []
        assert family
        while self._held or self._calling:
            if self._calling:
                calling = self._calling
                heard, self._held = calling.feed(self._held, over)
                out += heard
                if not calling.over:
                    break
                self._calling, self._inside = None, False
                continue
            if self._inside:
                found = self._taken(family, over)
                if found is None:
                    break
                out += found
                continue
            at = self._opening(family)
            said, rest = self._held[:at], self._held[at:]
            self._inside = bool(rest) and rest.startswith(family.opens)
            words = said.rstrip()
            if words:
                self._spoke = True
                out.append(Heard("said", words))
            # White space is held until it is known what follows: before a call it is dropped.
            self._held = rest if self._inside else said[len(words) :] + rest
            if not self._inside:
                break
        return out

    def _taken(self, family: Family, over: bool) -> list[Heard] | None:
        """The calls at the beginning of the held text, or a piece of it that is none; None: more
        must come.
        """
        calling = Calling(family, self._names, self._texts, self._digits)
        if begun := calling.begin(self._held):
            self._calling, self._called = calling, True
            self._held = begun[1]
            return begun[0]
        try:
            taken = family.take(self._held, over)
            if (
                taken
                and family.first
                and not self._names.issuperset(call.name for call in taken.calls)
            ):
                raise ValueError(self._held)
        except (ValueError, RecursionError):
            self._mistaken += 1
            first, self._held = self._held[:1], self._held[1:]
            self._inside, self._spoke = False, True
            return [Heard("said", first)]
        if taken is None:
            return None
        self._inside, self._called, self._held = False, True, self._held[taken.used :]
        calls = [replace(call, id=call.id or family.id(self._digits())) for call in taken.calls]
        return [heard for call in calls for heard in told(call)]

    def _opening(self, family: Family) -> int:
        """Where in the held text a call begins, or may begin; the text's length where none does."""
        held = self._held
        if self._mistaken >= MISTAKEN:
            return len(held)
        if family.first:
            blank = len(held) - len(held.lstrip())
            begins = any(
                held[blank:].startswith(word) or word.startswith(held[blank:])
                for word in family.opens
            )
            return blank if begins and not self._spoke else len(held)
        at = min((found for word in family.opens if (found := held.find(word)) >= 0), default=-1)
        return at if at >= 0 else len(held) - max(overlap(held, word) for word in family.opens)
