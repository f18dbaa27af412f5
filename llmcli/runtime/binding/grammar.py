"""llama.cpp's own grammar engine (src/llama-grammar.cpp), the alternative to llguidance for
constraints in GBNF. It accepts exactly the GBNF that llama.cpp accepts.

For each mask the engine compares the characters of all tokens of the vocabulary, so it is slower,
and it does not find forced text. If it accepted a token that the grammar does not allow, a C++
exception would end the process, so each token is checked first.
"""

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcli.errors import UserError
from llmcli.runtime.binding.library import last_log_lines, lib, reset_log
from llmcli.runtime.binding.model import Model
from llmcli.runtime.binding.sampler import CANDIDATE_DTYPE, candidate_array
from llmcli.runtime.constraint import gbnf
from llmcli.runtime.constraint.base import Constraint, TokenBits


class NativeGrammars:
    """Compiles GBNF texts for one model with llama.cpp, and owns the compiled grammars."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._samplers: list[Any] = []
        self._text: NDArray[np.bool_] | None = None
        self._ends: NDArray[np.int32] | None = None

    def compile(self, constraint: Constraint) -> "NativeGrammar":
        """Compile a constraint.

        Raises UserError for a constraint that is not GBNF, for `jump` "fast", and for a text with
        an error. The message has line and column if llmcli's own parser finds the error.
        """
        if constraint.kind != "gbnf":
            raise UserError(
                "llama.cpp's engine takes GBNF, not JSON schemas",
                hint="leave out --grammar-engine llama",
            )
        if constraint.jump == "fast":
            raise UserError(
                "llama.cpp's engine does not support forced text", hint="leave out --jump fast"
            )
        for name in gbnf.check_gbnf(
            constraint.text
        ):  # so that llama.cpp does not print the whole grammar to stderr
            if len(self.model.tokenize(name, special=True)) != 1:
                raise UserError(
                    f"{name} is no token of this model",
                    hint="run --json shows the ids of tokens; write <[5]> for token 5",
                )
        reset_log()
        pointer = lib().llama_sampler_init_grammar(
            self.model.vocab, constraint.text.encode(), b"root"
        )
        if not pointer:
            reason = last_log_lines() or "no reason given"
            raise UserError(
                f"llama.cpp refuses the grammar: {reason}", hint="leave out --grammar-engine llama"
            )
        self._samplers.append(pointer)
        return NativeGrammar(constraint, pointer, self.text_tokens, self.end_tokens)

    @property
    def text_tokens(self) -> NDArray[np.bool_]:
        """Return a boolean array `[n_vocab]`: whether a token has visible text or ends an answer.
        Other tokens are never allowed, because llama.cpp would match a control token by its name.
        """
        if self._text is None:
            model = self.model
            flags = (
                bool(model.piece(token)) or model.is_end(token) for token in range(model.n_vocab)
            )
            self._text = np.fromiter(flags, np.bool_, model.n_vocab)
        return self._text

    @property
    def end_tokens(self) -> NDArray[np.int32]:
        """Return the ids of the tokens that end an answer."""
        if self._ends is None:
            self._ends = np.array(
                [token for token in range(self.model.n_vocab) if self.model.is_end(token)], np.int32
            )
        return self._ends

    def close(self) -> None:
        """Free all compiled grammars."""
        while self._samplers:
            lib().llama_sampler_free(self._samplers.pop())


class NativeGrammar:
    """A GBNF grammar compiled by llama.cpp. It has the protocol `Grammar` of constraint/base.py.
    Its sampler stays at the start of the grammar, and each answer gets a copy of it.
    """

    not_enforced: tuple[str, ...] = ()

    def __init__(
        self, constraint: Constraint, pointer: Any, text: NDArray[np.bool_], ends: NDArray[np.int32]
    ) -> None:
        self.constraint, self.pointer, self.text_tokens, self.end_tokens = (
            constraint,
            pointer,
            text,
            ends,
        )

    def start(self, is_rigid: bool = False) -> "NativeMatcher":
        return NativeMatcher(self, self.pointer, [])


class NativeMatcher:
    """The progress of one answer in a GBNF grammar. It has the protocol `Matcher` of
    constraint/base.py.
    """

    def __init__(self, grammar: NativeGrammar, pointer: Any, accepted: list[int]) -> None:
        """`pointer`: the llama_sampler to copy. `accepted`: the tokens that this sampler has
        accepted.
        """
        self._grammar, self._accepted = grammar, accepted[:]
        self._pointer = lib().llama_sampler_clone(pointer)

    def mask(self) -> TokenBits:
        return np.packbits(
            self._are_allowed(np.arange(len(self._grammar.text_tokens), dtype=np.int32)),
            bitorder="little",
        )

    def allows(self, token: int) -> bool:
        return bool(self._are_allowed(np.array([token], np.int32))[0])

    def accept(self, token: int) -> None:
        assert self.allows(token), token
        lib().llama_sampler_accept(self._pointer, token)
        self._accepted.append(token)

    def rewind(self, count: int) -> None:
        remaining = self._accepted[: len(self._accepted) - count]
        self.close()
        self._pointer, self._accepted = lib().llama_sampler_clone(self._grammar.pointer), []
        for token in remaining:
            self.accept(token)

    def forced_tokens(self, jump: str) -> list[int]:
        """Return an empty list. Finding forced tokens would need a mask, which is slow in this
        engine.
        """
        return []

    @property
    def is_accepting(self) -> bool:
        return bool(self._are_allowed(self._grammar.end_tokens).any())

    @property
    def is_complete(self) -> bool:
        """Return False. Finding out whether the grammar allows no more text would need a mask,
        which is slow in this engine. The end token is drawn like any other token instead.
        """
        return False

    def copy(self) -> "NativeMatcher":
        return NativeMatcher(self._grammar, self._pointer, self._accepted)

    def close(self) -> None:
        """Free the sampler. A second call does nothing."""
        if self._pointer:
            lib().llama_sampler_free(self._pointer)
            self._pointer = None

    def _are_allowed(self, tokens: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Return for each of `tokens` whether the grammar allows it next.

        Shapes: tokens `[n]`, result `[n]`.
        """
        rows = np.zeros(len(tokens), CANDIDATE_DTYPE)
        rows["id"] = tokens
        lib().llama_sampler_apply(self._pointer, ctypes.byref(candidate_array(rows)))
        allowed: NDArray[np.bool_] = np.isfinite(rows["logit"]) & self._grammar.text_tokens[tokens]
        return allowed
