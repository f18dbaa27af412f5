"""llama-server's endpoints `/completion`, which continues a text, and `/infill`, which fills a gap
in a text. A request is translated to one for OpenAI's completions, which have other field names.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar

from llmcli.api import request_settings
from llmcli.api.bodies.base import (
    MaxEntries,
    RequestBody,
    WholeNumber,
    honored,
    ignored,
    refused,
)
from llmcli.api.bodies.checks import read_body
from llmcli.api.bodies.generation_fields import (
    GenerationBody,
    Texts,
    TokenLimit,
    shared_values,
)
from llmcli.api.errors import ApiError
from llmcli.api.forms import infill, logprobs
from llmcli.api.forms.answer_constraint import ResponseFormat
from llmcli.api.forms.base import Document, answer_timings, disk_counts, find_stop_sequence
from llmcli.api.forms.logprobs import MAX_NATIVE_ALTERNATIVES
from llmcli.api.forms.openai_completions import (
    CompletionsBody,
    CompletionsForm,
)
from llmcli.api.server_settings import ServerSettings
from llmcli.api.tokens import PromptObject
from llmcli.runtime.requests.request import Answer, Request
from llmcli.runtime.runner import Runner
from llmcli.runtime.sampling import logit_bias
from llmcli.runtime.strategies.base import end_tokens
from llmcli.types import Event

MAX_FIELDS, MAX_EXTRA_TEXTS = 64, 256
# written before each extra text if the model has no token that separates files
SNIPPET_SEPARATOR = "\n\n--- snippet ---\n\n"

ONE_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": ["integer", "string"]}},
        {
            "type": "object",
            "properties": {"prompt_string": {"type": "string"}},
            "required": ["prompt_string"],
        },
    ]
}
PROMPTS_SCHEMA = {"anyOf": [ONE_PROMPT_SCHEMA, {"type": "array", "items": ONE_PROMPT_SCHEMA}]}


class LlamaCompletionBody(GenerationBody):
    """A request to continue texts."""

    origin: ClassVar[str] = "llama-server"
    prompt: Any = honored(
        "a text, token ids, a list of both, an object with prompt_string, or a list of these",
        json_schema_extra=PROMPTS_SCHEMA,
    )
    n_predict: TokenLimit | None = honored("the largest number of tokens; -1: no limit")
    max_completion_tokens: TokenLimit | None = honored("the same as n_predict")
    max_tokens: TokenLimit | None = honored("the same as n_predict")
    n_cmpl: Annotated[int, WholeNumber(1, request_settings.MAX_SAMPLES)] | None = honored(
        "answers to each prompt"
    )
    n: Annotated[int, WholeNumber(1, request_settings.MAX_SAMPLES)] | None = honored(
        "the same as n_cmpl"
    )
    n_probs: Annotated[int, WholeNumber(0, MAX_NATIVE_ALTERNATIVES)] | None = honored(
        "return log-probabilities with this many alternatives"
    )
    logprobs: Annotated[int, WholeNumber(0, MAX_NATIVE_ALTERNATIVES)] | None = honored(
        "the same as n_probs"
    )
    stop: Texts | None = honored("texts that end the answer")
    return_tokens: bool | None = honored("return the token ids of the answer")
    response_fields: Annotated[list[str], MaxEntries(MAX_FIELDS)] | None = honored(
        "return only these fields, such as timings/prompt_n"
    )
    response_format: ResponseFormat | None = honored("the form of the answer")
    stream_options: Any = ignored("the last object of a stream always has the counts")
    echo: bool | None = refused("the answer has prompt")
    suffix: str | None = refused("use input_suffix of /infill")
    best_of: Any = refused("use n_cmpl", 1)
    multimodal_data: Any = refused("this server reads only text")
    continue_final_message: Any = ignored("a text has no messages")
    reasoning_format: Any = ignored("the text is returned as the model writes it")


class ExtraText(RequestBody):
    """A text of another file, which precedes the gap."""

    origin: ClassVar[str] = "llama-server"
    reports_unknown: ClassVar[bool] = False  # llama.vim adds the time of a chunk
    text: str = honored("the text", ...)
    filename: str | None = honored("the name of its file")


class InfillBody(LlamaCompletionBody):
    """A request for the text of a gap."""

    input_prefix: str = honored("the text before the gap", ...)
    input_suffix: str = honored("the text after the gap", ...)
    input_extra: Annotated[list[ExtraText], MaxEntries(MAX_EXTRA_TEXTS)] | None = honored(
        "texts of other files"
    )
    prompt: str | None = honored("the beginning of the text in the gap")
    truncate_prompt_tokens: Any = refused("the texts of other files are shortened as needed")
    truncation_side: Any = ignored("it belongs to truncate_prompt_tokens, which is refused")


class LlamaCompletionForm(CompletionsForm):
    """llama-server's completion endpoint. The response is one object, or a list of objects if there
    are several answers.
    """

    path: ClassVar[str] = "/completion"
    end_marker: ClassVar[bytes] = b""
    default_max_tokens: ClassVar[int | None] = None
    supports_beams: ClassVar[bool] = False
    body_type: ClassVar[type[RequestBody]] = LlamaCompletionBody

    def __init__(
        self, document: Mapping[str, Any], runner: Runner, settings: ServerSettings
    ) -> None:
        super().__init__(document, runner, settings)
        self._n_streamed = [0] * (len(self.requests) * self.n_samples)

    def completions_body(self) -> CompletionsBody:
        """Translate the request to one for /v1/completions."""
        body: LlamaCompletionBody = self.body
        limits = (body.n_predict, body.max_completion_tokens, body.max_tokens)
        document = {
            **shared_values(self.source, self.body_type),
            "prompt": body.prompt,
            "max_tokens": next((limit for limit in limits if limit is not None), None),
            "n": body.n_cmpl or body.n,
            "n_probs": body.n_probs if body.n_probs is not None else body.logprobs,
            "stop": body.stop,
            "response_format": self.source.get("response_format"),
        }
        return read_body(CompletionsBody, document, [], self.path)

    def _is_single(self, value: Any) -> bool:
        """Return whether the value is one prompt instead of a list of prompts. A list with a token
        id is one prompt, even if it also contains texts.
        """
        mixed = isinstance(value, list) and any(type(entry) is int for entry in value)
        return super()._is_single(value) or mixed or isinstance(value, dict)

    def _tokens(self, path: str, value: Any) -> tuple[int, ...]:
        """Return the token ids of one prompt: a text, a list of token ids, a list of texts and
        token ids, or an object with `prompt_string`. `path`: the prompt's path in the request, for
        errors.
        """
        if isinstance(value, dict):
            value = read_body(PromptObject, value, self.notes, self.path, path).prompt_string
            if value is None:
                raise ApiError(f"{path}.prompt_string is missing", param="prompt")
        if not isinstance(value, list) or not any(isinstance(entry, str) for entry in value):
            return super()._tokens(path, value)
        tokens: list[int] = []
        for number, entry in enumerate(value):
            if isinstance(entry, str) and number:
                request_settings.check_text_length(self.runner, self.settings, entry)
                tokens += self.runner.model.tokenize(entry, special=True)
            else:
                tokens += super()._tokens(path, entry if isinstance(entry, str) else [entry])
        return tuple(tokens)

    def document(self, answers: Sequence[Answer]) -> Any:
        """Return the result object of the only answer, or a list with the result object of each
        answer.
        """
        results = [self._result(number, answer) for number, answer in enumerate(answers)]
        return results[0] if len(results) == 1 else results

    def stream_start(self) -> Iterable[Document]:
        """Return no chunks: a stream of this API begins with its first token."""
        self.has_started = True
        return []

    def stream_event(self, event: Event) -> Iterable[Document]:
        """Return a chunk with the event's token and text, or no chunk if it has neither."""
        if not event.token and not event.text:
            return []
        number = event.sequence
        self._n_streamed[number] += event.token is not None
        tokens = [event.token.id] if event.token else []
        chunk = {**self.progress_chunk(number), "content": event.text, "tokens": tokens}
        if self.logprobs and event.token:
            chunk["completion_probabilities"] = [
                logprobs.token_logprobs(self.runner, event.token, event.top_logprobs, self._style)
            ]
        return [chunk]

    def progress_chunk(self, number: int) -> Document:
        """Return a chunk without text, for the progress of a prompt."""
        return {
            "index": number,
            "content": "",
            "tokens": [],
            "stop": False,
            "id_slot": -1,
            "tokens_predicted": self._n_streamed[number],
            "tokens_evaluated": len(self.requests[number // self.n_samples].tokens),
        }

    def encode_event(self, event: Event) -> bytes:
        """Return the chunks for an event as Server-Sent Events. The faster path of OpenAI's
        completions is not used, because each chunk contains token counts.
        """
        return self.encode_chunks(self.event_chunks(event))

    def stream_end(self, answers: Sequence[Answer]) -> Iterable[Document]:
        """Yield the result object of each answer, without its text, which was already streamed."""
        for number, answer in enumerate(answers):
            yield self._result(number, answer, streamed=True)

    def _result(self, number: int, answer: Answer, streamed: bool = False) -> Document:
        """Return llama-server's result object for an answer, reduced to the fields in
        `response_fields` if the request has them. `number`: the index of the answer. `streamed`:
        the text was already sent.
        """
        request = self.requests[number // self.n_samples]
        stop = find_stop_sequence(self.runner, request, answer)
        stop_type = "limit" if answer.finish != "stop" else "eos" if stop is None else "word"
        result: Document = {
            "index": number,
            "content": "" if streamed else answer.text,
            "tokens": [token.id for token in answer.tokens]
            if self.body.return_tokens and not streamed
            else [],
            "id_slot": answer.slot,
            "stop": True,
            "model": self.model,
            "tokens_predicted": len(answer.tokens),
            "tokens_evaluated": answer.prompt_tokens,
            "generation_settings": self._settings(answer),
            "prompt": self.prompt_text(request),
            "has_new_line": "\n" in answer.text,
            "truncated": self._is_truncated(answer),
            "stop_type": stop_type,
            "stopping_word": stop or "",
            "tokens_cached": answer.cached_tokens,
            **disk_counts([answer]),
            "timings": answer_timings(answer),
        }
        if self.logprobs and not streamed:
            result["completion_probabilities"] = logprobs.answer_logprobs(
                self.runner, answer, self._style
            )
        fields = self.body.response_fields
        return (
            {path: value for path in fields for value in _values_at(result, path)}
            if fields
            else result
        )

    def _is_truncated(self, answer: Answer) -> bool:
        """Return whether the size of the context ended the answer, or tokens were dropped."""
        size = request_settings.context_tokens(self.runner, self.settings)
        is_full = answer.prompt_tokens + len(answer.tokens) >= size and answer.finish != "stop"
        return is_full or answer.overflow_stats.times > 0

    def _settings(self, answer: Answer) -> Document:
        """Return the field `generation_settings`: the sampling settings and limits of the
        request.
        """
        request, limit = self.requests[0], self.limit
        values = request.sampling.as_dict()
        return {
            **values,
            "temperature": values["temp"],
            "seed": answer.seed,
            "n_predict": -1 if limit is None else limit,
            "max_tokens": -1 if limit is None else limit,
            "n_ctx": request_settings.context_tokens(self.runner, self.settings),
            "stop": list(request.stops),
            "stream": self.is_stream,
            "ignore_eos": request.ignore_eos,
            "logit_bias": self._biases(request),
            "n_probs": self.logprobs or 0,
            "grammar": self.body.grammar or "",
            "samplers": [step.name for step in request.sampling.steps if not step.is_neutral],
            "adaptive_target": -1.0,
            "adaptive_decay": 0.9,
            "min_keep": 0,
            "post_sampling_probs": bool(self.body.post_sampling_probs),
        }

    def _biases(self, request: Request) -> list[Document]:
        """Return llama-server's `logit_bias`: an object for each token whose logit is changed. The
        bias is None for a token that is forbidden, as all tokens that end an answer are with
        `ignore_eos`.
        """
        texts = tuple(request.sampling.as_dict()["logit_bias"])
        biases = list(logit_bias.parse_biases(texts))
        if request.ignore_eos:
            biases += [(int(token), -math.inf) for token in end_tokens(self.runner.model)]
        return [
            {"token": token, "bias": bias if math.isfinite(bias) else None}
            for token, bias in biases
        ]


class InfillForm(LlamaCompletionForm):
    """Fills the gap between `input_prefix` and `input_suffix`. The prompt is: the extra texts, the
    prefix, `prompt`, the suffix, and the model's token that asks for the missing text. If this is
    longer than the context, the beginning of the extra texts is dropped; prefix and suffix are
    never shortened.

    Source: format_prompt_infill in llama.cpp's tools/server/server-common.cpp.
    """

    path: ClassVar[str] = "/infill"
    body_type: ClassVar[type[RequestBody]] = InfillBody

    def _prompts(self) -> list[tuple[int, ...]]:
        body, model = self.body, self.runner.model
        prefix, suffix, words = body.input_prefix, body.input_suffix, body.prompt or ""
        for text in (prefix, suffix, words):
            request_settings.check_text_length(self.runner, self.settings, text)
        extra = self._extra_tokens()
        before = [
            *model.tokenize(prefix, special=False),
            *model.tokenize(words, special=False),
        ]
        core = infill.gap_tokens(self.runner, self.settings, before, suffix)
        size = request_settings.context_tokens(self.runner, self.settings)
        free = max(0, size - len(core) - max(1, self.limit or 0))
        return [(*extra[max(0, len(extra) - free) :], *core)]

    def _extra_tokens(self) -> list[int]:
        """Return the token ids of the texts in `input_extra`, each after its file name, or after
        SNIPPET_SEPARATOR if the model has no token for file names.
        """
        model, tokens = self.runner.model, list[int]()
        fim = model.fim_tokens
        if "rep" in fim:
            tokens += [fim["rep"], *model.tokenize("myproject\n", special=False)]
        for entry in self.body.input_extra or ():
            name = entry.filename or "tmp"
            request_settings.check_text_length(self.runner, self.settings, name + entry.text)
            tokens += (
                self._file_tokens(name)
                if "sep" in fim
                else model.tokenize(SNIPPET_SEPARATOR, special=False)
            )
            tokens += model.tokenize(entry.text, special=False)
        return [*tokens, *self._file_tokens("filename")] if "sep" in fim else tokens

    def _file_tokens(self, name: str) -> list[int]:
        """Return the token ids that introduce a file: the model's file separator and the file's
        name.
        """
        model = self.runner.model
        return [model.fim_tokens["sep"], *model.tokenize(f"{name}\n", special=False)]


def _values_at(value: Any, path: str) -> list[Any]:
    """Return the value at a path of field names, such as "timings/prompt_n", in a list. The list is
    empty if the path does not exist.
    """
    for name in path.split("/"):
        if not isinstance(value, dict) or name not in value:
            return []
        value = value[name]
    return [value]


FORMS = (LlamaCompletionForm, InfillForm)
