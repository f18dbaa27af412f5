"""A model file loaded by llama.cpp: its weights, tokenizer and sizes. A model is read-only;
everything that changes while text is generated belongs to a context (context.py).
"""

import ctypes
import functools
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llmcli.errors import UserError
from llmcli.runtime.binding import contract
from llmcli.runtime.binding.contract import set_fields
from llmcli.runtime.binding.kernels import products
from llmcli.runtime.binding.library import (
    MLOCK_WARNING,
    last_log_lines,
    lib,
    registry_lock,
    reset_log,
    system_info,
)
from llmcli.runtime.binding.placement import amx, rpc
from llmcli.runtime.binding.placement.model_placement import EVERYWHERE, ModelPlacement
from llmcli.runtime.binding.placement.placement_params import init_numa, set_placement
from llmcli.runtime.binding.tokens.special_tokens import SpecialToken, read_special_token
from llmcli.runtime.binding.tokens.tokenize_splits import (
    BPE,
    SENTENCEPIECE,
    SLICE_BYTES,
    TokenizeSplits,
)
from llmcli.runtime.interrupt import on_interrupt
from quant.model_file import read_header

LOAD_MODE_NONE = contract.CONSTANTS["LLAMA_LOAD_MODE_NONE"]
# architectures whose files may have learned positions (src/models, LLM_TENSOR_POS_EMBD)
POSITION_ARCHITECTURES = frozenset((b"bert", b"gpt2", b"mpt", b"starcoder"))
MAX_KEPT_PARTS = 2048  # parts of about SLICE_BYTES, about 40 MB with their ids


class AllocationError(UserError):
    """llama.cpp could not allocate the memory of a model or a context."""


class Model:
    """A loaded model. Made by `open_model`, and unusable after its `with` block."""

    def __init__(self, pointer: Any, path: Path, vocab_only: bool = False) -> None:
        self.pointer, self.path = pointer, path
        library = lib()
        self.vocab = library.llama_model_get_vocab(pointer)
        self.n_vocab: int = library.llama_vocab_n_tokens(self.vocab)
        self.n_swa: int = library.llama_model_n_swa(pointer)  # tokens of the sliding window, or 0
        self.add_bos: bool = library.llama_vocab_get_add_bos(self.vocab)
        self.bos: int | None = _id(library.llama_vocab_bos(self.vocab))
        self.eos: int | None = _id(library.llama_vocab_eos(self.vocab))
        self.n_embd: int = library.llama_model_n_embd_out(pointer)
        self.n_ctx_train: int = library.llama_model_n_ctx_train(pointer)
        self.n_params: int = library.llama_model_n_params(pointer)
        self.nbytes: int = library.llama_model_size(pointer)
        # whether the model has recurrent state, which exists only for the end of a sequence: it
        # cannot be cut or shared at an earlier token
        self.is_recurrent: bool = library.llama_model_is_recurrent(
            pointer
        ) or library.llama_model_is_hybrid(pointer)
        self.is_diffusion: bool = library.llama_model_is_diffusion(pointer)
        # whether a decoder writes text after an encoder has read another (T5)
        self.is_encoder_decoder: bool = library.llama_model_has_encoder(
            pointer
        ) and library.llama_model_has_decoder(pointer)
        # positions for which the model has learned embeddings; None: any number
        self.max_positions: int | None = None
        if not vocab_only and _architecture(pointer) in POSITION_ARCHITECTURES:
            self.max_positions = read_header.read_header(path).max_positions
        # whether cached keys can be moved to other positions; None until shift_support.py tries it
        self.can_shift_keys: bool | None = None
        self._pieces: dict[int, bytes] = {}
        self._is_end_cache: dict[int, bool] = {}
        self._special_tokens: dict[int, SpecialToken | None] = {}

    @property
    def description(self) -> str:
        """Return llama.cpp's description of the model, which llama-bench prints in its first
        column. Example: 'llama 135M Q4_1'.
        """
        buffer = ctypes.create_string_buffer(256)
        lib().llama_model_desc(self.pointer, buffer, len(buffer))
        return buffer.value.decode("utf-8", "replace")

    def tokenize(self, text: str, *, special: bool, add_special: bool = False) -> list[int]:
        """Return the token ids of a text.

        `special`: the names of control tokens, such as "<|im_end|>", become these tokens; otherwise
        they are tokenized like ordinary text. `add_special`: add BOS and EOS if the file asks for
        them.

        A long text is tokenized in parts, because llama.cpp is slow for many control tokens
        (tokenize_splits.py). The ids are the same.
        """
        raw = text.encode("utf-8", "surrogatepass")
        if (
            len(raw) <= SLICE_BYTES
            or not self._can_split
            or (add_special and lib().llama_vocab_get_add_eos(self.vocab))
        ):
            return self._tokenize_bytes(raw, special, add_special)
        ids: list[int] = []
        for number, part in enumerate(self._splits.split_text(raw, special)):
            ids += self._tokenize_part(part, special, add_special and not number)
        return ids

    def keep_parts(self) -> None:
        """Keep the ids of the parts of long texts. A conversation that grows is then tokenized only
        from its last kept part on: the cuts before it stay where they are.

        Only for a single user: the time of a call reveals whether a part was seen before.
        """
        self._tokenize_part = functools.lru_cache(MAX_KEPT_PARTS)(self._tokenize_part)  # type: ignore[method-assign]

    def _tokenize_part(self, raw: bytes, special: bool, add_special: bool) -> Sequence[int]:
        """Return the token ids of a part of a long text."""
        return tuple(self._tokenize_bytes(raw, special, add_special))

    def _tokenize_bytes(self, raw: bytes, special: bool, add_special: bool) -> list[int]:
        """Return the token ids of UTF-8 text, tokenized by one call of llama.cpp."""
        capacity = len(raw) + 8
        ids = (ctypes.c_int32 * capacity)()
        count = lib().llama_tokenize(self.vocab, raw, len(raw), ids, capacity, add_special, special)
        if count < 0:
            ids = (ctypes.c_int32 * -count)()
            count = lib().llama_tokenize(
                self.vocab, raw, len(raw), ids, -count, add_special, special
            )
        assert count >= 0, (count, len(raw))
        return ids[:count]

    def min_tokens(self, text: str) -> int:
        """Return a lower bound of the number of tokens of `text`: its length divided by the length
        of the longest token. Computing it takes much less time than tokenizing, so a text that is
        too long can be refused early. The bound is 0 when the vocabulary may drop characters.
        """
        if not self._can_split:
            return 0
        raw = text.encode("utf-8", "surrogatepass")
        size = sum(map(len, raw.split())) if self._splits.strips_spaces else len(raw)
        return -(-size // self._max_token_bytes)

    @functools.cached_property
    def _can_split(self) -> bool:
        """Return whether the tokens of a text never depend on the text before a control token, and
        no character is dropped. This holds for SentencePiece and BPE vocabularies.
        """
        return lib().llama_vocab_type(self.vocab) in (SENTENCEPIECE, BPE)

    @functools.cached_property
    def _splits(self) -> TokenizeSplits:
        return TokenizeSplits(self.vocab, self.n_vocab)

    @functools.cached_property
    def _max_token_bytes(self) -> int:
        """Return the number of bytes of the longest token."""
        return max(len(self.piece(token, special=True)) for token in range(self.n_vocab))

    def tokenize_pair(self, first: str, second: str) -> list[int]:
        """Return the token ids of two texts for a reranking model, with the special tokens that the
        file defines before, between and after the texts.

        Source: format_prompt_rerank of llama.cpp's server (tools/server/server-common.cpp). Unlike
        there, the separator is repeated at the end if the file adds no EOS, because BERT was
        trained with it.
        """
        library, vocab = lib(), self.vocab
        sep = _id(library.llama_vocab_sep(vocab))
        end = [token for token in (self.eos if self.eos is not None else sep,) if token is not None]
        ends = end if library.llama_vocab_get_add_eos(vocab) else []
        between = [sep] if sep is not None and library.llama_vocab_get_add_sep(vocab) else []
        begin = [self.bos] if self.add_bos and self.bos is not None else []
        first_ids, second_ids = (self.tokenize(text, special=False) for text in (first, second))
        return [*begin, *first_ids, *ends, *between, *second_ids, *(ends or between)]

    @functools.cached_property
    def fim_tokens(self) -> dict[str, int]:
        """Return the ids of the file's fill-in-the-middle tokens. The keys are "pre", "suf", "mid",
        "rep" and "sep" (prefix, suffix, middle, repository, file separator). A token that the file
        does not define is left out.
        """
        names = "pre", "suf", "mid", "rep", "sep"
        tokens = {
            name: _id(getattr(lib(), f"llama_vocab_fim_{name}")(self.vocab)) for name in names
        }
        return {name: token for name, token in tokens.items() if token is not None}

    def is_control(self, token: int) -> bool:
        """Return whether a token is a control token, such as EOS. `tokenize` finds control tokens
        in a text only with `special`.
        """
        return bool(lib().llama_vocab_is_control(self.vocab, token))

    def special_tokens(self, tokens: Iterable[int]) -> dict[int, SpecialToken]:
        """Return the special tokens among `tokens`, by their ids."""
        known, found = self._special_tokens, {}
        for token in dict.fromkeys(tokens):
            if token not in known:
                known[token] = read_special_token(self.vocab, token)
            if special_token := known[token]:
                found[token] = special_token
        return found

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """Return the bytes of a token's text. They are empty for a control token unless `special`
        is set, or `show_as_text` was called for this token.
        """
        if not special and token in self._pieces:
            return self._pieces[token]
        buffer = ctypes.create_string_buffer(64)
        count = lib().llama_token_to_piece(self.vocab, token, buffer, len(buffer), 0, special)
        if count < 0:
            buffer = ctypes.create_string_buffer(-count)
            count = lib().llama_token_to_piece(self.vocab, token, buffer, len(buffer), 0, special)
        raw = buffer.raw[:count]
        if not special:
            self._pieces[token] = raw
        return raw

    def token_text(self, token: int | None) -> str:
        """Return the text of a token for a chat template: the name of a control token, such as
        "<|im_end|>", and an empty string for None.
        """
        return "" if token is None else self.piece(token, special=True).decode("utf-8", "replace")

    def show_as_text(self, token: int) -> None:
        """Make `piece` return the name of a control token from now on, so that answers show it."""
        self._pieces[token] = self.piece(token, special=True)

    def is_end(self, token: int) -> bool:
        """Return whether llama.cpp stops generation at this token (EOS, end of turn, …)."""
        is_end = self._is_end_cache.get(token)
        if is_end is None:
            is_end = self._is_end_cache[token] = bool(lib().llama_vocab_is_eog(self.vocab, token))
        return is_end


@contextmanager
def open_model(
    path: Path,
    placement: ModelPlacement = EVERYWHERE,
    *,
    vocab_only: bool = False,
    dry_run: bool = False,
    load_mtp: bool = False,
) -> Iterator[Model]:
    """Load a GGUF file and yield the model. The file must have passed `check_loadable`, because
    llama.cpp aborts the process on some damaged files.

    - `placement`: on which devices the weights are put, and in which layout.
    - `vocab_only`: load the vocabulary without the weights.
    - `dry_run`: read and allocate no weights (for dry_run.py only).
    - `load_mtp`: also load the layers that predict further tokens.

    Raises UserError with llama.cpp's reason when it refuses the file, and KeyboardInterrupt at
    Ctrl-C.
    """
    library = lib()
    params = library.llama_model_default_params()
    init_numa(placement.numa)
    arrays = set_placement(params, placement)
    set_fields(params, vocab_only=vocab_only, load_mtp=load_mtp)
    if dry_run:
        # llama.cpp aborts in a dry run if the file is mapped
        set_fields(params, no_alloc=True, load_mode=LOAD_MODE_NONE)
    if not placement.repack:
        set_fields(params, use_extra_bufts=False)
    elif not vocab_only and "AMX" in system_info():
        is_latent = (
            read_header.read_header(path).has_latent_attention
            if placement.latent is None
            else placement.latent
        )
        set_fields(params, use_extra_bufts=not is_latent)
    if amx.is_build_faulty():
        set_fields(params, use_extra_bufts=False)
    reset_log()
    interrupted = threading.Event()
    # llama.cpp calls this after each tensor, so Ctrl-C ends a long load. KeyboardInterrupt is
    # raised later, because ctypes would swallow it inside the callback.
    progress = library.llama_progress_callback(lambda share, data: not interrupted.is_set())
    set_fields(params, progress_callback=progress)
    with registry_lock, on_interrupt(interrupted.set):
        products.choose_layout(placement.own_product_types(products.TYPES))
        pointer = library.llama_model_load_from_file(str(path).encode(), params)
    del arrays
    if interrupted.is_set():
        if pointer:
            library.llama_model_free(pointer)
        raise KeyboardInterrupt
    if not pointer:
        reason = last_log_lines() or "no reason given"
        kind = AllocationError if is_allocation_failure(reason) else UserError
        raise kind(f"llama.cpp cannot load {path.name}: {reason}", hint=_hint(reason, path))
    if (
        "mlock" in placement.load_mode
        and not dry_run
        and MLOCK_WARNING.decode() in last_log_lines()
    ):
        library.llama_model_free(pointer)
        raise UserError(
            "the system does not allow the weights to be locked in memory",
            hint="ulimit -l unlimited, or leave out --mlock",
        )
    if rpc.joined_workers():
        # after loading, because the connections that hold the weights are opened while the model is
        # loaded
        rpc.enable_keepalive()
    try:
        yield Model(pointer, path, vocab_only)
    finally:
        library.llama_model_free(pointer)


def is_allocation_failure(reason: str) -> bool:
    """Return whether error lines of llama.cpp say that memory could not be allocated."""
    return "memory" in reason or "alloc" in reason


def _hint(reason: str, path: Path) -> str:
    if "unknown model architecture" in reason:
        return (
            "this build of llama.cpp does not support the architecture; "
            "a newer llama-cpp-python may"
        )
    if "LLAMA_SPLIT_MODE_TENSOR not implemented" in reason:
        return "this architecture cannot be split within layers: -sm layer"
    if "does not support split buffers" in reason:
        return "this device cannot share matrices with others: -sm layer"
    if is_allocation_failure(reason):
        return "the model does not fit into memory; try a smaller quantization"
    return f"run llmcli show '{path}' to check the file; pull or convert it again if it is damaged"


def _architecture(pointer: Any) -> bytes:
    buffer = ctypes.create_string_buffer(64)
    lib().llama_model_meta_val_str(pointer, b"general.architecture", buffer, len(buffer))
    return buffer.value


def _id(token: int) -> int | None:
    return None if token < 0 else int(token)
