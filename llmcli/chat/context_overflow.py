"""`--on-full` for a conversation: what leaves the context when it is full.

- stop: nothing leaves; the answer ends, and a message that does not fit is refused.
- shift: the oldest turns leave; the system text stays.
- sinks: the first and the last tokens stay, for texts without an end.

A note reports what leaves. Turns that leave the context stay in the tree.
"""

from dataclasses import dataclass
from typing import Protocol

from llmcli.chat.conversation.conversation import Conversation
from llmcli.errors import UserError
from llmcli.runtime import kv_size
from llmcli.runtime.requests.context_overflow import AttentionSinks, DropTurns, OverflowPolicy
from llmcli.runtime.requests.request import OverflowStats
from llmcli.runtime.runner import Runner
from llmcli.ui import UI
from llmcli.units import format_count

# The number of tokens that are kept besides those before the first message. More than 4 gain
# nothing (Xiao et al. 2023, StreamingLLM).
SINK_TOKENS = 4


class PromptSource(Protocol):
    """The part of a chat session that is needed to fit its prompts into the context."""

    @property
    def runner(self) -> Runner: ...

    @property
    def conversation(self) -> Conversation: ...

    @property
    def ui(self) -> UI: ...

    def prompt_tokens(self, text: str, skip: int = 0) -> tuple[int, ...]:
        """Return the tokens of a prompt: the sent turns without the first `skip`, then `text`."""
        ...

    def prefix_token_count(self) -> int:
        """Return the number of tokens before the first message."""
        ...


@dataclass(frozen=True, slots=True)
class FittedPrompt:
    """A prompt that fits the context, and what the engine may do if the answer fills the context.

    `overflow` is None if the answer ends then.
    """

    tokens: tuple[int, ...]
    overflow: OverflowPolicy | None
    can_move_cells: bool


def fit_prompt(chat: PromptSource, text: str) -> FittedPrompt:
    """Return the prompt for the message `text`, shortened if it does not fit the context.

    Turns or tokens leave the context according to `--on-full`, and a note reports them. Raises
    UserError if nothing may leave.
    """
    tokens, mode, n_ctx = chat.prompt_tokens(text), chat.conversation.on_full, chat.runner.n_ctx
    if mode == "sinks":
        require_sinks_support(chat.runner)
        sinks = AttentionSinks(_count_kept_tokens(chat))
        if len(tokens) >= n_ctx and (shorter := sinks.shorten(tokens, len(tokens), 0, n_ctx)):
            describe_dropped_turns(chat, OverflowStats(1, len(tokens) - len(shorter.tokens)))
            tokens = tuple(shorter.tokens)
        return FittedPrompt(tokens, sinks, True)
    if len(tokens) >= n_ctx and mode == "stop":
        _refuse(chat, len(tokens), text)
    if len(tokens) >= n_ctx and (
        shorter := _turns(chat, text).shorten(tokens, len(tokens), 0, n_ctx)
    ):
        _drop_turns(chat, shorter.dropped_turns)
        describe_dropped_turns(
            chat, OverflowStats(1, len(tokens) - len(shorter.tokens), shorter.dropped_turns)
        )
        tokens = tuple(shorter.tokens)
    tree, can_move = chat.conversation.tree, not chat.runner.options.reproducible
    must_move = can_move and not tree.dropped.isdisjoint(tree.current_path())
    return FittedPrompt(
        tokens, _turns(chat, text, can_move) if mode == "shift" else None, must_move
    )


def record_dropped_turns(chat: PromptSource, overflow: OverflowStats) -> None:
    """Mark the turns that left the context during an answer, so that they are not sent again.

    Prints a note about them.
    """
    _drop_turns(chat, overflow.turns)
    describe_dropped_turns(chat, overflow)


def describe_dropped_turns(chat: PromptSource, overflow: OverflowStats) -> None:
    """Print one line about the turns or tokens that left the context, if any did."""
    if not overflow.times:
        return
    turns_line = (
        f"{format_count(overflow.turns, 'turn')} left the context ({overflow.tokens:,} tokens)"
    )
    window_line = (
        f"{overflow.tokens:,} tokens left the context; its first {_count_kept_tokens(chat)} stay"
    )
    steps = f", in {overflow.times} steps" if overflow.times > 1 else ""
    recomputed = f"; {overflow.recomputed:,} were recomputed" if overflow.recomputed else ""
    chat.ui.note((turns_line if overflow.turns else window_line) + steps + recomputed)


def require_sinks_support(runner: Runner) -> None:
    """Raise UserError if sinks are not possible with this model or these options.

    Sinks need cached keys that can be moved to other positions, which --reproducible does not
    allow.
    """
    if runner.options.reproducible:
        raise UserError(
            "sinks keep values that were computed with removed tokens, "
            "which --reproducible does not allow",
            hint="use --on-full shift, which recomputes what stays",
        )
    if runner.context.can_shift:
        return
    if runner.options.cache_type_k == "bf16":
        raise UserError(
            "sinks move keys to other positions, and bf16 keys cannot be rotated",
            hint="use -ctk f16",
        )
    reason = "keys cannot be rotated to other positions"
    if runner.context.is_recurrent:
        reason = "state is recurrent"
    elif runner.context.n_swa:
        reason = f"window of {runner.context.n_swa} tokens has separate cells"
    raise UserError(
        f"sinks move keys to other positions, but this model's {reason}",
        hint="use --on-full shift: whole turns leave, and what stays is recomputed",
    )


def context_full_note(conversation: Conversation) -> str:
    """Return a note for an answer that filled the context: what the user can do now."""
    if conversation.on_full == "stop":
        return (
            "the context is full: use /set on_full shift to let the oldest turns leave, "
            "/context drop N for a single turn, or /clear to start over"
        )
    if conversation.search.beams > 1:
        return (
            "the context is full with these beams alone: use fewer beams (/set beams), "
            "or a larger --ctx-size"
        )
    return (
        "the context is full with this answer alone: the next message replaces it; "
        "use a larger --ctx-size for more"
    )


def _turns(chat: PromptSource, text: str, move: bool = True) -> DropTurns:
    return DropTurns(
        len(chat.conversation.tree.sent_turns()),
        lambda turns: chat.prompt_tokens(text, turns),
        move,
    )


def _drop_turns(chat: PromptSource, turns: int) -> None:
    tree = chat.conversation.tree
    tree.dropped.update(tree.sent_turns()[:turns])


def _count_kept_tokens(chat: PromptSource) -> int:
    """Return how many tokens stay at the beginning: those before the first message, and the sinks.

    Raises UserError if they take more than half of the context.
    """
    n_prefix = chat.prefix_token_count() or int(chat.runner.model.add_bos)
    n_kept, n_ctx = n_prefix + SINK_TOKENS, chat.runner.n_ctx
    if n_kept > n_ctx // 2:
        raise UserError(
            f"the system text takes {n_prefix} of {n_ctx} tokens, which is too much for sinks",
            hint=f"shorten it, or start with --ctx-size {kv_size.round_up_cells(3 * n_kept)}",
        )
    return n_kept


def _refuse(chat: PromptSource, count: int, text: str) -> None:
    """Raise UserError if a message does not fit after the conversation but would fit alone."""
    turns, n_ctx = len(chat.conversation.tree.sent_turns()), chat.runner.n_ctx
    if turns and len(chat.prompt_tokens(text, turns)) < n_ctx:
        raise UserError(
            f"the conversation and this message have {count} tokens, but the context holds {n_ctx}",
            hint="use /set on_full shift to let the oldest turns leave, "
            "/context drop N for a single turn, or /clear to start over",
        )
