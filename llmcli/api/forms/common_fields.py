"""The request fields that all forms have in common: sampling settings (as defined by the registered
sampling steps), token limits, stop sequences, beam search.
"""

from collections.abc import Mapping
from typing import Any

from llmcli.api.errors import ApiError, context_length_error
from llmcli.api.fields import Fields
from llmcli.api.server_settings import ServerSettings
from llmcli.errors import UserError
from llmcli.runtime.requests.beam_settings import NO_SEARCH, BeamSettings
from llmcli.runtime.runner import Runner
from llmcli.runtime.sampling import N_SEEDS, Sampling
from llmcli.runtime.sampling import sampling_settings as known

MAX_STOPS, MAX_SAMPLES, MAX_TOKENS = 16, 128, 2**31 - 1
MAX_PRIORITY = 100
# Names of our settings in the APIs of vLLM and other servers.
SETTING_ALIASES = {"repetition_penalty": "repeat_penalty"}
BEAM_FIELDS = {
    "beams": "beams",
    "length_penalty": "length_penalty",
    "early_stopping": "early_stopping",
}
LIMIT_FIELDS = "max_completion_tokens", "max_tokens"


def read_sampling(fields: Fields, defaults: Sampling) -> Sampling:
    """Return the server's sampling settings, replaced by the request's where the request sets them."""
    names = {
        name: setting.name
        for setting in known().values()
        for name in (setting.name, *setting.aliases)
    }
    chosen: dict[str, object] = {}
    for name, name_of_setting in {**SETTING_ALIASES, **names}.items():
        if not fields.has(name):
            continue
        value = fields.values[name]
        if name_of_setting == "seed" and type(value) is int:
            value = value if value == -1 else value % N_SEEDS  # OpenAI allows any whole number
        try:
            chosen[name_of_setting] = known()[name_of_setting].parse(value)
        except UserError as error:
            hint = "" if "--" in error.hint else f"; {error.hint}"
            raise ApiError(
                f"{error}{hint}".replace(name_of_setting, name), param=fields.path_of(name)
            ) from None
    return defaults.with_values(chosen)


def read_limit(fields: Fields, names: tuple[str, ...] = LIMIT_FIELDS) -> int | None:
    """Return the token limit that the request sets, or None if it sets none."""
    return next(
        (value for name in names if (value := fields.integer(name, 0, MAX_TOKENS)) is not None),
        None,
    )


def effective_limit(requested: int | None, settings: ServerSettings) -> int | None:
    """Return the smaller of the request's and the server's token limit, or None if neither sets
    one.
    """
    tokens = settings.max_tokens if requested is None else requested
    if settings.max_answer_tokens is not None:
        return (
            settings.max_answer_tokens
            if tokens is None
            else min(tokens, settings.max_answer_tokens)
        )
    return tokens


def answer_budget(
    runner: Runner,
    settings: ServerSettings,
    prompt_tokens: int,
    limit: int | None,
    samples: int = 1,
) -> int:
    """Return the largest number of tokens of each answer to a prompt of `prompt_tokens` tokens.
    Raises ApiError if the prompt leaves no space for one token in the context.
    """
    size = context_tokens(runner, settings)
    if prompt_tokens >= size:
        raise _too_long(f"{prompt_tokens} tokens", prompt_tokens, size)
    return (
        max(1, (size - prompt_tokens) // samples)
        if limit is None
        else min(limit, size - prompt_tokens)
    )


def encode_prompt(runner: Runner, settings: ServerSettings, text: str) -> tuple[int, ...]:
    """Return the token ids of a rendered template or of a plain text.

    Raises ApiError if the text is too long. A text that must be too long by its length is refused
    before it is tokenized, because megabytes of spaces would occupy the tokenizer for many seconds.
    """
    size = context_tokens(runner, settings)
    if (least := runner.model.min_tokens(text)) >= size:
        raise _too_long(f"{least} tokens or more", least, size)
    return runner.encode_prompt(text)


def context_tokens(runner: Runner, settings: ServerSettings) -> int:
    """Return the largest number of tokens that a prompt and its answer may have together."""
    return min(runner.n_ctx, settings.max_context or runner.n_ctx)


def _too_long(words: str, prompt: int, size: int) -> ApiError:
    message = (
        f"the prompt has {words}; the context holds {size} tokens and must leave room for an answer"
    )
    return context_length_error(message, prompt, size)


def read_common_fields(
    fields: Fields, settings: ServerSettings, limits: tuple[str, ...] = LIMIT_FIELDS
) -> dict[str, Any]:
    """Return the values of the Request fields that all forms read, except the token limit."""
    beams = read_search(fields)
    return {
        "sampling": read_sampling(fields, settings.sampling),
        "stops": fields.texts("stop", MAX_STOPS) or settings.stops,
        "ignore_eos": fields.flag("ignore_eos"),
        "priority": fields.integer("priority", -MAX_PRIORITY, MAX_PRIORITY, 0),
        # If the request sets a length, the answer gets this length, even if it only repeats itself.
        "allow_repetition": read_limit(fields, limits) is not None,
        "search": beams,
        **({"strategy": "beam"} if beams.beams > 1 else {}),
    }


def with_logprobs(
    request_fields: Mapping[str, Any], runner: Runner, logprobs: bool, top_logprobs: int
) -> dict[str, Any]:
    """Return `request_fields` (read_common_fields) with the log-probability settings that the form
    has read. If they contain no strategy, as they do for a beam search, add the default strategy.
    """
    return {
        "strategy": runner.default_strategy(),
        **request_fields,
        "logprobs": logprobs,
        "top_logprobs": top_logprobs,
    }


def read_search(fields: Fields) -> BeamSettings:
    """Return the beam search settings of a request. The request uses the names of the command line,
    or vLLM's `use_beam_search` with `best_of`.
    """
    values: dict[str, object] = {
        name_of_setting: fields.values[name]
        for name, name_of_setting in BEAM_FIELDS.items()
        if fields.has(name)
    }
    if fields.flag("use_beam_search") and "beams" not in values:
        values["beams"] = (
            fields.integer("best_of", 1, MAX_SAMPLES, None)
            or fields.integer("n", 1, MAX_SAMPLES, 1)
            or 1
        )
    if isinstance(values.get("early_stopping"), bool):
        values["early_stopping"] = "yes" if values["early_stopping"] else "no"
    return _search(values)


def _search(values: Mapping[str, object]) -> BeamSettings:
    try:
        return NO_SEARCH.with_values(values)
    except UserError as error:
        name = next((name for name in BEAM_FIELDS if str(error).startswith(name)), None)
        raise ApiError(f"{error}; {error.hint}", param=name) from None


def read_samples(fields: Fields, beams: int = 1) -> int:
    """Return the number of answers (`n`). For a beam search it is at most the number of beams."""
    return fields.integer("n", 1, beams if beams > 1 else MAX_SAMPLES, 1) or 1
