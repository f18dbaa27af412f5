"""Compile JSON schemas, GBNF grammars and tool-call grammars with the library llguidance, which
computes a token mask within microseconds.

The library's tokenizer is built from the bytes of the model's tokens. Only this module imports the
library, and only a request with a constraint loads this module.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import llguidance
import numpy as np

from llmcli.errors import UserError
from llmcli.runtime.constraint import lark, tool_calls
from llmcli.runtime.constraint.base import (
    Constraint,
    TokenBits,
    UnsatisfiableConstraint,
    single_token,
)
from llmcli.runtime.constraint.json_schema.check import CheckedSchema, check_schema
from llmcli.runtime.constraint.json_schema.relaxation import relax_schema

# llguidance treats a token as special, that is as not part of a text, if its bytes start with this.
SPECIAL_PREFIX = b"\xff"
# The white space between the parts of a JSON document: a space, or up to two line ends with an
# indentation, as in llama.cpp's converter. It is bounded, because a model could write white space
# without end.
JSON_LAYOUT = {"whitespace_pattern": r"\x20|\n{1,2}[\x20\t]{0,20}"}
SCHEMA_KINDS = ("json_schema", "calls")  # of constraints whose texts hold JSON schemas
RIGID_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# Lets the model draw the tokens of forced text. Otherwise the library allows only the tokens that
# its tokenizer would choose, and a mask would not have all tokens that the grammar allows.
NO_FORCING = '%llguidance {"no_forcing": true}'
# Limits for schemas and grammars from untrusted sources. A grammar at these limits takes about a
# second to compile.
PARSER_LIMITS = {
    "max_lexer_states": 50_000,
    "max_grammar_size": 300_000,
    "max_items_in_row": 12_000,
}
# Stack size of the thread that compiles. The library recurses into every level of a schema, also
# through references, with about 5 KB per level. A schema of the maximum size can have 11,000
# levels, which would overflow the usual stack of 8 MiB. Unused stack takes no memory.
STACK_BYTES = 256 << 20
# Held while the stack size is changed, because the change applies to all threads that start then.
STACK_SIZE_LOCK = threading.Lock()


class TokenizerWrapper:
    """A model's vocabulary in the form that llguidance.LLTokenizer expects: the bytes of each
    token, and a call that tokenizes a text.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(
        self, pieces: list[bytes], ends: list[int], tokenize: Callable[[str], list[int]]
    ) -> None:
        """`pieces`: the bytes of each token, empty for a token that is not text. `ends`: the ids of
        the tokens that end an answer. `tokenize`: the model's tokenizer.
        """
        self.tokens = [
            piece or SPECIAL_PREFIX + f"<|{token}|>".encode() for token, piece in enumerate(pieces)
        ]
        for token in ends:
            self.tokens[token] = SPECIAL_PREFIX + f"<|{token}|>".encode()
        self.eos_token_id: int = ends[0]
        self.special_token_ids: list[int] = []
        self._tokenize, self._pieces = tokenize, pieces
        self._token_of_piece: dict[bytes, int] = {}
        self._max_piece_length = 0

    def __call__(self, text: str | bytes) -> list[int]:
        """Return tokens whose bytes together are exactly `text`. The model's tokenizer may add or
        change bytes, and llguidance would then allow more than the grammar does.
        """
        raw = text if isinstance(text, bytes) else text.encode()
        decoded = raw.decode("utf-8", "replace")
        tokens = self._tokenize(decoded)
        if self._bytes(tokens) == raw:
            return tokens
        # SentencePiece adds a space before the start of a text, which is the newline here.
        tokens = self._tokenize("\n" + decoded)
        suffixes = (tokens[start:] for start in range(1, len(tokens)))
        return next(
            (suffix for suffix in suffixes if self._bytes(suffix) == raw), None
        ) or self._tokenize_greedily(raw)

    def _tokenize_greedily(self, raw: bytes) -> list[int]:
        """Return tokens for the bytes `raw`. Each is the longest token that matches the bytes
        after the previous one. The result ends early where no token matches.
        """
        if not self._token_of_piece:
            self._token_of_piece = {
                piece: token for token, piece in enumerate(self._pieces) if piece
            }
            self._max_piece_length = max(map(len, self._token_of_piece))
        tokens: list[int] = []
        while raw:
            lengths = range(min(self._max_piece_length, len(raw)), 0, -1)
            token = next(
                (
                    self._token_of_piece[raw[:length]]
                    for length in lengths
                    if raw[:length] in self._token_of_piece
                ),
                None,
            )
            if token is None:
                break
            tokens.append(token)
            raw = raw[len(self._pieces[token]) :]
        return tokens

    def _bytes(self, tokens: list[int]) -> bytes:
        """Return the bytes of these tokens, joined."""
        return b"".join(self._pieces[token] for token in tokens)


class LLGuidanceCompiler:
    """Compiles constraints for one vocabulary. Creating it takes a fraction of a second, because
    llguidance builds a trie of all tokens, so one object is shared by all requests.
    """

    def __init__(self, tokenizer: TokenizerWrapper, ends: list[int]) -> None:
        self._tokenizer = llguidance.LLTokenizer(tokenizer, eos_token=ends)
        self._end_tokens = frozenset(ends)

    def __call__(self, constraint: Constraint) -> "CompiledGrammar":
        """Return the compiled grammar of a JSON schema, a GBNF grammar or a tool-call grammar.

        Raises UserError when llmcli's checks or llguidance refuse the schema or the grammar.
        """
        if constraint.kind == "json_schema":
            source = self._read_schema(constraint)
        elif constraint.kind == "calls":
            source = self._read_tool_calls(constraint)
        else:
            text = lark.to_lark(constraint)
            source = GrammarSource(lambda layout: text)
        matcher = self._create_matcher(source.write(JSON_LAYOUT), constraint.jump)
        if matcher.is_error():
            noun = "schema" if constraint.kind in SCHEMA_KINDS else "grammar"
            raise UserError(
                f"the {noun} cannot be followed: {_error_reason(matcher)}", hint="simplify it"
            )
        return CompiledGrammar(
            constraint,
            matcher,
            lambda: self._create_matcher(source.write(RIGID_LAYOUT), "fast"),
            self._tokenizer.vocab_size,
            self._end_tokens,
            source.not_enforced,
        )

    def _read_schema(self, constraint: Constraint) -> "GrammarSource":
        """Return the grammar of a JSON schema. Raises UserError when it cannot be followed."""
        checked = self._fit_schema(constraint.text, constraint.is_strict)
        return GrammarSource(
            lambda layout: "start: " + tool_calls.json_rule(checked.text, {"x-guidance": layout}),
            checked.not_enforced,
        )

    def _read_tool_calls(self, constraint: Constraint) -> "GrammarSource":
        """Return the grammar of function calls. Raises UserError when it cannot be followed."""
        calls = tool_calls.read_tool_calls(constraint.text)

        def write(layout: dict[str, Any]) -> str:
            return tool_calls.to_lark(calls, {"x-guidance": layout})

        if self._create_matcher(write(JSON_LAYOUT), constraint.jump).is_error():
            # The library does not say which function it refuses, so each schema is compiled alone.
            calls = calls.refit(self._fit_schema)
        return GrammarSource(write, calls.not_enforced)

    def _fit_schema(self, text: str, is_strict: bool) -> CheckedSchema:
        """Return a checked schema that llguidance accepts.

        Raises UserError, with the path of the inner schema that llguidance refuses. Unless
        `is_strict`, the keywords that it refuses are left out instead, if that helps.
        """
        checked = check_schema(text, is_strict)
        if self._refusal(checked.text) is None:
            return checked
        # closing objects may contradict other parts of the schema
        opened = check_schema(text, is_strict, closes=False)
        if self._refusal(opened.text) is None:
            return opened
        if not is_strict:
            for is_lenient in (False, True):
                relaxed = relax_schema(check_schema(text, is_lenient=is_lenient), self._refusal)
                if relaxed is not None and self._refusal(relaxed.text) is None:
                    return relaxed
        raise self._find_refused(checked)

    def _refusal(self, text: str) -> str | None:
        """Return the reason for which llguidance refuses a schema, or None if it accepts it."""
        source = llguidance.LLMatcher.grammar_from_json_schema(text, overrides=JSON_LAYOUT)
        matcher = self._build_matcher(source)
        return _error_reason(matcher) if matcher.is_error() else None

    def _find_refused(self, checked: CheckedSchema) -> UserError:
        """Return the error for the inner schema that llguidance refuses. The library does not say
        which one it is, so each is compiled alone, the deepest first.
        """
        for path, text in checked.inner_schemas():
            if (reason := self._refusal(text)) is not None:
                return _schema_error(checked.origins[path], reason)
        return _schema_error("#", self._refusal(checked.text) or "")

    def _create_matcher(self, lark: str, jump: str) -> Any:
        """Return an llguidance.LLMatcher for a grammar in llguidance's dialect of Lark. If the
        library refuses the grammar, the matcher's is_error() is true.

        `jump`: the mode of forced text (`Constraint.jump`).
        """
        source = lark if jump == "fast" else f"{NO_FORCING}\n{lark}"
        return self._build_matcher(llguidance.LLMatcher.grammar_from_lark(source))

    def _build_matcher(self, source: str) -> Any:
        """Return an llguidance.LLMatcher for a grammar in llguidance's own form."""
        limits = llguidance.LLParserLimits(**PARSER_LIMITS, verbose_errors=False)
        return _run_with_large_stack(
            lambda: llguidance.LLMatcher(self._tokenizer, source, log_level=0, limits=limits)
        )


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """A constraint as a grammar in llguidance's dialect of Lark.

    `write`: returns the grammar for a layout of JSON documents. `not_enforced`: what the constraint
    demands and the grammar does not enforce.
    """

    write: Callable[[dict[str, Any]], str]
    not_enforced: tuple[str, ...] = ()


class CompiledGrammar:
    """A constraint compiled by llguidance. It implements base.Grammar."""

    def __init__(
        self,
        constraint: Constraint,
        matcher: Any,
        compile_rigid: Callable[[], Any],
        n_vocab: int,
        ends: frozenset[int],
        not_enforced: tuple[str, ...] = (),
    ) -> None:
        """`matcher`: an llguidance.LLMatcher at the start of the grammar. `compile_rigid`: returns
        one that allows a single way to write each answer. `ends`: the tokens that end an answer.
        """
        self.constraint, self._matcher = constraint, matcher
        self.not_enforced = not_enforced
        self._compile_rigid = compile_rigid
        self._rigid_matcher: Any = None
        self._n_vocab, self._end_tokens = n_vocab, ends

    def start(self, is_rigid: bool = False) -> "GrammarMatcher":
        if is_rigid and self._rigid_matcher is None:
            self._rigid_matcher = self._compile_rigid()
        matcher = self._rigid_matcher if is_rigid else self._matcher
        # llguidance writes masks in words of 32 bits
        bits = np.zeros((self._n_vocab + 31) // 32 * 4, np.uint8)
        return GrammarMatcher(matcher.deep_copy(), bits, self._end_tokens)


class GrammarMatcher:
    """The state of one answer in a grammar. It implements base.Matcher. A matcher and its copies
    share one buffer for masks, so each call of mask() overwrites the result of the last call.
    """

    def __init__(self, matcher: Any, bits: TokenBits, ends: frozenset[int]) -> None:
        self._matcher, self._bits, self._end_tokens = matcher, bits, ends

    def mask(self) -> TokenBits:
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        self._check()
        return self._bits

    def allows(self, token: int) -> bool:
        # Where the answer must end, the library refuses even end tokens.
        if token in self._end_tokens:
            return self.is_accepting
        return bool(self._matcher.validate_tokens([token]))

    def accept(self, token: int) -> None:
        if not self._matcher.consume_tokens([token]):
            # accepting a token that mask() does not allow is a bug in llmcli
            assert "satisfy the grammar" not in self._matcher.get_error(), (
                token,
                self._matcher.get_error(),
            )
        self._check()

    def rewind(self, count: int) -> None:
        succeeded = self._matcher.rollback(count)
        assert succeeded, count

    def forced_tokens(self, jump: str) -> list[int]:
        if jump == "off":
            return []
        if jump == "fast":
            tokens: list[int] = self._matcher.compute_ff_tokens()
            return [] if self._end_tokens.intersection(tokens) else tokens
        single = single_token(self.mask())
        return [] if single is None or single in self._end_tokens else [single]

    @property
    def is_accepting(self) -> bool:
        return bool(self._matcher.is_accepting())

    @property
    def is_complete(self) -> bool:
        return bool(self._matcher.is_stopped())

    def copy(self) -> "GrammarMatcher":
        return GrammarMatcher(self._matcher.deep_copy(), self._bits, self._end_tokens)

    def close(self) -> None:
        """Do nothing: the library frees the matcher with the Python object."""

    def _check(self) -> None:
        """Raise UnsatisfiableConstraint when the library has reported an error."""
        if self._matcher.is_error():
            message = f"the grammar cannot be followed any further: {_error_reason(self._matcher)}"
            raise UnsatisfiableConstraint(message, hint="simplify it")


def _run_with_large_stack(function: Callable[[], Any]) -> Any:
    """Run `function` on a new thread with a stack of STACK_BYTES, and return its result."""
    with ThreadPoolExecutor(1, "llmcli-compile") as pool:
        with STACK_SIZE_LOCK:
            previous_size = threading.stack_size(STACK_BYTES)
            try:
                result = pool.submit(function)
            finally:
                threading.stack_size(previous_size)
        return result.result()


def _schema_error(path: str, reason: str) -> UserError:
    """Return the error for the schema at `path` and the reason for which llguidance refused it."""
    return UserError(f"the schema cannot be followed at {path}: {reason}", hint="rewrite that part")


def _error_reason(matcher: Any) -> str:
    """Return the reason of a matcher's error as one line of at most 200 characters."""
    if "symbols.len()" in matcher.get_error():  # the text of a failed assertion in the library
        return "it has more than 65,535 parts"
    if "Too many items" in matcher.get_error():
        return "it has no end, or too many alternatives"
    return " ".join(str(matcher.get_error()).split())[:200]
