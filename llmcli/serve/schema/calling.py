"""The calls of one block as they come: names first, then their arguments in pieces.

A call counts as one from where its arguments begin: what was told cannot be taken back. Its
arguments are what the model wrote; where it was cut off or wrote no JSON they end there, whole and
in pieces alike.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any, Literal

from llmcli.serve.calls.base import Call, Digits, Family, Written
from llmcli.strict import strict

# Within a string and outside of one: what changes the place. Outside nothing else but words and
# numbers may stand.
INSIDE, OUTSIDE = re.compile(r'["\\]'), re.compile(r'["{}\[\]]|[^\s\w.,:+-]')
CONTROLS = {code: f"\\u{code:04x}" for code in range(32)} | {9: "\\t", 10: "\\n", 13: "\\r"}
PAIRS = {"{": "}", "[": "]"}
CUTS = 256  # places at which a text that was cut off is tried
BETWEEN = " \t\r\n}],;`"
ID = re.compile(r',\s*"id"\s*:\s*"[^"]*"')  # Mistral's


@dataclass(frozen=True, slots=True)
class Heard:
    """A piece of an answer: what was thought or said; that a call begins, a piece of its arguments,
    that it is over (`call` has no arguments before).
    """

    kind: Literal["thought", "said", "call", "arguments", "called"]
    text: str
    call: Call | None = None


def told(call: Call) -> list[Heard]:
    """A call that comes whole."""
    return [
        Heard("call", "", replace(call, arguments="")),
        Heard("arguments", call.arguments),
        Heard("called", "", call),
    ]


class Arguments:
    """A JSON object on its way: where it ends, and control characters in its strings written as
    JSON has them.
    """

    def __init__(self) -> None:
        self.done = False
        self._open, self._string, self._escaped = list[str](), False, False

    @property
    def rest(self) -> str | None:
        """What would end it where it is; None within a string."""
        return None if self._string else "".join(reversed(self._open))

    def take(self, text: str, over: bool = False) -> tuple[str, int]:
        """What of a text belongs to it, and how many characters those were."""
        out: list[str] = []
        at = 0
        while at < len(text) and not self.done:
            if self._escaped:
                out.append(text[at].translate(CONTROLS))
                self._escaped, at = False, at + 1
                continue
            found = (INSIDE if self._string else OUTSIDE).search(text, at)
            end = found.start() if found else len(text)
            out.append(text[at:end].translate(CONTROLS) if self._string else text[at:end])
            at = end
            if found:
                at += self._mark(found[0], out)
        return "".join(out), at

    def _mark(self, mark: str, out: list[str]) -> int:
        """One of the characters that change the place; 0 where it is none of JSON's."""
        if mark == "\\":
            self._escaped = True
        elif mark == '"':
            self._string = not self._string
        elif mark in PAIRS:
            self._open.append(PAIRS[mark])
        elif self._open and mark == self._open[-1]:
            self._open.pop()
            self.done = not self._open
        else:
            self.done = True
            return 0
        out.append(mark)
        return 1


class Calling:
    """One block: `begin` finds its first call, `feed` goes on. `over` once nothing of it can
    follow. `texts` are the arguments that are text by the schemas, of each function by its name;
    `digits` are for its calls' ids.
    """

    def __init__(
        self,
        family: Family,
        names: frozenset[str],
        texts: Mapping[str, frozenset[str]],
        digits: Digits,
    ) -> None:
        self.over = False
        self._family, self._names, self._texts, self._digits, self._number = (
            family,
            names,
            texts,
            digits,
            0,
        )
        self._call, self._text = Call("", ""), list[str]()
        self._arguments: Written = Arguments()

    def begin(self, text: str) -> tuple[list[Heard], str] | None:
        """The call that `text` begins with, and the rest, which are its arguments; None where there
        is none (yet).
        """
        head = self._family.head(text, self._number)
        if head is None or (self._family.first and head.call.name not in self._names):
            return None
        self._number += 1
        self._call = replace(head.call, id=head.call.id or self._family.id(self._digits()))
        texts = self._texts.get(head.call.name, frozenset())
        self._arguments, self._text = head.form.reader(texts) if head.form else Arguments(), []
        return [Heard("call", "", self._call)], text[head.used :]

    def feed(self, text: str, over: bool) -> tuple[list[Heard], str]:
        """What this text adds, and what of it is not read; all is where nothing follows (`over`)."""
        out: list[Heard] = []
        while text or over:
            if not self._arguments.done:
                piece, used = self._arguments.take(text, over)
                text = text[used:]
                if piece:
                    self._text.append(piece)
                    out.append(Heard("arguments", piece))
                if not self._arguments.done and not over:
                    break
                self._arguments.done = True
                out.append(Heard("called", "", replace(self._call, arguments="".join(self._text))))
            if again := self.begin(text):
                out += again[0]
                text = again[1]
                continue
            more, text = self._end(text, over)
            return out + more, text
        return out, text

    def _end(self, text: str, over: bool) -> tuple[list[Heard], str]:
        """What stands behind the calls, where their end has come."""
        family = self._family
        ends = [(at, at + len(word)) for word in family.ends if (at := text.find(word)) >= 0]
        if not family.first:  # one that nothing ended ends where the next begins
            ends += [(at, at) for word in family.opens if (at := text.find(word)) >= 0]
        if not ends and not over:
            return [], text
        start, end = min(ends, default=(len(text), len(text)))
        self.over, left = True, text[:start]
        for word in family.closes:
            left = left.replace(word, "")
        left = ID.sub("", left).lstrip(BETWEEN)
        return [Heard("said", left)] if left else [], text[end:]


def partly(arguments: str) -> dict[str, Any]:
    """As much of a call's arguments as was told whole, as Anthropic's client reads those of one
    that was cut off.
    """
    for text in _closed(arguments):
        try:
            found = strict(text)
        except (ValueError, RecursionError):
            continue
        return found if isinstance(found, dict) else {}
    return {}


def _closed(text: str) -> Iterator[str]:
    """What a text that was cut off may have been, the longest first: ended where it is, before a
    comma of it, or where something of it begins.
    """
    cuts = (at + (text[at] != ",") for at in range(len(text) - 1, -1, -1) if text[at] in ",{[")
    for end in islice(chain((len(text),), cuts), CUTS):
        scan = Arguments()
        kept = scan.take(text[:end])[0]
        if scan.rest is not None:
            yield kept + scan.rest
