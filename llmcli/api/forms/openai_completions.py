"""`/v1/completions`: continues texts without a chat template, in OpenAI's format."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar

from llmcli.api import request_settings
from llmcli.api.bodies.base import RequestBody, WholeNumber, honored, ignored
from llmcli.api.bodies.checks import wrong_value
from llmcli.api.bodies.generation_fields import (
    GenerationBody,
    StreamOptions,
    Texts,
    TokenLimit,
)
from llmcli.api.errors import ApiError
from llmcli.api.forms import infill, logprobs
from llmcli.api.forms.answer_constraint import (
    ResponseFormat,
    read_answer_schema,
    read_constraint,
)
from llmcli.api.forms.base import (
    ApiForm,
    Document,
    answer_timings,
    best_beams,
    finish_reason,
    token_usage,
)
from llmcli.api.forms.logprobs import MAX_ALTERNATIVES, MAX_NATIVE_ALTERNATIVES
from llmcli.api.server_settings import ServerSettings
from llmcli.api.stream_resume import StreamPosition
from llmcli.runtime.constraint.tool_calls import AnswerSchema
from llmcli.runtime.requests.request import Answer, Request
from llmcli.runtime.runner import Runner
from llmcli.runtime.sampling.top_logprobs import TokenLogprob, TokenScore
from llmcli.types import Event

MAX_PROMPTS = 256
# An idle server accepts a request for this many answers even if its queue is shorter. It refuses
# other requests until the queue has space again.
MAX_ANSWERS = 1024
TEXT_SCHEMA, IDS_SCHEMA = {"type": "string"}, {"type": "array", "items": {"type": "integer"}}
PROMPT_SCHEMA = {
    "anyOf": [
        TEXT_SCHEMA,
        IDS_SCHEMA,
        {"type": "array", "items": {"anyOf": [TEXT_SCHEMA, IDS_SCHEMA]}},
    ]
}


class TextFields(RequestBody):
    """Fields of vLLM and llama-server for texts that are continued without a chat template."""

    origin: ClassVar[str] = "vLLM, llama-server"
    response_format: ResponseFormat | None = honored("the form of the answer")
    n_predict: TokenLimit | None = honored("the largest number of tokens; -1: no limit")
    n_cmpl: Annotated[int, WholeNumber(1, request_settings.MAX_SAMPLES)] | None = honored(
        "the number of answers"
    )
    add_special_tokens: bool | None = honored("false adds no BOS token to a text")
    reasoning_format: Any = ignored("the text is returned as the model writes it")
    return_tokens: Any = ignored("logprobs have the tokens")
    response_fields: Any = ignored("completions have all of their fields")


class CompletionsBody(TextFields, GenerationBody):
    """A request for completions of texts."""

    origin: ClassVar[str] = "OpenAI"
    prompt: Any = honored("a text, token ids, or a list of either", json_schema_extra=PROMPT_SCHEMA)
    suffix: str | None = honored("the text after the gap that the answer fills")
    max_tokens: TokenLimit | None = honored(
        "the largest number of tokens, 16 by default; -1: no limit"
    )
    n: Annotated[int, WholeNumber(1, request_settings.MAX_SAMPLES)] | None = honored(
        "answers to each prompt"
    )
    best_of: Annotated[int, WholeNumber(1, request_settings.MAX_SAMPLES)] | None = honored(
        "generate this many answers, and return the best"
    )
    n_probs: Annotated[int, WholeNumber(0, MAX_NATIVE_ALTERNATIVES)] | None = honored(
        "the same as logprobs"
    )
    logprobs: Annotated[int, WholeNumber(0, MAX_ALTERNATIVES)] | None = honored(
        "return log-probabilities with this many alternatives"
    )
    echo: bool | None = honored("return the prompt in front of each answer")
    stop: Texts | None = honored("texts that end the answer")
    stream_options: StreamOptions | None = honored("what a stream contains")


class CompletionsForm(ApiForm):
    """OpenAI's completions. The request has one prompt or a list of prompts; a prompt is a text or
    a list of token ids.

    Each prompt gets `n_choices` choices (the field `n`). With `best_of`, more answers are generated
    for each prompt, and the best `n_choices` of them are returned.

    `completions`: the request. `logprobs`: the number of alternatives, or None if the response has
    no log-probabilities.
    """

    path: ClassVar[str] = "/v1/completions"
    id_prefix: ClassVar[str] = "cmpl-"
    default_max_tokens: ClassVar[int | None] = 16  # the default token limit of OpenAI's API
    supports_beams: ClassVar[bool] = True
    body_type: ClassVar[type[RequestBody]] = CompletionsBody

    def __init__(
        self, document: Mapping[str, Any], runner: Runner, settings: ServerSettings
    ) -> None:
        super().__init__(document, runner, settings)
        self.completions = body = self.completions_body()
        options = body.stream_options
        self.includes_usage = bool(options and options.include_usage)
        self.logprobs = body.logprobs if body.logprobs is not None else body.n_probs or None
        self.has_echo, self._style = bool(body.echo), logprobs.LogprobStyle.of(body)
        self.n_choices = body.n or body.n_cmpl or 1
        limit = request_settings.first_limit(body.n_predict, body.max_tokens)
        request_fields = request_settings.read_common_fields(
            body, runner, settings, body.stop, limit, body.best_of or self.n_choices
        )
        beams = request_fields["search"].beams
        request_settings.check_samples(self.n_choices, beams)
        self.samples_per_request = self.n_choices if beams > 1 else body.best_of or self.n_choices
        self._refuse(beams)
        schema = read_answer_schema(body.response_format, "response_format")
        form = read_constraint(body, schema)
        self.constraint = form.constraint if isinstance(form, AnswerSchema) else form
        needs_logprobs = self.logprobs is not None or self.samples_per_request > self.n_choices
        request_fields = request_settings.with_logprobs(
            request_fields, runner, body, needs_logprobs, self.logprobs or 0
        )
        self.limit = limit
        has_limit = body.n_predict is not None or body.max_tokens is not None
        has_default = has_limit or settings.max_tokens is not None
        answer_limit = request_settings.effective_limit(
            limit if has_default else self.default_max_tokens, settings
        )
        n_answers = self.samples_per_request, beams
        self.requests = tuple(
            Request(
                tokens,
                max_tokens=request_settings.answer_budget(
                    runner, settings, len(tokens), answer_limit, *n_answers
                ),
                score_prompt=self.scores_prompt,
                **request_settings.context_fields(body, runner, settings, len(tokens), *n_answers),
                **request_fields,
            )
            for tokens in self._prompts()
        )
        self.check_requests()
        self._echoes = [self._echo(number, request) for number, request in enumerate(self.requests)]
        self._offsets = [
            logprobs.TextOffsets(len(echo)) for echo in self._echoes for _ in range(self.n_choices)
        ]
        # For each prompt, whether its log-probabilities must still be sent.
        self._prompt_pending = [self.scores_prompt] * len(self.requests)

    def completions_body(self) -> CompletionsBody:
        """Return the request as one for completions."""
        body: CompletionsBody = self.body
        return body

    def resume(self, position: StreamPosition) -> None:
        """Continue an interrupted stream. The echoed prompts with log-probabilities are not sent
        again for prompts whose answers have begun, because they were sent with the first event of
        these answers.
        """
        super().resume(position)
        started = {number // self.n_choices for number in position.tokens}
        self._prompt_pending = [
            is_pending and number not in started
            for number, is_pending in enumerate(self._prompt_pending)
        ]

    def _refuse(self, beams: int) -> None:
        """Raise ApiError for combinations of fields that contradict each other. `beams`: the number
        of beams.
        """
        if self.samples_per_request < self.n_choices:
            raise ApiError(f"best_of must be at least n ({self.n_choices})", param="best_of")
        if self.is_stream and self.samples_per_request > self.n_choices:
            raise ApiError(
                "best_of is decided when all answers are complete: leave out stream",
                param="best_of",
            )
        if self.logprobs is not None and beams > 1:
            raise ApiError(
                "a beam search keeps no alternatives: leave out logprobs or beams", param="logprobs"
            )

    @property
    def scores_prompt(self) -> bool:
        """Whether the response contains the prompts with the log-probabilities of their tokens."""
        return self.has_echo and self.logprobs is not None

    def _prompts(self) -> list[tuple[int, ...]]:
        """Return the token ids of each prompt. Raises ApiError for an invalid prompt or too many
        prompts.
        """
        value = self.completions.prompt
        if self._is_single(value):
            value = [value]
        if not isinstance(value, list) or not value:
            raise wrong_value("prompt", value, "text, token ids, or a list of either")
        if len(value) > MAX_PROMPTS:
            raise ApiError(
                f"prompt has {len(value)} entries; the limit is {MAX_PROMPTS}", param="prompt"
            )
        if (count := len(value) * self.samples_per_request) > MAX_ANSWERS:
            raise ApiError(
                f"the request asks for {count:,} answers; the limit is {MAX_ANSWERS:,}",
                param="n",
            )
        suffix = self.completions.suffix
        truncation = request_settings.read_truncation(self.completions)
        prompts = []
        for index, prompt in enumerate(value):
            tokens = self._tokens(f"prompt[{index}]", prompt)
            if truncation:
                size = request_settings.context_tokens(self.runner, self.settings)
                tokens = truncation.shorten(tokens, size - 1)
            prompts.append(
                infill.gap_tokens(self.runner, self.settings, tokens, suffix) if suffix else tokens
            )
        return prompts

    def _is_single(self, value: Any) -> bool:
        """Return whether the field `prompt` is one prompt instead of a list of prompts."""
        return isinstance(value, str) or _is_token_ids(value)

    def _tokens(self, path: str, value: Any) -> tuple[int, ...]:
        """Return the token ids of one prompt. `path`: the prompt's path in the request, for
        errors.
        """
        model = self.runner.model
        if isinstance(value, str):
            tokens = self._encode(value)
            return tokens or ((model.bos,) if model.bos is not None else ())
        if not _is_token_ids(value):
            raise ApiError(f"{path} must be text or token ids", param="prompt")
        check_tokens(value, path, model.n_vocab, "prompt")
        return tuple(value)

    def _encode(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a prompt that is a text."""
        body, runner, settings = self.completions, self.runner, self.settings
        truncation = request_settings.read_truncation(body)
        if body.add_special_tokens is False or body.suffix:
            request_settings.check_text_length(runner, settings, text, truncation)
            return tuple(runner.model.tokenize(text, special=not body.suffix))
        return request_settings.encode_prompt(runner, settings, text, truncation)

    def _echo(self, number: int, request: Request) -> str:
        """Return the text of a prompt if the request wants the prompt in the response (`echo`),
        otherwise "". `number`: the index of the prompt.
        """
        if not self.has_echo:
            return ""
        value = self.completions.prompt
        prompt = value if self._is_single(value) else value[number]
        return prompt if isinstance(prompt, str) else self.prompt_text(request)

    def document(self, answers: Sequence[Answer]) -> Document:
        """Return the response with the choices of every prompt. With `best_of`, the choices are the
        answers with the highest mean log-probability.
        """
        choices: list[Document] = []
        for number, echo in enumerate(self._echoes):
            prompt_answers = answers[number * self.n_samples : (number + 1) * self.n_samples]
            if self.is_beam_search:
                chosen = [
                    replace(prompt_answers[0], text=answer.text)
                    for answer in best_beams(prompt_answers[0], self.n_choices)
                ]
            else:
                chosen = (
                    sorted(prompt_answers, key=_mean_logprob, reverse=True)[: self.n_choices]
                    if self.samples_per_request > self.n_choices
                    else list(prompt_answers)
                )
            prompt_logprobs = None
            if self.scores_prompt:
                prompt_logprobs = logprobs.prompt_logprobs(
                    self.runner,
                    self.requests[number].tokens,
                    prompt_answers[0].prompt_scores,
                    echo,
                    self._style,
                )
            first = number * self.n_choices
            choices += [
                self._choice(first + index, echo, answer, prompt_logprobs)
                for index, answer in enumerate(chosen)
            ]
        counts = token_usage(answers, self.n_samples)
        return {
            **self._head(),
            "choices": choices,
            "usage": counts,
            "timings": answer_timings(answers[0]),
        }

    def _choice(self, index: int, echo: str, answer: Answer, prompt: Document | None) -> Document:
        """Return a choice. `echo`: the text of the prompt, or "". `prompt`: the logprobs object of
        the prompt, or None.
        """
        lists = None
        if self.logprobs is not None:
            lists = logprobs.completion_logprobs(
                self.runner,
                answer.tokens,
                answer.top_logprobs,
                logprobs.TextOffsets(len(echo)),
                self._style,
            )
            lists = logprobs.join_logprobs(prompt, lists) if prompt else lists
        return {
            "index": index,
            "text": echo + answer.text,
            "logprobs": lists,
            "finish_reason": finish_reason(answer),
        }

    def stream_start(self) -> Iterable[Document]:
        """Return a chunk with the prompt for each choice, if the request wants the prompts in the
        response. Prompts with log-probabilities are sent later, with the first event of their
        answers, and prompts of a beam search at its end.
        """
        self.has_started = True
        is_sent_later = self.scores_prompt or self.is_beam_search
        echoed = (
            () if is_sent_later else [echo for echo in self._echoes for _ in range(self.n_choices)]
        )
        return [self._chunk(index, echo) for index, echo in enumerate(echoed) if echo]

    def progress_chunk(self, number: int) -> Document:
        """Return a chunk without text, for the progress of a prompt."""
        return self._chunk(number, "")

    def _prompt_chunks(self, event: Event) -> list[Document]:
        """Return chunks with the prompt and its log-probabilities, one for each choice of the
        prompt that `event` belongs to. They are only returned for the first event of this prompt's
        answers.
        """
        number = event.sequence // self.n_choices
        if not self._prompt_pending[number]:
            return []
        self._prompt_pending[number] = False
        scores = [
            TokenScore(value, tuple(TokenLogprob(*pair) for pair in top))
            for value, top in event.prompt_logprobs
        ]
        echo = self._echoes[number]
        lists = logprobs.prompt_logprobs(
            self.runner, self.requests[number].tokens, scores, echo, self._style
        )
        return [
            self._chunk(number * self.n_choices + index, echo, lists)
            for index in range(self.n_choices)
        ]

    def stream_event(self, event: Event) -> Iterable[Document]:
        """Return chunks with the text that an event adds."""
        if self.is_beam_search:
            return []
        return [*self._prompt_chunks(event), *self._token_chunks(event)]

    def _token_chunks(self, event: Event) -> list[Document]:
        lists = None
        if self.logprobs is not None and event.token:
            top = (
                [[TokenLogprob(*pair) for pair in event.top_logprobs]] if event.top_logprobs else []
            )
            lists = logprobs.completion_logprobs(
                self.runner, [event.token], top, self._offsets[event.sequence], self._style
            )
        return [self._chunk(event.sequence, event.text, lists)] if event.text or lists else []

    def encode_event(self, event: Event) -> bytes:
        """Return the chunks for an event as Server-Sent Events. If the event only adds text, as
        most events do, the faster encode_text_event() is used.
        """
        if (
            self.logprobs is not None
            or not event.text
            or self.is_beam_search
            or self.telemetry.is_on
        ):
            return super().encode_event(event)
        return self.encode_text_event(
            event.sequence, event.text, lambda text: self._chunk(event.sequence, text)
        )

    def stream_end(self, answers: Sequence[Answer]) -> Iterable[Document]:
        """Return chunks with the finish reason of each choice, then the token counts if the request
        asks for them. For a beam search, these chunks contain the whole answers.
        """
        chunks = []
        for number, answer in enumerate(answers):
            if not self.is_beam_search:
                chunks.append(self._chunk(number, "", None, finish_reason(answer)))
                continue
            for index, beam in enumerate(
                best_beams(answer, self.n_choices), number * self.n_choices
            ):
                chunks.append(
                    self._chunk(
                        index, self._echoes[number] + beam.text, None, finish_reason(answer)
                    )
                )
        chunks[-1]["timings"] = answer_timings(answers[0])
        if self.includes_usage:
            chunks.append(
                {**self._head(), "choices": [], "usage": token_usage(answers, self.n_samples)}
            )
        return chunks

    def _head(self) -> Document:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": request_settings.system_fingerprint(),
        }

    def _chunk(
        self, index: int, text: str, logprobs_document: Any = None, finish: str | None = None
    ) -> Document:
        choice = {
            "index": index,
            "text": text,
            "logprobs": logprobs_document,
            "finish_reason": finish,
        }
        return {**self._head(), "choices": [choice]}


def check_tokens(tokens: Sequence[int], path: str, n_vocab: int, field: str | None = None) -> None:
    """Raise ApiError for token ids outside a vocabulary of `n_vocab` tokens. `path`: where they are
    in the request. `field`: the field that the error names, if not the path.
    """
    if invalid := [token for token in tokens if not 0 <= token < n_vocab]:
        raise ApiError(
            f"{path} has {invalid[0]}, which is no token: the last one is {n_vocab - 1}",
            param=field or path,
        )


def _is_token_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


def _mean_logprob(answer: Answer) -> float:
    """Return the mean log-probability of the answer's tokens, by which `best_of` chooses."""
    return sum(token.logprob or 0.0 for token in answer.tokens) / max(1, len(answer.tokens))


FORMS = (CompletionsForm,)
