"""llama-server's endpoints `/completion`, which continues a text, and `/infill`, which fills a gap
in a text.

A request is translated to one for OpenAI's completions, which have other field names. Unsupported
fields that would change the answer are refused. Fields that only control a cache or the connection
are ignored: cache_prompt, n_cache_reuse, sse_ping_interval, min_keep.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from llmcli.api.errors import ApiError
from llmcli.api.fields import Fields
from llmcli.api.forms import common_fields as common
from llmcli.api.forms import logprobs
from llmcli.api.forms.base import Document, answer_timings, find_stop_sequence
from llmcli.api.forms.openai_completions import CompletionsForm
from llmcli.api.server_settings import ServerSettings
from llmcli.runtime.requests.request import Answer
from llmcli.runtime.runner import Runner
from llmcli.types import Event

LIMIT_FIELD = "n_predict"
MAX_FIELDS, MAX_EXTRA_TEXTS = 64, 256
# written before each extra text if the model has no token that separates files
SNIPPET_SEPARATOR = "\n\n--- snippet ---\n\n"
INFILL_TOKENS = ("pre", "suf", "mid")  # the model's tokens before prefix, suffix and answer
# Fields of OpenAI's completions that these endpoints refuse, and the advice in the error message.
REPLACED_FIELDS = {
    "logprobs": "use n_probs",
    "echo": "the answer has prompt",
    "best_of": "use n_cmpl",
}


class LlamaCompletionForm(CompletionsForm):
    """llama-server's completion endpoint. The response is one object, or a list of objects if there
    are several answers.
    """

    path: ClassVar[str] = "/completion"
    end_marker: ClassVar[bytes] = b""
    default_max_tokens: ClassVar[int | None] = None
    supports_beams: ClassVar[bool] = False
    refused_fields: ClassVar[dict[str, str]] = {
        "suffix": "use input_suffix of /infill",
        "post_sampling_probs": "n_probs returns those of the whole vocabulary",
        "multimodal_data": "this server reads only text",
        "response_format": "use json_schema",
    }

    def __init__(self, body: Mapping[str, Any], runner: Runner, settings: ServerSettings) -> None:
        self._native_fields = fields = Fields(body)
        self._response_fields = fields.texts("response_fields", MAX_FIELDS)
        self._returns_ids = fields.flag("return_tokens")
        if unsupported := next((name for name in REPLACED_FIELDS if fields.values.get(name)), None):
            raise ApiError(
                f"{unsupported} is not supported: {REPLACED_FIELDS[unsupported]}", param=unsupported
            )
        super().__init__(_openai_document(fields, runner), runner, settings)
        self._n_streamed = [0] * (len(self.requests) * self.n_samples)

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
            inner = Fields(value, path)
            if inner.list("multimodal_data"):
                raise ApiError(
                    f"{inner.path_of('multimodal_data')}: this server reads only text",
                    param="prompt",
                )
            value = inner.required_text("prompt_string")
        if not isinstance(value, list) or not any(isinstance(entry, str) for entry in value):
            return super()._tokens(path, value)
        tokens: list[int] = []
        for number, entry in enumerate(value):
            if isinstance(entry, str) and number:
                # raises ApiError for a text that is too long
                common.encode_prompt(self.runner, self.settings, entry)
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
                logprobs.token_logprobs(self.runner, event.token, event.top_logprobs)
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
        request, model = self.requests[number // self.n_samples], self.runner.model
        stop = find_stop_sequence(self.runner, request, answer)
        stop_type = "limit" if answer.finish != "stop" else "eos" if stop is None else "word"
        prompt = b"".join(model.piece(token, special=True) for token in request.tokens).decode(
            "utf-8", "replace"
        )
        result: Document = {
            "index": number,
            "content": "" if streamed else answer.text,
            "tokens": [token.id for token in answer.tokens]
            if self._returns_ids and not streamed
            else [],
            "id_slot": answer.slot,
            "stop": True,
            "model": self.model,
            "tokens_predicted": len(answer.tokens),
            "tokens_evaluated": answer.prompt_tokens,
            "generation_settings": self._settings(answer),
            "prompt": prompt,
            "has_new_line": "\n" in answer.text,
            "truncated": self._is_truncated(answer),
            "stop_type": stop_type,
            "stopping_word": stop or "",
            "tokens_cached": answer.cached_tokens,
            "timings": answer_timings(answer),
        }
        if self.logprobs and not streamed:
            result["completion_probabilities"] = logprobs.answer_logprobs(self.runner, answer)
        return (
            {path: value for path in self._response_fields for value in _values_at(result, path)}
            if self._response_fields
            else result
        )

    def _is_truncated(self, answer: Answer) -> bool:
        """Return whether the size of the context ended the answer, or tokens were dropped."""
        size = common.context_tokens(self.runner, self.settings)
        is_full = answer.prompt_tokens + len(answer.tokens) >= size and answer.finish != "stop"
        return is_full or answer.overflow_stats.times > 0

    def _settings(self, answer: Answer) -> Document:
        """Return the field `generation_settings`: the sampling settings and limits of the
        request.
        """
        request, limit = self.requests[0], common.read_limit(self.fields, ("max_tokens",))
        values = request.sampling.as_dict()
        return {
            **values,
            "temperature": values["temp"],
            "seed": answer.seed,
            LIMIT_FIELD: -1 if limit is None else limit,
            "max_tokens": -1 if limit is None else limit,
            "n_ctx": common.context_tokens(self.runner, self.settings),
            "stop": list(request.stops),
            "stream": self.is_stream,
            "ignore_eos": request.ignore_eos,
            "n_probs": self.logprobs or 0,
            "grammar": self.fields.text("grammar") or "",
        }


class InfillForm(LlamaCompletionForm):
    """Fills the gap between `input_prefix` and `input_suffix`. The prompt is: the extra texts, the
    prefix, `prompt`, the suffix, and the model's token that asks for the missing text. If this is
    longer than the context, the beginning of the extra texts is dropped; prefix and suffix are
    never shortened.

    Source: format_prompt_infill in llama.cpp's tools/server/server-common.cpp.
    """

    path: ClassVar[str] = "/infill"

    def _prompts(self) -> list[tuple[int, ...]]:
        fields, model = self._native_fields, self.runner.model
        prefix, suffix = fields.required_text("input_prefix"), fields.required_text("input_suffix")
        words = fields.text("prompt") or ""
        for text in (prefix, suffix, words):
            # raises ApiError for a text that is too long
            common.encode_prompt(self.runner, self.settings, text)
        extra = self._extra_tokens()
        if missing := [f"fim_{name}" for name in INFILL_TOKENS if name not in model.fim_tokens]:
            raise ApiError(
                f"this model cannot fill gaps: its file has no {', '.join(missing)} token", 501
            )
        fim, bos = model.fim_tokens, [model.bos] if model.add_bos and model.bos is not None else []
        parts = [model.tokenize(text, special=False) for text in (prefix, words, suffix)]
        core = [*bos, fim["pre"], *parts[0], *parts[1], fim["suf"], *parts[2], fim["mid"]]
        limit = common.read_limit(self.fields, ("max_tokens",)) or 0
        free = max(0, common.context_tokens(self.runner, self.settings) - len(core) - max(1, limit))
        return [(*extra[max(0, len(extra) - free) :], *core)]

    def _extra_tokens(self) -> list[int]:
        """Return the token ids of the texts in `input_extra`, each after its file name, or after
        SNIPPET_SEPARATOR if the model has no token for file names.
        """
        model, tokens = self.runner.model, list[int]()
        fim = model.fim_tokens
        if "rep" in fim:
            tokens += [fim["rep"], *model.tokenize("myproject\n", special=False)]
        for entry in self._native_fields.tables("input_extra", MAX_EXTRA_TEXTS):
            text, name = entry.required_text("text"), entry.text("filename") or "tmp"
            common.encode_prompt(self.runner, self.settings, name + text)
            tokens += (
                self._file_tokens(name)
                if "sep" in fim
                else model.tokenize(SNIPPET_SEPARATOR, special=False)
            )
            tokens += model.tokenize(text, special=False)
        return [*tokens, *self._file_tokens("filename")] if "sep" in fim else tokens

    def _file_tokens(self, name: str) -> list[int]:
        """Return the token ids that introduce a file: the model's file separator and the file's
        name.
        """
        model = self.runner.model
        return [model.fim_tokens["sep"], *model.tokenize(f"{name}\n", special=False)]


def _openai_document(fields: Fields, runner: Runner) -> Document:
    """Translate llama-server's request to a request for /v1/completions."""
    renamed = {
        LIMIT_FIELD,
        "max_tokens",
        "n_cmpl",
        "n_probs",
        "logit_bias",
        "response_fields",
        "return_tokens",
    }
    document = {name: value for name, value in fields.values.items() if name not in renamed}
    limit = next((name for name in (LIMIT_FIELD, "max_tokens") if fields.has(name)), LIMIT_FIELD)
    n_predict = fields.integer(limit, -1, common.MAX_TOKENS, -1)
    document["max_tokens"] = None if n_predict == -1 else n_predict
    document["n"] = fields.values.get("n_cmpl") or fields.values.get("n")
    document["logprobs"] = fields.integer("n_probs", 0, logprobs.MAX_ALTERNATIVES, 0) or None
    biases = fields.values.get("logit_bias")
    document["logit_bias"] = _biases(fields, runner) if isinstance(biases, list) else biases
    return document


def _biases(fields: Fields, runner: Runner) -> list[str]:
    """Return the entries of a `logit_bias` list as texts, such as "15043+1.5", which the engine
    parses. An entry is a pair of a token id or a text, and a number or false. A text stands for all
    of its tokens; false forbids them.
    """
    biases = []
    for pair in fields.list("logit_bias"):
        if not isinstance(pair, list) or len(pair) != 2 or not isinstance(pair[1], int | float):
            raise fields.type_error(
                "logit_bias", "a list of pairs of a token and a number, or false"
            )
        token, bias = pair
        if type(token) is not int and not isinstance(token, str):
            raise fields.type_error(
                "logit_bias", "a list of pairs of a token and a number, or false"
            )
        ids = [token] if isinstance(token, int) else runner.model.tokenize(token, special=True)
        amount = (
            "-inf" if bias is False else f"{bias:+f}" if isinstance(bias, float) else f"{bias:+d}"
        )
        biases += [f"{id_}{amount}" for id_ in ids]
    return biases


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
