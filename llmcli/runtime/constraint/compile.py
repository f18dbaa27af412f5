"""Compiles constraints for one model and caches the results."""

from collections.abc import Callable
from typing import Any

from llmcli.errors import UserError
from llmcli.runtime.constraint.base import Constraint, Grammar
from llmcli.runtime.vocabulary import Vocabulary

MAX_COMPILED = 16  # maximum compiled constraints in the cache; a conversation uses few


class GrammarCompiler:
    """Compiles and caches constraints. There are two engines, and each is loaded only with the
    first constraint that needs it.
    """

    def __init__(self, model: Vocabulary, native: Callable[[Constraint], Grammar]) -> None:
        """`native`: compiles a constraint with llama.cpp's own grammars."""
        self._model, self._native = model, native
        self._compiler: Any = None
        self._compiled: dict[Constraint, Grammar] = {}

    def __call__(self, constraint: Constraint) -> Grammar:
        """Return the compiled form of a constraint, from the cache if it is there.

        Raises UserError when the constraint is not a valid grammar or cannot be enforced.
        """
        if constraint not in self._compiled:
            while len(self._compiled) >= MAX_COMPILED:
                del self._compiled[next(iter(self._compiled))]
            self._compiled[constraint] = self._compile(constraint)
        else:  # move the grammar to the end, because the one at the beginning is dropped first
            self._compiled[constraint] = self._compiled.pop(constraint)
        return self._compiled[constraint]

    def _compile(self, constraint: Constraint) -> Grammar:
        if constraint.engine == "llama":
            return self._native(constraint)
        if self._compiler is None:
            from llmcli.runtime.constraint.llguidance import LLGuidanceCompiler, TokenizerWrapper

            model = self._model
            pieces = [model.piece(token) for token in range(model.n_vocab)]
            ends = [token for token in range(model.n_vocab) if model.is_end(token)]
            if not ends:
                raise UserError(
                    "this model has no token that ends an answer",
                    hint="leave out the grammar or schema",
                )
            tokenizer = TokenizerWrapper(
                pieces, ends, lambda text: model.tokenize(text, special=False)
            )
            self._compiler = LLGuidanceCompiler(tokenizer, ends)
        grammar: Grammar = self._compiler(constraint)
        return grammar
