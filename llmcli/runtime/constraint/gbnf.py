"""Translate grammars from GBNF, the format of llama.cpp (grammars/README.md,
src/llama-grammar.cpp), to llguidance's dialect of Lark.

Every character of a GBNF literal becomes a separate Lark lexeme. Longer lexemes would be wrong:
llguidance's lexer always takes the longest lexeme and does not backtrack, but GBNF has no lexemes.
"""

import re
from itertools import count

from llmcli.errors import UserError

# maximum number of characters of a grammar, and maximum depth of nested groups
MAX_CHARACTERS, MAX_DEPTH = 1 << 18, 200
MAX_REPETITIONS = 2000  # maximum number in {low,high}, as in llama.cpp
ESCAPES = {"t": "\t", "r": "\r", "n": "\n", "\\": "\\", '"': '"', "[": "[", "]": "]", "-": "-"}
HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
NAME, NUMBER = re.compile(r"[A-Za-z0-9-]+"), re.compile(r"[0-9]+")
TOKEN = re.compile(r"!?<(?:\[[0-9]{1,9}\]|[^>\[\r\n]+)>")


def to_lark(text: str) -> str:
    """Return the GBNF grammar `text` in llguidance's dialect of Lark.

    Raises UserError with the line and column when `text` is not a valid grammar, or contains single
    tokens such as <[5]>, which Lark cannot express.
    """
    rules = _read_rules(_Parser(text))
    return "%llguidance {}\n" + "".join(
        f"{_lark_name(name)}: {body}\n" for name, body in rules.items()
    )


def check_gbnf(text: str) -> list[str]:
    """Check a GBNF grammar that llama.cpp's own engine will use. Return the texts of the tokens
    that the grammar contains by name, such as <|im_end|>. The caller checks that the model has
    them.

    Raises UserError with the line and column when the grammar is not valid.
    """
    parser = _Parser(text, tokens=True)
    _read_rules(parser)
    return parser.named_tokens


def _read_rules(parser: "_Parser") -> dict[str, str]:
    """Return the body of each rule in Lark, by the rule's GBNF name. Raises UserError when the text
    is too long or not valid, or when a rule is missing.
    """
    if len(parser.text) > MAX_CHARACTERS:
        raise UserError(
            f"the grammar has {len(parser.text)} characters; the limit is {MAX_CHARACTERS}",
            hint="use a smaller grammar",
        )
    if "\0" in parser.text:  # llama.cpp would read only the text before it
        raise parser.error_at("a NUL character", parser.text.index("\0"))
    rules = parser.rules()
    if "root" not in rules:
        raise UserError(
            "the grammar has no rule called root",
            hint="add the rule of the whole answer: root ::= …",
        )
    for name, position in parser.used_rules.items():
        if name not in rules:
            raise parser.error_at(f"there is no rule called {name}", position)
    return rules


def _lark_name(name: str) -> str:
    """Return the Lark name for the rule `name`. GBNF names may contain hyphens and capital letters.
    Lark names contain only lower-case letters, digits and underscores.
    """
    escaped = "".join(
        letter if letter.islower() or letter.isdigit() else f"_{ord(letter)}_" for letter in name
    )
    return "start" if name == "root" else f"r_{escaped}"


def _lark_character(character: str) -> str:
    """Return a character as an escape in a Lark regular expression, such as \\x{41}."""
    return rf"\x{{{ord(character):X}}}"


class _Parser:
    """A recursive-descent parser of GBNF, which translates to Lark while it reads. A method that
    reads something starts at `position`, moves `position` behind it, and returns it in Lark.
    """

    def __init__(self, text: str, tokens: bool = False) -> None:
        """`tokens`: whether the grammar may contain single tokens, such as <[5]> or <|im_end|>.
        Lark cannot express them.
        """
        self.text, self.tokens = text, tokens
        self.position = 0  # index of the next character
        # the rules that the grammar refers to, each with the position of its first use
        self.used_rules: dict[str, int] = {}
        self.named_tokens: list[str] = []  # the tokens that it contains by name

    def rules(self) -> dict[str, str]:
        """Read the whole grammar. Return the body of each rule in Lark, by the rule's GBNF name."""
        rules: dict[str, str] = {}
        self._skip_space(lines=True)
        while self.position < len(self.text):
            start, name = self.position, self._match(NAME, "a rule's name")
            if name in rules:
                raise self.error_at(f"the rule {name} is there twice", start)
            self._skip_space()
            self._expect("::=")
            self._skip_space(lines=True)
            rules[name] = self._read_choice(0)
            if self.position < len(self.text) and self._peek() not in "\r\n":
                raise self.error_at("expected the end of the rule")
            self._skip_space(lines=True)
        return rules

    def error_at(self, problem: str, position: int | None = None) -> UserError:
        """Return an error that contains `problem` and the line and column of `position`, which is
        the parser's position by default.
        """
        before = self.text[: self.position if position is None else position]
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        return UserError(
            f"the grammar is wrong in line {line}, column {column}: {problem}",
            hint='root ::= "yes" | "no"',
        )

    def _read_choice(self, depth: int) -> str:
        """Read alternatives that are separated by |. `depth`: the number of enclosing groups."""
        if depth > MAX_DEPTH:
            raise self.error_at(f"more than {MAX_DEPTH} groups within groups")
        alternatives = [self._read_sequence(depth)]
        while self._peek() == "|":
            self.position += 1
            self._skip_space(lines=True)
            alternatives.append(self._read_sequence(depth))
        return " | ".join(alternatives)

    def _read_sequence(self, depth: int) -> str:
        """Read one alternative: any number of items, each with its repetitions."""
        items: list[str] = []
        while (item := self._read_item(depth)) is not None:
            self._skip_space(lines=depth > 0)
            for n_suffixes in count():
                if (times := self._read_repetition()) is None:
                    break
                if n_suffixes == MAX_DEPTH:
                    raise self.error_at(f"more than {MAX_DEPTH} repetitions of repetitions")
                item = f"({item}){times}"
                self._skip_space(lines=depth > 0)
            items.append(item)
        return " ".join(items) or '""'

    def _read_item(self, depth: int) -> str | None:
        """Read a literal, a character class, a group, a dot, a token or a rule's name. Return None
        when the text continues with something else.
        """
        character = self._peek()
        if character == '"':
            return self._read_literal()
        if character == "[":
            return self._read_class()
        if character == "(":
            self.position += 1
            self._skip_space(lines=True)
            inner = self._read_choice(depth + 1)
            self._expect(")")
            return f"({inner})"
        if character == ".":
            self.position += 1
            return "/(?s:.)/"
        if character and character in "<!":
            if not self.tokens:
                raise self.error_at("tokens in a grammar need --grammar-engine llama")
            word = self._match(TOKEN, "a token: <[5]> or <|name|>")
            if "[" not in word:
                self.named_tokens.append(word.removeprefix("!"))
            return word
        if character and NAME.match(character):
            start, name = self.position, self._match(NAME, "a name")
            self.used_rules.setdefault(name, start)
            return _lark_name(name)
        return None

    def _read_literal(self) -> str:
        """Read a text in quotes. Each character becomes a lexeme."""
        self.position += 1
        lexemes = []
        while self._peek() != '"':
            lexemes.append(f"/{_lark_character(self._read_character())}/")
        self.position += 1
        return f"({' '.join(lexemes)})" if lexemes else '""'

    def _read_class(self) -> str:
        """Read a character class such as [^a-z]."""
        start = self.position
        self.position += 1
        is_negated = self._peek() == "^"
        self.position += is_negated
        ranges = ""
        while self._peek() != "]":
            first = last = self._read_character()
            if self._peek() == "-" and self.text[self.position + 1 : self.position + 2] != "]":
                self.position += 1
                last = self._read_character()
            if last < first:
                raise self.error_at(f"the range {first}-{last} is empty", start)
            ranges += _lark_character(first)
            if last != first:
                ranges += f"-{_lark_character(last)}"
        self.position += 1
        if not ranges:
            raise self.error_at("an empty character class", start)
        return f"/[{'^' if is_negated else ''}{ranges}]/"

    def _read_character(self) -> str:
        """Read one character of a literal or class, which may be an escape. Return the character
        itself.
        """
        character = self._peek()
        if not character:
            raise self.error_at("the text ends in the middle of a literal or class")
        self.position += 1
        if character != "\\":
            return character
        kind = self._peek()
        self.position += 1
        if kind in HEX_DIGITS:
            digits = self.text[self.position : self.position + HEX_DIGITS[kind]]
            if not re.fullmatch(r"[0-9A-Fa-f]+", digits) or len(digits) != HEX_DIGITS[kind]:
                raise self.error_at(rf"\{kind} takes {HEX_DIGITS[kind]} hexadecimal digits")
            self.position += len(digits)
            code = int(digits, 16)
            if code > 0x10FFFF or 0xD800 <= code < 0xE000:
                raise self.error_at(rf"\{kind}{digits} is no character")
            return chr(code)
        if kind not in ESCAPES or not kind:
            raise self.error_at(rf"there is no escape \{kind}")
        return ESCAPES[kind]

    def _read_repetition(self) -> str | None:
        """Read *, +, ? or {low,high} after an item. Return None when there is none."""
        character = self._peek()
        if character and character in "*+?":
            self.position += 1
            return character
        if character != "{":
            return None
        start = self.position
        self.position += 1
        self._skip_space(lines=True)
        low = high = self._match(NUMBER, "a number")
        self._skip_space(lines=True)
        if self._peek() == ",":
            self.position += 1
            self._skip_space(lines=True)
            high = self._match(NUMBER, "a number") if self._peek().isdigit() else ""
            self._skip_space(lines=True)
        self._expect("}")
        if (
            max(len(low), len(high)) > 4
            or int(low) > MAX_REPETITIONS
            or int(high or 0) > MAX_REPETITIONS
        ):
            raise self.error_at(f"more than {MAX_REPETITIONS} repetitions", start)
        if high and int(high) < int(low):
            raise self.error_at("the maximum is below the minimum", start)
        return f"{{{int(low)},{int(high) if high else ''}}}"

    def _peek(self) -> str:
        """Return the next character, or an empty string at the end of the grammar."""
        return self.text[self.position : self.position + 1]

    def _expect(self, word: str) -> None:
        """Move behind `word`. Raises UserError when the text continues differently."""
        if not self.text.startswith(word, self.position):
            raise self.error_at(f"expected {word}")
        self.position += len(word)

    def _match(self, pattern: re.Pattern[str], description: str) -> str:
        """Return the text that matches `pattern` at the position, and move behind it. Raises
        UserError, which contains `description`, when nothing matches.
        """
        match = pattern.match(self.text, self.position)
        if not match:
            raise self.error_at(f"expected {description}")
        self.position = match.end()
        return match[0]

    def _skip_space(self, lines: bool = False) -> None:
        """Move behind white space and comments. `lines`: also behind line ends."""
        pattern = r"(?:[ \t\r\n]|#[^\r\n]*)*" if lines else r"(?:[ \t]|#[^\r\n]*)*"
        match = re.compile(pattern).match(self.text, self.position)
        assert match
        self.position = match.end()
