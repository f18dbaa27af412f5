"""Computes the vectors or scores of many input lines with one model, and reports the record of each
line as soon as it is finished.

Lines are read one window at a time, so that the memory does not depend on the size of the input.
The texts of a window are sorted by length and divided into groups that are read in one pass. A
vector depends a little on the texts that are computed beside it. Windows and groups depend only on
the input, and a resumed run computes the groups that it finds unfinished again, so that it gets the
same bits.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from llmcli.batch.scoring.text_files import SourceLine
from llmcli.errors import UserError
from llmcli.planning.embedding_context import open_embedding_context
from llmcli.runtime.binding.contexts.pooled_context import Vector
from llmcli.runtime.interrupt import on_interrupt
from llmcli.runtime.runner import Runner
from llmcli.runtime.scoring.embedder import MAX_TEXTS, MIN_CELLS

# A window ends when it has this many lines, or when their texts have this many characters.
WINDOW_LINES, WINDOW_CHARACTERS = 1024, 1 << 20
GROUP_TOKENS = MIN_CELLS  # the most tokens of several texts in one pass


@dataclass(frozen=True, slots=True)
class LineTexts:
    """The texts of one line. `n_characters`: of all its texts. `encode`: function that returns the
    token ids of each text; it raises UserError for one that cannot be computed. `write`: function
    that returns the record of the line for these ids and the vector of each.
    """

    n_characters: int
    encode: Callable[[], list[list[int]]]
    write: Callable[[list[list[int]], list[Vector]], bytes]


class LineReader(Protocol):
    """Makes texts of input lines, and records of results."""

    def read(self, line: SourceLine) -> LineTexts:
        """Return the texts of the line. Raises UserError."""

    def error_record(self, line: SourceLine, error: UserError) -> bytes:
        """Return the record of a line that cannot be computed."""


@dataclass(slots=True, eq=False)
class _Task:
    """A line of a window whose result is missing. `texts`: None after an error."""

    line: SourceLine
    is_finished: bool
    texts: LineTexts | None = None
    ids: list[list[int]] = field(default_factory=list)
    vectors: dict[int, Vector] = field(default_factory=dict)


class ScoringExecutor:
    """Runs lines through the embedder of `runner`. `on_done` is called with the index and the
    record of each line, `on_error` with each line that cannot be computed and its error.

    `tokens` and `prompt_tokens`: number of tokens that were read. `is_stopped`: whether the run was
    interrupted.
    """

    def __init__(
        self,
        runner: Runner,
        reader: LineReader,
        norm: int,
        on_done: Callable[[int, bytes], None],
        on_error: Callable[[SourceLine, UserError], None],
    ) -> None:
        self._runner, self._reader, self._norm = runner, reader, norm
        self._on_done, self._on_error = on_done, on_error
        self.on_progress: Callable[[], None] = lambda: None
        self.tokens = self.prompt_tokens = self.cached_tokens = 0
        self.is_stopped = False

    def stop(self) -> None:
        """Interrupt run(), which returns after its current pass. Any thread may call this."""
        self.is_stopped = True

    def run(self, lines: Iterable[SourceLine], is_finished: Callable[[int], bool]) -> None:
        """Compute all lines whose index is not finished. Return early if stop() is called or Ctrl-C
        is pressed. Raises UserError if the model fails.
        """
        with on_interrupt(self.stop):
            for window in self._windows(lines, is_finished):
                if self.is_stopped:
                    return
                if not all(task.is_finished for task in window):
                    self._run_window(window)

    def _windows(
        self, lines: Iterable[SourceLine], is_finished: Callable[[int], bool]
    ) -> Iterator[list[_Task]]:
        window: list[_Task] = []
        n_characters = 0
        for line in lines:
            task = _Task(line, is_finished(line.index))
            window.append(task)
            try:
                task.texts = self._reader.read(line)
            except UserError as error:
                self._fail(task, error)
            else:
                n_characters += task.texts.n_characters
            if len(window) >= WINDOW_LINES or n_characters >= WINDOW_CHARACTERS:
                yield window
                window, n_characters = [], 0
        if window:
            yield window

    def _run_window(self, window: Sequence[_Task]) -> None:
        """Compute all groups of a window that belong to an unfinished line."""
        for task in window:
            if task.texts is None:
                continue
            try:
                task.ids = task.texts.encode()
            except UserError as error:
                self._fail(task, error)
        texts = [(task, number) for task in window for number in range(len(task.ids))]
        limit = min(GROUP_TOKENS, self._runner.embedder().max_tokens)
        for group in divide([len(task.ids[number]) for task, number in texts], limit):
            members = [texts[position] for position in group]
            if all(task.is_finished for task, _ in members):
                continue
            if not self._compute([task.ids[number] for task, number in members], members):
                return

    def _compute(self, ids: list[list[int]], members: Sequence[tuple[_Task, int]]) -> bool:
        """Compute one group, and report the lines that it finishes. Return False if the run is
        interrupted.
        """
        longest = max(map(len, ids))
        open_embedding_context(self._runner, longest)
        job = self._runner.embedder().start_job(ids, self._norm)
        while not self.is_stopped and job.step():
            self.on_progress()
        if self.is_stopped:
            return False
        self.tokens += job.tokens
        self.prompt_tokens = self.tokens
        for (task, number), vector in zip(members, job.vectors, strict=True):
            task.vectors[number] = vector
            if len(task.vectors) == len(task.ids) and not task.is_finished:
                self._finish(task)
        self.on_progress()
        return True

    def _finish(self, task: _Task) -> None:
        """Report the record of a line whose vectors are complete."""
        assert task.texts is not None
        vectors = [task.vectors[number] for number in range(len(task.ids))]
        if not all(np.isfinite(vector).all() for vector in vectors):
            self._fail(task, UserError("the model's result is not a finite number"))
            return
        self._on_done(task.line.index, task.texts.write(task.ids, vectors))
        task.is_finished = True
        task.vectors.clear()

    def _fail(self, task: _Task, error: UserError) -> None:
        """Report that a line cannot be computed."""
        task.texts = None
        if not task.is_finished:
            self._on_error(task.line, error)
            self._on_done(task.line.index, self._reader.error_record(task.line, error))
            task.is_finished = True


def divide(lengths: Sequence[int], limit: int) -> list[list[int]]:
    """Divide texts with these numbers of tokens into groups of at most MAX_TEXTS texts and `limit`
    tokens, the shortest texts first. A longer text is a group of its own. Return the positions of
    the texts in `lengths`.
    """
    groups: list[list[int]] = []
    n_tokens = 0
    for position in sorted(range(len(lengths)), key=lambda number: (lengths[number], number)):
        n_tokens += lengths[position]
        if not groups or len(groups[-1]) == MAX_TEXTS or n_tokens > limit:
            groups.append([])
            n_tokens = lengths[position]
        groups[-1].append(position)
    return groups
