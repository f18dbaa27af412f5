"""Formats an answer's text for a terminal: thinking dimmed, folded or hidden; Markdown rendered."""

import sys
import time

from llmcli.chat.display.display_settings import FOLD, HIDE, SHOW, Screen
from llmcli.chat.display.markdown import Blocks, Drawer
from llmcli.chat.display.styles import DIM, PLAIN, dimmed
from llmcli.runtime.text.reasoning import ThinkingPiece, ThinkingSplitter, ThinkingTags
from llmcli.ui import UI, visible


class Paint:
    """Formats one answer.

    `thinking` is SHOW, FOLD or HIDE. `color` allows dimming. `drawer` renders Markdown; without
    one, text stays as it is.
    """

    def __init__(self, thinking: str, color: bool, drawer: Drawer | None = None) -> None:
        self._thinking, self._color, self._drawer = thinking, color, drawer
        self._blocks = Blocks(drawer) if drawer else None
        self._splitter = ThinkingSplitter()
        self._steps, self._since = 0, 0.0
        self._bare = False  # no content was shown since hidden thinking
        self._above = False  # shown thinking is on the current line

    def begin(self, opened: ThinkingTags | None) -> None:
        """Begin an answer; `opened` are the thinking tags that its prompt opened."""
        self._splitter = ThinkingSplitter(opened)
        self._blocks = Blocks(self._drawer) if self._drawer else None
        self._steps, self._since, self._bare, self._above = 0, 0.0, False, False

    @property
    def over(self) -> bool:
        """Whether all further text is shown unchanged."""
        return self._splitter.is_replying and not self._bare and not self._blocks

    def feed(self, text: str) -> str:
        """Format one token's text; must be called for empty texts, too."""
        if not self._since:
            self._since = time.perf_counter()
        self._steps += not self._splitter.is_replying
        return self._shown(self._splitter.feed(text))

    def finish(self) -> str:
        """Return what was held back, and close an open fold."""
        shown = self._shown(self._splitter.finish())
        if self._bare and not self._splitter.is_replying:
            shown += self._unfold()
        return shown + (self._apart(self._blocks.finish()) if self._blocks else "")

    def _shown(self, pieces: list[ThinkingPiece]) -> str:
        return "".join(
            self._thought(piece.text) if piece.is_thinking else self._said(piece.text)
            for piece in pieces
        )

    def _thought(self, text: str) -> str:
        if self._thinking == SHOW:
            self._above = True
            return dimmed(visible(text)) if self._color else visible(text)
        is_first, self._bare = not self._bare, True
        if self._thinking == HIDE:
            return ""
        shown = self._faint("(thinking") if is_first else ""
        return shown + (self._unfold() if self._splitter.is_replying else "")

    def _unfold(self) -> str:
        """Return the end of the line that replaces folded thinking."""
        if self._thinking != FOLD:
            return ""
        seconds = time.perf_counter() - self._since
        return self._faint(f" for {self._steps} tokens, {seconds:.1f} s: /think shows it)") + "\n"

    def _said(self, text: str) -> str:
        if self._bare:
            text = text.lstrip()
            self._bare = not text
        return self._apart(self._blocks.feed(text)) if self._blocks else visible(text)

    def _apart(self, drawn: str) -> str:
        """Separate rendered content from the thinking shown before it.

        Rendering drops leading blank lines.
        """
        if drawn and self._above:
            self._above, drawn = False, f"\n\n{drawn}"
        return drawn

    def _faint(self, text: str) -> str:
        return f"{DIM}{text}{PLAIN}" if self._color else text


def painted(screen: Screen, ui: UI) -> Paint | None:
    """Build the formatter for this stdout, or None if text stays as it is, as in a pipe."""
    terminal = sys.stdout.isatty() and not ui.json
    thinking = HIDE if screen.thinking == FOLD and not terminal else screen.thinking
    drawer = ui if screen.markdown and terminal else None
    if thinking == SHOW and not (terminal and ui.color) and not drawer:
        return None
    if drawer:
        drawer.markdown("")  # loads the renderer before the answer begins
    return Paint(thinking, terminal and ui.color, drawer)
