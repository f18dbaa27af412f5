"""Translates GBNF, llama.cpp's grammars (grammars/README.md, src/llama-grammar.cpp), into the Lark
syntax that llguidance reads.

GBNF has no lexemes. Each character becomes a separate lexeme in Lark, because llguidance's lexer
always takes the longest lexeme and does not backtrack.
"""

import re
from itertools import count

from llmcli.errors import UserError

# maximum characters of a grammar, and maximum depth of nested groups
MAX_CHARACTERS, MAX_DEPTH = 1 << 18, 200
MAX_REPETITIONS = 2000  # maximum repetitions of an item, as in llama.cpp
ESCAPES = {"t": "\t", "r": "\r", "n": "\n", "\\": "\\", '"': '"', "[": "[", "]": "]", "-": "-"}
HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
NAME, NUMBER = re.compile(r"[A-Za-z0-9-]+"), re.compile(r"[0-9]+")
TOKEN = re.compile(r"!?<(?:\[[0-9]{1,9}\]|[^>\[\r\n]+)>")


def to_lark(text: str) -> str:
    """Return the GBNF grammar `text` in Lark.

    Raises UserError with line and column when `text` is not a valid grammar.
    """
    rules = _rules(_Parser(text))
    return "%llguidance {}\n" + "".join(f"{_lark(name)}: {body}\n" for name, body in rules.items())


def check_gbnf(text: str) -> list[str]:
    """Check a grammar for llama.cpp's engine. Return the tokens that the grammar contains by name,
    such as <|name|>.

    Raises UserError with line and column when llama.cpp could not read the grammar.
    """
    parser = _Parser(text, tokens=True)
    _rules(parser)
    return parser.named


def _rules(parser: "_Parser") -> dict[str, str]:
    if len(parser.text) > MAX_CHARACTERS:
        raise UserError(
            f"the grammar has {len(parser.text)} characters; the limit is {MAX_CHARACTERS}",
            hint="use a smaller grammar",
        )
    if "\0" in parser.text:  # C code would take it for the end of the text
        raise parser.wrong("a NUL character", parser.text.index("\0"))
    rules = parser.rules()
    if "root" not in rules:
        raise UserError(
            "the grammar has no rule called root",
            hint="add the rule of the whole answer: root ::= …",
        )
    for name, at in parser.used.items():
        if name not in rules:
            raise parser.wrong(f"there is no rule called {name}", at)
    return rules


def _lark(name: str) -> str:
    """Return the name of a rule in Lark. GBNF names have hyphens and capitals; Lark names have only
    lower-case letters, digits and underscores.
    """
    spelled = "".join(
        letter if letter.islower() or letter.isdigit() else f"_{ord(letter)}_" for letter in name
    )
    return "start" if name == "root" else f"r_{spelled}"


def _char(character: str) -> str:
    return rf"\x{{{ord(character):X}}}"


class _Parser:
    """Reads a grammar from left to right. `used`: the names of rules that the grammar refers to,
    each with the position of its first use.
    """

    def __init__(self, text: str, tokens: bool = False) -> None:
        """`tokens`: whether the grammar may contain single tokens, such as <[5]> or <|name|>. Lark
        cannot express them.
        """
        self.text, self.tokens, self.at, self.used = text, tokens, 0, dict[str, int]()
        self.named: list[str] = []

    def rules(self) -> dict[str, str]:
        """Return each rule's name and its body in Lark."""
        rules: dict[str, str] = {}
        self._space(lines=True)
        while self.at < len(self.text):
            at, name = self.at, self._match(NAME, "a rule's name")
            if name in rules:
                raise self.wrong(f"the rule {name} is there twice", at)
            self._space()
            self._expect("::=")
            self._space(lines=True)
            rules[name] = self._choice(0)
            if self.at < len(self.text) and self._here() not in "\r\n":
                raise self.wrong("expected the end of the rule")
            self._space(lines=True)
        return rules

    def wrong(self, what: str, at: int | None = None) -> UserError:
        """Return an error that contains line and column of position `at`, or of the present
        position. `what`: what is wrong there.
        """
        before = self.text[: self.at if at is None else at]
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        return UserError(
            f"the grammar is wrong in line {line}, column {column}: {what}",
            hint='root ::= "yes" | "no"',
        )

    def _choice(self, depth: int) -> str:
        if depth > MAX_DEPTH:
            raise self.wrong(f"more than {MAX_DEPTH} groups within groups")
        alternatives = [self._sequence(depth)]
        while self._here() == "|":
            self.at += 1
            self._space(lines=True)
            alternatives.append(self._sequence(depth))
        return " | ".join(alternatives)

    def _sequence(self, depth: int) -> str:
        items: list[str] = []
        while (item := self._item(depth)) is not None:
            self._space(lines=depth > 0)
            for n_suffixes in count():
                if (times := self._times()) is None:
                    break
                if n_suffixes == MAX_DEPTH:
                    raise self.wrong(f"more than {MAX_DEPTH} repetitions of repetitions")
                item = f"({item}){times}"
                self._space(lines=depth > 0)
            items.append(item)
        return " ".join(items) or '""'

    def _item(self, depth: int) -> str | None:
        character = self._here()
        if character == '"':
            return self._literal()
        if character == "[":
            return self._class()
        if character == "(":
            self.at += 1
            self._space(lines=True)
            inner = self._choice(depth + 1)
            self._expect(")")
            return f"({inner})"
        if character == ".":
            self.at += 1
            return "/(?s:.)/"
        if character and character in "<!":
            if not self.tokens:
                raise self.wrong("tokens in a grammar need --grammar-engine llama")
            word = self._match(TOKEN, "a token: <[5]> or <|name|>")
            if "[" not in word:
                self.named.append(word.removeprefix("!"))
            return word
        if character and NAME.match(character):
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
            raise self.wrong("an empty character class", start)
        return f"/[{'^' if negated else ''}{parts}]/"

    def _letter(self) -> str:
        character = self._here()
        if not character:
            raise self.wrong("the text ends in the middle of a literal or class")
        self.at += 1
        if character != "\\":
            return character
        kind = self._here()
        self.at += 1
        if kind in HEX_DIGITS:
            digits = self.text[self.at : self.at + HEX_DIGITS[kind]]
            if not re.fullmatch(r"[0-9A-Fa-f]+", digits) or len(digits) != HEX_DIGITS[kind]:
                raise self.wrong(rf"\{kind} takes {HEX_DIGITS[kind]} hexadecimal digits")
            self.at += len(digits)
            code = int(digits, 16)
            if code > 0x10FFFF or 0xD800 <= code < 0xE000:
                raise self.wrong(rf"\{kind}{digits} is no character")
            return chr(code)
        if kind not in ESCAPES or not kind:
            raise self.wrong(rf"there is no escape \{kind}")
        return ESCAPES[kind]

    def _times(self) -> str | None:
        character = self._here()
        if character and character in "*+?":
            self.at += 1
            return character
        if character != "{":
            return None
        start = self.at
        self.at += 1
        self._space(lines=True)
        low = high = self._match(NUMBER, "a number")
        self._space(lines=True)
        if self._here() == ",":
            self.at += 1
            self._space(lines=True)
            high = self._match(NUMBER, "a number") if self._here().isdigit() else ""
            self._space(lines=True)
        self._expect("}")
        if (
            max(len(low), len(high)) > 4
            or int(low) > MAX_REPETITIONS
            or int(high or 0) > MAX_REPETITIONS
        ):
            raise self.wrong(f"more than {MAX_REPETITIONS} repetitions", start)
        if high and int(high) < int(low):
            raise self.wrong("the maximum is below the minimum", start)
        return f"{{{int(low)},{int(high) if high else ''}}}"

    def _here(self) -> str:
        return self.text[self.at : self.at + 1]

    def _expect(self, word: str) -> None:
        if not self.text.startswith(word, self.at):
            raise self.wrong(f"expected {word}")
        self.at += len(word)

    def _match(self, pattern: re.Pattern[str], what: str) -> str:
        match = pattern.match(self.text, self.at)
        if not match:
            raise self.wrong(f"expected {what}")
        self.at = match.end()
        return match[0]

    def _space(self, lines: bool = False) -> None:
        pattern = r"(?:[ \t\r\n]|#[^\r\n]*)*" if lines else r"(?:[ \t]|#[^\r\n]*)*"
        match = re.compile(pattern).match(self.text, self.at)
        assert match
        self.at = match.end()
