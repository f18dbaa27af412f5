"""The fields that every form has: sampling settings (read from the registered sampling steps),
limits, stop sequences, beams.
"""

from collections.abc import Mapping
from typing import Any

from llmcli.api.errors import Problem
from llmcli.api.fields import Fields
from llmcli.api.server_settings import Settings
from llmcli.errors import UserError
from llmcli.runtime.requests.beam_settings import NO_SEARCH, Search
from llmcli.runtime.runner import Runner
from llmcli.runtime.sampling import SEEDS, Sampling
from llmcli.runtime.sampling import settings as known

MOST_STOPS, MOST_SAMPLES, MOST_TOKENS = 16, 128, 2**31 - 1
MOST_PRIORITY = 100
# Names that vLLM and others give to our settings.
OTHERS = {"repetition_penalty": "repeat_penalty"}
BEAMS = {"beams": "beams", "length_penalty": "length_penalty", "early_stopping": "early_stopping"}
LIMITS = "max_completion_tokens", "max_tokens"


def sampling(fields: Fields, defaults: Sampling) -> Sampling:
    """Return the server's sampling settings with those of the request applied."""
    names = {
        name: setting.name
        for setting in known().values()
        for name in (setting.name, *setting.aliases)
    }
    chosen: dict[str, object] = {}
    for name, name_of_setting in {**OTHERS, **names}.items():
        if not fields.has(name):
            continue
        value = fields.values[name]
        if name_of_setting == "seed" and type(value) is int:
            value = value if value == -1 else value % SEEDS  # OpenAI allows any whole number
        try:
            chosen[name_of_setting] = known()[name_of_setting].parse(value)
        except UserError as error:
            hint = "" if "--" in error.hint else f"; {error.hint}"
            raise Problem(
                f"{error}{hint}".replace(name_of_setting, name), param=fields.at(name)
            ) from None
    return defaults.with_values(chosen)


def asked_limit(fields: Fields, names: tuple[str, ...] = LIMITS) -> int | None:
    """Return the largest number of tokens that the request asks for, or None."""
    return next(
        (value for name in names if (value := fields.whole(name, 0, MOST_TOKENS)) is not None), None
    )


def limit(requested: int | None, settings: Settings) -> int | None:
    """Return the largest number of tokens that the request and the server allow, or None if neither
    sets a limit.
    """
    tokens = settings.max_tokens if requested is None else requested
    if settings.most_tokens is not None:
        return settings.most_tokens if tokens is None else min(tokens, settings.most_tokens)
    return tokens


def room(
    runner: Runner, settings: Settings, prompt: int, wanted: int | None, samples: int = 1
) -> int:
    """Return the largest number of tokens for each answer to a prompt of `prompt_tokens` tokens.
    Raises ApiError if the prompt leaves no room for one token.
    """
    size = context(runner, settings)
    if prompt >= size:
        raise _too_long(f"{prompt} tokens", prompt, size)
    return max(1, (size - prompt) // samples) if wanted is None else min(wanted, size - prompt)


def encoded(runner: Runner, settings: Settings, text: str) -> tuple[int, ...]:
    """Return the token ids of a rendered template or of a plain text.

    Raises ApiError at once for a text that is too long whatever its tokens are: without this check,
    megabytes of spaces would occupy the tokenizer for many seconds.
    """
    size = context(runner, settings)
    if (least := runner.model.least(text)) >= size:
        raise _too_long(f"{least} tokens or more", least, size)
    return runner.encode_prompt(text)


def context(runner: Runner, settings: Settings) -> int:
    """Return the largest number of tokens of a prompt and its answer together."""
    return min(runner.n_ctx, settings.most_context or runner.n_ctx)


def _too_long(words: str, prompt: int, size: int) -> Problem:
    return Problem(
        f"the prompt has {words}; the context holds {size} tokens and must leave room for an "
        "answer",
        code="context_length_exceeded",
        type="exceed_context_size_error",
        n_prompt_tokens=prompt,
        n_ctx=size,
    )


def common(fields: Fields, settings: Settings, limits: tuple[str, ...] = LIMITS) -> dict[str, Any]:
    """Return the fields of a Request that all forms share, except its token limit."""
    beams = search(fields)
    return {
        "sampling": sampling(fields, settings.sampling),
        "stops": fields.words("stop", MOST_STOPS) or settings.stops,
        "ignore_eos": fields.flag("ignore_eos"),
        "priority": fields.whole("priority", -MOST_PRIORITY, MOST_PRIORITY, 0),
        # A request that sets a length gets it, even if the answer only repeats itself.
        "endless": asked_limit(fields, limits) is not None,
        "search": beams,
        **({"strategy": "beam"} if beams.beams > 1 else {}),
    }


def search(fields: Fields) -> Search:
    """Return the beam search that a request asks for, by the command line's names or by vLLM's
    (use_beam_search with best_of).
    """
    values: dict[str, object] = {
        name_of_setting: fields.values[name]
        for name, name_of_setting in BEAMS.items()
        if fields.has(name)
    }
    if fields.flag("use_beam_search") and "beams" not in values:
        values["beams"] = (
            fields.whole("best_of", 1, MOST_SAMPLES, None)
            or fields.whole("n", 1, MOST_SAMPLES, 1)
            or 1
        )
    if isinstance(values.get("early_stopping"), bool):
        values["early_stopping"] = "yes" if values["early_stopping"] else "no"
    return _search(values)


def _search(values: Mapping[str, object]) -> Search:
    try:
        return NO_SEARCH.with_values(values)
    except UserError as error:
        name = next((name for name in BEAMS if str(error).startswith(name)), None)
        raise Problem(f"{error}; {error.hint}", param=name) from None


def samples(fields: Fields, beams: int = 1) -> int:
    """Return the number of answers, at most as many as there are beams."""
    return fields.whole("n", 1, beams if beams > 1 else MOST_SAMPLES, 1) or 1
