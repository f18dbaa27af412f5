"""An answer's text as a terminal shows it: thinking dimmed, folded or left out; Markdown drawn.
Text in, text out.
"""

import sys
import time

from llmcli.chat.display.display_settings import FOLD, HIDE, SHOW, Screen
from llmcli.chat.display.markdown import Blocks, Drawer
from llmcli.chat.display.styles import DIM, PLAIN, dimmed
from llmcli.runtime.text.reasoning import Piece, Splitter, Tags
from llmcli.ui import UI, visible


class Paint:
    """One answer. `thinking` is SHOW, FOLD or HIDE; `color` allows dimming; `drawer` draws
    Markdown, None leaves it.
    """

    def __init__(self, thinking: str, color: bool, drawer: Drawer | None = None) -> None:
        self._thinking, self._color, self._drawer = thinking, color, drawer
        self._blocks = Blocks(drawer) if drawer else None
        self._splitter = Splitter()
        self._steps, self._since = 0, 0.0
        self._bare = False  # nothing was said since the thinking that is not shown
        self._above = False  # thinking that is shown stands on the line

    def begin(self, opened: Tags | None) -> None:
        """The answer begins; `opened` are the tags that its prompt has opened."""
        self._splitter = Splitter(opened)
        self._blocks = Blocks(self._drawer) if self._drawer else None
        self._steps, self._since, self._bare, self._above = 0, 0.0, False, False

    @property
    def over(self) -> bool:
        """Whether all that follows stays as it is."""
        return self._splitter.talking and not self._bare and not self._blocks

    def feed(self, text: str) -> str:
        """What one token's text becomes, control characters shown; to be called for empty texts as
        well.
        """
        if not self._since:
            self._since = time.perf_counter()
        self._steps += not self._splitter.talking
        return self._shown(self._splitter.feed(text))

    def finish(self) -> str:
        """What was held back, and the end of a fold that never closed."""
        shown = self._shown(self._splitter.finish())
        if self._bare and not self._splitter.talking:
            shown += self._unfold()
        return shown + (self._apart(self._blocks.finish()) if self._blocks else "")

    def _shown(self, pieces: list[Piece]) -> str:
        return "".join(
            self._thought(one.text) if one.thinking else self._said(one.text) for one in pieces
        )

    def _thought(self, text: str) -> str:
        if self._thinking == SHOW:
            self._above = True
            return dimmed(visible(text)) if self._color else visible(text)
        begins, self._bare = not self._bare, True
        if self._thinking == HIDE:
            return ""
        shown = self._faint("(thinking") if begins else ""
        return shown + (self._unfold() if self._splitter.talking else "")

    def _unfold(self) -> str:
        """The end of what is told of folded thinking."""
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
        """What is drawn first after thinking that is shown stands below it: drawing has no use for
        blank lines.
        """
        if drawn and self._above:
            self._above, drawn = False, f"\n\n{drawn}"
        return drawn

    def _faint(self, text: str) -> str:
        return f"{DIM}{text}{PLAIN}" if self._color else text


def painted(screen: Screen, ui: UI) -> Paint | None:
    """How answers are painted on this stdout; None where their text stays as it is, which is what a
    pipe gets.
    """
    terminal = sys.stdout.isatty() and not ui.json
    thinking = HIDE if screen.thinking == FOLD and not terminal else screen.thinking
    drawer = ui if screen.markdown and terminal else None
    if thinking == SHOW and not (terminal and ui.color) and not drawer:
        return None
    if drawer:
        drawer.markdown("")  # what it takes is loaded before the answer, not in the middle of it
    return Paint(thinking, terminal and ui.color, drawer)
