"""A chat session: a conversation, the model that answers, and how a turn is answered.

`chat`, `run` and the REPL's commands use it. Input and the terminal are handled elsewhere.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from llmcli.chat import constraint_report, context_overflow
from llmcli.chat.conversation import turn_records
from llmcli.chat.conversation.answer import NO_ANSWER_TEXT, AnswerText, split_answer
from llmcli.chat.conversation.conversation import Conversation
from llmcli.chat.conversation.session_log import NoSessionLog
from llmcli.chat.conversation.totals import SessionTotals
from llmcli.chat.display import answer_report
from llmcli.chat.display.answer_formatter import open_formatter
from llmcli.chat.display.display_settings import DisplaySettings
from llmcli.chat.display.stream_writer import StreamWriter
from llmcli.config import Config
from llmcli.errors import UserError
from llmcli.model_loader.opened_model import OpenedModel
from llmcli.runtime.requests.request import Answer, Request
from llmcli.runtime.runner import Runner
from llmcli.runtime.text.reasoning import ThinkingTags, split_thinking
from llmcli.types import Event, Message
from llmcli.ui import UI


class ModelChoices(Protocol):
    """The models that a chat can change to."""

    def list_names(self) -> Iterable[str]:
        """Return the names that can be given as REF: catalog names and local models."""
        ...

    def switch(self, ref: str, beams: int, use: Callable[[OpenedModel], None]) -> None:
        """Open `ref` for up to `beams` beams, pass it to `use`, then close the previous model.

        If anything raises, the previous model stays open.
        """
        ...


@dataclass(frozen=True, slots=True)
class MeasuredSpeed:
    """The speed of one test: tokens per second over its repetitions.

    For a generation test, `p50_ms` and `p99_ms` are milliseconds per token.
    """

    test: str
    per_second: float
    std_per_second: float
    p50_ms: float | None
    p99_ms: float | None


@dataclass(slots=True)
class ChatSession:
    """The state that the REPL's commands work on.

    - `stop_texts`: texts that end an answer.
    - `file_bytes`: the file size when the model was loaded; the file may be replaced meanwhile.
    - `models`: None if the model cannot be changed.
    - `measure_speed`: a speed test; takes a runner, prompt tokens and answer tokens.
    - `attachments`: texts of files that are sent with the next message.
    - `log`: records the session.
    - `last_text`: the text of the last answer.
    - `pending_message`: the last message, if an error or Ctrl-C prevented its answer.
    - `should_exit`: ends the input loop.
    - `opened_tags`: the thinking tags that the last prompt ends with.
    - `counted_tokens`: the last token count of status_line.py, with the key of what was counted.
    - `can_prefill`: whether a command can put `next_draft` into the next input line.
    """

    name: str
    runner: Runner
    conversation: Conversation
    config: Config
    ui: UI
    stop_texts: tuple[str, ...] = ()
    ignore_eos: bool = False
    endless: bool = False
    logprobs: bool = False
    file_bytes: int = 0
    models: ModelChoices | None = None
    measure_speed: Callable[[Runner, int, int], Sequence[MeasuredSpeed]] | None = None
    attachments: list[str] = field(default_factory=list)
    log: NoSessionLog = field(default_factory=NoSessionLog)
    last_answer: Answer | None = None
    last_text: AnswerText = NO_ANSWER_TEXT
    pending_message: str | None = None
    saved_name: str = ""
    should_exit: bool = False
    opened_tags: ThinkingTags | None = None
    display: DisplaySettings = field(default_factory=DisplaySettings)
    totals: SessionTotals = field(default_factory=SessionTotals)
    counted_tokens: tuple[tuple[object, ...], int] = ((), 0)
    can_prefill: bool = False
    next_draft: str = ""
    _warned: set[str] = field(default_factory=set)

    def ask(self, text: str, writer: StreamWriter) -> Answer:
        """Ask one question: encode it, stream the answer, and add the turn to the conversation.

        Raises UserError if the prompt cannot be built or does not fit; then the conversation is
        unchanged, and the message stays in `pending_message`.
        """
        conversation, dropped = self.conversation, set(self.conversation.tree.dropped)
        try:
            reply = self.runner.reply(self._request(text))
        except BaseException:
            conversation.tree.dropped = dropped
            raise
        self.log.record_question(
            {
                "prompt": text,
                "parent": conversation.tree.current_turn,
                "turn": len(conversation.tree.current_path()) + 1,
                "system": conversation.system,
                "settings": conversation.sampling.as_dict(),
                "predict": conversation.predict,
                "on_full": conversation.on_full,
                "format": turn_records.build_constraint_record(conversation.constraint),
                "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            }
        )
        try:
            writer.begin_answer(self.opened_tags)
            for event in reply:
                writer.write_event(event)
        except BaseException:
            self.log.record_unanswered()
            raise
        finally:
            writer.close()
        answer, answer_text = reply.answer, self._set_last_answer(reply.answer)
        self.totals.add_answer(answer, answer_text.n_thinking_chars)
        context_overflow.record_dropped_turns(self, answer.overflow_stats)
        document = self.build_document(answer, answer_text)
        if answer.tokens or answer.finish != "cancelled":
            conversation.add_turn(text, answer_text.full, answer.finish, len(answer.tokens))
            self.pending_message = None
            document |= {
                "node": conversation.tree.current_turn,
                **({"answer": answer_text.full} if answer_text.n_prompt_chars else {}),
            }
        self.log.record_answer(document, conversation)
        return answer

    def with_attachments(self, text: str) -> str:
        """Return `text` after the attached files, and clear the attachments."""
        joined = "\n".join([*self.attachments, text])
        self.attachments.clear()
        return joined

    def ask_samples(self, text: str, count: int, writer: StreamWriter) -> list[Answer]:
        """Generate several answers to one message, outside the conversation.

        When all of them are complete, they are written one after the other, each under a heading.
        The first of them becomes `last_answer`.
        """
        reply = self.runner.reply(self._request(text), count)
        for _ in reply:
            pass
        self._set_last_answer(reply.answers[0])
        for number, answer in enumerate(reply.answers, 1):
            writer.begin_answer(self.opened_tags)
            writer.write_heading(f"--- sample {number} · seed {answer.seed} ---")
            writer.write_event(Event(0, None, answer.text))
            writer.close()
        return reply.answers

    def _request(self, text: str) -> Request:
        start = time.perf_counter()
        self.pending_message = text
        prompt, conversation = context_overflow.fit_prompt(self, text), self.conversation
        self.opened_tags = self.runner.opened_tags(prompt.tokens)
        grammar = self.runner.grammars(conversation.constraint) if conversation.constraint else None
        strategy = (
            "beam" if conversation.search.beams > 1 else self.runner.default_strategy(grammar)
        )
        return Request(
            prompt.tokens,
            conversation.sampling,
            conversation.predict,
            self.stop_texts,
            self.ignore_eos,
            self.logprobs or self.display.probs > 0,
            start,
            strategy,
            conversation.search,
            allow_repetition=self.endless,
            top_logprobs=self.display.probs,
            turn=len(conversation.tree.turns) + 1,
            earlier_turns=frozenset(conversation.tree.current_path()),
            grammar=grammar,
            grammar_after=self.opened_tags.closing if self.opened_tags else "",
            overflow=prompt.overflow,
            can_move_cells=prompt.can_move_cells,
        )

    def open_writer(self, silent: bool = False) -> StreamWriter:
        """Return the writer for the next answer."""
        return StreamWriter(silent, open_formatter(self.display, self.ui))

    def _set_last_answer(self, answer: Answer) -> AnswerText:
        """Store `answer` as the last answer; return its text, split into thinking and content."""
        self.last_answer = answer
        self.last_text = split_answer(answer.text, self.opened_tags)
        return self.last_text

    def build_document(self, answer: Answer, text: AnswerText) -> dict[str, Any]:
        """Return the JSON document of an answer and its text, as `run --json` prints it."""
        parts = {"thinking": text.thinking, "content": text.content} if text.thinking else {}
        return {
            **answer_report.build_document(self.runner, self.name, self.file_bytes, answer),
            **parts,
            **self.constraint_json(answer),
        }

    def is_complete(self, answer: Answer) -> bool:
        """Return whether an answer to the last prompt satisfies the constraint completely."""
        return constraint_report.is_complete(
            self.runner, self.conversation.constraint, self.opened_tags, answer
        )

    def constraint_json(self, answer: Answer) -> dict[str, Any]:
        """Return the constraint's part of an answer's JSON document; empty without one."""
        return constraint_report.constraint_json(
            self.runner, self.conversation.constraint, self.opened_tags, answer
        )

    def prompt_tokens(self, text: str, skip: int = 0) -> tuple[int, ...]:
        """Return the tokens of a prompt: the sent turns without the first `skip`, then `text`."""
        if self.runner.template is None:
            return self.runner.encode_text(self._plain(text, skip))
        return self.runner.encode_chat(
            self.template_messages(
                [*self.conversation.sent_messages[2 * skip :], Message("user", text)]
            )
        )

    def conversation_tokens(self) -> tuple[int, ...]:
        """Return the tokens of the conversation so far, without another message.

        Empty if there is no turn, or if the template cannot render the conversation.
        """
        messages = self.conversation.sent_messages
        if not messages:
            return ()
        if self.runner.template is None:
            return self.runner.encode_text(self._head() + "\n".join(self._pairs()))
        try:
            return self.runner.encode_chat(
                self.template_messages(messages), add_generation_prompt=False
            )
        except UserError:  # the template requires a question at the end
            return ()

    def prefix_token_count(self) -> int:
        """Return the number of tokens before the first message: system text and template."""
        if self.runner.template is None:
            return (
                len(self.runner.encode_text(f"{self.conversation.system}\n\n"))
                if self.conversation.system
                else 0
            )
        try:
            first, second = (
                self.runner.encode_chat(self.template_messages([Message("user", probe)]))
                for probe in ("a", "b")
            )
        # the template requires longer or several messages; sending one reports the error
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

    def turn_ends(self) -> list[int]:
        """Return the conversation's token count at the end of each turn.

        Empty if the template cannot render the turns.
        """
        counts = []
        for count in range(2, len(self.conversation.sent_messages) + 1, 2):
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
                messages = self.template_messages(self.conversation.sent_messages[:count])
                counts.append(len(self.runner.encode_chat(messages, add_generation_prompt=False)))
            except UserError:  # the template requires a question at the end
                return []
        return counts

    def token_count(self) -> int:
        """Return the token count of the conversation as it is sent with the next message."""
        if not self.conversation.sent_messages:
            return self.prefix_token_count()
        # If the template requires a question at the end, count with a short one.
        return len(self.conversation_tokens() or self.prompt_tokens("a"))

    def warn_once(self, line: str) -> None:
        """Print a warning that is not repeated in this session."""
        if line not in self._warned:
            self._warned.add(line)
            self.ui.warn(line)

    def template_messages(self, messages: list[Message]) -> list[Message]:
        """Return messages for the template: add the system text, and remove thinking.

        If the template does not support a system message, the system text is put before the first
        message. Most templates remove the thinking of earlier answers themselves, and none needs
        it.
        """
        assert self.runner.template is not None
        messages = [_without_thinking(message) for message in messages]
        system = self.conversation.system
        if not system:
            return messages
        if self.runner.template.accepts_system():
            return [Message("system", system), *messages]
        self.warn_once(
            "this model's template does not support a system text; "
            "it is put before the first message"
        )
        return [Message("user", f"{system}\n\n{messages[0].content}"), *messages[1:]]

    def _plain(self, text: str, skip: int) -> str:
        """Return the prompt without a template: system text, turns and `text` in plain text."""
        if self.conversation.system:
            self.warn_once("without a chat template, the system text is put before the prompt")
        return self._head() + "\n".join([*self._pairs()[skip:], text])

    def _head(self) -> str:
        return f"{self.conversation.system}\n\n" if self.conversation.system else ""

    def _pairs(self) -> list[str]:
        contents = [message.content for message in self.conversation.sent_messages]
        return [
            question + answer
            for question, answer in zip(contents[::2], contents[1::2], strict=True)
        ]


def _without_thinking(message: Message) -> Message:
    """Return a message as it is sent again: an answer without its thinking."""
    if message.role != "assistant":
        return message
    thought, content = split_thinking(message.content)
    return Message("assistant", content) if thought else message
