"""The model of a chat behind a server with OpenAI's API."""

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmcli.chat.chat_model import ChatModel, ChatReply, ChatState, ContextUse
from llmcli.chat.conversation.answer import split_answer
from llmcli.chat.server import server_report, server_request
from llmcli.chat.server.server_answer import ServerAnswer, ServerReply
from llmcli.chat.server.server_kind import UNKNOWN, ServerKind, recognize_kind
from llmcli.errors import UserError
from llmcli.http_client import openai_stream
from llmcli.http_client.background_client import BackgroundClient
from llmcli.http_client.client import CertificateError, RequestError, StatusError
from llmcli.runtime.constraint.base import Constraint
from llmcli.runtime.interrupt import allow_interrupts
from llmcli.runtime.requests.request import Answer
from llmcli.runtime.runner import Runner
from llmcli.runtime.sampling import sampling_settings
from llmcli.runtime.text.reasoning import ThinkingTags
from llmcli.types import Message

if TYPE_CHECKING:
    from llmcli.chat.tools.call_filter import CallFilter

LIST_SECONDS = 30.0  # time limit for the list of models
MAX_LISTED_MODELS = 20  # in an error message
MAX_NAME_CHARS = 200  # of a model's name; longer ones are not offered
MAX_CONTEXT = 1 << 32  # a longer context is not believed
# Settings that every server has: they are fields of OpenAI's API, or only change the display.
SHARED_SETTINGS = frozenset(
    (
        *("predict", "stop", "format", "grammar", "reasoning"),
        *("timing", "thinking", "markdown", "probs"),
    )
)


@dataclass(frozen=True, slots=True)
class RemoteModelEntry:
    """A model in a server's list. `n_ctx`: the length of its context, None if unknown."""

    name: str
    kind: ServerKind
    n_ctx: int | None = None


class RemoteModel(ChatModel):
    """A model behind the server at `base_url`, which all requests reach through `client`."""

    has_tokenizer = False
    timed_unit = "chunk"

    def __init__(self, client: BackgroundClient, base_url: str) -> None:
        self._client, self._base_url = client, base_url
        self._models: list[RemoteModelEntry] = []
        self._served = RemoteModelEntry("", UNKNOWN)
        self._reasoning: bool | None = None

    def choose(self, name: str | None, earlier: str = "") -> str:
        """Choose the model `name`. Without a name, choose `earlier` if the server lists it, or the
        only model of the server. Return the name.

        Raises UserError if the server cannot be reached or refuses the key, or if there is no name
        and the server has several models or lists none.
        """
        try:
            self._models = self._list_models()
        except RequestError as error:
            # a server without a list of models can still answer
            has_no_list = isinstance(error, StatusError) and error.status in (404, 405, 501)
            if name is None or not (has_no_list or error.kind == "bad stream"):
                raise self.explain(error) from None
        if name is None:
            listed = [one.name for one in self._models]
            if earlier not in listed and len(listed) != 1:
                raise self._ambiguous_model()
            name = earlier if earlier in listed else listed[0]
        self._served = self._find(name)
        return name

    def is_listed(self, name: str) -> bool:
        """Return whether the server lists the model `name`. True if it lists no models."""
        return not self._models or any(one.name == name for one in self._models)

    def describe_models(self, name: str) -> str:
        """Return a text about the models that the server lists, those like `name` first."""
        names = [one.name for one in self._models]
        near = get_close_matches(name, names, 3)
        names = [*near, *(one for one in names if one not in near)]
        more = f" and {len(names) - MAX_LISTED_MODELS} more" * (len(names) > MAX_LISTED_MODELS)
        return ", ".join(one[:MAX_NAME_CHARS] for one in names[:MAX_LISTED_MODELS]) + more

    def explain(self, error: RequestError) -> UserError:
        """Return the error for the user of a failed request."""
        where, message = self._base_url, error.message or error.kind
        if isinstance(error, StatusError):
            return UserError(
                f"{where} answers {error.status}: {message}", hint=self._status_hint(error.status)
            )
        if isinstance(error, CertificateError):
            hint = "--cacert FILE trusts its issuer, --insecure skips the check"
        elif error.kind == "bad stream":
            hint = "the address is http://HOST:PORT or …/v1 of a server with OpenAI's API"
        elif error.kind == "no connection":
            hint = "is the server running? llmcli serve REF starts one"
        else:
            hint = "check the server's log"
        return UserError(f"{where}: {message}", hint=hint)

    def require_runner(self) -> Runner:
        raise UserError(
            f"this needs the model in this process, and the chat uses the server {self._base_url}",
            hint="start a chat without --server: llmcli chat REF",
        )

    @property
    def location(self) -> str:
        return self._base_url

    @property
    def server(self) -> str:
        return self._base_url

    @property
    def n_ctx(self) -> int | None:
        return self._served.n_ctx

    def describe(self, name: str, shows_start: bool = False) -> str:
        kind, n_ctx = self._served.kind, self._served.n_ctx
        server = f"{kind.name} at {self._base_url}" if kind.is_known else self._base_url
        context = "" if n_ctx is None else f" · {n_ctx:,} tokens of context"
        return f"{name} · {server}{context}"

    def summary_rows(self, name: str) -> list[tuple[str, str]]:
        n_ctx = self._served.n_ctx
        return [
            ("model", name),
            ("server", self._base_url),
            ("kind of server", self._served.kind.name),
            ("context", "unknown" if n_ctx is None else f"{n_ctx} tokens"),
        ]

    def list_names(self, chat: ChatState) -> Iterable[str]:
        names = [one.name for one in self._models]
        return [name for name in names if len(name) <= MAX_NAME_CHARS and name.isprintable()]

    def switch(self, chat: ChatState, ref: str) -> None:
        try:
            with allow_interrupts():
                self._models = self._list_models()
        except RequestError as error:
            raise self.explain(error) from None
        if not self.is_listed(ref):
            raise UserError(
                f"{self._base_url} has no model called {ref}",
                hint=f"it has {self.describe_models(ref)}",
            )
        self._served = self._find(ref)
        chat.name = ref

    def start_reply(self, chat: ChatState, text: str, count: int) -> ChatReply:
        assert count == 1, count  # only `run` asks for several
        start = time.perf_counter()
        chat.opened_tags = None
        body = server_request.build_request(chat, self._served.kind, text, self._reasoning)
        raw = json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")
        stream = self._client.post(f"{self._base_url}/chat/completions", raw)
        return ServerReply(stream, start, chat.conversation.sampling.seed, self.explain)

    def encode_messages(
        self, chat: ChatState, messages: Sequence[Message], *, add_generation_prompt: bool = True
    ) -> tuple[int, ...]:
        raise AssertionError("the tokenizer is on the server")

    def open_call_filter(self, chat: ChatState) -> "CallFilter | None":
        return None

    def build_document(self, chat: ChatState, answer: Answer) -> dict[str, Any]:
        return server_report.build_document(self._base_url, chat.name, _as_served(answer))

    def format_timing(self, answer: Answer) -> str:
        return server_report.format_timing(_as_served(answer))

    def report_lines(self, answer: Answer, timing: str) -> list[str]:
        return server_report.report_lines(_as_served(answer), timing)

    def token_text(self, answer: Answer, token: int) -> str:
        return _as_served(answer).texts[token]

    def count_text(self, text: str) -> int:
        raise AssertionError("the tokenizer is on the server")

    def check_constraint(self, constraint: Constraint) -> Sequence[str]:
        server_request.build_constraint(self._served.kind, constraint)
        return ()

    def is_complete(
        self, constraint: Constraint | None, opened_tags: ThinkingTags | None, answer: Answer
    ) -> bool:
        if constraint is None or answer.error is not None:
            return True  # the chat reports the error itself
        if answer.finish != "stop" or constraint.kind != "json_schema":
            return answer.finish == "stop"
        try:
            json.loads(split_answer(answer.text).content)
        except (ValueError, RecursionError):
            return False
        return True

    def constraint_json(
        self, constraint: Constraint | None, opened_tags: ThinkingTags | None, answer: Answer
    ) -> dict[str, Any]:
        if constraint is None:
            return {}
        complete = self.is_complete(constraint, opened_tags, answer)
        return {"constraint": {"kind": constraint.kind, "complete": complete}}

    def setting_obstacle(self, name: str) -> str:
        if name in SHARED_SETTINGS:
            return ""
        if name in sampling_settings() or name in ("ignore_eos", "reasoning_budget"):
            return server_request.find_obstacle(self._served.kind, name)
        return f"it belongs to a model in this process, and {self._base_url} has its own"

    def has_own_value(self, chat: ChatState, name: str) -> bool:
        return name not in server_request.sent_settings(chat.conversation)

    @property
    def reasoning(self) -> bool | None:
        return self._reasoning

    def set_reasoning(self, reasoning: bool | None) -> None:
        if reasoning is not None and not self.can_switch_reasoning:
            raise UserError(
                f"{self._served.kind.name} has no field that turns thinking on or off",
                hint="/set thinking hide (--hidethinking) hides any thinking",
            )
        self._reasoning = reasoning

    @property
    def can_switch_reasoning(self) -> bool:
        return bool(self._served.kind.reasoning)

    def context_use(self, chat: ChatState) -> ContextUse:
        answer = chat.last_answer
        n_tokens = _count_context(answer) if isinstance(answer, ServerAnswer) else None
        return ContextUse(n_tokens, self._served.n_ctx)

    def describe_position(self, chat: ChatState) -> str:
        return ""

    def conversation_size(self, chat: ChatState) -> int | None:
        return None

    def forget_conversation(self) -> None:
        """Do nothing: the server manages its own cache."""

    def save_state(self, chat: ChatState, path: Path) -> str:
        path.unlink(missing_ok=True)
        return "without a KV state, which only the server has"

    def restore_state(self, chat: ChatState, path: Path) -> str:
        return ""

    def _list_models(self) -> list[RemoteModelEntry]:
        """Return the models that the server lists. Raises RequestError."""
        document = self._client.fetch_json(f"{self._base_url}/models", LIST_SECONDS)
        return [
            RemoteModelEntry(
                entry["id"].encode("utf-8", "replace").decode(),
                recognize_kind(entry.get("owned_by")),
                _read_context(entry),
            )
            for entry in openai_stream.read_model_entries(document)
        ]

    def _find(self, name: str) -> RemoteModelEntry:
        """Return the listed model `name`, or one about which only the kind of server is known."""
        kind = self._models[0].kind if self._models else UNKNOWN
        listed = (one for one in self._models if one.name == name)
        return next(listed, RemoteModelEntry(name, kind))

    def _ambiguous_model(self) -> UserError:
        """Return the error for a server with several models or none if the user names none."""
        if not self._models:
            return UserError(f"{self._base_url} lists no model", hint="name it: --model NAME")
        return UserError(
            f"{self._base_url} has {len(self._models)} models",
            hint=f"choose one with --model NAME: {self.describe_models('')}",
        )

    def _status_hint(self, status: int) -> str:
        """Return a hint for the user at an HTTP status."""
        if status in (401, 403):
            return "--api-key-file FILE or LLMCLI_API_KEY sends a key"
        if 300 <= status < 400:
            return "redirects are not followed: give the final address to --server"
        if status == 404:
            names = self.describe_models(self._served.name)
            return f"/model NAME changes the model: {names}" if names else "check the address"
        if status in (429, 503):
            return "the server is busy: /regen asks again"
        return "change what the message says, or check the server's log"


def _as_served(answer: Answer) -> ServerAnswer:
    assert isinstance(answer, ServerAnswer), answer
    return answer


def _count_context(answer: ServerAnswer) -> int | None:
    """Return the tokens of the prompt and the answer; None if the server does not count them."""
    usage = answer.usage
    if usage is None or usage.prompt is None or usage.output is None:
        return None
    return usage.prompt + usage.output


def _read_context(entry: dict[str, Any]) -> int | None:
    """Return the context length in an entry of the list of models, under the name that vLLM,
    SGLang or llama-server gives it; None without a plausible one.
    """
    meta = entry.get("meta")
    lengths = (
        entry.get("max_model_len"),
        entry.get("context_length"),
        *((meta.get("n_ctx"), meta.get("n_ctx_train")) if isinstance(meta, dict) else ()),
    )
    return next((n for n in lengths if type(n) is int and 0 < n < MAX_CONTEXT), None)
