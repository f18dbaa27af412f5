"""A conversation going on: a session, the model that answers, and one turn of it.

What `chat`, `run` and the REPL's commands share. Where lines come from, and the terminal, are
others'.
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
from llmcli.runtime.text.reasoning import Tags, split
from llmcli.types import Event, Message
from llmcli.ui import UI


class Models(Protocol):
    """Where models come from, which is not the chat's to know."""

    def names(self) -> Iterable[str]:
        """What may be written as a REF: the catalog's names and the models that are here."""
        ...

    def change(self, ref: str, beams: int, take: Callable[[Opened], None]) -> None:
        """Open `ref` for up to `beams` beams, let `take` have it, then close the model there was.

        Whatever is raised, that one is still open."""
        ...


@dataclass(frozen=True, slots=True)
class Speed:
    """One measured test: tokens per second over its repetitions; a generation's milliseconds a
    token, too.
    """

    test: str
    per_second: float
    deviation: float
    p50_ms: float | None
    p99_ms: float | None


@dataclass(slots=True)
class Talk:
    """Everything a command may look at. `file_bytes` was measured when the model was loaded: its
    file may be replaced while it runs. `unanswered` is a message that an error or Ctrl-C kept from
    an answer, `log` keeps what happens, `leaving` ends the loop. Where lines are typed (`prefills`)
    a command may leave a `draft` of the next one. `models` None: there is no other model to be had,
    `measure` takes a runner, prompt and answer tokens. `attached` are files' texts for the next
    message, `opened` thinking tags that the last prompt ends with, `counted` the tokens of a
    conversation, and of which (status.py).
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
    opened: Tags | None = None
    screen: Screen = field(default_factory=Screen)
    tally: Tally = field(default_factory=Tally)
    counted: tuple[tuple[object, ...], int] = ((), 0)
    prefills: bool = False
    draft: str = ""
    _told: set[str] = field(default_factory=set)

    def ask(self, text: str, stream: Stream) -> Answer:
        """One turn: encode, answer, keep. Raises UserError where the prompt cannot be made or does
        not fit; then the conversation is as it was, and the message waits in `unanswered`.
        """
        session, left = self.session, set(self.session.tree.left)
        try:
            reply = self.runner.reply(self._request(text))
        except BaseException:
            session.tree.left = left
            raise
        self.log.asked(
            {
                "prompt": text,
                "parent": session.tree.at,
                "turn": len(session.tree.path()) + 1,
                "system": session.system,
                "settings": session.sampling.as_dict(),
                "predict": session.predict,
                "on_full": session.on_full,
                "format": turn_records.form_record(session.constraint),
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
        context_overflow.settle(self, answer.left)
        document, said = self.document(answer), self.whole(answer.text)
        if answer.tokens or answer.finish != "cancelled":
            session.add(text, said, answer.finish, len(answer.tokens))
            self.unanswered = None
            document |= {
                "node": session.tree.at,
                **({"answer": said} if said != answer.text else {}),
            }
        self.log.answered(document, session)
        return answer

    def message(self, text: str) -> str:
        """`text` after the files that wait for it; they wait no longer."""
        whole = "\n".join([*self.attached, text])
        self.attached.clear()
        return whole

    def samples(self, text: str, count: int, stream: Stream) -> list[Answer]:
        """Several answers to one message, outside the conversation; each is shown whole, under a
        line of its own.
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
        started = time.perf_counter()
        self.unanswered = text
        made, session = context_overflow.fitted(self, text), self.session
        self.opened = self.runner.opened(made.tokens)
        grammar = self.runner.grammars(session.constraint) if session.constraint else None
        strategy = "beam" if session.search.beams > 1 else self.runner.strategy(grammar)
        return Request(
            made.tokens,
            session.sampling,
            session.predict,
            self.stops,
            self.ignore_eos,
            self.logprobs or self.screen.probs > 0,
            started,
            strategy,
            session.search,
            endless=self.endless,
            top_logprobs=self.screen.probs,
            turn=len(session.tree.turns) + 1,
            path=frozenset(session.tree.path()),
            grammar=grammar,
            after=self.opened.closes if self.opened else "",
            overflow=made.overflow,
            move=made.move,
        )

    def stream(self, silent: bool = False) -> Stream:
        """The screen for the next answer."""
        return Stream(silent, painted(self.screen, self.ui))

    def whole(self, text: str) -> str:
        """An answer's text with the thinking tag that its prompt has opened for it."""
        return self.opened.opens + text if self.opened else text

    def thought(self, answer: Answer) -> str:
        """What of the last answer's own text is thinking."""
        thought, _ = split(self.whole(answer.text))
        return thought.removeprefix(self.opened.opens) if self.opened else thought

    def document(self, answer: Answer) -> dict[str, Any]:
        """An answer's accounts, as `run --json` prints them."""
        thought, said = split(self.whole(answer.text))
        more = {"thinking": thought, "content": said} if thought else {}
        accounts = answer_report.document(self.runner, self.name, self.file_bytes, answer)
        return {**accounts, **more, **constraint_report.facts(self, answer)}

    def tokens(self, text: str, skip: int = 0) -> tuple[int, ...]:
        """The ids of the conversation as the model is shown it, but for its first `skip` turns,
        with `text` as its next message.
        """
        if self.runner.template is None:
            return self.runner.encode_text(self._plain(text, skip))
        return self.runner.encode_chat(
            self._framed([*self.session.kept[2 * skip :], Message("user", text)])
        )

    def spoken(self) -> tuple[int, ...]:
        """The ids of what was said, without a next message; empty where nothing was or the template
        cannot tell.
        """
        messages = self.session.kept
        if not messages:
            return ()
        if self.runner.template is None:
            return self.runner.encode_text(self._head() + "\n".join(self._pairs()))
        try:
            return self.runner.encode_chat(self._framed(messages), add_generation_prompt=False)
        except UserError:  # a template that wants a question last
            return ()

    def prefix(self) -> int:
        """How many tokens stand before the first message: system text and what the template adds."""
        if self.runner.template is None:
            return (
                len(self.runner.encode_text(f"{self.session.system}\n\n"))
                if self.session.system
                else 0
            )
        try:
            one, other = (
                self.runner.encode_chat(self._framed([Message("user", probe)]))
                for probe in ("a", "b")
            )
        except UserError:  # a template that wants more than one short message: told when it matters
            return 0
        return next(
            (
                index
                for index, pair in enumerate(zip(one, other, strict=False))
                if pair[0] != pair[1]
            ),
            0,
        )

    def ends(self) -> list[int]:
        """How many tokens the conversation has at the end of each turn; empty where its template
        cannot tell.
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
                said = self._framed(self.session.kept[:count])
                counts.append(len(self.runner.encode_chat(said, add_generation_prompt=False)))
            except UserError:  # a template that wants a question last
                return []
        return counts

    def held(self) -> int:
        """How many tokens the conversation so far has, as it is sent with the next message."""
        if not self.session.kept:
            return self.prefix()
        return len(
            self.spoken() or self.tokens("a")
        )  # a template that wants a question last: with a short one

    def tell_once(self, line: str) -> None:
        """A warning that need not be repeated in one sitting."""
        if line not in self._told:
            self._told.add(line)
            self.ui.warn(line)

    def _framed(self, messages: list[Message]) -> list[Message]:
        """With the system text: as a message of its own, or inside the first one where the template
        drops it.

        Answers go without their thinking: most templates take it out themselves, and none wants it
        later on.
        """
        assert self.runner.template is not None
        messages = [_talked(message) for message in messages]
        system = self.session.system
        if not system:
            return messages
        if self.runner.template.accepts_system():
            return [Message("system", system), *messages]
        self.tell_once(
            "this model's template has no place for a system text; it goes before the first message"
        )
        return [Message("user", f"{system}\n\n{messages[0].content}"), *messages[1:]]

    def _plain(self, text: str, skip: int) -> str:
        """Without a template: system text, then what was said and continued, then `text`."""
        if self.session.system:
            self.tell_once("without a chat template the system text is put before the prompt")
        return self._head() + "\n".join([*self._pairs()[skip:], text])

    def _head(self) -> str:
        return f"{self.session.system}\n\n" if self.session.system else ""

    def _pairs(self) -> list[str]:
        turns = [message.content for message in self.session.kept]
        return [one + other for one, other in zip(turns[::2], turns[1::2], strict=True)]


def _talked(message: Message) -> Message:
    """A message as it is sent again: an answer without what was thought."""
    if message.role != "assistant":
        return message
    thought, said = split(message.content)
    return Message("assistant", said) if thought else message
