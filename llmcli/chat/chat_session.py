"""A chat session: a conversation together with the model that answers it. Builds prompts from the
conversation, generates answers and adds them to the conversation.

The commands `chat` and `run` and all REPL commands use it. It reads no input (input_loop.py).
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from llmcli.chat import context_overflow
from llmcli.chat.chat_model import ChatModel, ChatReply, ModelChoices
from llmcli.chat.conversation import turn_records
from llmcli.chat.conversation.answer import (
    NO_ANSWER_TEXT,
    AnswerText,
    split_answer,
    without_thinking,
)
from llmcli.chat.conversation.conversation import Conversation
from llmcli.chat.conversation.session_log import NoSessionLog
from llmcli.chat.conversation.tool_steps import ToolStep, build_step_records, step_messages
from llmcli.chat.conversation.totals import SessionTotals
from llmcli.chat.display.answer_formatter import open_formatter
from llmcli.chat.display.display_settings import DisplaySettings
from llmcli.chat.display.stream_writer import StreamWriter
from llmcli.chat.tools.chat_tools import ChatTools
from llmcli.config import Config
from llmcli.errors import UserError
from llmcli.runtime.requests.request import Answer
from llmcli.runtime.runner import Runner
from llmcli.runtime.text.reasoning import ThinkingTags
from llmcli.types import Event, Message
from llmcli.ui import UI

if TYPE_CHECKING:
    from llmcli.chat.tools.call_filter import CallFilter


@dataclass(frozen=True, slots=True)
class MeasuredSpeed:
    """The result of a speed test such as "pp512" or "tg128", whose names are those of llama-bench.

    `per_second`, `std_per_second`: mean and standard deviation of tokens per second over the
    repetitions. `p50_ms`, `p99_ms`: percentiles of milliseconds per token; None for a prompt test.
    """

    test: str
    per_second: float
    std_per_second: float
    p50_ms: float | None
    p99_ms: float | None


@dataclass(slots=True)
class ChatSession:
    """A conversation, the model that answers it, and the state that REPL commands read and change.

    - `name`, `model`: the model's name, and the model that answers.
    - `stop_texts`: texts that end an answer.
    - `ignore_eos`: continue after the model's end token.
    - `endless`: continue if an answer only repeats itself.
    - `reasoning_budget`: the largest number of thinking tokens of an answer; None: any number.
    - `logprobs`: compute the log-probability of every drawn token.
    - `file_bytes`: size of the model file when it was loaded. (The file may have changed since.)
    - `model_sha256`: sha256 of the model's files, "" if it is not known.
    - `models`: opens other models; None if the model cannot be changed.
    - `measure_speed`: function for /bench. Takes the runner, and the numbers of prompt tokens and
      of generated tokens.
    - `attachments`: texts of files that are sent before the next message.
    - `log`: where the session is recorded.
    - `last_answer`, `last_text`: the last answer, and its text split into thinking and content.
    - `pending_message`: the last message, if an error or Ctrl-C prevented its answer.
    - `saved_name`: name under which the conversation was saved or loaded; "" for none.
    - `should_exit`: set by a command to end the input loop.
    - `opened_tags`: the thinking tags that are open at the end of the last prompt, or None.
    - `counted_tokens`: cache of LocalModel: what was counted, and its number of tokens.
    - `tools`: the tools that the model may call; None without tools.
    - `last_steps`: the calls of tools before the last answer.
    - `can_prefill`: whether a command can set `next_draft`, the text that the next input line
      begins with.
    """

    name: str
    model: ChatModel
    conversation: Conversation
    config: Config
    ui: UI
    stop_texts: tuple[str, ...] = ()
    ignore_eos: bool = False
    endless: bool = False
    logprobs: bool = False
    file_bytes: int = 0
    model_sha256: str = ""
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
    reasoning_budget: int | None = None
    tools: ChatTools | None = None
    last_steps: tuple[ToolStep, ...] = ()
    _warned: set[str] = field(default_factory=set)
    # the calls of tools for the question that is being answered
    _open_steps: tuple[ToolStep, ...] = ()

    @property
    def runner(self) -> Runner:
        """The model in this process. Raises UserError if the model is on a server."""
        return self.model.require_runner()

    @property
    def model_record(self) -> dict[str, str]:
        """The name of the model, and the address of its server if it has one, as the log has
        them.
        """
        return {"name": self.name, **({"server": self.model.server} if self.model.server else {})}

    def record_position(self) -> None:
        """Record the place in the conversation in the log if it has changed."""
        self.log.record_position(self.conversation, self.model_record)

    def ask(self, text: str, writer: StreamWriter) -> Answer:
        """Send the message `text`, pass the answer to `writer` as it is generated, and add both to
        the conversation as a new turn. While the model calls tools, call them and let it go on.

        Raises UserError if the prompt cannot be built or does not fit into the context. The
        conversation is then unchanged, and the message is in `pending_message`. But if tools have
        been called, their calls and results become a turn that was stopped.
        """
        conversation, dropped = self.conversation, set(self.conversation.tree.dropped)
        self.last_steps = ()
        try:
            reply = self._start_reply(text)
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
            answer = self._generate(text, reply, writer)
        except BaseException:
            if self._open_steps:
                self._keep_steps(text)
            else:
                self.log.record_unanswered()
            raise
        finally:
            self.last_steps, self._open_steps = self._open_steps, ()
        answer_text = self.last_text
        document = self.build_document(answer, answer_text)
        if answer.tokens or answer.finish != "cancelled" or self.last_steps:
            conversation.add_turn(
                text, answer_text.full, answer.finish, answer.n_generated, self.last_steps
            )
            self.pending_message = None
            document |= {
                "node": conversation.tree.current_turn,
                **({"answer": answer_text.full} if answer_text.n_prompt_chars else {}),
            }
        self.log.record_answer(document, conversation)
        return answer

    def _start_reply(self, text: str, count: int = 1) -> ChatReply:
        """Start `count` answers to the message `text`, and set `pending_message` and `opened_tags`.
        Raises UserError if the message cannot be sent.
        """
        self.pending_message = text
        return self.model.start_reply(self, text, count)

    def _generate(self, text: str, reply: ChatReply, writer: StreamWriter) -> Answer:
        """Generate the answer to the message `text`, whose first part is `reply`. The calls of
        tools are in `_open_steps`.
        """
        while True:
            call_filter = self.model.open_call_filter(self)
            try:
                writer.begin_answer(self.opened_tags)
                for event in reply:
                    shown = call_filter.feed(event.text) if call_filter else event.text
                    writer.write_event(event._replace(text=shown))
                if call_filter:
                    writer.write_event(Event(0, None, call_filter.finish()))
            finally:
                writer.close()
            answer, answer_text = reply.answer, self._set_last_answer(reply.answer)
            self.totals.add_answer(answer, answer_text.n_thinking_chars)
            context_overflow.record_dropped_turns(self, answer.overflow_stats)
            if not call_filter or not self._runs_calls(answer, call_filter):
                return answer
            self._run_calls(call_filter)
            reply = self._start_reply(text)

    def _runs_calls(self, answer: Answer, call_filter: "CallFilter") -> bool:
        """Return whether the calls of an answer are made. A note says why they are not."""
        assert self.tools
        if not call_filter.calls or answer.finish == "cancelled":
            return False
        names = ", ".join(call.name for call in call_filter.calls)
        if answer.finish != "stop":
            self.ui.note(f"not called: {names[:200]}, because the answer is not complete")
            return False
        if len(self._open_steps) >= self.tools.max_rounds:
            self.ui.note(
                f"not called: {names[:200]}, because the answer has called tools "
                f"{self.tools.max_rounds} times, which is the limit (--tool-rounds)"
            )
            return False
        return True

    def _run_calls(self, call_filter: "CallFilter") -> None:
        """Make the calls of an answer, and add them to `_open_steps`, also if one is stopped."""
        assert self.tools
        step = ToolStep(self.last_text.plain_thinking, call_filter.content.strip(), ())
        earlier = self._open_steps
        for record in self.tools.run_calls(call_filter.calls, lambda: self.should_exit):
            step = replace(step, calls=(*step.calls, record))
            self._open_steps = (*earlier, step)

    def _keep_steps(self, text: str) -> None:
        """Add the turn of a message after whose calls of tools no answer came, because the user or
        an error stopped it.
        """
        conversation = self.conversation
        conversation.add_turn(text, "", "cancelled", 0, self._open_steps)
        self.pending_message = None
        document = {
            "model": self.model_record,
            "text": "",
            "finish": "cancelled",
            "tool_steps": build_step_records(self._open_steps),
            "node": conversation.tree.current_turn,
        }
        self.log.record_answer(document, conversation)

    def with_attachments(self, text: str) -> str:
        """Return the attached files' texts followed by `text`, and clear the attachments."""
        joined = "\n".join([*self.attachments, text])
        self.attachments.clear()
        return joined

    def ask_samples(self, text: str, count: int, writer: StreamWriter) -> list[Answer]:
        """Generate `count` answers to the message `text` in parallel, without adding a turn to the
        conversation. When all are complete, write each of them under a heading. The first one
        becomes `last_answer`.
        """
        reply = self._start_reply(text, count)
        for _ in reply:
            pass
        self._set_last_answer(reply.answers[0])
        for number, answer in enumerate(reply.answers, 1):
            writer.begin_answer(self.opened_tags)
            writer.write_heading(f"--- sample {number} · seed {answer.seed} ---")
            writer.write_event(Event(0, None, answer.text))
            writer.close()
        return reply.answers

    def open_writer(self, silent: bool = False) -> StreamWriter:
        """Return a writer that formats an answer according to the display settings. `silent`: the
        writer discards all text.
        """
        formatter = open_formatter(self.display, self.ui, self.config.moves_cursor)
        return StreamWriter(silent, formatter)

    def _set_last_answer(self, answer: Answer) -> AnswerText:
        """Set `last_answer` and `last_text`. Return the answer's text, split into thinking and
        content.
        """
        self.last_answer = answer
        self.last_text = split_answer(answer.text, self.opened_tags)
        return self.last_text

    def build_document(self, answer: Answer, text: AnswerText) -> dict[str, Any]:
        """Return an answer as a JSON document, as `run --json` prints it. `text`: the answer's
        text, split into thinking and content.
        """
        split_text = {"thinking": text.thinking, "content": text.content} if text.thinking else {}
        steps = build_step_records(self.last_steps)
        return {
            **self.model.build_document(self, answer),
            **split_text,
            **self.constraint_json(answer),
            **({"tools": list(self.tools.offered_names)} if self.tools else {}),
            **({"tool_steps": steps} if steps else {}),
        }

    def is_complete(self, answer: Answer) -> bool:
        """Return whether an answer to the last prompt is complete according to the grammar or
        schema, for example a closed JSON document. True without a constraint.
        """
        return self.model.is_complete(self.conversation.constraint, self.opened_tags, answer)

    def constraint_json(self, answer: Answer) -> dict[str, Any]:
        """Return the fields about the grammar or schema for an answer's JSON document. Empty
        without a constraint.
        """
        return self.model.constraint_json(self.conversation.constraint, self.opened_tags, answer)

    def prompt_tokens(self, text: str, skip: int = 0) -> tuple[int, ...]:
        """Return the tokens of a prompt for the message `text` after the conversation. `skip`:
        number of turns to leave out, from the first turn that is still sent. Raises UserError if
        the template cannot render the conversation.
        """
        if self.runner.template is None:
            return self.runner.encode_text(self._plain_prompt(text, skip))
        turns = self.conversation.sent_turn_messages[skip:]
        steps = [step_messages(step, with_thinking=True) for step in self._open_steps]
        return self.model.encode_messages(
            self,
            self.template_messages(
                [
                    *(message for messages in turns for message in messages),
                    Message("user", text),
                    *(message for messages in steps for message in messages),
                ]
            ),
        )

    def conversation_tokens(self) -> tuple[int, ...]:
        """Return the tokens of all turns that are still sent, without a new message. Empty if there
        are no turns, or if the template can render only conversations that end with a question.
        """
        messages = self.conversation.sent_messages
        if not messages:
            return ()
        if self.runner.template is None:
            return self.runner.encode_text(
                self._plain_system_text() + "\n".join(self._plain_turns())
            )
        try:
            return self.model.encode_messages(
                self, self.template_messages(messages), add_generation_prompt=False
            )
        except UserError:  # the template requires a question at the end
            return ()

    def prefix_token_count(self) -> int:
        """Return the number of prompt tokens before the text of the first message: the system text
        and the template's own tokens. 0 if the template cannot render a short message.
        """
        if self.runner.template is None:
            return (
                len(self.runner.encode_text(f"{self.conversation.system}\n\n"))
                if self.conversation.system
                else 0
            )
        try:
            first, second = (
                self.model.encode_messages(self, self.template_messages([Message("user", probe)]))
                for probe in ("a", "b")
            )
        # The template requires longer or several messages. Sending a message will report the error.
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
        """Return for each sent turn the number of tokens from the start of the conversation to the
        end of the turn. Empty if the template cannot render the turns.
        """
        counts: list[int] = []
        sent: list[Message] = []
        for turn, turn_messages in enumerate(self.conversation.sent_turn_messages, 1):
            sent += turn_messages
            if self.runner.template is None:
                counts.append(
                    len(
                        self.runner.encode_text(
                            self._plain_system_text() + "\n".join(self._plain_turns()[:turn])
                        )
                    )
                )
                continue
            try:
                messages = self.template_messages(sent)
                counts.append(
                    len(self.model.encode_messages(self, messages, add_generation_prompt=False))
                )
            except UserError:  # the template requires a question at the end
                return []
        return counts

    def token_count(self) -> int:
        """Return the number of tokens that the conversation adds to the next prompt."""
        if not self.conversation.sent_messages:
            return self.prefix_token_count()
        # If the template requires a question at the end, count with a short one.
        return len(self.conversation_tokens() or self.prompt_tokens("a"))

    def warn_once(self, line: str) -> None:
        """Print a warning, but each text only once in a session."""
        if line not in self._warned:
            self._warned.add(line)
            self.ui.warn(line)

    def template_messages(self, messages: list[Message]) -> list[Message]:
        """Return the messages in the form in which the chat template receives them: with the
        system text as the first message, and with no thinking in earlier answers. (Models are not
        trained on it, and most templates would remove it.)

        If the template does not support a system message, the system text becomes a part of the
        first message, and a warning is printed.
        """
        assert self.runner.template is not None
        messages = [without_thinking(message) for message in messages]
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

    def _plain_prompt(self, text: str, skip: int) -> str:
        """Return the prompt for a model without a chat template, as one text: the system text, the
        turns without the first `skip`, and `text`.
        """
        if self.conversation.system:
            self.warn_once("without a chat template, the system text is put before the prompt")
        return self._plain_system_text() + "\n".join([*self._plain_turns()[skip:], text])

    def _plain_system_text(self) -> str:
        """Return the beginning of a prompt without a template: the system text and a blank line."""
        return f"{self.conversation.system}\n\n" if self.conversation.system else ""

    def _plain_turns(self) -> list[str]:
        """Return each sent turn as one text, in which the answer directly follows the question, as
        the model has continued it.
        """
        turns = self.conversation.sent_turn_messages
        return [messages[0].content + messages[-1].content for messages in turns]
