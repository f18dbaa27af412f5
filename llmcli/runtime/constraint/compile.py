"""Compile constraints (JSON schemas and grammars) for a model, and cache the compiled grammars."""

from collections.abc import Callable
from typing import Any

from llmcli.errors import UserError
from llmcli.runtime.constraint.base import Constraint, Grammar
from llmcli.runtime.constraint.token_set import compile_token_set
from llmcli.runtime.vocabulary import Vocabulary

MAX_COMPILED = 16  # maximum number of grammars in the cache; a conversation uses few


class GrammarCompiler:
    """Compiles constraints for one model, and caches the MAX_COMPILED grammars used last. The
    library llguidance is loaded with the first constraint that needs it.
    """

    def __init__(self, model: Vocabulary, native: Callable[[Constraint], Grammar]) -> None:
        """`native`: compiles a constraint with the grammar engine of llama.cpp."""
        self._model, self._native = model, native
        self._llguidance_compiler: Any = None
        self._compiled: dict[Constraint, Grammar] = {}

    def __call__(self, constraint: Constraint) -> Grammar:
        """Return the compiled grammar of a constraint, from the cache or newly compiled.

        Raises UserError when the constraint is not valid or cannot be enforced.
        """
        if constraint not in self._compiled:
            while len(self._compiled) >= MAX_COMPILED:
                del self._compiled[next(iter(self._compiled))]
            self._compiled[constraint] = self._compile(constraint)
        else:  # move the grammar to the end: when the cache is full, the first one is dropped
            self._compiled[constraint] = self._compiled.pop(constraint)
        return self._compiled[constraint]

    def _compile(self, constraint: Constraint) -> Grammar:
        """Compile a constraint with its engine. Raises UserError like `__call__`."""
        if constraint.kind == "tokens":
            return compile_token_set(constraint, self._model.n_vocab)
        if constraint.engine == "llama":
            return self._native(constraint)
        if self._llguidance_compiler is None:
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
            self._llguidance_compiler = LLGuidanceCompiler(tokenizer, ends)
        grammar: Grammar = self._llguidance_compiler(constraint)
        return grammar
