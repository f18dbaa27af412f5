"""A sequence's KV state as a file: the tokens it holds, the bytes that llama.cpp keeps for them,
and whose they are.

MAGIC, the length of the head (4 bytes, little endian), the head (JSON: world, numbers, sha256), the
tokens (int32), the state as llama_state_seq_get_data writes it. What does not match to the byte
never reaches llama.cpp, which trusts its states. It knows no names and no folders.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from llmcli.runtime.identity import World, world
from llmcli.runtime.runner import Runner

MAGIC = b"llmcliKV"
HEAD = 1 << 16  # bytes that a head may have
Bytes = bytes | memoryview


class Unusable(Exception):
    """A state that cannot be taken up; the reason is its text."""


@dataclass(frozen=True, slots=True)
class Kept:
    """The tokens of one sequence, and its state."""

    tokens: tuple[int, ...]
    state: Bytes


def keep(runner: Runner, tokens: Sequence[int]) -> Kept | None:
    """A copy of the slot that holds most of the beginning of `tokens`; None where none holds any."""
    ledger = runner.engine.ledger
    slot, common = ledger.nearest(tokens)
    return Kept(tuple(ledger.tokens[slot]), runner.context.state(slot)) if common else None


def resume(runner: Runner, kept: Kept, turn: int = 0) -> None:
    """Put a state into an idle slot, as that of a `turn` of the conversation. Raises Unusable; none
    holds it then.
    """
    ledger, count = runner.engine.ledger, len(kept.tokens)
    if count > ledger.size:
        raise Unusable(f"it has {count} tokens, the context holds {ledger.size}")
    if ledger.nearest(kept.tokens)[1] == count:  # it is here still
        return
    if not whole(runner, count):
        raise Unusable(
            "it lacks what the model's windows no longer see, and --reproducible may go back there"
        )
    if not ledger.adopt(kept.tokens, lambda slot: runner.context.put_state(slot, kept.state), turn):
        raise Unusable("llama.cpp does not take it")


def whole(runner: Runner, count: int) -> bool:
    """Whether the state of a slot with so many tokens has all of them. Where windows keep every
    cell llama.cpp leaves out what is out of sight (state_write_meta of llama-kv-cache.cpp), and
    going back there would find nothing.
    """
    return runner.context.whole_states or count <= runner.model.n_swa


def parts(kept: Kept, here: World) -> list[Bytes]:
    """The bytes of a file, in order."""
    tokens = np.array(kept.tokens, "<i4").tobytes()
    head = json.dumps(
        {
            "version": 1,
            "world": here.as_dict(),
            "tokens": len(kept.tokens),
            "state_bytes": len(kept.state),
            "sha256": _digest(tokens, kept.state),
        }
    ).encode()
    return [MAGIC, len(head).to_bytes(4, "little"), head, tokens, kept.state]


def read(file: BinaryIO, runner: Runner) -> Kept:
    """The state in a file, if it is whole and of the runner's world. Raises Unusable with the
    reason.
    """
    head = _head(file)
    here, theirs = world(runner), head.get("world")
    if here is None:
        raise Unusable("the model's file has changed since it was loaded")
    if not isinstance(theirs, Mapping):
        raise Unusable("it is damaged: its head names no model")
    if different := here.differences(theirs):
        raise Unusable(f"it is {', '.join(different)}")
    count, nbytes = head.get("tokens"), head.get("state_bytes")
    if not isinstance(count, int) or not isinstance(nbytes, int) or count < 1 or nbytes < 1:
        raise Unusable("it is damaged: its head gives no sizes")
    rest = os.fstat(file.fileno()).st_size - file.tell()
    if rest != 4 * count + nbytes:
        raise Unusable(
            f"it is damaged: {rest} bytes follow its head, {4 * count + nbytes} are told"
        )
    body = memoryview(file.read(rest))
    tokens, state = body[: 4 * count], body[4 * count :]
    if _digest(tokens, state) != head.get("sha256"):
        raise Unusable("it is damaged: its bytes have changed since they were written")
    ids = np.frombuffer(tokens, "<i4")
    if len(body) != rest or ids.min() < 0 or ids.max() >= runner.model.n_vocab:
        raise Unusable("it is damaged: it holds tokens that are none")
    return Kept(tuple(int(token) for token in ids), state)


def _head(file: BinaryIO) -> dict[str, Any]:
    size = int.from_bytes(file.read(len(MAGIC) + 4).removeprefix(MAGIC), "little")
    raw = file.read(size) if size <= HEAD else b""
    try:
        head = json.loads(raw)
    except ValueError:
        head = None
    if not isinstance(head, dict) or head.get("version") != 1:
        raise Unusable("it is damaged: it does not begin as a KV state")
    return head


def _digest(tokens: Bytes, state: Bytes) -> str:
    digest = hashlib.sha256(tokens)
    digest.update(state)
    return digest.hexdigest()
