"""llguidance, the engine for JSON schemas and GBNF grammars, which computes token masks within
microseconds.

Its tokenizer is built from the bytes of the vocabulary. The library is imported only in this
module, and the module is loaded only when a constraint is used.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import llguidance
import numpy as np

from llmcli.errors import UserError
from llmcli.runtime.constraint import gbnf, schema_check, tool_calls
from llmcli.runtime.constraint.base import (
    Constraint,
    TokenBits,
    UnsatisfiableConstraint,
    single_token,
)

SPECIAL_PREFIX = b"\xff"  # prefix of the name of a token that is not text
# The white space that models usually write. If white space were optional, a model could repeat it
# without end.
JSON_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# Limits for schemas and grammars from untrusted sources. A grammar at these limits takes about a
# second.
PARSER_LIMITS = {
    "max_lexer_states": 50_000,
    "max_grammar_size": 300_000,
    "max_items_in_row": 12_000,
}
# Stack size of the thread that compiles. The library recurses once per level, including levels
# reached by references, and needs about 5 KB for each, so a deep schema would overflow the usual 8
# MiB. A document has room for 11,000 levels. Memory of an unused stack is never allocated.
STACK_BYTES = 256 << 20
# because a changed stack size applies to all threads that start meanwhile
STACK_SIZE_LOCK = threading.Lock()


class TokenizerWrapper:
    """A vocabulary in the form that llguidance expects: the bytes of each token, and a function
    that tokenizes.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(
        self, pieces: list[bytes], ends: list[int], tokenize: Callable[[str], list[int]]
    ) -> None:
        """`pieces`: the bytes of each token, empty for a token that is not text. `ends`: the end
        tokens.
        """
        self.tokens = [
            piece or SPECIAL_PREFIX + f"<|{token}|>".encode() for token, piece in enumerate(pieces)
        ]
        for token in ends:
            self.tokens[token] = SPECIAL_PREFIX + f"<|{token}|>".encode()
        self.eos_token_id: int = ends[0]
        self.special_token_ids: list[int] = []
        self._tokenize, self._pieces = tokenize, pieces
        self._known: dict[bytes, int] = {}
        self._longest = 0

    def __call__(self, text: str | bytes) -> list[int]:
        """Return tokens whose bytes are exactly `text`. If some bytes were missing, the library
        would allow more than the grammar does.
        """
        raw = text if isinstance(text, bytes) else text.encode()
        words = raw.decode("utf-8", "replace")
        tokens = self._tokenize(words)
        if self._bytes(tokens) == raw:
            return tokens
        tokens = self._tokenize(
            "\n" + words
        )  # SentencePiece adds a space before the first word only, which is the newline here
        cuts = (tokens[cut:] for cut in range(1, len(tokens)))
        return next(
            (suffix for suffix in cuts if self._bytes(suffix) == raw), None
        ) or self._greedily(raw)

    def _greedily(self, raw: bytes) -> list[int]:
        """Return tokens that match the longest possible piece at each step. The result ends early
        where no token matches.
        """
        if not self._known:
            self._known = {piece: token for token, piece in enumerate(self._pieces) if piece}
            self._longest = max(map(len, self._known))
        tokens: list[int] = []
        while raw:
            cuts = range(min(self._longest, len(raw)), 0, -1)
            token = next((self._known[raw[:cut]] for cut in cuts if raw[:cut] in self._known), None)
            if token is None:
                break
            tokens.append(token)
            raw = raw[len(self._pieces[token]) :]
        return tokens

    def _bytes(self, tokens: list[int]) -> bytes:
        return b"".join(self._pieces[token] for token in tokens)


class LLGuidanceCompiler:
    """Compiles constraints for one vocabulary. Creating the object takes a fraction of a second."""

    def __init__(self, tokenizer: TokenizerWrapper, ends: list[int]) -> None:
        self._tokenizer = llguidance.LLTokenizer(tokenizer, eos_token=ends)
        self._ends = frozenset(ends)

    def __call__(self, constraint: Constraint) -> "CompiledGrammar":
        """Compile a constraint.

        Raises UserError when llmcli's checks or the library refuse the schema or the grammar.
        """
        if constraint.kind == "json_schema":
            matcher = self._schema(schema_check.check_schema(constraint.text))
        elif constraint.kind == "calls":
            matcher = self._calls(tool_calls.read_tool_calls(constraint.text))
        else:
            matcher = self._matcher(
                llguidance.LLMatcher.grammar_from_lark(gbnf.to_lark(constraint.text))
            )
            if matcher.is_error():
                raise UserError(
                    f"the grammar cannot be followed: {_reason(matcher)}", hint="simplify it"
                )
        return CompiledGrammar(constraint, matcher, self._tokenizer.vocab_size, self._ends)

    def _schema(self, checked: schema_check.CheckedSchema) -> Any:
        matcher = self._matcher(_json_grammar(checked.text))
        if not matcher.is_error():
            return matcher
        # The library does not say which part is at fault, so each part is compiled alone, the
        # deepest first.
        for path, text in checked.inner_schemas():
            inner = self._matcher(_json_grammar(text))
            if inner.is_error():
                raise _refused(path, inner)
        raise _refused("#", matcher)

    def _calls(self, wanted: tool_calls.ToolCallGrammar) -> Any:
        layout = {"x-guidance": JSON_LAYOUT}
        matcher = self._matcher(
            llguidance.LLMatcher.grammar_from_lark(tool_calls.to_lark(wanted, layout))
        )
        if matcher.is_error():
            # the library does not say which function is at fault
            for arguments in wanted.arguments:
                self._schema(arguments)
            raise _refused("#", matcher)
        return matcher

    def _matcher(self, source: str) -> Any:
        limits = llguidance.LLParserLimits(**PARSER_LIMITS, verbose_errors=False)
        return _deep(
            lambda: llguidance.LLMatcher(self._tokenizer, source, log_level=0, limits=limits)
        )


class CompiledGrammar:
    """A constraint compiled by llguidance (Grammar)."""

    def __init__(
        self, constraint: Constraint, matcher: Any, size: int, ends: frozenset[int]
    ) -> None:
        self.constraint, self._matcher, self._size, self._ends = constraint, matcher, size, ends

    def start(self) -> "GrammarMatcher":
        return GrammarMatcher(
            self._matcher.deep_copy(), np.zeros((self._size + 31) // 32 * 4, np.uint8), self._ends
        )


class GrammarMatcher:
    """The progress of one answer in a grammar (Matcher). A matcher and its copies share one buffer
    for masks, which the next call of mask() overwrites.
    """

    def __init__(self, matcher: Any, bits: TokenBits, ends: frozenset[int]) -> None:
        self._matcher, self._bits, self._ends = matcher, bits, ends

    def mask(self) -> TokenBits:
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        self._check()
        return self._bits

    def allows(self, token: int) -> bool:
        # when an answer must end, the library refuses end tokens, too, so they are checked
        # separately
        if token in self._ends:
            return self.is_accepting
        return bool(self._matcher.validate_tokens([token]))

    def accept(self, token: int) -> None:
        if not self._matcher.consume_tokens([token]):
            # a token that mask() did not allow is a bug in llmcli, not a fault of the grammar
            assert "satisfy the grammar" not in self._matcher.get_error(), (
                token,
                self._matcher.get_error(),
            )
        self._check()

    def rewind(self, count: int) -> None:
        done = self._matcher.rollback(count)
        assert done, count

    def forced_tokens(self, jump: str) -> list[int]:
        # If a single token is legal, its bytes are forced. Whether bytes are forced is a fast
        # query, so it comes first.
        if jump == "off" or not self._matcher.compute_ff_bytes():
            return []
        if jump == "fast":
            tokens: list[int] = self._matcher.compute_ff_tokens()
            return [] if self._ends.intersection(tokens) else tokens
        only = single_token(self.mask())
        return [] if only is None or only in self._ends else [only]

    @property
    def is_accepting(self) -> bool:
        return bool(self._matcher.is_accepting())

    @property
    def is_complete(self) -> bool:
        return bool(self._matcher.is_stopped())

    def copy(self) -> "GrammarMatcher":
        return GrammarMatcher(self._matcher.deep_copy(), self._bits, self._ends)

    def close(self) -> None:
        """Do nothing, because the library frees its memory itself."""

    def _check(self) -> None:
        if self._matcher.is_error():
            message = f"the grammar cannot be followed any further: {_reason(self._matcher)}"
            raise UnsatisfiableConstraint(message, hint="simplify it")


def _deep(function: Callable[[], Any]) -> Any:
    """Run `function` on a thread with a large stack. Return its result."""
    with ThreadPoolExecutor(1, "llmcli-compile") as pool:
        with STACK_SIZE_LOCK:
            before = threading.stack_size(STACK_BYTES)
            try:
                result = pool.submit(function)
            finally:
                threading.stack_size(before)
        return result.result()


def _json_grammar(text: str) -> str:
    return str(llguidance.LLMatcher.grammar_from_json_schema(text, overrides=JSON_LAYOUT))


def _refused(path: str, matcher: Any) -> UserError:
    reason = _reason(matcher)
    if (
        "coerce_one_of" in reason
    ):  # the library's message suggests an option that would allow more than the schema does
        reason = (
            "the alternatives of oneOf may overlap, and llmcli cannot rule that out; "
            "use anyOf to allow any of them"
        )
    return UserError(f"the schema cannot be followed at {path}: {reason}", hint="rewrite that part")


def _reason(matcher: Any) -> str:
    """Return the library's reason for an error as one line."""
    if "symbols.len()" in matcher.get_error():  # the text of a failed assertion in the library
        return "it has more than 65,535 parts"
    if "Too many items" in matcher.get_error():
        return "it has no end, or too many alternatives"
    return " ".join(str(matcher.get_error()).split())[:200]
