"""Save the KV state of a sequence to a file and restore it, so that a conversation can be resumed
without computing its prompt again.

Format: MAGIC; the length of the head (4 bytes, little endian); the head (JSON: the identity of the
model and its settings, sizes, sha256); the tokens (int32); the state as llama_state_seq_get_data
writes it. llama.cpp does not check the bytes of a state, so everything is checked here before
llama.cpp reads them.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, BinaryIO

import numpy as np

from llmcli import config
from llmcli.runtime.binding.library import llama_cpp_version
from llmcli.runtime.model_identity import content_hash, file_stamp
from llmcli.runtime.runner import Runner
from quant.json_dataclasses import parse_object

DIFFERENCE_TEXTS = {  # by field of StateIdentity, for messages that begin with "it is"
    "model": "of another model file",
    "build": "of another build of llama.cpp",
    "type_k": "of another type of K",
    "type_v": "of another type of V",
    "flash": "of the other flash-attention mode",
    "rotated": "of the other rotation",
    "template": "of another chat template",
    "reproducible": "computed with --reproducible on one side only",
}


@dataclass(frozen=True, slots=True)
class StateIdentity:
    """The model and the settings with which a KV state was computed. A saved state is usable only
    where all of them are equal.
    """

    model: str  # hash of the model file
    build: str  # version of llama.cpp
    type_k: str
    type_v: str
    flash: bool  # False only when flash attention is off
    rotated: bool  # whether quantized keys and values are rotated before they are stored
    template: str  # hash of the chat template
    reproducible: bool

    def as_dict(self) -> dict[str, Any]:
        """Return the identity as a dictionary, as it is written to the head of a state file."""
        return asdict(self)

    def differences(self, other: Mapping[str, Any]) -> list[str]:
        """Return a description of each field in which `other`, the dictionary of another identity,
        differs from this one.
        """
        return [
            DIFFERENCE_TEXTS[name]
            for name, value in asdict(self).items()
            if other.get(name) != value
        ]


def state_identity(runner: "Runner") -> StateIdentity | None:
    """Return the identity of the KV states that a runner computes. Return None when the model file
    was changed or removed since it was loaded, because its hash would be wrong.
    """
    try:
        model = content_hash(runner.header)
    except OSError:
        return None
    if file_stamp(runner.header.files) != runner.file_stamp:
        return None
    template, options = runner.template, runner.options
    source = (template.source, template.bos, template.eos) if template else ()
    return StateIdentity(
        model,
        llama_cpp_version(),
        options.cache_type_k,
        options.cache_type_v,
        options.flash_attn != "off",
        config.has_rotated_cache(),
        hashlib.sha256("\0".join(source).encode("utf-8", "surrogatepass")).hexdigest(),
        options.reproducible,
    )


MAGIC = b"llmcliKV"
MAX_HEAD_BYTES = 1 << 16  # maximum length of a head; a longer one is not read
Bytes = bytes | memoryview


class UnusableState(Exception):
    """Raised for a saved state that cannot be used. The message is the reason, such as "it is
    damaged".
    """


@dataclass(frozen=True, slots=True)
class SequenceState:
    """The tokens of a sequence and their KV state."""

    tokens: tuple[int, ...]
    state: Bytes  # as llama_state_seq_get_data writes it


def copy_state(runner: Runner, tokens: Sequence[int]) -> SequenceState | None:
    """Return a copy of the KV state of the slot (llama.cpp sequence id) whose cached tokens have
    the longest common prefix with `tokens`. Return None when no slot starts with the same token.
    """
    ledger = runner.engine.ledger
    slot, n_common = ledger.find_nearest(tokens)
    return (
        SequenceState(tuple(ledger.tokens[slot]), runner.context.read_state(slot))
        if n_common
        else None
    )


def restore_state(runner: Runner, state: SequenceState, turn: int = 0) -> None:
    """Restore a KV state into an idle slot of the runner. Do nothing when its tokens are still in
    the cache. `turn`: number of the conversation turn with which the state ends.

    Raises UnusableState when the state does not fit or llama.cpp refuses it. No slot holds the
    state then.
    """
    ledger, count = runner.engine.ledger, len(state.tokens)
    if count > ledger.size:
        raise UnusableState(f"it has {count} tokens, but the context holds {ledger.size}")
    if ledger.find_nearest(state.tokens)[1] == count:  # the tokens are still in the cache
        return
    if not has_complete_state(runner, count):
        raise UnusableState(
            "it is missing the cells that the model's windows no longer see, "
            "which --reproducible may need"
        )
    if not ledger.restore_state(
        state.tokens, lambda slot: runner.context.write_state(slot, state.state), turn
    ):
        raise UnusableState("llama.cpp does not accept it")


def has_complete_state(runner: Runner, count: int) -> bool:
    """Return whether the saved state of a slot with `count` tokens contains the cells of all of
    these tokens.

    With swa_full, the cache keeps the cells of all tokens, but llama.cpp leaves those outside the
    sliding window out of a saved state (state_write_meta in llama-kv-cache.cpp). A sequence
    restored from such a state cannot be shortened.
    """
    return runner.context.has_complete_states or count <= runner.model.n_swa


def encode_state(state: SequenceState, identity: StateIdentity) -> list[Bytes]:
    """Return the contents of a state file, as pieces to be written one after another."""
    tokens = np.array(state.tokens, "<i4").tobytes()
    head = json.dumps(
        {
            "version": 1,
            "world": identity.as_dict(),
            "tokens": len(state.tokens),
            "state_bytes": len(state.state),
            "sha256": _digest(tokens, state.state),
        }
    ).encode()
    return [MAGIC, len(head).to_bytes(4, "little"), head, tokens, state.state]


def read_state(file: BinaryIO, runner: Runner) -> SequenceState:
    """Read a KV state from an open state file, and check that it is intact and was computed with
    the model and the settings of `runner`.

    Raises UnusableState when it was not.
    """
    head = _read_head(file)
    identity, recorded = state_identity(runner), head.get("world")
    if identity is None:
        raise UnusableState("the model's file has changed since it was loaded")
    if not isinstance(recorded, Mapping):
        raise UnusableState("it is damaged: its header names no model")
    if differences := identity.differences(recorded):
        raise UnusableState(f"it is {', '.join(differences)}")
    count, nbytes = head.get("tokens"), head.get("state_bytes")
    if not isinstance(count, int) or not isinstance(nbytes, int) or count < 1 or nbytes < 1:
        raise UnusableState("it is damaged: its header has no sizes")
    n_bytes = os.fstat(file.fileno()).st_size - file.tell()
    if n_bytes != 4 * count + nbytes:
        raise UnusableState(
            f"it is damaged: {n_bytes} bytes follow its header instead of {4 * count + nbytes}"
        )
    body = memoryview(file.read(n_bytes))
    tokens, state = body[: 4 * count], body[4 * count :]
    if _digest(tokens, state) != head.get("sha256"):
        raise UnusableState("it is damaged: its bytes have changed since they were written")
    ids = np.frombuffer(tokens, "<i4")
    if len(body) != n_bytes or ids.min() < 0 or ids.max() >= runner.model.n_vocab:
        raise UnusableState("it is damaged: it has tokens outside the vocabulary")
    return SequenceState(tuple(int(token) for token in ids), state)


def _read_head(file: BinaryIO) -> dict[str, Any]:
    """Read the start of a state file, and return its JSON head. Raises UnusableState when it is not
    that of a state file.
    """
    size = int.from_bytes(file.read(len(MAGIC) + 4).removeprefix(MAGIC), "little")
    raw = file.read(size) if size <= MAX_HEAD_BYTES else b""
    try:
        head = parse_object(raw, MAX_HEAD_BYTES)
    except ValueError:
        head = {}
    if head.get("version") != 1:
        raise UnusableState("it is damaged: it does not start like a KV state")
    return head


def _digest(tokens: Bytes, state: Bytes) -> str:
    """Return the SHA-256 of the tokens' bytes and the state, in hexadecimal."""
    digest = hashlib.sha256(tokens)
    digest.update(state)
    return digest.hexdigest()
