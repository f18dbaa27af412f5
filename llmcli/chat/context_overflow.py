"""What happens when a conversation fills its context: `--on-full`. What leaves is told, never cut
in silence.

stop: the answer ends, and a message that does not fit is refused. shift: the oldest whole turns
leave, the system text stays. sinks: the first tokens and the last ones stay, for texts without an
end. The turns stay in the tree.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmcli.errors import UserError
from llmcli.runtime import kv_size
from llmcli.runtime.requests.context_overflow import Overflow, Shift, Sinks
from llmcli.runtime.requests.request import Left
from llmcli.units import several

if TYPE_CHECKING:  # it asks here before it asks the model
    from llmcli.chat.chat_session import Talk
    from llmcli.runtime.runner import Runner

# tokens behind what stands before the first message; Xiao et al. 2023 found that more gain nothing
SINKS = 4


@dataclass(frozen=True, slots=True)
class Fitted:
    """A prompt that fits, and what the engine may do when the answer fills the rest."""

    tokens: tuple[int, ...]
    overflow: Overflow | None
    move: bool


def fitted(talk: "Talk", text: str) -> Fitted:
    """The prompt for a message. Where it is too long, what may leave leaves and that is told; where
    nothing may, raises UserError with what can be typed.
    """
    tokens, mode, room = talk.tokens(text), talk.session.on_full, talk.runner.n_ctx
    if mode == "sinks":
        refuse_sinks(talk.runner)
        sinks = Sinks(_sinks(talk))
        if len(tokens) >= room and (shorter := sinks.shorten(tokens, len(tokens), 0, room)):
            tell(talk, Left(1, len(tokens) - len(shorter.tokens)))
            tokens = tuple(shorter.tokens)
        return Fitted(tokens, sinks, True)
    if len(tokens) >= room and mode == "stop":
        _refuse(talk, len(tokens), text)
    if len(tokens) >= room and (
        shorter := _turns(talk, text).shorten(tokens, len(tokens), 0, room)
    ):
        _leave(talk, shorter.turns)
        tell(talk, Left(1, len(tokens) - len(shorter.tokens), shorter.turns))
        tokens = tuple(shorter.tokens)
    tree, may = talk.session.tree, not talk.runner.options.reproducible
    moves = may and not tree.left.isdisjoint(tree.path())
    return Fitted(tokens, _turns(talk, text, may) if mode == "shift" else None, moves)


def settle(talk: "Talk", left: Left) -> None:
    """After an answer: the turns that left while it was made are not sent again, and all that left
    is told.
    """
    _leave(talk, left.turns)
    tell(talk, left)


def tell(talk: "Talk", left: Left) -> None:
    """One line about what left, where anything did."""
    if not left.times:
        return
    turns = f"{several(left.turns, 'turn')} left the context ({left.tokens:,} tokens)"
    window = f"{left.tokens:,} tokens left the context, its first {_sinks(talk)} stay"
    steps = f", in {left.times} steps" if left.times > 1 else ""
    anew = f"; {left.recomputed:,} were computed anew" if left.recomputed else ""
    talk.ui.note((turns if left.turns else window) + steps + anew)


def refuse_sinks(runner: "Runner") -> None:
    """Raise UserError where this model's memory cannot move its cells, or must not."""
    if runner.options.reproducible:
        raise UserError(
            "sinks keep what was computed with what has left, and --reproducible promises otherwise",
            hint="use --on-full shift: what stays is computed anew",
        )
    if runner.context.can_shift:
        return
    if runner.options.cache_type_k == "bf16":
        raise UserError(
            "sinks move the context's keys, and bf16 keys cannot be turned", hint="use -ctk f16"
        )
    why = "keys cannot be turned to other positions"
    if runner.context.recurrent:
        why = "state is recurrent"
    elif runner.context.n_swa:
        why = f"window of {runner.context.n_swa} tokens has cells of its own"
    raise UserError(
        f"sinks move what is in the context, and this model's {why}",
        hint="use --on-full shift: whole turns leave, and what stays is computed anew",
    )


def full(talk: "Talk") -> str:
    """What to type after an answer that filled the context."""
    if talk.session.on_full == "stop":
        return (
            "the context is full: /set on_full shift lets the oldest turns leave, /context drop N one of them, "
            "/clear begins anew"
        )
    if talk.session.search.beams > 1:
        return "the context is full of these beams alone: fewer of them (/set beams), or a larger --ctx-size"
    return "the context is full of this answer alone: the next message takes its place; a larger --ctx-size holds more"


def _turns(talk: "Talk", text: str, move: bool = True) -> Shift:
    return Shift(len(talk.session.tree.kept()), lambda turns: talk.tokens(text, turns), move)


def _leave(talk: "Talk", turns: int) -> None:
    tree = talk.session.tree
    tree.left.update(tree.kept()[:turns])


def _sinks(talk: "Talk") -> int:
    """How many tokens stay: what stands before the first message, and the sinks proper. Raises
    UserError where that leaves no room to move in.
    """
    before = talk.prefix() or int(talk.runner.model.add_bos)
    keep, room = before + SINKS, talk.runner.n_ctx
    if keep > room // 2:
        raise UserError(
            f"the system text takes {before} of {room} tokens, too many for sinks to stay beside",
            hint=f"shorten it, or start with --ctx-size {kv_size.round_up(3 * keep)}",
        )
    return keep


def _refuse(talk: "Talk", count: int, text: str) -> None:
    """Raise UserError for a message that has no room behind the conversation; nothing where it
    alone is too long.
    """
    turns, room = len(talk.session.tree.kept()), talk.runner.n_ctx
    if turns and len(talk.tokens(text, turns)) < room:
        raise UserError(
            f"the conversation and this message have {count} tokens, the context holds {room}",
            hint="/set on_full shift lets the oldest turns leave, /context drop N one of them, /clear begins anew",
        )
