"""A chat session: a conversation, the model that answers, and one turn of it.

`chat`, `run` and the REPL's commands share it. Input and the terminal are handled elsewhere.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from llmcli.chat import constraint_report, context_overflow
from llmcli.chat.conversation import turn_records
from llmcli.chat.conversation.conversation import Session
from llmcli.chat.conversation.session_log import NoLog
from llmcli.chat.conversation.totals import Tally
from llmcli.chat.display import answer_report
from llmcli.chat.display.answer_formatter import painted
from llmcli.chat.display.display_settings import Screen
from llmcli.chat.display.stream_writer import Stream
from llmcli.config import Config
from llmcli.errors import UserError
from llmcli.model_loader.opened_model import Opened
from llmcli.runtime.requests.request import Answer, Request
from llmcli.runtime.runner import Runner
from llmcli.runtime.text.reasoning import ThinkingTags, split_thinking
from llmcli.types import Event, Message
from llmcli.ui import UI


class Models(Protocol):
    """The models that a chat can change to."""

    def names(self) -> Iterable[str]:
        """Return the names that can be given as REF: catalog names and local models."""
        ...

    def switch(self, ref: str, beams: int, take: Callable[[Opened], None]) -> None:
        """Open `ref` for up to `beams` beams, pass it to `take`, then close the previous model.

        If anything raises, the previous model stays open.
        """
        ...


@dataclass(frozen=True, slots=True)
class Speed:
    """The speed of one test: tokens per second over its repetitions.

    For a generation test, `p50_ms` and `p99_ms` are milliseconds per token.
    """

    test: str
    per_second: float
    deviation: float
    p50_ms: float | None
    p99_ms: float | None


@dataclass(slots=True)
class Talk:
    """The state that the REPL's commands work on.

    - `stops`: texts that end an answer.
    - `file_bytes`: the file size when the model was loaded; the file may be replaced meanwhile.
    - `models`: None if the model cannot be changed.
    - `measure`: a speed test; takes a runner, prompt tokens and answer tokens.
    - `attached`: texts of files for the next message.
    - `log`: records the session.
    - `unanswered`: the last message, if an error or Ctrl-C prevented its answer.
    - `leaving`: ends the input loop.
    - `opened`: the thinking tags that the last prompt ends with.
    - `counted`: the cached token count of a conversation, with its key (status.py).
    - `prefills`: whether a command can put a `draft` into the next input line.
    """

    name: str
    runner: Runner
    session: Session
    config: Config
    ui: UI
    stops: tuple[str, ...] = ()
    ignore_eos: bool = False
    endless: bool = False
    logprobs: bool = False
    file_bytes: int = 0
    models: Models | None = None
    measure: Callable[[Runner, int, int], Sequence[Speed]] | None = None
    attached: list[str] = field(default_factory=list)
    log: NoLog = field(default_factory=NoLog)
    last: Answer | None = None
    unanswered: str | None = None
    saved_as: str = ""
    leaving: bool = False
    opened: ThinkingTags | None = None
    screen: Screen = field(default_factory=Screen)
    tally: Tally = field(default_factory=Tally)
    counted: tuple[tuple[object, ...], int] = ((), 0)
    prefills: bool = False
    draft: str = ""
    _told: set[str] = field(default_factory=set)

    def ask(self, text: str, stream: Stream) -> Answer:
        """Ask one question: encode it, stream the answer, and add the turn to the conversation.

        Raises UserError if the prompt cannot be built or does not fit; then the conversation is
        unchanged, and the message stays in `unanswered`.
        """
        conversation, dropped = self.session, set(self.session.tree.left)
        try:
            reply = self.runner.reply(self._request(text))
        except BaseException:
            conversation.tree.left = dropped
            raise
        self.log.asked(
            {
                "prompt": text,
                "parent": conversation.tree.at,
                "turn": len(conversation.tree.path()) + 1,
                "system": conversation.system,
                "settings": conversation.sampling.as_dict(),
                "predict": conversation.predict,
                "on_full": conversation.on_full,
                "format": turn_records.form_record(conversation.constraint),
                "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            }
        )
        try:
            stream.begin(self.opened)
            for event in reply:
                stream.show(event)
        except BaseException:
            self.log.missed()
            raise
        finally:
            stream.close()
        answer = self.last = reply.answer
        self.tally.add(answer, len(self.thought(answer)))
        context_overflow.settle(self, answer.overflow_stats)
        document, full_answer = self.document(answer), self.whole(answer.text)
        if answer.tokens or answer.finish != "cancelled":
            conversation.add(text, full_answer, answer.finish, len(answer.tokens))
            self.unanswered = None
            document |= {
                "node": conversation.tree.at,
                **({"answer": full_answer} if full_answer != answer.text else {}),
            }
        self.log.answered(document, conversation)
        return answer

    def message(self, text: str) -> str:
        """Return `text` after the attached files, and clear the attachments."""
        joined = "\n".join([*self.attached, text])
        self.attached.clear()
        return joined

    def samples(self, text: str, count: int, stream: Stream) -> list[Answer]:
        """Generate several answers to one message, outside the conversation.

        Each answer is written complete, under a heading.
        """
        reply = self.runner.reply(self._request(text), count)
        for _ in reply:
            pass
        for number, answer in enumerate(reply.answers, 1):
            stream.begin(self.opened)
            stream.heading(f"--- sample {number} · seed {answer.seed} ---")
            stream.show(Event(0, None, answer.text))
            stream.close()
        return reply.answers

    def _request(self, text: str) -> Request:
        start = time.perf_counter()
        self.unanswered = text
        prompt, conversation = context_overflow.fitted(self, text), self.session
        self.opened = self.runner.opened_tags(prompt.tokens)
        grammar = self.runner.grammars(conversation.constraint) if conversation.constraint else None
        strategy = (
            "beam" if conversation.search.beams > 1 else self.runner.default_strategy(grammar)
        )
        return Request(
            prompt.tokens,
            conversation.sampling,
            conversation.predict,
            self.stops,
            self.ignore_eos,
            self.logprobs or self.screen.probs > 0,
            start,
            strategy,
            conversation.search,
            allow_repetition=self.endless,
            top_logprobs=self.screen.probs,
            turn=len(conversation.tree.turns) + 1,
            earlier_turns=frozenset(conversation.tree.path()),
            grammar=grammar,
            grammar_after=self.opened.closing if self.opened else "",
            overflow=prompt.overflow,
            can_move_cells=prompt.move,
        )

    def stream(self, silent: bool = False) -> Stream:
        """Return the writer for the next answer."""
        return Stream(silent, painted(self.screen, self.ui))

    def whole(self, text: str) -> str:
        """Return an answer's text, including the thinking tag that its prompt opened."""
        return self.opened.opening + text if self.opened else text

    def thought(self, answer: Answer) -> str:
        """Return the part of the last answer's text that is thinking."""
        thought, _ = split_thinking(self.whole(answer.text))
        return thought.removeprefix(self.opened.opening) if self.opened else thought

    def document(self, answer: Answer) -> dict[str, Any]:
        """Return the JSON document of an answer, as `run --json` prints it."""
        thought, content = split_thinking(self.whole(answer.text))
        parts = {"thinking": thought, "content": content} if thought else {}
        report_document = answer_report.document(self.runner, self.name, self.file_bytes, answer)
        return {**report_document, **parts, **constraint_report.facts(self, answer)}

    def tokens(self, text: str, skip: int = 0) -> tuple[int, ...]:
        """Return the prompt's tokens: the turns after the first `skip`, then `text`."""
        if self.runner.template is None:
            return self.runner.encode_text(self._plain(text, skip))
        return self.runner.encode_chat(
            self._framed([*self.session.kept[2 * skip :], Message("user", text)])
        )

    def spoken(self) -> tuple[int, ...]:
        """Return the tokens of the conversation without a next message.

        Empty if there is no turn, or if the template cannot render the conversation.
        """
        messages = self.session.kept
        if not messages:
            return ()
        if self.runner.template is None:
            return self.runner.encode_text(self._head() + "\n".join(self._pairs()))
        try:
            return self.runner.encode_chat(self._framed(messages), add_generation_prompt=False)
        except UserError:  # the template requires a question at the end
            return ()

    def prefix(self) -> int:
        """Return the number of tokens before the first message: system text and template."""
        if self.runner.template is None:
            return (
                len(self.runner.encode_text(f"{self.session.system}\n\n"))
                if self.session.system
                else 0
            )
        try:
            first, second = (
                self.runner.encode_chat(self._framed([Message("user", probe)]))
                for probe in ("a", "b")
            )
        # a template that requires longer or several messages; reported when it matters
        except UserError:
            return 0
        return next(
            (
                index
                for index, pair in enumerate(zip(first, second, strict=False))
                if pair[0] != pair[1]
            ),
            0,
        )

    def ends(self) -> list[int]:
        """Return the conversation's token count at the end of each turn.

        Empty if the template cannot render the turns.
        """
        counts = []
        for count in range(2, len(self.session.kept) + 1, 2):
            if self.runner.template is None:
                counts.append(
                    len(
                        self.runner.encode_text(
                            self._head() + "\n".join(self._pairs()[: count // 2])
                        )
                    )
                )
                continue
            try:
                messages = self._framed(self.session.kept[:count])
                counts.append(len(self.runner.encode_chat(messages, add_generation_prompt=False)))
            except UserError:  # the template requires a question at the end
                return []
        return counts

    def held(self) -> int:
        """Return the conversation's token count, as it is sent with the next message."""
        if not self.session.kept:
            return self.prefix()
        # If the template requires a question at the end, count with a short one.
        return len(self.spoken() or self.tokens("a"))

    def tell_once(self, line: str) -> None:
        """Print a warning that is not repeated in this session."""
        if line not in self._told:
            self._told.add(line)
            self.ui.warn(line)

    def _framed(self, messages: list[Message]) -> list[Message]:
        """Return messages for the template: with the system text, without thinking.

        Where the template drops a system message, its text goes into the first message. Most
        templates remove earlier thinking themselves, and none needs it.
        """
        assert self.runner.template is not None
        messages = [_talked(message) for message in messages]
        system = self.session.system
        if not system:
            return messages
        if self.runner.template.accepts_system():
            return [Message("system", system), *messages]
        self.tell_once(
            "this model's template does not support a system text; "
            "it is put before the first message"
        )
        return [Message("user", f"{system}\n\n{messages[0].content}"), *messages[1:]]

    def _plain(self, text: str, skip: int) -> str:
        """Return the prompt without a template: system text, turns and `text` in plain text."""
        if self.session.system:
            self.tell_once("without a chat template, the system text is put before the prompt")
        return self._head() + "\n".join([*self._pairs()[skip:], text])

    def _head(self) -> str:
        return f"{self.session.system}\n\n" if self.session.system else ""

    def _pairs(self) -> list[str]:
        contents = [message.content for message in self.session.kept]
        return [
            question + answer
            for question, answer in zip(contents[::2], contents[1::2], strict=True)
        ]


def _talked(message: Message) -> Message:
    """Return a message as it is sent again: an answer without its thinking."""
    if message.role != "assistant":
        return message
    thought, content = split_thinking(message.content)
    return Message("assistant", content) if thought else message
