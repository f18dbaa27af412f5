"""What a chat needs of the model that answers it. A model is in this process (local_model.py) or
behind a server (server/remote_model.py).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from llmcli.chat.context_overflow import PromptSource
from llmcli.chat.display.display_settings import DisplaySettings
from llmcli.chat.tools.chat_tools import ChatTools
from llmcli.model_loader.opened_model import OpenedModel
from llmcli.runtime.constraint.base import Constraint
from llmcli.runtime.requests.request import Answer
from llmcli.runtime.runner import Runner
from llmcli.runtime.text.reasoning import ThinkingTags
from llmcli.types import Event, Message

if TYPE_CHECKING:
    from llmcli.chat.tools.call_filter import CallFilter


class ModelChoices(Protocol):
    """Opens another model for the command /model. Implemented by the `chat` command."""

    def list_names(self) -> Iterable[str]:
        """Return the model names that Tab offers: catalog names and local models."""
        ...

    def switch(self, ref: str, beams: int, use: Callable[[OpenedModel], None]) -> None:
        """Open the model `ref` with enough sequences for `beams` beams, call `use` with it, then
        close the previous model. If opening or `use` raises, the previous model stays open.
        """
        ...


class ChatState(PromptSource, Protocol):
    """The attributes of a ChatSession that its model uses. (A direct import of ChatSession would be
    circular.) They are described there.
    """

    name: str
    model: "ChatModel"
    models: ModelChoices | None
    model_sha256: str
    stop_texts: tuple[str, ...]
    ignore_eos: bool
    endless: bool
    reasoning_budget: int | None
    logprobs: bool
    file_bytes: int
    display: DisplaySettings
    opened_tags: ThinkingTags | None
    last_answer: Answer | None
    counted_tokens: tuple[tuple[object, ...], int]
    tools: ChatTools | None

    def conversation_tokens(self) -> tuple[int, ...]:
        """Return the tokens of all turns that are still sent, without a new message."""
        ...

    def token_count(self) -> int:
        """Return the number of tokens that the conversation adds to the next prompt."""
        ...

    def warn_once(self, line: str) -> None:
        """Print a warning, but each text only once in a session."""
        ...


class ChatReply(Protocol):
    """One or several answers while they are generated. Iterate over it to get the events, then read
    the answers. A Ctrl-C ends the answers early.
    """

    def __iter__(self) -> Iterator[Event]: ...

    @property
    def answers(self) -> list[Answer]: ...

    @property
    def answer(self) -> Answer: ...


@dataclass(frozen=True, slots=True)
class ContextUse:
    """How much of the context a conversation takes. `n_tokens`, `n_ctx`: tokens of the conversation
    and of the context; None if unknown. `cache`: a text about the KV cache, or "".
    """

    n_tokens: int | None
    n_ctx: int | None
    cache: str = ""


class ChatModel(ABC):
    """The model that answers a chat.

    - `has_tokenizer`: whether texts can be counted in tokens before they are sent.
    - `timed_unit`: what the entries of an answer's `tokens` are, and what their times are of.
    """

    has_tokenizer: bool
    timed_unit: str

    @abstractmethod
    def require_runner(self) -> Runner:
        """Return the model in this process. Raises UserError if it is not in this process."""

    @property
    @abstractmethod
    def location(self) -> str:
        """The path of the model's file, or the address of its server."""

    @property
    def server(self) -> str:
        """The address of the model's server; "" for a model in this process."""
        return ""

    @property
    @abstractmethod
    def n_ctx(self) -> int | None:
        """The tokens that the context holds; None if unknown."""

    @abstractmethod
    def describe(self, name: str, shows_start: bool = False) -> str:
        """Return a line about the model called `name`. `shows_start`: end it with how it was
        opened, for the first line of a chat.
        """

    @abstractmethod
    def summary_rows(self, name: str) -> list[tuple[str, str]]:
        """Return table rows with the most important facts about the model called `name`."""

    @abstractmethod
    def list_names(self, chat: ChatState) -> Iterable[str]:
        """Return the names of the models that `switch` can take."""

    @abstractmethod
    def switch(self, chat: ChatState, ref: str) -> None:
        """Let the model `ref` answer the chat from now on. Raises UserError if it cannot; the chat
        then stays as it is.
        """

    @abstractmethod
    def start_reply(self, chat: ChatState, text: str, count: int) -> ChatReply:
        """Start `count` answers to the message `text` after the conversation, and set
        `chat.opened_tags`. Raises UserError if the message cannot be sent.
        """

    @abstractmethod
    def encode_messages(
        self, chat: ChatState, messages: Sequence[Message], *, add_generation_prompt: bool = True
    ) -> tuple[int, ...]:
        """Return the tokens of a conversation, which offers the tools of the chat. Call it only for
        a model with a chat template. Raises UserError if the template cannot render it.
        """

    @abstractmethod
    def open_call_filter(self, chat: ChatState) -> "CallFilter | None":
        """Return the filter for the answer to the last prompt; None if it offers no tools."""

    @abstractmethod
    def build_document(self, chat: ChatState, answer: Answer) -> dict[str, Any]:
        """Return an answer as a JSON document, as the session log contains it."""

    @abstractmethod
    def format_timing(self, answer: Answer) -> str:
        """Return the line about the time of an answer."""

    @abstractmethod
    def report_lines(self, answer: Answer, timing: str) -> list[str]:
        """Return the lines to print below an answer. `timing`: one of
        display_settings.TIMING_MODES.
        """

    @abstractmethod
    def token_text(self, answer: Answer, token: int) -> str:
        """Return the text of the id of a token or an alternative in an answer."""

    @abstractmethod
    def count_text(self, text: str) -> int:
        """Return the number of tokens of a text. Call it only if `has_tokenizer`."""

    @abstractmethod
    def check_constraint(self, constraint: Constraint) -> Sequence[str]:
        """Return what a grammar or schema demands and is not enforced. Raises UserError if it
        cannot be used with this model.
        """

    @abstractmethod
    def is_complete(
        self, constraint: Constraint | None, opened_tags: ThinkingTags | None, answer: Answer
    ) -> bool:
        """Return whether the grammar or schema accepts the answer as a complete text. True without
        a constraint.
        """

    @abstractmethod
    def constraint_json(
        self, constraint: Constraint | None, opened_tags: ThinkingTags | None, answer: Answer
    ) -> dict[str, Any]:
        """Return the fields about the constraint for an answer's JSON document."""

    @abstractmethod
    def setting_obstacle(self, name: str) -> str:
        """Return why a setting of /set cannot be changed for this model, or "". `name`: its name,
        not an alias.
        """

    @abstractmethod
    def has_own_value(self, chat: ChatState, name: str) -> bool:
        """Return whether the sampling setting `name` is left to the model's server, because it was
        not set here.
        """

    @property
    @abstractmethod
    def reasoning(self) -> bool | None:
        """Whether the model is asked to think first; None for the model's default."""

    @abstractmethod
    def set_reasoning(self, reasoning: bool | None) -> None:
        """Change `reasoning`. Raises UserError if the model cannot be asked for that."""

    @property
    @abstractmethod
    def can_switch_reasoning(self) -> bool:
        """Whether thinking can be turned on and off."""

    @abstractmethod
    def context_use(self, chat: ChatState) -> ContextUse:
        """Return how much of the context the conversation takes."""

    @abstractmethod
    def describe_position(self, chat: ChatState) -> str:
        """Return a text about the cached tokens of the conversation, or ""."""

    @abstractmethod
    def conversation_size(self, chat: ChatState) -> int | None:
        """Return the number of tokens of the turns that are sent; None if unknown."""

    @abstractmethod
    def forget_conversation(self) -> None:
        """Drop what is cached of a conversation that was cleared."""

    @abstractmethod
    def save_state(self, chat: ChatState, path: Path) -> str:
        """Write what is cached of the conversation to `path`, and return a text that says what was
        written. An older file is removed if nothing is written. Raises UserError.
        """

    @abstractmethod
    def restore_state(self, chat: ChatState, path: Path) -> str:
        """Read the file that save_state has written, and return a text that says what was read."""
