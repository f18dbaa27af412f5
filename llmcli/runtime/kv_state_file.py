"""Save the KV state of a sequence to a file and restore it, so that a conversation can be resumed
without computing its prompt again.

The format is that of state_file_format.py, which is checked before llama.cpp reads a state.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, BinaryIO

from llmcli import config
from llmcli.runtime.binding.library import llama_cpp_version
from llmcli.runtime.model_identity import content_hash, file_stamp
from llmcli.runtime.runner import Runner
from llmcli.runtime.state_file_format import Bytes, encode_file, read_body, read_head
from llmcli.runtime.state_file_format import UnusableState as UnusableState

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
    return encode_file(state.tokens, state.state, identity.as_dict())


def read_state(file: BinaryIO, runner: Runner) -> SequenceState:
    """Read a KV state from an open state file, and check that it is intact and was computed with
    the model and the settings of `runner`.

    Raises UnusableState when it was not.
    """
    head = read_head(file)
    identity, recorded = state_identity(runner), head.get("world")
    if identity is None:
        raise UnusableState("the model's file has changed since it was loaded")
    if not isinstance(recorded, Mapping):
        raise UnusableState("it is damaged: its header names no model")
    if differences := identity.differences(recorded):
        raise UnusableState(f"it is {', '.join(differences)}")
    body = read_body(file, head, runner.model.n_vocab)
    return SequenceState(body.tokens, body.state)
