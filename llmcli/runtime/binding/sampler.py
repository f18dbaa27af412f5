"""A chain of llama.cpp's own samplers (src/llama-sampler.cpp): the fast path of sampling/chain.py."""

from typing import Any

from llmcli.runtime.binding.library import lib
from llmcli.runtime.sampling.base import Native


def make(step: Native, n_vocab: int) -> Any:
    """One llama.cpp sampler; penalties also want the size of the vocabulary."""
    name, arguments = step
    size = (n_vocab,) if name == "penalties" else ()
    return getattr(lib(), f"llama_sampler_init_{name}")(*size, *arguments)


class NativeChain:
    """One sequence's llama.cpp chain, ending in a draw; free it with close()."""

    def __init__(self, steps: list[Native], seed: int, n_vocab: int) -> None:
        library = lib()
        self.pointer: Any = library.llama_sampler_chain_init(library.llama_sampler_chain_default_params())
        for step in steps:
            library.llama_sampler_chain_add(self.pointer, make(step, n_vocab))
        # Without a selecting sampler at the end llama_sampler_sample aborts the process.
        library.llama_sampler_chain_add(self.pointer, library.llama_sampler_init_dist(seed))
        self._remembers = any(name == "penalties" for name, _ in steps)
        self._seen = 0

    def draw(self, row: Any, tokens: list[int]) -> int:
        """Sample from a row of the binding's; the prompt is shown to the penalties first, as llama.cpp's tools do."""
        library = lib()
        for token in tokens[self._seen :] if self._remembers else ():
            library.llama_sampler_accept(self.pointer, token)
        token = int(library.llama_sampler_sample(self.pointer, row.context.pointer, row.index))
        self._seen = len(tokens) + 1  # sampling accepts what it drew
        return token

    def close(self) -> None:
        """Free the samplers; a second call does nothing."""
        if self.pointer:
            lib().llama_sampler_free(self.pointer)
            self.pointer = None


class NativeChains:
    """Makes native chains for one vocabulary; what `make_chain` takes."""

    def __init__(self, n_vocab: int) -> None:
        self.n_vocab = n_vocab

    def chain(self, steps: list[Native], seed: int) -> NativeChain:
        return NativeChain(steps, seed, self.n_vocab)
