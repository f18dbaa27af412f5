"""Implements `--on-full` for a conversation: what is removed from the context when it is full.

- stop: nothing. The answer ends, and a message that does not fit raises an error.
- shift: the oldest turns. The system text stays.
- sinks: the tokens in the middle. The first and the last tokens stay (Xiao et al. 2023,
  StreamingLLM). This suits texts without an end.

A note tells the user what was removed. Removed turns stay in the tree of the conversation.
"""

from dataclasses import dataclass
from typing import Protocol

from llmcli.chat.conversation.conversation import Conversation
from llmcli.errors import UserError
from llmcli.runtime import kv_size
from llmcli.runtime.requests.context_overflow import (
    SINK_TOKENS,
    AttentionSinks,
    DropTurns,
    OverflowPolicy,
)
from llmcli.runtime.requests.request import OverflowStats
from llmcli.runtime.runner import Runner
from llmcli.runtime.sinks_support import require_sinks_support
from llmcli.ui import UI
from llmcli.units import format_count


class PromptSource(Protocol):
    """The attributes of a ChatSession that this module uses. (A direct import of ChatSession would
    be circular.)
    """

    @property
    def runner(self) -> Runner: ...

    @property
    def conversation(self) -> Conversation: ...

    @property
    def ui(self) -> UI: ...

    def prompt_tokens(self, text: str, skip: int = 0) -> tuple[int, ...]:
        """Return the tokens of a prompt for the message `text`, without the first `skip` turns."""
        ...

    def prefix_token_count(self) -> int:
        """Return the number of prompt tokens before the first message."""
        ...


@dataclass(frozen=True, slots=True)
class FittedPrompt:
    """The tokens of a prompt that fits into the context.

    `overflow`: what the engine removes if the answer fills the context; None if the answer then
    ends. `can_move_cells`: whether the engine may move cached keys to other positions to reuse them
    for this prompt.
    """

    tokens: tuple[int, ...]
    overflow: OverflowPolicy | None
    can_move_cells: bool


def fit_prompt(chat: PromptSource, text: str) -> FittedPrompt:
    """Return the prompt for the message `text`. If it does not fit into the context, turns or
    tokens are removed as `--on-full` says, and a note tells the user.

    Raises UserError if `--on-full` is "stop" and the message would fit without the turns. A message
    that does not even fit alone is returned unchanged, and the engine rejects it.
    """
    tokens, mode, n_ctx = chat.prompt_tokens(text), chat.conversation.on_full, chat.runner.n_ctx
    if mode == "sinks":
        require_sinks_support(chat.runner)
        sinks = AttentionSinks(_count_first_tokens(chat))
        if len(tokens) >= n_ctx and (shorter := sinks.shorten(tokens, len(tokens), 0, n_ctx)):
            print_dropped_turns(chat, OverflowStats(1, len(tokens) - len(shorter.tokens)))
            tokens = tuple(shorter.tokens)
        return FittedPrompt(tokens, sinks, True)
    if len(tokens) >= n_ctx and mode == "stop":
        _check_fits_with_turns(chat, len(tokens), text)
    if len(tokens) >= n_ctx and (
        shorter := _drop_policy(chat, text).shorten(tokens, len(tokens), 0, n_ctx)
    ):
        _drop_turns(chat, shorter.dropped_turns)
        print_dropped_turns(
            chat, OverflowStats(1, len(tokens) - len(shorter.tokens), shorter.dropped_turns)
        )
        tokens = tuple(shorter.tokens)
    tree, can_move = chat.conversation.tree, not chat.runner.options.reproducible
    must_move = can_move and not tree.dropped.isdisjoint(tree.current_path())
    return FittedPrompt(
        tokens, _drop_policy(chat, text, can_move) if mode == "shift" else None, must_move
    )


def record_dropped_turns(chat: PromptSource, overflow: OverflowStats) -> None:
    """Mark the turns that the engine removed from the context during an answer, so that they are
    not sent again. Print a note about them.
    """
    _drop_turns(chat, overflow.turns)
    print_dropped_turns(chat, overflow)


def print_dropped_turns(chat: PromptSource, overflow: OverflowStats) -> None:
    """Print one line about the turns or tokens that were removed from the context, if any were."""
    if not overflow.times:
        return
    turns_line = (
        f"{format_count(overflow.turns, 'turn')} left the context ({overflow.tokens:,} tokens)"
    )
    window_line = (
        f"{overflow.tokens:,} tokens left the context; its first {_count_first_tokens(chat)} stay"
    )
    steps = f", in {overflow.times} steps" if overflow.times > 1 else ""
    recomputed = f"; {overflow.recomputed:,} were recomputed" if overflow.recomputed else ""
    chat.ui.note((turns_line if overflow.turns else window_line) + steps + recomputed)


def context_full_note(conversation: Conversation) -> str:
    """Return a note for the user after an answer that filled the context. It says what to do."""
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


def _drop_policy(chat: PromptSource, text: str, move: bool = True) -> DropTurns:
    """Return the policy that removes the oldest turns from the prompt for `text`. `move`: reuse the
    cached keys of the remaining turns by moving them to their new positions.
    """
    return DropTurns(
        len(chat.conversation.tree.sent_turns()),
        lambda turns: chat.prompt_tokens(text, turns),
        move,
    )


def _drop_turns(chat: PromptSource, turns: int) -> None:
    """Mark the oldest `turns` turns that are still sent, so that they are not sent again."""
    tree = chat.conversation.tree
    tree.dropped.update(tree.sent_turns()[:turns])


def _count_first_tokens(chat: PromptSource) -> int:
    """Return how many tokens at the beginning stay with `--on-full sinks`: the tokens before the
    first message, and SINK_TOKENS more. Raises UserError if this is more than half of the context.
    """
    n_prefix = chat.prefix_token_count() or int(chat.runner.model.add_bos)
    n_first, n_ctx = n_prefix + SINK_TOKENS, chat.runner.n_ctx
    if n_first > n_ctx // 2:
        raise UserError(
            f"the system text takes {n_prefix} of {n_ctx} tokens, which is too much for sinks",
            hint=f"shorten it, or start with --ctx-size {kv_size.round_up_cells(3 * n_first)}",
        )
    return n_first


def _check_fits_with_turns(chat: PromptSource, count: int, text: str) -> None:
    """Raise UserError if the message `text` would fit without the turns of the conversation.
    `count`: number of tokens of the prompt that does not fit.
    """
    turns, n_ctx = len(chat.conversation.tree.sent_turns()), chat.runner.n_ctx
    if turns and len(chat.prompt_tokens(text, turns)) < n_ctx:
        raise UserError(
            f"the conversation and this message have {count} tokens, but the context holds {n_ctx}",
            hint="use /set on_full shift to let the oldest turns leave, "
            "/context drop N for a single turn, or /clear to start over",
        )
