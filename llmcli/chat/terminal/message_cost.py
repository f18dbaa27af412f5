"""Counts the tokens of a message while the user types it, and describes how many are left.

The count is updated at every key. Therefore the text is tokenized in pieces, and the count of each
piece is stored and reused. The sum can be slightly too large, because a token can cross the border
of two pieces.
"""

from bisect import bisect_left

from llmcli.chat.chat_session import ChatSession
from llmcli.chat.input_loop import parse_message
from llmcli.errors import UserError
from llmcli.runtime.requests.context_overflow import FREED_FRACTION
from llmcli.units import format_count

PIECE_CHARS = 2000  # maximum length of a piece that is tokenized


class MessageCost:
    """Counts the tokens of the message that is typed into one input line. Must be created anew when
    the conversation has changed.
    """

    def __init__(self, chat: ChatSession) -> None:
        self.chat = chat
        self._piece_counts: dict[str, int] = {}
        self._prompt_sizes: dict[int, int] = {}
        self._n_conversation: int | None = None

    def describe(self, draft: str) -> str:
        """Return a text such as `+37 tokens, 512 of 8,192 left` for the typed text `draft`. Empty
        if `draft` is a command or empty, if the template cannot render the conversation, or if the
        model is on a server, which alone has the tokenizer.
        """
        text = parse_message(draft.strip())
        if not text or not text.strip() or not self.chat.model.has_tokenizer:
            return ""
        n_ctx = self.chat.runner.n_ctx
        try:
            if self._n_conversation is None:
                self._n_conversation = self.chat.token_count()
            count = (
                self._prompt_size(0)
                - self._n_conversation
                + self._count_text("\n".join([*self.chat.attachments, text]))
            )
            n_left = n_ctx - self._n_conversation - count
            return f"+{count:,} tokens, " + (
                f"{n_left:,} of {n_ctx:,} left" if n_left > 0 else self._describe_overflow(count)
            )
        except UserError:
            return ""

    def _describe_overflow(self, count: int) -> str:
        """Return a text that says what will happen to a message that does not fit into the context.
        `count`: number of tokens that the message adds.
        """
        n_ctx, turns = self.chat.runner.n_ctx, len(self.chat.conversation.tree.sent_turns())
        mode, n_conversation = self.chat.conversation.on_full, self._n_conversation or 0
        if mode == "sinks":
            return "the window moves"
        if mode == "stop" or not turns:
            return f"does not fit: {max(0, n_ctx - n_conversation):,} of {n_ctx:,} left"
        n_added = count - self._prompt_size(0) + n_conversation
        choices, target = range(1, turns + 1), n_ctx - n_ctx // FREED_FRACTION - n_added
        n_leaving = choices[
            min(bisect_left(choices, True, key=lambda k: self._prompt_size(k) <= target), turns - 1)
        ]
        if self._prompt_size(n_leaving) + n_added >= n_ctx:
            return f"too long: the context holds {n_ctx:,}"
        return f"{format_count(n_leaving, 'turn')} will leave"

    def _prompt_size(self, skip: int) -> int:
        """Return the number of prompt tokens without the first `skip` turns and without the text of
        the new message. The tokens that the template adds around the message are included.
        """
        if skip not in self._prompt_sizes:
            self._prompt_sizes[skip] = len(self.chat.prompt_tokens("a", skip)) - self._count_text(
                "a"
            )
        return self._prompt_sizes[skip]

    def _count_text(self, text: str) -> int:
        """Return the number of tokens of a text, which is counted in pieces."""
        lines = text.splitlines(keepends=True)
        pieces = [
            line[start : start + PIECE_CHARS]
            for line in lines
            for start in range(0, len(line), PIECE_CHARS)
        ]
        return sum(self._count_piece(piece) for piece in pieces)

    def _count_piece(self, piece: str) -> int:
        """Return the number of tokens of a piece, which is tokenized only once."""
        if piece not in self._piece_counts:
            self._piece_counts[piece] = len(self.chat.runner.model.tokenize(piece, special=True))
        return self._piece_counts[piece]
