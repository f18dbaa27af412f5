"""`/v1/completions`: texts gone on with, as they are; no chat template."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from llmcli.runtime.ranked import Ranked, Scored
from llmcli.runtime.request import Answer, Request
from llmcli.runtime.runner import Runner
from llmcli.serve.known import Known
from llmcli.serve.problems import Problem
from llmcli.serve.schema import logprobs
from llmcli.serve.schema import settings as common
from llmcli.serve.schema.base import Document, Form, best, reason, timings, usage
from llmcli.serve.schema.prompt import answer_format, grammar
from llmcli.serve.settings import Settings
from llmcli.types import Event

MOST_PROMPTS = 256
MOST_ANSWERS = (
    1024  # of one request: an idle server takes any one whole, and whoever comes next waits for it
)
LIMITS = "max_tokens", "n_predict"


class Completions(Form):
    """OpenAI's older completions: one prompt or several, as text or as ids of tokens."""

    path: ClassVar[str] = "/v1/completions"
    prefix: ClassVar[str] = "cmpl-"
    few: ClassVar[int | None] = 16  # tokens where nobody says how many: OpenAI's
    searches: ClassVar[bool] = True
    refused: ClassVar[dict[str, str]] = {"suffix": "text is gone on with at its end, not filled in"}

    def __init__(self, body: Mapping[str, Any], runner: Runner, settings: Settings) -> None:
        super().__init__(body, runner, settings)
        fields = self.fields
        options = fields.table("stream_options")
        self.counted = bool(options and options.flag("include_usage"))
        self.logprobs, self.echo = fields.whole("logprobs", 0, logprobs.MOST), fields.flag("echo")
        asked = common.common(fields, settings, LIMITS)
        beams = asked["search"].beams
        self.count = common.samples(fields, beams)
        self.samples = (
            self.count
            if beams > 1
            else fields.whole("best_of", 1, common.MOST_SAMPLES) or self.count
        )
        self._refuse(beams)
        limit = common.limit(common.asked_limit(fields, LIMITS), settings)
        schema = answer_format(fields, "response_format")
        self.constraint = grammar(fields, schema)
        keeps = self.logprobs is not None or self.samples > self.count
        asked = {
            "strategy": runner.strategy(),
            **asked,
            "logprobs": keeps,
            "top_logprobs": self.logprobs or 0,
            "scores": self.scores,
        }
        most = self.few if limit is None else limit
        self.requests = tuple(
            Request(
                tokens,
                max_tokens=common.room(runner, settings, len(tokens), most, self.samples),
                **asked,
            )
            for tokens in self._prompts()
        )
        self.check()
        self._echoes = [self._echo(number, request) for number, request in enumerate(self.requests)]
        self._offsets = [len(echo) for echo in self._echoes for _ in range(self.count)]
        self._awaited = [self.scores] * len(
            self.requests
        )  # the prompts that a stream has not told yet

    def resume(self, known: Known) -> None:
        """A prompt's log-probabilities came with the first event of any of its answers."""
        super().resume(known)
        begun = {number // self.count for number in known.tokens}
        self._awaited = [
            waits and number not in begun for number, waits in enumerate(self._awaited)
        ]

    def _refuse(self, beams: int) -> None:
        if self.samples < self.count:
            raise Problem(f"best_of must be at least n, {self.count}", param="best_of")
        if self.stream and self.samples > self.count:
            raise Problem("best_of is known when all are done: leave out stream", param="best_of")
        if self.logprobs is not None and beams > 1:
            raise Problem(
                "a beam search keeps no alternatives: leave out logprobs or beams", param="logprobs"
            )

    @property
    def scores(self) -> bool:
        """Whether the prompt's own tokens are told with their log-probabilities."""
        return self.echo and self.logprobs is not None

    def _prompts(self) -> list[tuple[int, ...]]:
        value = self.fields.values.get("prompt")
        if self._single(value):
            value = [value]
        if not isinstance(value, list) or not value:
            raise self.fields.wrong("prompt", "text, ids of tokens, or a list of either")
        if len(value) > MOST_PROMPTS:
            raise Problem(
                f"prompt has {len(value)} entries, at most {MOST_PROMPTS} are taken", param="prompt"
            )
        if (count := len(value) * self.samples) > MOST_ANSWERS:
            raise Problem(
                f"these are {count:,} answers, at most {MOST_ANSWERS:,} are given to one request",
                param="n",
            )
        return [self._tokens(f"prompt[{index}]", one) for index, one in enumerate(value)]

    def _single(self, value: Any) -> bool:
        """Whether it is one prompt, not a list of them."""
        return isinstance(value, str) or _ids(value)

    def _tokens(self, where: str, value: Any) -> tuple[int, ...]:
        model = self.runner.model
        if isinstance(value, str):
            found = common.encoded(self.runner, self.settings, value)
            return found or ((model.bos,) if model.bos is not None else ())
        if not _ids(value):
            raise Problem(f"{where} must be text or ids of tokens", param="prompt")
        if wrong := [one for one in value if not 0 <= one < model.n_vocab]:
            raise Problem(
                f"{where} has {wrong[0]}, which is no token: they end at {model.n_vocab - 1}",
                param="prompt",
            )
        return tuple(value)

    def _echo(self, number: int, request: Request) -> str:
        """A prompt as it was given; of ids the text that they stand for."""
        if not self.echo:
            return ""
        value = self.fields.values["prompt"]
        one = value if self._single(value) else value[number]
        if isinstance(one, str):
            return one
        raw = b"".join(self.runner.model.piece(token, special=True) for token in request.tokens)
        return raw.decode("utf-8", "replace")

    def whole(self, answers: Sequence[Answer]) -> Document:
        """One document: for each prompt its choices, of `best_of` the likeliest a token."""
        found: list[Document] = []
        for number, echo in enumerate(self._echoes):
            mine = answers[number * self.each : (number + 1) * self.each]
            if self.searched:
                kept = [replace(mine[0], text=one.text) for one in best(mine[0], self.count)]
            else:
                kept = (
                    sorted(mine, key=_mean, reverse=True)[: self.count]
                    if self.samples > self.count
                    else list(mine)
                )
            about = None
            if self.scores:
                about = logprobs.of_prompt(
                    self.runner, self.requests[number].tokens, mine[0].prompt, echo
                )
            first = number * self.count
            found += [
                self._choice(first + index, echo, one, about) for index, one in enumerate(kept)
            ]
        counts = usage(answers, self.each)
        return {**self._head(), "choices": found, "usage": counts, "timings": timings(answers[0])}

    def _choice(self, index: int, echo: str, answer: Answer, prompt: Document | None) -> Document:
        about = None
        if self.logprobs is not None:
            about = logprobs.legacy(self.runner, answer.tokens, answer.top, len(echo))
            about = logprobs.together(prompt, about) if prompt else about
        return {
            "index": index,
            "text": echo + answer.text,
            "logprobs": about,
            "finish_reason": reason(answer),
        }

    def begin(self) -> Iterable[Document]:
        """The prompts, where they are echoed; with their log-probabilities each comes when it is
        computed, those of a search with what it found.
        """
        self.begun = True
        later = self.scores or self.searched
        echoed = () if later else [echo for echo in self._echoes for _ in range(self.count)]
        return [self._chunk(index, echo) for index, echo in enumerate(echoed) if echo]

    def _prompt(self, event: Event) -> list[Document]:
        """A prompt for each of its choices, at the first event of any."""
        number = event.sequence // self.count
        if not self._awaited[number]:
            return []
        self._awaited[number] = False
        scores = [Scored(value, tuple(Ranked(*one) for one in top)) for value, top in event.prompt]
        echo = self._echoes[number]
        about = logprobs.of_prompt(self.runner, self.requests[number].tokens, scores, echo)
        return [
            self._chunk(number * self.count + index, echo, about) for index in range(self.count)
        ]

    def show(self, event: Event) -> Iterable[Document]:
        """The text that an event added."""
        if self.searched:
            return []
        return [*self._prompt(event), *self._token(event)]

    def _token(self, event: Event) -> list[Document]:
        about = None
        if self.logprobs is not None and event.token:
            top = [[Ranked(*one) for one in event.top]] if event.top else []
            about = logprobs.legacy(self.runner, [event.token], top, self._offsets[event.sequence])
            self._offsets[event.sequence] += len(about["tokens"][0])
        return [self._chunk(event.sequence, event.text, about)] if event.text or about else []

    def streamed(self, event: Event) -> bytes:
        """The same, quickly where it is a piece of text only."""
        if self.logprobs is not None or not event.text or self.searched:
            return super().streamed(event)
        return self.framed(
            event.sequence, event.text, lambda text: self._chunk(event.sequence, text)
        )

    def end(self, answers: Sequence[Answer]) -> Iterable[Document]:
        """Why each choice ended, and the counts where they were asked for."""
        chunks = []
        for number, answer in enumerate(answers):
            if not self.searched:
                chunks.append(self._chunk(number, "", None, reason(answer)))
                continue
            for index, one in enumerate(best(answer, self.count), number * self.count):
                chunks.append(
                    self._chunk(index, self._echoes[number] + one.text, None, reason(answer))
                )
        chunks[-1]["timings"] = timings(answers[0])
        if self.counted:
            chunks.append({**self._head(), "choices": [], "usage": usage(answers, self.each)})
        return chunks

    def _head(self) -> Document:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": None,
        }

    def _chunk(
        self, index: int, text: str, about: Any = None, finish: str | None = None
    ) -> Document:
        choice = {"index": index, "text": text, "logprobs": about, "finish_reason": finish}
        return {**self._head(), "choices": [choice]}


def _ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(one) is int for one in value)


def _mean(answer: Answer) -> float:
    """The log-probability a token."""
    return sum(token.logprob or 0.0 for token in answer.tokens) / max(1, len(answer.tokens))


FORMS = (Completions,)
