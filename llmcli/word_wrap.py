"""Wrap text at the width of a terminal, between words, also while the text arrives in pieces.

A terminal breaks a long line wherever its edge is, in the middle of a word. `WordWrapper` adds the
line breaks itself. A word that is already on the screen when it reaches the edge is erased there
and written again on the next line, so that a stream need not wait for the end of each word. The
cursor goes back by the columns of the word, or to a saved position where terminals differ about
them.

Chinese and Japanese text has no spaces: a line may end after almost every character, but not before
a closing bracket, nor after an opening one. Characters that combine into one, such as the parts of
an emoji, stay in one line. Lines of code keep their length.
"""

import re
import unicodedata
from collections.abc import Callable
from functools import lru_cache

SAVE_CURSOR, RESTORE_CURSOR, ERASE_LINE_END = "\x1b7", "\x1b8", "\x1b[K"
FIRST_ODD_CHARACTER = "\u0590"  # before it are Latin, Greek and Cyrillic letters
PIECE_PATTERN = re.compile(r"\x1b\[[0-9;]*m|.", re.DOTALL)
FENCE_PATTERN = re.compile(r" {0,3}(`{3,}|~{3,})[^`]*$")
FENCE_STARTS = ("```", "~~~")
INDENTED_CODE = ("    ", "\t")
LIST_ITEM_PATTERN = re.compile(r" {0,3}(?:[-*+]|\d{1,9}[.)])(?: |$)")
TAB_COLUMNS = 8
MAX_LINE_START = 200  # characters of a line that are kept to recognize code
EMOJI_SELECTOR, JOINER = "\ufe0f", "\u200d"
# small kana, prolonged sound and iteration marks, which do not begin a line
NO_LINE_START = frozenset("ぁぃぅぇぉっゃゅょゎァィゥェォッャュョヮヵヶー々〻…‥～〜")
CLOSING_CATEGORIES, OPENING_CATEGORIES = ("Pe", "Pf", "Po"), ("Ps", "Pi")


class WordWrapper:
    """Inserts line breaks between words into a text that arrives in pieces.

    `width`: returns the current number of columns of the terminal. `moves_cursor`: whether the
    terminal understands escape sequences that move the cursor; without them, each word is held back
    until it ends. `keeps_code`: whether the text is Markdown, whose code blocks are not wrapped.
    `divides_words`: whether a word that is longer than a line is divided; otherwise the terminal
    divides it at its edge, so that an address can be copied whole.
    """

    def __init__(
        self,
        width: Callable[[], int],
        moves_cursor: bool = True,
        keeps_code: bool = True,
        divides_words: bool = False,
    ) -> None:
        self._width, self._moves_cursor, self._keeps_code = width, moves_cursor, keeps_code
        self._divides_words = divides_words
        self.reset()

    def reset(self) -> None:
        """Begin a new text at the start of a line."""
        self._column = 0  # of the cursor
        self._word = ""  # text since the last place where a line may end, with its styles
        self._word_start = 0  # column where this word begins
        self._is_saved = False  # whether the terminal has stored the position of this column
        self._previous = ""  # last character; "" at the start of a line
        self._n_regional = 0  # letters of flags before the cursor
        self._line = ""  # start of the current line of the text, to recognize code
        self._fence = ""  # the mark that ends the current code block; "" outside of code
        self._is_code = False  # whether the current line belongs to a code block
        self._is_after_blank, self._is_in_list = True, False
        self._limit = 1

    def feed(self, text: str) -> str:
        """Return what to write to the terminal for the next piece of the text. Its only escape
        sequences may be styles (SGR).
        """
        # One column stays free, because terminals differ in what they do at the last one.
        self._limit = max(1, self._width() - 1)
        return "".join(map(self._add, PIECE_PATTERN.findall(text)))

    def finish(self) -> str:
        """Return the word that feed() has held back, and begin a new text."""
        word = "" if self._moves_cursor else self._word
        self.reset()
        return word

    def _add(self, piece: str) -> str:
        if len(piece) > 1:  # a style
            return self._add_to_word(piece)
        if piece == "\n":
            return self._end_line()
        if len(self._line) < MAX_LINE_START:
            self._line += piece
            self._is_code = self._keeps_code and self._belongs_to_code()
        if self._is_code:
            return self._end_word() + piece
        if piece in " \t":
            return self._add_space(piece)
        columns = self._columns(piece)
        output = ""
        ends_flag = is_regional(piece) and self._n_regional > 0 and self._n_regional % 2 == 0
        if ends_flag or may_break(self._previous, piece):
            output = self._end_word()
            self._is_saved = self._moves_cursor and not has_sure_width(piece)
            output += SAVE_CURSOR if self._is_saved else ""
        self._n_regional = self._n_regional + 1 if is_regional(piece) else 0
        self._previous = piece
        if columns and self._column + columns > self._limit:
            return output + self._begin_line(piece, columns)
        self._column += columns
        return output + self._add_to_word(piece)

    def _begin_line(self, piece: str, columns: int) -> str:
        """Continue on the next line with the current word, if it does not begin this line. A word
        that does is longer than a line.
        """
        word_columns = self._column - self._word_start
        if self._word_start and word_columns + columns <= self._limit:
            erased = self._erase_word(word_columns)
            word, self._word, self._word_start = self._word, "", 0
            self._column = word_columns + columns
            return f"{erased}\n{self._add_to_word(word + piece)}"
        word_is_new = not word_columns
        if not (self._divides_words or word_is_new):
            self._column += columns
            return self._add_to_word(piece)
        output = self._end_word()
        self._column, self._word_start = columns, 0
        return f"{output}\n{self._add_to_word(piece)}"

    def _erase_word(self, columns: int) -> str:
        """Return the escape sequences that erase the current word, which takes `columns`."""
        if not self._moves_cursor or not columns:
            return ""
        return (RESTORE_CURSOR if self._is_saved else f"\x1b[{columns}D") + ERASE_LINE_END

    def _add_to_word(self, text: str) -> str:
        """Add text to the current word. Return it, or nothing if the word is held back."""
        self._word += text
        return text if self._moves_cursor else ""

    def _end_word(self) -> str:
        """End the current word. Return it if it was held back."""
        word, self._word, self._word_start = self._word, "", self._column
        return "" if self._moves_cursor else word

    def _add_space(self, space: str) -> str:
        output, self._previous = self._end_word(), space
        columns = TAB_COLUMNS - self._column % TAB_COLUMNS if space == "\t" else 1
        fits = self._column + columns <= self._limit
        # White space that does not fit is not written, and the next word begins a line.
        self._column = self._word_start = min(self._limit, self._column + columns)
        return output + (space if fits else "")

    def _end_line(self) -> str:
        output = self._end_word()
        if self._keeps_code:
            self._record_line(self._line)
        self._line = self._previous = ""
        self._column = self._word_start = 0
        self._is_code = bool(self._fence)
        return f"{output}\n"

    def _belongs_to_code(self) -> bool:
        """Return whether the current line, of which the start is known, belongs to a code block."""
        if self._fence or self._line.lstrip(" ").startswith(FENCE_STARTS):
            return True
        return (
            self._line.startswith(INDENTED_CODE) and self._is_after_blank and not self._is_in_list
        )

    def _record_line(self, line: str) -> None:
        """Note what a complete line says about the next one: whether it begins or ends a code block
        or a list.
        """
        if self._fence:
            mark = line.strip()
            if mark.startswith(self._fence) and set(mark) == {self._fence[0]}:
                self._fence = ""
            return
        if match := FENCE_PATTERN.match(line):
            self._fence = match[1]
        if not line.strip():
            self._is_after_blank = True
            return
        # an indented line after code is code, too
        self._is_after_blank = self._is_after_blank and line.startswith(INDENTED_CODE)
        if LIST_ITEM_PATTERN.match(line):
            self._is_in_list = True
        elif not line.startswith((" ", "\t")):
            self._is_in_list = False

    def _columns(self, character: str) -> int:
        """Return how many columns a character takes. A selector widens the character before it."""
        if character == EMOJI_SELECTOR:
            return 1 if self._previous and character_columns(self._previous) == 1 else 0
        return character_columns(character)


def wrap_text(text: str, width: int, *, divides_words: bool = False) -> str:
    """Return a text with line breaks between words, so that its lines fit into `width` columns.
    `divides_words`: as in WordWrapper.
    """
    if text.isascii() and max(map(len, text.split("\n"))) < width:
        return text
    wrapper = WordWrapper(
        lambda: width, moves_cursor=False, keeps_code=False, divides_words=divides_words
    )
    wrapped = wrapper.feed(text) + wrapper.finish()
    return "\n".join(line.rstrip(" ") for line in wrapped.split("\n"))


@lru_cache(maxsize=4096)
def character_columns(character: str) -> int:
    """Return how many columns of a terminal a character takes: 0 for one that combines with the
    character before it. Where terminals differ, return the larger number.
    """
    if character.isascii():
        return 1
    if is_regional(character) or is_skin_tone(character):
        return 2
    from rich.cells import get_character_cell_size

    return get_character_cell_size(character)


def text_columns(text: str) -> int:
    """Return how many columns of a terminal a text of one line takes."""
    return len(text) if text.isascii() else sum(map(character_columns, text))


@lru_cache(maxsize=4096)
def may_break(before: str, after: str) -> bool:
    """Return whether a line may end between two characters: after white space, and before or after
    a Chinese or Japanese character or an emoji. `before`: "" at the start of a line. (A small part
    of Unicode's line breaking algorithm, UAX #14.)
    """
    if not before or before in " \t":
        return True
    if before in (JOINER, "\u00a0") or after == "\u00a0" or is_extender(after):
        return False
    if is_regional(before) and is_regional(after):  # the two letters of a flag
        return False
    if not (is_ideographic(before) or is_ideographic(after)):
        return False
    if unicodedata.category(before) in OPENING_CATEGORIES:
        return False
    return unicodedata.category(after) not in CLOSING_CATEGORIES and after not in NO_LINE_START


def has_sure_width(character: str) -> bool:
    """Return whether all terminals agree on the columns of a character and of what combines with
    it: Latin, Greek, Cyrillic, Chinese, Japanese and Korean ones, but not emoji.
    """
    return character < FIRST_ODD_CHARACTER or "\u3000" <= character <= "\ud7a3"


def is_ideographic(character: str) -> bool:
    """Return whether a line may end before or after this character: a wide one that is no Korean
    syllable. (Korean separates words by spaces.)
    """
    return character_columns(character) == 2 and not "\uac00" <= character <= "\ud7a3"


def is_extender(character: str) -> bool:
    """Return whether a character changes the one before it, such as an accent or a skin tone."""
    return (
        character_columns(character) == 0 or character == JOINER or is_skin_tone(character)
    ) and character != "\u200b"


def is_regional(character: str) -> bool:
    """Return whether a character is one of the letters of which two are a flag."""
    return "\U0001f1e6" <= character <= "\U0001f1ff"


def is_skin_tone(character: str) -> bool:
    """Return whether a character sets the skin tone of the emoji before it."""
    return "\U0001f3fb" <= character <= "\U0001f3ff"
