"""Translate the regular expressions of the keyword `pattern` for llguidance.

JSON Schema uses the syntax of ECMA-262. llguidance uses that of Rust, without lookarounds. The
translation accepts exactly the same strings. Lookaheads at the beginning of a pattern become
patterns of their own, all of which a string must match.
"""

import re
from collections.abc import Iterable, Iterator, Sequence

# The characters of ECMA's \s, and those that its dot does not match, as parts of a class.
SPACES = r"\t\n\x0b\x0c\r \xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
LINE_ENDS = r"\n\r\u2028\u2029"
NEGATED_LETTERS = {"D": "0-9", "W": "0-9A-Za-z_", "S": SPACES}
CLASS_ESCAPES = {"d": r"0-9", "w": r"0-9A-Za-z_", "s": SPACES}
CONTROL_LETTERS = {"t": "\t", "n": "\n", "r": "\r", "f": "\x0c", "v": "\x0b", "0": "\0"}
REPETITION = re.compile(r"\{(\d+)(?:,(\d*))?\}")
ESCAPED_CODE = re.compile(
    r"\\u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})"
    r"|\\u\{([0-9a-fA-F]{1,6})\}|\\u([0-9a-fA-F]{4})|\\x([0-9a-fA-F]{2})"
)
GROUP_OPENING = re.compile(r"\(\?(?:(?P<look><?[=!])|P?<(?P<name>\w+)>|:|(?P<flags>[a-z-]+:?))?")
LITERAL_BODY = re.compile(r"(?:[^\\\[\](){}.*+?|^$]|\\[^\w])+")
MAX_COMPLEMENT = 400  # maximum number of characters of the strings that a pattern excludes
EVERYTHING = r"[\s\S]*"


class UnsupportedPattern(ValueError):
    """Raised for a regular expression that no grammar can follow. The text is the reason."""


def translate_pattern(pattern: str) -> list[str]:
    """Return regular expressions in Rust's syntax. A string matches all of them exactly if it
    matches `pattern`, which is in ECMA's syntax. Raises UnsupportedPattern.
    """
    if len(pattern) > 1 and pattern[0] == "^":
        body, lookaheads = _split_lookaheads(pattern[1:])
        if lookaheads and "|" in _outside_groups(body):
            raise UnsupportedPattern("a lookahead before alternatives")
        if lookaheads:
            return [*map(_lookahead_pattern, lookaheads), *translate_pattern("^" + body)]
    return [_Translator(pattern).translate()]


def exclude_strings(literals: Sequence[str]) -> str:
    """Return a pattern that matches every string except `literals`. Raises UnsupportedPattern when
    they are too long together.
    """
    return f"^(?:{_complement(literals, is_prefix=False)})$"


def escape_literal(text: str) -> str:
    """Return a pattern that matches `text` itself."""
    return "".join(
        letter if letter.isalnum() and letter.isascii() else rf"\x{{{ord(letter):X}}}"
        for letter in text
    )


def _complement(literals: Iterable[str], is_prefix: bool) -> str:
    """Return a pattern of all strings that do not equal one of `literals`, or with `is_prefix` do
    not begin with one of them.
    """
    words = list(dict.fromkeys(literals))
    if sum(map(len, words)) > MAX_COMPLEMENT:
        raise UnsupportedPattern("it excludes too many strings")
    by_first: dict[str, list[str]] = {}
    for word in words:
        if word:
            by_first.setdefault(word[0], []).append(word[1:])
    if "" in words and is_prefix:
        return "[^\\s\\S]"  # nothing is left
    others = "".join(map(escape_literal, by_first))
    alternatives = [f"[^{others}]{EVERYTHING}" if others else f"[\\s\\S]{EVERYTHING}"]
    if "" not in words:
        alternatives.append("")
    for letter, rests in by_first.items():
        if is_prefix and "" in rests:
            continue
        alternatives.append(f"{escape_literal(letter)}(?:{_complement(rests, is_prefix)})")
    return "|".join(alternatives)


def _exclude_inner(literal: str) -> str:
    """Return a pattern of all strings that do not contain `literal`. It is the automaton of Knuth,
    Morris and Pratt without its last state, written as a regular expression.
    """
    size, letters = len(literal), sorted(set(literal))
    if size > 4:
        raise UnsupportedPattern("a lookahead for a long text")
    table: list[dict[str, int]] = []
    for state in range(size):
        row = {}
        for letter in letters:
            text = literal[:state] + letter
            row[letter] = next(
                length for length in range(len(text), -1, -1) if text.endswith(literal[:length])
            )
        table.append(row)
    others = f"[^{''.join(map(escape_literal, letters))}]"
    # the edges between states as patterns; any other letter leads to state 0
    edges: dict[tuple[int, int], str] = {}
    for state, row in enumerate(table):
        by_target: dict[int, list[str]] = {0: [others]}
        for letter, target in row.items():
            if target < size:
                by_target.setdefault(target, []).append(escape_literal(letter))
        for target, choices in by_target.items():
            edges[state, target] = f"(?:{'|'.join(choices)})"
    # all states accept: remove them one by one, the last first
    endings = dict.fromkeys(range(size), "")
    for state in range(size - 1, 0, -1):
        loop = f"{edges[state, state]}*" if (state, state) in edges else ""
        targets = [target for origin, target in edges if origin == state and target != state]
        for origin in [first for first, second in edges if second == state and first != state]:
            into = edges[origin, state] + loop
            for target in targets:
                path = into + edges[state, target]
                before = edges.get((origin, target))
                edges[origin, target] = f"(?:{before}|{path})" if before else f"(?:{path})"
            endings[origin] = f"(?:{endings[origin]}|{into}(?:{endings[state]}))"
        edges = {edge: text for edge, text in edges.items() if state not in edge}
    return f"^(?:{edges[0, 0]})*(?:{endings[0]})$"


def _lookahead_pattern(lookahead: tuple[str, str]) -> str:
    """Return the pattern of a lookahead at the beginning of a string. `lookahead`: its sign, = or
    !, and its body.
    """
    sign, body = lookahead
    if sign == "=":
        return translate_pattern(f"^(?:{body})")[0]
    is_inner = body.startswith(".*")
    rest = body.removeprefix(".*")
    is_end = rest.endswith("$") and not rest.endswith("\\$")
    literals = [_read_literal(part) for part in _strip_group(rest.removesuffix("$")).split("|")]
    if is_inner and is_end:
        raise UnsupportedPattern("a lookahead for the end of a text")
    if not is_inner:
        return f"^(?:{_complement(literals, is_prefix=not is_end)})$"
    if len(literals) > 1:
        raise UnsupportedPattern("a lookahead for several texts")
    return _exclude_inner(literals[0])


def _read_literal(pattern: str) -> str:
    """Return the only text that a pattern matches. Raises UnsupportedPattern for any other
    pattern.
    """
    if not LITERAL_BODY.fullmatch(pattern):
        raise UnsupportedPattern("a lookahead")
    return re.sub(r"\\(.)", r"\1", pattern)


def _strip_group(pattern: str) -> str:
    """Return the inside of a pattern that is one group, else the pattern itself."""
    for opening in ("(?:", "("):
        inner = pattern.removeprefix(opening).removesuffix(")")
        if pattern == opening + inner + ")" and not re.search(r"[()]", inner):
            return inner
    return pattern


def _split_lookaheads(pattern: str) -> tuple[str, list[tuple[str, str]]]:
    """Split the lookaheads off the beginning of a pattern. Return the rest, and the sign and the
    body of each lookahead.
    """
    lookaheads = []
    while pattern.startswith(("(?=", "(?!")):
        end = _group_end(pattern)
        lookaheads.append((pattern[2], pattern[3:end]))
        pattern = pattern[end + 1 :]
    return pattern, lookaheads


def _walk_groups(pattern: str) -> Iterator[tuple[int, str, int]]:
    """Yield the index of each character outside classes and escapes, the character, and the number
    of groups that are open after it.
    """
    depth, in_class, index = 0, False, 0
    while index < len(pattern):
        letter = pattern[index]
        if letter == "\\":
            index += 1
        elif in_class:
            in_class = letter != "]"
        elif letter == "[":
            in_class = True
        else:
            depth += (letter == "(") - (letter == ")")
            yield index, letter, depth
        index += 1


def _group_end(pattern: str) -> int:
    """Return the index of the parenthesis that closes the group at the beginning of `pattern`."""
    for index, letter, depth in _walk_groups(pattern):
        if letter == ")" and depth == 0:
            return index
    raise UnsupportedPattern("an unclosed group")


def _outside_groups(pattern: str) -> str:
    """Return the characters of a pattern that are outside all groups and classes."""
    return "".join(
        letter for _, letter, depth in _walk_groups(pattern) if depth == 0 and letter not in "()"
    )


class _Translator:
    """Reads a pattern in ECMA's syntax from left to right and writes it in Rust's."""

    def __init__(self, pattern: str) -> None:
        self._pattern, self._index = pattern, 0
        self._written: list[str] = []

    def translate(self) -> str:
        """Return the translated pattern. Raises UnsupportedPattern."""
        while self._index < len(self._pattern):
            self._written.append(self._next())
        return "".join(self._written)

    def _next(self) -> str:
        """Read one element of the pattern, and return it translated."""
        pattern, start = self._pattern, self._index
        letter = pattern[start]
        self._index += 1
        if letter == "\\":
            return self._escape(in_class=False)
        if letter == "[":
            return self._class()
        if letter == ".":
            return f"[^{LINE_ENDS}]"
        if letter == "(":
            return self._group()
        if letter == "{":
            repetition = REPETITION.match(pattern, start)
            if repetition is None or not self._written:
                return r"\{"
            self._index = repetition.end()
            return repetition[0] + self._lazy_mark()
        if letter in "*+?":
            return letter + self._lazy_mark()
        return rf"\{letter}" if letter in "}]#&~-" else letter

    def _lazy_mark(self) -> str:
        """Skip the mark of a lazy repetition, which does not change what a pattern matches."""
        if self._pattern.startswith("+", self._index):
            raise UnsupportedPattern("a possessive repetition")
        if self._pattern.startswith("?", self._index):
            self._index += 1
        return ""

    def _group(self) -> str:
        """Translate the opening of a group."""
        opening = GROUP_OPENING.match(self._pattern, self._index - 1)
        if opening is None:
            return "("
        self._index = opening.end()
        if opening["look"]:
            raise UnsupportedPattern("a lookahead or lookbehind")
        if opening["flags"]:
            if set(opening["flags"]) - set("is:-"):
                raise UnsupportedPattern(f"the flags {opening['flags']}")
            return opening[0]
        return "(?:"

    def _escape(self, in_class: bool) -> str:
        """Translate the escape sequence whose backslash has just been read."""
        pattern, start = self._pattern, self._index - 1
        if self._index == len(pattern):
            raise UnsupportedPattern("a backslash at the end")
        if code := ESCAPED_CODE.match(pattern, start):
            self._index = code.end()
            return self._code(code)
        letter = pattern[self._index]
        self._index += 1
        if letter in CLASS_ESCAPES:
            return CLASS_ESCAPES[letter] if in_class else f"[{CLASS_ESCAPES[letter]}]"
        if letter in NEGATED_LETTERS:
            return f"[^{NEGATED_LETTERS[letter]}]"
        if letter in CONTROL_LETTERS and not (
            letter == "0" and pattern[self._index : self._index + 1].isdigit()
        ):
            return rf"\x{{{ord(CONTROL_LETTERS[letter]):X}}}"
        if letter == "b" and in_class:
            return r"\x{8}"
        if letter == "c" and re.match(r"[A-Za-z]", pattern[self._index : self._index + 1]):
            self._index += 1
            return rf"\x{{{ord(pattern[self._index - 1]) % 32:X}}}"
        if letter in "pP" and pattern.startswith("{", self._index):
            end = pattern.find("}", self._index) + 1
            if end > 0:
                name, self._index = pattern[self._index : end], end
                return f"\\{letter}{name}"
        if not in_class and letter in "AZz":
            return "^" if letter == "A" else "$"
        if letter.isalnum():
            raise UnsupportedPattern(f"\\{letter}")
        return escape_literal(letter)

    def _code(self, code: re.Match[str]) -> str:
        """Translate the escape sequence of a character's number."""
        high, low, braced, four, two = code.groups()
        number = int(high or braced or four or two, 16)
        if high:
            number = 0x10000 + ((number - 0xD800) << 10) + int(low, 16) - 0xDC00
        if 0xD800 <= number <= 0xDFFF or number > 0x10FFFF:
            raise UnsupportedPattern("half a character")
        return rf"\x{{{number:X}}}"

    def _class(self) -> str:
        """Translate a class of characters, whose opening bracket has just been read."""
        pattern = self._pattern
        is_negated = pattern.startswith("^", self._index)
        self._index += is_negated
        parts: list[str] = []
        while self._index < len(pattern) and pattern[self._index] != "]":
            letter = pattern[self._index]
            self._index += 1
            if letter == "\\":
                parts.append(self._escape(in_class=True))
            elif letter == "-" and self._is_range(parts):
                parts.append("-")
            else:
                parts.append(escape_literal(letter))
        if self._index == len(pattern):
            raise UnsupportedPattern("an unclosed class")
        self._index += 1
        if not parts:
            return r"[\s\S]" if is_negated else r"[^\s\S]"
        return f"[{'^' * is_negated}{''.join(parts)}]"

    def _is_range(self, parts: list[str]) -> bool:
        """Return whether the hyphen before the next character stands between two characters. Next
        to a class such as \\w it means itself.
        """
        following = self._pattern[self._index : self._index + 2]
        return (
            bool(parts)
            and not following.startswith("]")
            and re.match(r"\\[dwsDWSpP]", following) is None
            and not self._ends_with_class(parts)
        )

    @staticmethod
    def _ends_with_class(parts: list[str]) -> bool:
        """Return whether the last part of a class is itself a class, or the end of a range."""
        last = parts[-1]
        return (
            last in CLASS_ESCAPES.values()
            or last.startswith(("[^", r"\p", r"\P"))
            or (len(parts) > 2 and parts[-2] == "-")
        )
