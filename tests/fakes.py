"""A model without llama.cpp: every byte is a token, and what it answers is known beforehand.

FakeContext keeps the promises of the real context (positions, cells, slots) and checks its callers,
so the engine, the chat and the commands can be tested in microseconds.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from llmcli.runtime.binding.context import Aborted, NoSlot, Rows
from llmcli.runtime.binding.memory import Allocated
from llmcli.runtime.request import RunOptions
from llmcli.runtime.runner import Runner
from llmcli.runtime.template import Template
from quant.container import Field, Header, TensorInfo

BOS, EOS, N_VOCAB = 256, 257, 260
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
Speak = Callable[[list[int]], int]  # tokens so far -> the next one


@dataclass(frozen=True)
class FakeRow:
    """The logits of one row."""

    logits: NDArray[np.float32]

    @property
    def address(self) -> int:
        """Where they lie."""
        return self.logits.ctypes.data

    def log_sum(self, near: float) -> float:
        """log Σ exp."""
        return float(np.logaddexp.reduce(self.logits))


def saying(reply: bytes) -> Speak:
    """Say `reply`, then end: the next byte is told from how much of it the tokens end with."""

    def speak(tokens: list[int]) -> int:
        raw = bytes(token for token in tokens if token < 256)
        done = next(n for n in range(len(reply), -1, -1) if raw.endswith(reply[:n]))
        return reply[done] if done < len(reply) else EOS

    return speak


@dataclass
class FakeContext:
    """A context of `n_ctx` cells shared by `n_seq_max` sequences. `batches` counts passes and rows.

    `abort_at` is the number of the pass that raises Aborted half way; `before` is called at every
    pass with its number, to do from outside what a user or a signal would do in the middle.
    """

    n_ctx: int = 256
    n_seq_max: int = 1
    n_batch: int = 64
    reply: bytes | Speak = b"hello"
    n_swa: int = 0
    recurrent: bool = False
    can_shift: bool = True
    whole_states: bool = True
    word: bytes = b"state"
    n_outputs: int = 16
    abort_at: int = -1
    before: Callable[[int], None] = lambda number: None
    memory: int = 1
    batches: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.n_ubatch = self.n_batch
        self.speak = saying(self.reply) if isinstance(self.reply, bytes) else self.reply
        # Per sequence: (cell, token) in order of position. Cells of one number are shared.
        self.cells: list[list[tuple[int, int]]] = [[] for _ in range(self.n_seq_max)]
        # A window's older cells are overwritten as it moves on: the first position that is still
        # there.
        self._oldest = [0] * self.n_seq_max
        self._next = 0
        self._stop = False

    @property
    def used(self) -> int:
        """Cells in use over all sequences."""
        return len({cell for held in self.cells for cell, _ in held})

    def decode(self, rows: Rows) -> list[FakeRow]:
        """One pass: as the real one, positions must follow on, and NoSlot changes nothing."""
        assert 0 < len(rows) <= self.n_batch
        assert sum(rows.wants) <= max(self.n_outputs, self.n_seq_max)
        self.before(len(self.batches))
        if self.used + len(rows) > self.n_ctx:
            raise NoSlot
        self.batches.append(len(rows))
        aborts, self._stop = self._stop or len(self.batches) - 1 == self.abort_at, False
        out = []
        for number, (token, position, sequence, wanted) in enumerate(
            zip(rows.tokens, rows.positions, rows.sequences, rows.wants, strict=True)
        ):
            if aborts and number >= len(rows) // 2:
                raise Aborted
            held = self.cells[sequence]
            assert position == len(held), (sequence, position, len(held))
            self.put(sequence, token)
            if wanted:
                out.append(FakeRow(self._logits([t for _, t in held])))
        if aborts:
            raise Aborted
        return out

    def put(self, sequence: int, token: int) -> None:
        """One more token in a sequence, in a cell of its own."""
        held = self.cells[sequence]
        held.append((self._next, token))
        self._next += 1
        if self.n_swa:
            self._oldest[sequence] = max(self._oldest[sequence], len(held) - self.n_swa)

    def _logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        noise = np.random.default_rng(sum(tokens) + len(tokens)).random(N_VOCAB, np.float32)
        noise[self.speak(list(tokens))] += 20
        return noise

    def interrupt(self) -> None:
        """The next pass aborts."""
        self._stop = True

    def trim(self, sequence: int, keep: int) -> bool:
        """As llama_memory_seq_rm: recurrent state can be dropped whole only."""
        if self.recurrent and 0 < keep < len(self.cells[sequence]):
            return False
        del self.cells[sequence][keep:]
        if not keep:
            self._oldest[sequence] = 0
        return True

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        assert source != target
        assert 0 <= start < end <= len(self.cells[source])
        assert len(self.cells[target]) == start, "what was there is not cleared"
        self.cells[target] += self.cells[source][start:end]

    def shift(self, sequence: int, start: int, end: int, last: int) -> None:
        held = self.cells[sequence]
        assert self.can_shift and not self.recurrent
        assert 0 <= start < end < len(held)
        others = {
            cell for other, cells in enumerate(self.cells) if other != sequence for cell, _ in cells
        }
        assert not others & {cell for cell, _ in held[end:]}, (
            "another sequence holds what would move"
        )
        assert held[-1][1] == last
        del held[start:end]

    def first(self, sequence: int) -> int:
        oldest = self._oldest[sequence]
        return oldest if oldest < len(self.cells[sequence]) else -1

    def last(self, sequence: int) -> int:
        return len(self.cells[sequence]) - 1

    def state(self, sequence: int, start: int = 0) -> bytes:
        """A word of its own for each context's kind, and the tokens."""
        assert not start or not self.recurrent
        return self.word + bytes(str([token for _, token in self.cells[sequence][start:]]), "ascii")

    def put_state(self, sequence: int, kept: bytes, start: int = 0, source: int = -1) -> bool:
        """As llama_state_seq_set_data: cells of its own, or none at all; before them those of
        another.
        """
        del self.cells[sequence][:]
        tokens = (
            json.loads(bytes(kept).removeprefix(self.word))
            if bytes(kept).startswith(self.word)
            else None
        )
        if tokens is None or self.used + len(tokens) > self.n_ctx:
            return False
        if start:
            assert source != sequence
            assert start <= len(self.cells[source])
            self.cells[sequence] += self.cells[source][:start]
        for token in tokens:
            self.put(sequence, token)
        return True

    @property
    def output_bytes(self) -> int:
        return 4 * N_VOCAB * self.n_seq_max

    def allocated(self) -> Allocated | None:
        return None


class FakeModel:
    """Bytes as tokens; 256 begins, 257 ends. "\\x00EOS" in a text is read as the end token where
    special.
    """

    n_vocab, n_params, n_embd, n_swa, recurrent = N_VOCAB, 42, 64, 0, False
    add_bos, bos, eos, vocab = True, BOS, EOS, None
    description = "fake 42 F32"
    fim: ClassVar[dict[str, int]] = {}

    def tokenize(self, text: str, *, special: bool, add_special: bool = False) -> list[int]:
        return [BOS] * add_special + list(text.encode("utf-8", "surrogatepass"))

    def least(self, text: str) -> int:
        return len(text) // 4

    def piece(self, token: int, *, special: bool = False) -> bytes:
        if token < 256:
            return bytes([token])
        return {BOS: b"<s>", EOS: b"</s>"}.get(token, b"") if special else b""

    def ends(self, token: int) -> bool:
        return token == EOS

    def control(self, token: int) -> bool:
        return token >= 256


def fake_header(path: Path = Path("fake.gguf")) -> Header:
    """The header of a llama with two layers of two heads of 32: its KV cache is 512 bytes a token
    in f16.
    """
    arch: dict[str, int | str] = {
        "general.architecture": "llama",
        "general.file_type": 0,
        "llama.block_count": 2,
        "llama.context_length": 256,
        "llama.embedding_length": 64,
        "llama.attention.head_count": 2,
    }
    fields = tuple(
        Field(k, "string" if isinstance(v, str) else "uint32", v, path, (0, 0))
        for k, v in arch.items()
    )
    tensors = (TensorInfo("token_embd.weight", (64, N_VOCAB), "F32", 0, 64 * N_VOCAB * 4, path),)
    return Header(path, (path,), 3, fields, tensors, 32)


def fake_runner(
    reply: bytes | Speak = b"hello",
    *,
    template: str | None = TEMPLATE,
    path: Path = Path("fake.gguf"),
    context: FakeContext | None = None,
    **settings: int,
) -> Runner:
    """A Runner over the fakes; `settings` go to FakeContext, `template` None makes it a base model."""
    made = context or FakeContext(reply=reply, **settings)
    options = RunOptions(
        ctx_size=made.n_ctx,
        threads=1,
        threads_batch=1,
        batch_size=made.n_batch,
        ubatch_size=made.n_ubatch,
    )
    return Runner(
        fake_header(path),
        FakeModel(),
        made,
        options,  # type: ignore[arg-type]
        Template(template) if template else None,
        1.0,
        native_sampling=False,
    )
