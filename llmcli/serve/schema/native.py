"""`/completion` and `/infill`: llama-server's own ways to go on with a text and to fill a gap in
one.

They are Completions in other words. What another answer would come of is refused by name; passed
over is what steers a cache or a line that is ours to steer: cache_prompt, id_slot, n_keep,
n_cache_reuse, return_progress, timings_per_token, sse_ping_interval, min_keep.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from llmcli.runtime.request import Answer
from llmcli.runtime.runner import Runner
from llmcli.serve.problems import Problem
from llmcli.serve.schema import logprobs
from llmcli.serve.schema import settings as common
from llmcli.serve.schema.base import Document, stopped_by, timings
from llmcli.serve.schema.completions import Completions
from llmcli.serve.schema.fields import Fields
from llmcli.serve.settings import Settings
from llmcli.types import Event

LIMIT = "n_predict"
MOST_FIELDS, MOST_EXTRAS = 64, 256
SNIPPET = "\n\n--- snippet ---\n\n"  # before extra text, where the model has no token for a file
GAP = ("pre", "suf", "mid")  # tokens without which no gap is told
# Of Completions, and no fields of theirs.
INSTEAD = {"logprobs": "n_probs is", "echo": "the answer tells the prompt", "best_of": "n_cmpl is"}


class Native(Completions):
    """llama-server's completions: an object for each answer, a list of them where there are
    several.
    """

    path: ClassVar[str] = "/completion"
    last: ClassVar[bytes] = b""
    few: ClassVar[int | None] = None
    searches: ClassVar[bool] = False
    refused: ClassVar[dict[str, str]] = {
        "suffix": "/infill takes input_suffix",
        "post_sampling_probs": "n_probs tells those of the whole vocabulary",
        "multimodal_data": "this server reads text",
        "response_format": "json_schema is",
    }

    def __init__(self, body: Mapping[str, Any], runner: Runner, settings: Settings) -> None:
        self._wanted = fields = Fields(body)
        self._told = fields.words("response_fields", MOST_FIELDS)
        self._ids = fields.flag("return_tokens")
        if wrong := next((name for name in INSTEAD if fields.values.get(name)), None):
            raise Problem(f"{wrong} is not known here: {INSTEAD[wrong]}", param=wrong)
        super().__init__(_openai(fields, runner), runner, settings)
        self._begun = [0] * (len(self.requests) * self.each)

    def _single(self, value: Any) -> bool:
        mixed = isinstance(value, list) and any(type(one) is int for one in value)
        return super()._single(value) or mixed or isinstance(value, dict)

    def _tokens(self, where: str, value: Any) -> tuple[int, ...]:
        """Text, ids, both mixed, or an object with `prompt_string`."""
        if isinstance(value, dict):
            inner = Fields(value, where)
            if inner.list("multimodal_data"):
                raise Problem(
                    f"{inner.at('multimodal_data')}: this server reads text", param="prompt"
                )
            value = inner.needed("prompt_string")
        if not isinstance(value, list) or not any(isinstance(one, str) for one in value):
            return super()._tokens(where, value)
        found: list[int] = []
        for number, one in enumerate(value):
            if isinstance(one, str) and number:
                common.encoded(self.runner, self.settings, one)  # refuses what is too long
                found += self.runner.model.tokenize(one, special=True)
            else:
                found += super()._tokens(where, one if isinstance(one, str) else [one])
        return tuple(found)

    def whole(self, answers: Sequence[Answer]) -> Any:
        """What each answer came to."""
        found = [self._result(number, answer) for number, answer in enumerate(answers)]
        return found[0] if len(found) == 1 else found

    def begin(self) -> Iterable[Document]:
        """Nothing: their streams begin with the first token."""
        self.begun = True
        return []

    def show(self, event: Event) -> Iterable[Document]:
        """A token and its text."""
        if not event.token and not event.text:
            return []
        number = event.sequence
        self._begun[number] += event.token is not None
        about: Document = {
            "index": number,
            "content": event.text,
            "tokens": [event.token.id] if event.token else [],
            "stop": False,
            "id_slot": -1,
            "tokens_predicted": self._begun[number],
            "tokens_evaluated": len(self.requests[number // self.each].tokens),
        }
        if self.logprobs and event.token:
            about["completion_probabilities"] = [
                logprobs.token(self.runner, event.token, event.top)
            ]
        return [about]

    def streamed(self, event: Event) -> bytes:
        """As events."""
        return self.written(self.show(event))

    def end(self, answers: Sequence[Answer]) -> Iterable[Document]:
        """What each answer came to, without what was told already."""
        for number, answer in enumerate(answers):
            yield self._result(number, answer, streamed=True)

    def _result(self, number: int, answer: Answer, streamed: bool = False) -> Document:
        request, model = self.requests[number // self.each], self.runner.model
        stop = stopped_by(self.runner, request, answer)
        ended = "limit" if answer.finish != "stop" else "eos" if stop is None else "word"
        prompt = b"".join(model.piece(token, special=True) for token in request.tokens).decode(
            "utf-8", "replace"
        )
        found: Document = {
            "index": number,
            "content": "" if streamed else answer.text,
            "tokens": [token.id for token in answer.tokens] if self._ids and not streamed else [],
            "id_slot": -1,
            "stop": True,
            "model": self.model,
            "tokens_predicted": len(answer.tokens),
            "tokens_evaluated": answer.prompt_tokens,
            "generation_settings": self._settings(answer),
            "prompt": prompt,
            "has_new_line": "\n" in answer.text,
            "truncated": answer.finish == "context_full",
            "stop_type": ended,
            "stopping_word": stop or "",
            "tokens_cached": answer.cached_tokens,
            "timings": timings(answer),
        }
        if self.logprobs and not streamed:
            found["completion_probabilities"] = logprobs.content(self.runner, answer)
        return (
            {path: found_at for path in self._told for found_at in _at(found, path)}
            if self._told
            else found
        )

    def _settings(self, answer: Answer) -> Document:
        request, limit = self.requests[0], common.asked_limit(self.fields, ("max_tokens",))
        values = request.sampling.as_dict()
        return {
            **values,
            "temperature": values["temp"],
            "seed": answer.seed,
            LIMIT: -1 if limit is None else limit,
            "max_tokens": -1 if limit is None else limit,
            "n_ctx": common.context(self.runner, self.settings),
            "stop": list(request.stops),
            "stream": self.stream,
            "ignore_eos": request.ignore_eos,
            "n_probs": self.logprobs or 0,
            "grammar": self.fields.text("grammar") or "",
        }


class Infill(Native):
    """A gap between `input_prefix` and `input_suffix`, as format_prompt_infill of llama.cpp's
    server writes it (tools/server/server-common.cpp): extra text, prefix, prompt, suffix, and the
    token behind which the gap is filled. Prefix and suffix are never cut; of the extra text the
    beginning is, where it does not fit.
    """

    path: ClassVar[str] = "/infill"

    def _prompts(self) -> list[tuple[int, ...]]:
        fields, model = self._wanted, self.runner.model
        before, behind = fields.needed("input_prefix"), fields.needed("input_suffix")
        words = fields.text("prompt") or ""
        for text in (before, behind, words):
            common.encoded(self.runner, self.settings, text)  # refuses what is too long
        extra = self._extra()
        if missing := [f"fim_{name}" for name in GAP if name not in model.fim]:
            raise Problem(
                f"this model fills no gaps: its file names no {', '.join(missing)} token", 501
            )
        fim, bos = model.fim, [model.bos] if model.add_bos and model.bos is not None else []
        plain = [model.tokenize(text, special=False) for text in (before, words, behind)]
        core = [*bos, fim["pre"], *plain[0], *plain[1], fim["suf"], *plain[2], fim["mid"]]
        limit = common.asked_limit(self.fields, ("max_tokens",)) or 0
        room = max(0, common.context(self.runner, self.settings) - len(core) - max(1, limit))
        return [(*extra[max(0, len(extra) - room) :], *core)]

    def _extra(self) -> list[int]:
        model, found = self.runner.model, list[int]()
        fim = model.fim
        if "rep" in fim:
            found += [fim["rep"], *model.tokenize("myproject\n", special=False)]
        for one in self._wanted.tables("input_extra", MOST_EXTRAS):
            text, name = one.needed("text"), one.text("filename") or "tmp"
            common.encoded(self.runner, self.settings, name + text)
            found += self._file(name) if "sep" in fim else model.tokenize(SNIPPET, special=False)
            found += model.tokenize(text, special=False)
        return [*found, *self._file("filename")] if "sep" in fim else found

    def _file(self, name: str) -> list[int]:
        model = self.runner.model
        return [model.fim["sep"], *model.tokenize(f"{name}\n", special=False)]


def _openai(fields: Fields, runner: Runner) -> Document:
    """The document that would ask the same of /v1/completions."""
    renamed = {
        LIMIT,
        "max_tokens",
        "n_cmpl",
        "n_probs",
        "logit_bias",
        "response_fields",
        "return_tokens",
    }
    found = {name: value for name, value in fields.values.items() if name not in renamed}
    limit = next((name for name in (LIMIT, "max_tokens") if fields.has(name)), LIMIT)
    most = fields.whole(limit, -1, common.MOST_TOKENS, -1)
    found["max_tokens"] = None if most == -1 else most
    found["n"] = fields.values.get("n_cmpl") or fields.values.get("n")
    found["logprobs"] = fields.whole("n_probs", 0, logprobs.MOST, 0) or None
    biases = fields.values.get("logit_bias")
    found["logit_bias"] = _biases(fields, runner) if isinstance(biases, list) else biases
    return found


def _biases(fields: Fields, runner: Runner) -> list[str]:
    """Pairs of a token, or of a text whose tokens are meant, and a number, or false: never."""
    found = []
    for one in fields.list("logit_bias"):
        if not isinstance(one, list) or len(one) != 2 or not isinstance(one[1], int | float):
            raise fields.wrong("logit_bias", "a list of pairs of a token and a number, or false")
        token, bias = one
        if type(token) is not int and not isinstance(token, str):
            raise fields.wrong("logit_bias", "a list of pairs of a token and a number, or false")
        ids = [token] if isinstance(token, int) else runner.model.tokenize(token, special=True)
        amount = (
            "-inf" if bias is False else f"{bias:+f}" if isinstance(bias, float) else f"{bias:+d}"
        )
        found += [f"{each}{amount}" for each in ids]
    return found


def _at(found: Any, path: str) -> list[Any]:
    """What stands at a path of names, if anything."""
    for name in path.split("/"):
        if not isinstance(found, dict) or name not in found:
            return []
        found = found[name]
    return [found]


FORMS = (Native, Infill)
