"""What the message being typed will take of the context, before it is sent. Asked at every key: it
counts pieces of the text once and adds them up, so a token may be counted twice where two pieces
meet.
"""

from bisect import bisect_left

from llmcli.chat.chat_session import Talk
from llmcli.chat.input_loop import message
from llmcli.errors import UserError
from llmcli.runtime.requests.context_overflow import SPARE
from llmcli.units import several

PIECE = 2000  # characters that are counted at a time


class Cost:
    """Made once a prompt; the conversation stands still while a message is typed."""

    def __init__(self, talk: Talk) -> None:
        self.talk = talk
        self._pieces: dict[str, int] = {}
        self._sizes: dict[int, int] = {}
        self._held: int | None = None

    def line(self, draft: str) -> str:
        """`+37 tokens, 512 of 8,192 left`; empty for what is no message, and where the template
        cannot tell.
        """
        text = message(draft.strip())
        if not text or not text.strip():
            return ""
        room = self.talk.runner.n_ctx
        try:
            if self._held is None:
                self._held = self.talk.held()
            count = self._size(0) - self._held + self._count("\n".join([*self.talk.attached, text]))
            left = room - self._held - count
            return f"+{count:,} tokens, " + (
                f"{left:,} of {room:,} left" if left > 0 else self._full(count)
            )
        except UserError:
            return ""

    def _full(self, count: int) -> str:
        """What happens to a message that does not fit."""
        room, turns = self.talk.runner.n_ctx, len(self.talk.session.tree.kept())
        mode, held = self.talk.session.on_full, self._held or 0
        if mode == "sinks":
            return "the window moves on"
        if mode == "stop" or not turns:
            return f"no room: {max(0, room - held):,} of {room:,} left"
        said = count - self._size(0) + held
        choices, wanted = range(1, turns + 1), room - room // SPARE - said
        leave = choices[
            min(bisect_left(choices, True, key=lambda k: self._size(k) <= wanted), turns - 1)
        ]
        if self._size(leave) + said >= room:
            return f"too long: the context holds {room:,}"
        return f"{several(leave, 'turn')} will leave"

    def _size(self, skip: int) -> int:
        """Tokens of the conversation without its first turns, and of what the template puts around
        a message.
        """
        if skip not in self._sizes:
            self._sizes[skip] = len(self.talk.tokens("a", skip)) - self._count("a")
        return self._sizes[skip]

    def _count(self, text: str) -> int:
        lines = text.splitlines(keepends=True)
        pieces = [line[at : at + PIECE] for line in lines for at in range(0, len(line), PIECE)]
        return sum(self._piece(piece) for piece in pieces)

    def _piece(self, piece: str) -> int:
        if piece not in self._pieces:
            self._pieces[piece] = len(self.talk.runner.model.tokenize(piece, special=True))
        return self._pieces[piece]
