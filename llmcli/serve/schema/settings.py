"""The fields that every way to ask has: sampling settings (read off the steps), limits, stops, alternatives."""

from llmcli.errors import UserError
from llmcli.runtime.ranked import MOST as MOST_LOGPROBS
from llmcli.runtime.runner import Runner
from llmcli.runtime.sampling import Sampling
from llmcli.runtime.sampling import settings as known
from llmcli.serve.problems import Problem
from llmcli.serve.schema.fields import Fields
from llmcli.serve.settings import Settings

MOST_STOPS = 16
MOST_SAMPLES = 128
# vLLM's and other names for a setting of ours.
OTHERS = {"repetition_penalty": "repeat_penalty"}


def sampling(fields: Fields, given: Sampling) -> Sampling:
    """The settings of a request over the server's own."""
    names = {name: setting.name for setting in known().values() for name in (setting.name, *setting.aliases)}
    chosen: dict[str, object] = {}
    for name, own in {**OTHERS, **names}.items():
        if not fields.has(name):
            continue
        try:
            chosen[own] = known()[own].parse(fields.values[name])
        except UserError as error:
            raise Problem(str(error).replace(own, name, 1), param=fields.at(name)) from None
    return given.with_values(chosen)


def limit(fields: Fields, names: tuple[str, ...], settings: Settings) -> int | None:
    """The most tokens of the answer that the request and the server allow; None: neither says."""
    asked = next((found for name in names if (found := fields.whole(name, 0, 2**31 - 1)) is not None), None)
    if asked is None:
        asked = settings.max_tokens
    if settings.most_tokens is not None:
        return settings.most_tokens if asked is None else min(asked, settings.most_tokens)
    return asked


def room(runner: Runner, settings: Settings, prompt: int, wanted: int | None, samples: int = 1) -> int:
    """The most tokens of each answer to a prompt of so many; raises Problem where there is no room for one."""
    size = min(runner.n_ctx, settings.most_context or runner.n_ctx)
    if prompt >= size:
        raise Problem(
            f"the prompt has {prompt} tokens, the context holds {size} and must leave room for an answer",
            code="context_length_exceeded", type="exceed_context_size_error", n_prompt_tokens=prompt, n_ctx=size,
        )  # fmt: skip
    return max(1, (size - prompt) // samples) if wanted is None else min(wanted, size - prompt)


def samples(fields: Fields, most: int) -> int:
    """How many answers."""
    return fields.whole("n", 1, min(most, MOST_SAMPLES), 1) or 1


def alternatives(fields: Fields, name: str) -> int:
    """How many of the likeliest tokens of each step are wanted."""
    return fields.whole(name, 0, MOST_LOGPROBS, 0) or 0
