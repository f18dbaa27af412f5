"""GBNF, llama.cpp's grammars (grammars/README.md, src/llama-grammar.cpp), as the Lark text that
llguidance takes.

Every character becomes a lexeme of its own: llguidance's lexer takes the longest lexeme and does
not turn back, GBNF knows no lexemes. It knows nothing of models.
"""

import re
from itertools import count

from llmcli.errors import UserError

LARGEST, DEEPEST = 1 << 18, 200  # characters of a grammar, groups within groups
MOST = 2000  # repetitions, as in llama.cpp
ESCAPES = {"t": "\t", "r": "\r", "n": "\n", "\\": "\\", '"': '"', "[": "[", "]": "]", "-": "-"}
HEX = {"x": 2, "u": 4, "U": 8}
NAME, NUMBER = re.compile(r"[A-Za-z0-9-]+"), re.compile(r"[0-9]+")
TOKEN = re.compile(r"!?<(?:\[[0-9]{1,9}\]|[^>\[\r\n]+)>")


def to_lark(text: str) -> str:
    """The same language in Lark; raises UserError with line and column where `text` is no grammar."""
    rules = _rules(_Parser(text))
    return "%llguidance {}\n" + "".join(f"{_lark(name)}: {body}\n" for name, body in rules.items())


def check(text: str) -> list[str]:
    """The tokens that `text` names, <|name|>; raises UserError with line and column where llama.cpp
    cannot read it.
    """
    parser = _Parser(text, tokens=True)
    _rules(parser)
    return parser.named


def _rules(parser: "_Parser") -> dict[str, str]:
    if len(parser.text) > LARGEST:
        raise UserError(f"the grammar has {len(parser.text)} characters", hint=f"at most {LARGEST}")
    if "\0" in parser.text:  # where C would think that it ends
        raise parser.wrong("a NUL character", parser.text.index("\0"))
    rules = parser.rules()
    if "root" not in rules:
        raise UserError(
            "the grammar has no rule called root",
            hint="root is where the answer begins: root ::= …",
        )
    for name, at in parser.used.items():
        if name not in rules:
            raise parser.wrong(f"there is no rule called {name}", at)
    return rules


def _lark(name: str) -> str:
    """A rule's name: Lark takes small letters and underscores, GBNF hyphens and capitals."""
    spelled = "".join(
        letter if letter.islower() or letter.isdigit() else f"_{ord(letter)}_" for letter in name
    )
    return "start" if name == "root" else f"r_{spelled}"


def _char(character: str) -> str:
    return rf"\x{{{ord(character):X}}}"


class _Parser:
    """Reads a grammar from the left; `used` are the names of rules and where they first stand."""

    def __init__(self, text: str, tokens: bool = False) -> None:
        """`tokens`: single tokens, <[5]> or <|name|>, may be part of it; Lark has no words for
        them.
        """
        self.text, self.tokens, self.at, self.used = text, tokens, 0, dict[str, int]()
        self.named: list[str] = []

    def rules(self) -> dict[str, str]:
        """Each rule's name and its body in Lark."""
        found: dict[str, str] = {}
        self._space(lines=True)
        while self.at < len(self.text):
            at, name = self.at, self._match(NAME, "a rule's name")
            if name in found:
                raise self.wrong(f"the rule {name} is there twice", at)
            self._space()
            self._expect("::=")
            self._space(lines=True)
            found[name] = self._choice(0)
            if self.at < len(self.text) and self._here() not in "\r\n":
                raise self.wrong("expected the end of the rule")
            self._space(lines=True)
        return found

    def wrong(self, what: str, at: int | None = None) -> UserError:
        """A mistake, with the place where it stands."""
        before = self.text[: self.at if at is None else at]
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        return UserError(
            f"the grammar is wrong in line {line}, column {column}: {what}",
            hint='root ::= "yes" | "no"',
        )

    def _choice(self, depth: int) -> str:
        if depth > DEEPEST:
            raise self.wrong(f"more than {DEEPEST} groups within groups")
        options = [self._sequence(depth)]
        while self._here() == "|":
            self.at += 1
            self._space(lines=True)
            options.append(self._sequence(depth))
        return " | ".join(options)

    def _sequence(self, depth: int) -> str:
        items: list[str] = []
        while (item := self._item(depth)) is not None:
            self._space(lines=depth > 0)
            for again in count():
                if (times := self._times()) is None:
                    break
                if again == DEEPEST:
                    raise self.wrong(f"more than {DEEPEST} repetitions of repetitions")
                item = f"({item}){times}"
                self._space(lines=depth > 0)
            items.append(item)
        return " ".join(items) or '""'

    def _item(self, depth: int) -> str | None:
        here = self._here()
        if here == '"':
            return self._literal()
        if here == "[":
            return self._class()
        if here == "(":
            self.at += 1
            self._space(lines=True)
            inner = self._choice(depth + 1)
            self._expect(")")
            return f"({inner})"
        if here == ".":
            self.at += 1
            return "/(?s:.)/"
        if here and here in "<!":
            if not self.tokens:
                raise self.wrong("only --grammar-engine llama takes tokens in a grammar")
            word = self._match(TOKEN, "a token: <[5]> or <|name|>")
            if "[" not in word:
                self.named.append(word.removeprefix("!"))
            return word
        if here and NAME.match(here):
            at, name = self.at, self._match(NAME, "a name")
            self.used.setdefault(name, at)
            return _lark(name)
        return None

    def _literal(self) -> str:
        self.at += 1
        letters = []
        while self._here() != '"':
            letters.append(f"/{_char(self._letter())}/")
        self.at += 1
        return f"({' '.join(letters)})" if letters else '""'

    def _class(self) -> str:
        start = self.at
        self.at += 1
        negated = self._here() == "^"
        self.at += negated
        parts = ""
        while self._here() != "]":
            first = last = self._letter()
            if self._here() == "-" and self.text[self.at + 1 : self.at + 2] != "]":
                self.at += 1
                last = self._letter()
            if last < first:
                raise self.wrong(f"the range {first}-{last} is empty", start)
            parts += _char(first) if first == last else f"{_char(first)}-{_char(last)}"
        self.at += 1
        if not parts:
            raise self.wrong("a class of no characters", start)
        return f"/[{'^' if negated else ''}{parts}]/"

    def _letter(self) -> str:
        here = self._here()
        if not here:
            raise self.wrong("the text ends in the middle of a literal or class")
        self.at += 1
        if here != "\\":
            return here
        kind = self._here()
        self.at += 1
        if kind in HEX:
            digits = self.text[self.at : self.at + HEX[kind]]
            if not re.fullmatch(r"[0-9A-Fa-f]+", digits) or len(digits) != HEX[kind]:
                raise self.wrong(rf"\{kind} takes {HEX[kind]} hexadecimal digits")
            self.at += len(digits)
            code = int(digits, 16)
            if code > 0x10FFFF or 0xD800 <= code < 0xE000:
                raise self.wrong(rf"\{kind}{digits} is no character")
            return chr(code)
        if kind not in ESCAPES or not kind:
            raise self.wrong(rf"there is no escape \{kind}")
        return ESCAPES[kind]

    def _times(self) -> str | None:
        here = self._here()
        if here and here in "*+?":
            self.at += 1
            return here
        if here != "{":
            return None
        start = self.at
        self.at += 1
        self._space(lines=True)
        least = most = self._match(NUMBER, "a number")
        self._space(lines=True)
        if self._here() == ",":
            self.at += 1
            self._space(lines=True)
            most = self._match(NUMBER, "a number") if self._here().isdigit() else ""
            self._space(lines=True)
        self._expect("}")
        if max(len(least), len(most)) > 4 or int(least) > MOST or int(most or 0) > MOST:
            raise self.wrong(f"more than {MOST} repetitions", start)
        if most and int(most) < int(least):
            raise self.wrong("at most fewer times than at least", start)
        return f"{{{int(least)},{int(most) if most else ''}}}"

    def _here(self) -> str:
        return self.text[self.at : self.at + 1]

    def _expect(self, word: str) -> None:
        if not self.text.startswith(word, self.at):
            raise self.wrong(f"expected {word}")
        self.at += len(word)

    def _match(self, pattern: re.Pattern[str], what: str) -> str:
        found = pattern.match(self.text, self.at)
        if not found:
            raise self.wrong(f"expected {what}")
        self.at = found.end()
        return found[0]

    def _space(self, lines: bool = False) -> None:
        pattern = r"(?:[ \t\r\n]|#[^\r\n]*)*" if lines else r"(?:[ \t]|#[^\r\n]*)*"
        found = re.compile(pattern).match(self.text, self.at)
        assert found
        self.at = found.end()
