"""One model file opened by llama.cpp: its vocabulary and its sizes. Generating text changes nothing
in it.
"""

import ctypes
import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llmcli.errors import UserError
from llmcli.runtime.binding import rpc
from llmcli.runtime.binding.devices import tensor_split
from llmcli.runtime.binding.library import last_log_lines, lib, reset_log
from llmcli.runtime.binding.tokenize_splits import BPE, SENTENCEPIECE, SLICE_BYTES, TokenizeSplits
from llmcli.runtime.interrupt import on_interrupt
from quant.model_file import read_header

ALL_GPU_LAYERS = -1
LOAD_MODE_NONE = 0  # enum llama_load_mode


class Model:
    """An open model, made by `open_model`; unusable after its `with` block."""

    def __init__(self, pointer: Any, path: Path) -> None:
        self.pointer, self.path = pointer, path
        library = lib()
        self.vocab = library.llama_model_get_vocab(pointer)
        self.n_vocab: int = library.llama_vocab_n_tokens(self.vocab)
        self.n_swa: int = library.llama_model_n_swa(pointer)
        self.add_bos: bool = library.llama_vocab_get_add_bos(self.vocab)
        self.bos: int | None = _id(library.llama_vocab_bos(self.vocab))
        self.eos: int | None = _id(library.llama_vocab_eos(self.vocab))
        self.n_embd: int = library.llama_model_n_embd_out(pointer)
        self.n_ctx_train: int = library.llama_model_n_ctx_train(pointer)
        self.n_params: int = library.llama_model_n_params(pointer)
        self.nbytes: int = library.llama_model_size(pointer)
        # whether the model has recurrent state, which cannot be cut or shared at a token
        self.is_recurrent: bool = library.llama_model_is_recurrent(
            pointer
        ) or library.llama_model_is_hybrid(pointer)
        self.is_diffusion: bool = library.llama_model_is_diffusion(pointer)
        # whether keys can be moved to other positions; None before shift_support.py has tried it
        self.can_shift_keys: bool | None = None
        self._pieces: dict[int, bytes] = {}
        self._ends: dict[int, bool] = {}

    @property
    def description(self) -> str:
        """Return llama.cpp's description of the model, which llama-bench prints in its first
        column. Example: 'llama 135M Q4_1'.
        """
        buffer = ctypes.create_string_buffer(256)
        lib().llama_model_desc(self.pointer, buffer, len(buffer))
        return buffer.value.decode("utf-8", "replace")

    def tokenize(self, text: str, *, special: bool, add_special: bool = False) -> list[int]:
        """Return text as token ids. `special`: names of control tokens in the text become control
        tokens. `add_special`: add BOS and EOS if the file asks for them.
        """
        raw = text.encode("utf-8", "surrogatepass")
        if (
            len(raw) <= SLICE_BYTES
            or not self._cuttable
            or (add_special and lib().llama_vocab_get_add_eos(self.vocab))
        ):
            return self._tokens(raw, special, add_special)
        ids: list[int] = []
        for number, piece in enumerate(self._seams.split_text(raw, special)):
            ids += self._tokens(piece, special, add_special and not number)
        return ids

    def _tokens(self, raw: bytes, special: bool, add_special: bool) -> list[int]:
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
        """Return a lower bound of the number of tokens of `text`, without tokenizing it. It is 0
        when the vocabulary may drop characters.
        """
        if not self._cuttable:
            return 0
        raw = text.encode("utf-8", "surrogatepass")
        size = sum(map(len, raw.split())) if self._seams.strips_spaces else len(raw)
        return -(-size // self._longest)

    @functools.cached_property
    def _cuttable(self) -> bool:
        return lib().llama_vocab_type(self.vocab) in (SENTENCEPIECE, BPE)

    @functools.cached_property
    def _seams(self) -> TokenizeSplits:
        return TokenizeSplits(self.vocab, self.n_vocab)

    @functools.cached_property
    def _longest(self) -> int:
        """Return the bytes of the longest token."""
        return max(len(self.piece(token, special=True)) for token in range(self.n_vocab))

    def tokenize_pair(self, first: str, second: str) -> list[int]:
        """Return the token ids of two texts for a reranking model, with the file's special tokens
        around and between the texts.

        Source: format_prompt_rerank of llama.cpp's server (tools/server/server-common.cpp). One
        thing is different here: if the file adds no EOS, the separator is repeated at the end,
        because BERT was trained with it.
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
        """Return the fill-in-the-middle tokens of the file: pre, suf, mid, rep, sep."""
        names = "pre", "suf", "mid", "rep", "sep"
        tokens = {
            name: _id(getattr(lib(), f"llama_vocab_fim_{name}")(self.vocab)) for name in names
        }
        return {name: token for name, token in tokens.items() if token is not None}

    def is_control(self, token: int) -> bool:
        """Return whether a token is a control token: text contains it only if tokenized with
        `special`.
        """
        return bool(lib().llama_vocab_is_control(self.vocab, token))

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """Return the bytes of a token. They are empty for a control token unless `special` is set."""
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
        """Return a token as a template writes it: a control token by its name, and None as ""."""
        return "" if token is None else self.piece(token, special=True).decode("utf-8", "replace")

    def show_as_text(self, token: int) -> None:
        """From now on show a control token in answers: `piece` returns its name."""
        self._pieces[token] = self.piece(token, special=True)

    def is_end(self, token: int) -> bool:
        """Return whether llama.cpp stops generation at this token (EOS, end of turn, …)."""
        is_end = self._ends.get(token)
        if is_end is None:
            is_end = self._ends[token] = bool(lib().llama_vocab_is_eog(self.vocab, token))
        return is_end


@contextmanager
def open_model(
    path: Path,
    *,
    gpu_layers: int = ALL_GPU_LAYERS,
    vocab_only: bool = False,
    latent: bool | None = None,
    repack: bool = True,
    dry_run: bool = False,
) -> Iterator[Model]:
    """Load a GGUF that has passed `check_loadable`, and yield the model. `latent`: whether the
    model has latent attention; None reads it from the file.

    `dry_run`: read and allocate no weights (for dry_run.py only). `repack`: if False, weights keep
    the layout of the file. On a CPU with AMX, weights of models with latent attention always keep
    it, because llama.cpp aborts on a product of a repacked matrix with a tensor that is not in
    memory order.

    Raises UserError with llama.cpp's reason when it refuses the file, and KeyboardInterrupt at
    Ctrl-C.
    """
    library = lib()
    params = library.llama_model_default_params()
    params.n_gpu_layers = gpu_layers
    if (split := tensor_split()) is not None:
        params.tensor_split = split
    params.vocab_only = vocab_only
    if dry_run:
        params.no_alloc, params.load_mode = (
            True,
            LOAD_MODE_NONE,
        )  # a dry run makes llama.cpp abort if the file is mapped
    if not repack:
        params.use_extra_bufts = False
    elif not vocab_only and b"AMX" in library.llama_print_system_info():
        params.use_extra_bufts = not (
            read_header.read_header(path).has_latent_attention if latent is None else latent
        )
    reset_log()
    stopped = threading.Event()
    # llama.cpp calls this after each tensor, so Ctrl-C ends a long load. KeyboardInterrupt is
    # raised later, because ctypes would swallow it inside the callback.
    params.progress_callback = library.llama_progress_callback(
        lambda share, data: not stopped.is_set()
    )
    with on_interrupt(stopped.set):
        pointer = library.llama_model_load_from_file(str(path).encode(), params)
    if stopped.is_set():
        if pointer:
            library.llama_model_free(pointer)
        raise KeyboardInterrupt
    if not pointer:
        reason = last_log_lines() or "no reason given"
        raise UserError(f"llama.cpp cannot load {path.name}: {reason}", hint=_hint(reason, path))
    if rpc.joined_workers():
        # after loading, because the connections that hold the weights are opened while the model is
        # loaded
        rpc.enable_keepalive()
    try:
        yield Model(pointer, path)
    finally:
        library.llama_model_free(pointer)


def _hint(reason: str, path: Path) -> str:
    if "unknown model architecture" in reason:
        return (
            "this build of llama.cpp does not support the architecture; "
            "a newer llama-cpp-python may"
        )
    if "memory" in reason or "alloc" in reason:
        return "the model does not fit into memory; try a smaller quantization"
    return f"run llmcli show '{path}' to check the file; pull or convert it again if it is damaged"


def _id(token: int) -> int | None:
    return None if token < 0 else int(token)
