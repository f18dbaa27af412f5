"""Reads the request fields that several APIs share: sampling settings, token limits, stop
sequences, beam search, and the conditions for the end of an answer.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from llmcli import __version__
from llmcli.api.bodies.generation_fields import GenerationBody
from llmcli.api.bodies.sampling_fields import bias_texts, chosen_settings
from llmcli.api.errors import ApiError, context_length_error
from llmcli.api.server_settings import ServerSettings
from llmcli.api.stream_telemetry import StreamTelemetry
from llmcli.errors import UserError
from llmcli.runtime.binding.library import llama_cpp_version
from llmcli.runtime.requests.beam_settings import NO_SEARCH, BeamSettings
from llmcli.runtime.requests.context_overflow import SINK_TOKENS, AttentionSinks
from llmcli.runtime.requests.end_conditions import EndConditions
from llmcli.runtime.runner import Runner
from llmcli.runtime.sampling import Sampling

MAX_SAMPLES = 128
BEAM_FIELDS = ("beams", "length_penalty", "early_stopping")
NO_SLOT = -1  # the value of `id_slot` that leaves the choice to the server
NO_LIMIT = -1  # the value of a token limit that limits nothing
# Characters of a prompt that a request shortens. A longer text is not tokenized.
MAX_SHORTENED_CHARACTERS = 1 << 21


@dataclass(frozen=True, slots=True)
class Truncation:
    """How a prompt is shortened (vLLM's `truncate_prompt_tokens`). `tokens`: its largest number of
    tokens; None: as many as the context holds with an answer. `keeps_end`: the beginning is cut
    off instead of the end.
    """

    tokens: int | None = None
    keeps_end: bool = True

    def shorten(self, tokens: tuple[int, ...], size: int) -> tuple[int, ...]:
        """Return the tokens that remain. `size`: the most that the context can hold."""
        count = size if self.tokens is None else min(self.tokens, size)
        return tokens[max(0, len(tokens) - count) :] if self.keeps_end else tokens[:count]


@cache
def system_fingerprint() -> str:
    """Return what computes the answers: the versions of llama.cpp's binding and of llmcli. It begins
    with "b", as llama-server's does.
    """
    return f"b{llama_cpp_version()}-llmcli-{__version__}"


def read_truncation(body: GenerationBody) -> Truncation | None:
    """Return how the request shortens its prompt, or None if it does not."""
    count = body.truncate_prompt_tokens
    if count is None:
        return None
    if count == 0:
        raise ApiError(
            "truncate_prompt_tokens is 0, which leaves no prompt", param="truncate_prompt_tokens"
        )
    return Truncation(None if count == -1 else count, body.truncation_side != "right")


def read_sampling(body: GenerationBody, runner: Runner, defaults: Sampling) -> Sampling:
    """Return the sampling settings of a request. Settings that the request lacks are taken from
    `defaults`. Raises ApiError for an unknown sampler, or a bias that is too large.
    """
    chosen = dict(chosen_settings(body))
    if body.logit_bias is not None:
        chosen["logit_bias"] = bias_texts(
            body.logit_bias, lambda text: runner.model.tokenize(text, special=True)
        )
    try:
        sampling = defaults.with_values(chosen)
    except UserError as error:
        raise ApiError(str(error), param="logit_bias") from None
    if body.samplers is None:
        return sampling
    names = body.samplers if isinstance(body.samplers, list) else list(body.samplers)
    try:
        return sampling.in_order(names)
    except UserError as error:
        raise ApiError(f"samplers: {error}; {error.hint}", param="samplers") from None


def first_limit(*limits: int | None) -> int | None:
    """Return the first token limit that is not None; None if it is NO_LIMIT or if there is none."""
    limit = next((limit for limit in limits if limit is not None), None)
    return None if limit == NO_LIMIT else limit


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
    size = check_prompt_length(prompt_tokens, runner, settings)
    if settings.slides_context and samples == beams == 1:
        return size if limit is None else limit
    return (
        max(1, (size - prompt_tokens) // samples)
        if limit is None
        else min(limit, size - prompt_tokens)
    )


def context_fields(
    body: GenerationBody,
    runner: Runner,
    settings: ServerSettings,
    prompt_tokens: int,
    samples: int = 1,
    beams: int = 1,
) -> dict[str, Any]:
    """Return keyword arguments for Request: the size of the context, the slot (llama-server's
    `id_slot`), and what is dropped when the context is full. The request's `n_keep` tokens at the
    beginning stay (-1: the whole prompt), and a few more that the attention needs. Several samples
    or beams share their prompt, so nothing is dropped from them.

    Raises ApiError for a slot that does not exist.
    """
    size = context_tokens(runner, settings)
    context: dict[str, Any] = {} if size == runner.n_ctx else {"max_context": size}
    if body.id_slot is not None and body.id_slot != NO_SLOT:
        n_slots = runner.context.n_seq_max
        if body.id_slot >= n_slots:
            words = f"a whole number from {NO_SLOT} to {n_slots - 1}"
            raise ApiError(f"id_slot must be {words}, not {body.id_slot}", param="id_slot")
        context |= {"slot": body.id_slot}
    n_keep = body.n_keep or 0
    if settings.slides_context and samples == beams == 1:
        n_kept = prompt_tokens if n_keep < 0 else n_keep + runner.model.add_bos
        n_kept = min(max(n_kept, SINK_TOKENS), size - SINK_TOKENS)
        context |= {"overflow": AttentionSinks(n_kept), "can_move_cells": True}
    return context


def encode_prompt(
    runner: Runner, settings: ServerSettings, text: str, truncation: Truncation | None = None
) -> tuple[int, ...]:
    """Return the token ids of a prompt text, which is a rendered template or a plain text.

    Raises ApiError if the text is too long and there is no `truncation`.
    """
    check_text_length(runner, settings, text, truncation)
    tokens = runner.encode_prompt(text)
    return (
        truncation.shorten(tokens, context_tokens(runner, settings) - 1) if truncation else tokens
    )


def check_text_length(
    runner: Runner, settings: ServerSettings, text: str, truncation: Truncation | None = None
) -> None:
    """Raise ApiError for a text that does not fit into the context even with the smallest number of
    tokens that it can have, because tokenizing megabytes of spaces would take many seconds. With a
    `truncation`, a text may be longer, but not of any length.
    """
    if truncation and len(text) <= MAX_SHORTENED_CHARACTERS:
        return
    size = context_tokens(runner, settings)
    if (min_tokens := runner.model.min_tokens(text)) >= size:
        raise _too_long(f"{min_tokens} tokens or more", min_tokens, size)


def context_tokens(runner: Runner, settings: ServerSettings) -> int:
    """Return the largest number of tokens that a prompt and its answer may have together."""
    return min(runner.n_ctx, settings.max_context or runner.n_ctx)


def check_prompt_length(prompt_tokens: int, runner: Runner, settings: ServerSettings) -> int:
    """Return the size of the context. Raises ApiError if a prompt of `prompt_tokens` tokens leaves
    no space for an answer.
    """
    size = context_tokens(runner, settings)
    if prompt_tokens >= size:
        raise _too_long(f"{prompt_tokens} tokens", prompt_tokens, size)
    return size


def _too_long(words: str, prompt: int, size: int) -> ApiError:
    message = (
        f"the request exceeds the available context size: the prompt has {words}; the context holds"
        f" {size} tokens and must leave room for an answer"
    )
    return context_length_error(message, prompt, size)


def read_common_fields(
    body: GenerationBody,
    runner: Runner,
    settings: ServerSettings,
    stops: str | list[str] | None,
    limit: int | None,
    n_samples: int = 1,
) -> dict[str, Any]:
    """Return keyword arguments for Request: the values of the fields that all APIs share.

    `stops`: the request's stop sequences. `limit`: its token limit, or None; the caller applies it
    to the prompts. `n_samples`: the number of answers to each prompt.
    """
    search = read_search(body, n_samples)
    return {
        "reports_progress": StreamTelemetry(body).is_on,
        "sampling": read_sampling(body, runner, settings.sampling),
        "stops": ((stops,) if isinstance(stops, str) else tuple(stops or ())) or settings.stops,
        "ignore_eos": bool(body.ignore_eos),
        "priority": body.priority or 0,
        # If the request sets a length, the answer gets this length, even if it only repeats itself.
        "allow_repetition": (settings.allow_repetition or limit is not None)
        if body.endless is None
        else body.endless,
        "search": search,
        "end_conditions": EndConditions(
            frozenset(body.stop_token_ids or ()),
            body.min_tokens or 0,
            float(max(0, body.t_max_predict_ms or 0)),
            body.n_indent or 0,
        ),
        **({"strategy": "beam"} if search.beams > 1 else {}),
    }


def with_logprobs(
    request_fields: Mapping[str, Any],
    runner: Runner,
    body: GenerationBody,
    logprobs: bool,
    top_logprobs: int,
) -> dict[str, Any]:
    """Add the log-probability settings to the result of read_common_fields(), and a strategy if it
    has none. (Only a beam search has one.)
    """
    is_post_sampling = logprobs and body.post_sampling_probs
    return {
        "strategy": "post_sampling" if is_post_sampling else runner.default_strategy(),
        **request_fields,
        "logprobs": logprobs,
        "top_logprobs": top_logprobs,
    }


def read_search(body: GenerationBody, n_samples: int = 1) -> BeamSettings:
    """Return the beam search settings of a request: from the fields `beams`, `length_penalty` and
    `early_stopping`, or from vLLM's `use_beam_search`, which searches with as many beams as the
    request has answers (`n_samples`).
    """
    values: dict[str, object] = {
        name: value for name in BEAM_FIELDS if (value := getattr(body, name)) is not None
    }
    if body.use_beam_search and "beams" not in values:
        values["beams"] = n_samples
    if isinstance(values.get("early_stopping"), bool):
        values["early_stopping"] = "yes" if values["early_stopping"] else "no"
    try:
        return NO_SEARCH.with_values(values)
    except UserError as error:
        name = next((name for name in BEAM_FIELDS if str(error).startswith(name)), None)
        raise ApiError(f"{error}; {error.hint}", param=name) from None


def check_samples(n_samples: int, beams: int) -> None:
    """Raise ApiError if a request asks for more answers than a beam search has beams."""
    if beams > 1 and n_samples > beams:
        raise ApiError(f"n must be a whole number from 1 to {beams}, not {n_samples}", param="n")
