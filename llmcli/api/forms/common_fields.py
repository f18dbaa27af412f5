"""Reads the request fields that several APIs share: sampling settings, token limits, stop
sequences, beam search. The names of sampling settings are those of the registered sampling steps.
"""

from collections.abc import Mapping
from typing import Any

from llmcli.api.errors import ApiError, context_length_error
from llmcli.api.fields import Fields
from llmcli.api.server_settings import ServerSettings
from llmcli.api.stream_telemetry import StreamTelemetry
from llmcli.errors import UserError
from llmcli.runtime.requests.beam_settings import NO_SEARCH, BeamSettings
from llmcli.runtime.requests.context_overflow import SINK_TOKENS, AttentionSinks
from llmcli.runtime.runner import Runner
from llmcli.runtime.sampling import N_SEEDS, Sampling, sampling_settings

MAX_STOPS, MAX_SAMPLES, MAX_TOKENS = 16, 128, 2**31 - 1
MAX_PRIORITY = 100
# Names of sampling settings in the APIs of vLLM and other servers -> their names here.
SETTING_ALIASES = {"repetition_penalty": "repeat_penalty"}
BEAM_FIELDS = {
    "beams": "beams",
    "length_penalty": "length_penalty",
    "early_stopping": "early_stopping",
}
LIMIT_FIELDS = "max_completion_tokens", "max_tokens"


def read_sampling(fields: Fields, defaults: Sampling) -> Sampling:
    """Return the sampling settings of a request. Settings that the request lacks are taken from
    `defaults`. Raises ApiError for an invalid value.
    """
    names = {
        name: setting.name
        for setting in sampling_settings().values()
        for name in (setting.name, *setting.aliases)
    }
    chosen: dict[str, object] = {}
    for name, setting_name in {**SETTING_ALIASES, **names}.items():
        if not fields.has(name):
            continue
        value = fields.values[name]
        if setting_name == "seed" and type(value) is int:
            value = value if value == -1 else value % N_SEEDS  # OpenAI allows any whole number
        try:
            chosen[setting_name] = sampling_settings()[setting_name].parse(value)
        except UserError as error:
            hint = "" if "--" in error.hint else f"; {error.hint}"
            raise ApiError(
                f"{error}{hint}".replace(setting_name, name), param=fields.path_of(name)
            ) from None
    return defaults.with_values(chosen)


def read_limit(fields: Fields, names: tuple[str, ...] = LIMIT_FIELDS) -> int | None:
    """Return the token limit of a request, which is in one of the fields `names`; None if the
    request sets no limit.
    """
    return next(
        (value for name in names if (value := fields.integer(name, 0, MAX_TOKENS)) is not None),
        None,
    )


def effective_limit(requested: int | None, settings: ServerSettings) -> int | None:
    """Return the token limit of each answer: the request's limit, or the server's default without
    one, and never more than `max_answer_tokens`. None means no limit except the context.
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
    beams: int = 1,
) -> int:
    """Return the largest number of tokens of each answer to a prompt of `prompt_tokens` tokens.
    Without a `limit`, the answers share the rest of the context equally. If the context slides, an
    answer may be longer than the rest; without a limit it gets as many tokens as the context has.
    Raises ApiError if the prompt leaves no space in the context.
    """
    size = context_tokens(runner, settings)
    if prompt_tokens >= size:
        raise _too_long(f"{prompt_tokens} tokens", prompt_tokens, size)
    if settings.slides_context and samples == beams == 1:
        return size if limit is None else limit
    return (
        max(1, (size - prompt_tokens) // samples)
        if limit is None
        else min(limit, size - prompt_tokens)
    )


def context_fields(
    fields: Fields,
    runner: Runner,
    settings: ServerSettings,
    prompt_tokens: int,
    samples: int = 1,
    beams: int = 1,
) -> dict[str, Any]:
    """Return keyword arguments for Request: the size of the context, the slot (llama-server's
    `id_slot`), and what is dropped when the context is full. The request's `n_keep` tokens at the beginning stay (-1: the whole prompt), and a few more
    that the attention needs. Several samples or beams share their prompt, so nothing is dropped
    from them.
    """
    size = context_tokens(runner, settings)
    context: dict[str, Any] = {} if size == runner.n_ctx else {"max_context": size}
    slot = fields.integer("id_slot", -1, runner.context.n_seq_max - 1, -1)
    context |= {} if slot in (None, -1) else {"slot": slot}
    n_keep = fields.integer("n_keep", -1, MAX_TOKENS, 0) or 0
    if settings.slides_context and samples == beams == 1:
        n_kept = prompt_tokens if n_keep < 0 else n_keep + runner.model.add_bos
        n_kept = min(max(n_kept, SINK_TOKENS), size - SINK_TOKENS)
        context |= {"overflow": AttentionSinks(n_kept), "can_move_cells": True}
    return context


def encode_prompt(runner: Runner, settings: ServerSettings, text: str) -> tuple[int, ...]:
    """Return the token ids of a prompt text, which is a rendered template or a plain text.

    Raises ApiError if the text is too long. A text is first refused by the smallest number of
    tokens that it can have, because tokenizing megabytes of spaces would take many seconds.
    """
    size = context_tokens(runner, settings)
    if (min_tokens := runner.model.min_tokens(text)) >= size:
        raise _too_long(f"{min_tokens} tokens or more", min_tokens, size)
    return runner.encode_prompt(text)


def context_tokens(runner: Runner, settings: ServerSettings) -> int:
    """Return the largest number of tokens that a prompt and its answer may have together."""
    return min(runner.n_ctx, settings.max_context or runner.n_ctx)


def _too_long(words: str, prompt: int, size: int) -> ApiError:
    message = (
        f"the request exceeds the available context size: the prompt has {words}; the context holds"
        f" {size} tokens and must leave room for an answer"
    )
    return context_length_error(message, prompt, size)


def read_common_fields(
    fields: Fields, settings: ServerSettings, limits: tuple[str, ...] = LIMIT_FIELDS
) -> dict[str, Any]:
    """Return keyword arguments for Request: the values of the fields that all APIs share, except
    the token limit. `limits`: the names of the API's token limit fields.
    """
    beams, telemetry = read_search(fields), StreamTelemetry(fields)
    return {
        "reports_progress": telemetry.is_on,
        "sampling": read_sampling(fields, settings.sampling),
        "stops": fields.texts("stop", MAX_STOPS) or settings.stops,
        "ignore_eos": fields.flag("ignore_eos"),
        "priority": fields.integer("priority", -MAX_PRIORITY, MAX_PRIORITY, 0),
        # If the request sets a length, the answer gets this length, even if it only repeats itself.
        "allow_repetition": settings.allow_repetition or read_limit(fields, limits) is not None,
        "search": beams,
        **({"strategy": "beam"} if beams.beams > 1 else {}),
    }


def with_logprobs(
    request_fields: Mapping[str, Any], runner: Runner, logprobs: bool, top_logprobs: int
) -> dict[str, Any]:
    """Add the log-probability settings to the result of read_common_fields(), and the model's
    default strategy if it has no strategy. (Only a beam search has one.)
    """
    return {
        "strategy": runner.default_strategy(),
        **request_fields,
        "logprobs": logprobs,
        "top_logprobs": top_logprobs,
    }


def read_search(fields: Fields) -> BeamSettings:
    """Return the beam search settings of a request: from the fields `beams`, `length_penalty` and
    `early_stopping`, or from vLLM's `use_beam_search` with `best_of`.
    """
    values: dict[str, object] = {
        setting_name: fields.values[name]
        for name, setting_name in BEAM_FIELDS.items()
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
    """Return the number of answers that the request asks for (`n`). Raises ApiError if it is larger
    than the number of beams of a beam search.
    """
    return fields.integer("n", 1, beams if beams > 1 else MAX_SAMPLES, 1) or 1
