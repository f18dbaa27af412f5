"""Counts the tokens of the message being typed, before it is sent.

The count is updated at every key, so pieces of the text are counted once and added up. Where two
pieces meet, a token may be counted twice.
"""

from bisect import bisect_left

from llmcli.chat.chat_session import ChatSession
from llmcli.chat.input_loop import parse_message
from llmcli.errors import UserError
from llmcli.runtime.requests.context_overflow import FREED_FRACTION
from llmcli.units import format_count

PIECE_CHARS = 2000  # characters counted at once


class MessageCost:
    """The cost of the message typed at one prompt; the conversation does not change meanwhile."""

    def __init__(self, chat: ChatSession) -> None:
        self.chat = chat
        self._pieces: dict[str, int] = {}
        self._sizes: dict[int, int] = {}
        self._n_conversation: int | None = None

    def describe(self, draft: str) -> str:
        """Return a line such as `+37 tokens, 512 of 8,192 left`.

        Empty for a command, and if the template cannot render the conversation.
        """
        text = parse_message(draft.strip())
        if not text or not text.strip():
            return ""
        n_ctx = self.chat.runner.n_ctx
        try:
            if self._n_conversation is None:
                self._n_conversation = self.chat.token_count()
            count = (
                self._size(0)
                - self._n_conversation
                + self._count("\n".join([*self.chat.attachments, text]))
            )
            n_left = n_ctx - self._n_conversation - count
            return f"+{count:,} tokens, " + (
                f"{n_left:,} of {n_ctx:,} left" if n_left > 0 else self._describe_overflow(count)
            )
        except UserError:
            return ""

    def _describe_overflow(self, count: int) -> str:
        """Describe what happens to a message that does not fit."""
        n_ctx, turns = self.chat.runner.n_ctx, len(self.chat.conversation.tree.sent_turns())
        mode, n_conversation = self.chat.conversation.on_full, self._n_conversation or 0
        if mode == "sinks":
            return "the window moves"
        if mode == "stop" or not turns:
            return f"does not fit: {max(0, n_ctx - n_conversation):,} of {n_ctx:,} left"
        n_added = count - self._size(0) + n_conversation
        choices, target = range(1, turns + 1), n_ctx - n_ctx // FREED_FRACTION - n_added
        n_leaving = choices[
            min(bisect_left(choices, True, key=lambda k: self._size(k) <= target), turns - 1)
        ]
        if self._size(n_leaving) + n_added >= n_ctx:
            return f"too long: the context holds {n_ctx:,}"
        return f"{format_count(n_leaving, 'turn')} will leave"

    def _size(self, skip: int) -> int:
        """Return the prompt's token count without its first `skip` turns and without the message's
        text.

        The tokens that the template adds around the message are included.
        """
        if skip not in self._sizes:
            self._sizes[skip] = len(self.chat.prompt_tokens("a", skip)) - self._count("a")
        return self._sizes[skip]

    def _count(self, text: str) -> int:
        lines = text.splitlines(keepends=True)
        pieces = [
            line[start : start + PIECE_CHARS]
            for line in lines
            for start in range(0, len(line), PIECE_CHARS)
        ]
        return sum(self._piece(piece) for piece in pieces)

    def _piece(self, piece: str) -> int:
        if piece not in self._pieces:
            self._pieces[piece] = len(self.chat.runner.model.tokenize(piece, special=True))
        return self._pieces[piece]
