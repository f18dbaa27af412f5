"""Shortens a conversation that does not fit into the context, for the APIs of which a request can
ask for that: OpenAI's `truncation: auto` and ollama's `truncate`.

Whole turns are left out, the oldest first, so many that a quarter of the context remains for the
answer. System texts and the last turn always remain.
"""

from collections.abc import Sequence
from dataclasses import replace

from llmcli.api import request_settings
from llmcli.api.conversation.prompt import PromptRequest, RenderedPrompt, render_prompt
from llmcli.api.errors import ApiError
from llmcli.api.server_settings import ServerSettings
from llmcli.runtime.runner import Runner
from llmcli.types import Message

CONTEXT_CODE = "context_length_exceeded"
ANSWER_SHARE = 4  # one part of this many of the context remains for the answer


def render_within_context(
    request: PromptRequest,
    runner: Runner,
    settings: ServerSettings,
    notes: list[str],
) -> RenderedPrompt:
    """Return the prompt of a conversation, without the oldest turns that do not fit. A note about
    them is appended to `notes`. Raises ApiError if the last turn does not fit, and the errors of
    render_prompt().
    """
    starts = turn_starts(request.messages)
    n_others = len(starts) - 1  # turns that may be left out
    answer_tokens = request_settings.context_tokens(runner, settings) // ANSWER_SHARE

    def attempt(n_dropped: int) -> RenderedPrompt | None:
        """Return the prompt without the first `n_dropped` turns; None if it is too long."""
        messages = without_turns(request.messages, starts, n_dropped)
        try:
            prompt = render_prompt(replace(request, messages=messages), runner, settings)
            n_tokens = len(prompt.tokens) + (answer_tokens if 0 < n_dropped < n_others else 0)
            request_settings.check_prompt_length(n_tokens, runner, settings)
        except ApiError as error:
            if error.code != CONTEXT_CODE or n_dropped >= n_others:
                raise
            return None
        return prompt

    if prompt := attempt(0):
        return prompt
    low, high = 1, max(1, n_others)  # the smallest number of turns to leave out
    best = attempt(high)
    while low < high:
        middle = (low + high) // 2
        prompt = attempt(middle)
        if prompt is None:
            low = middle + 1
        else:
            best, high = prompt, middle
    assert best is not None  # attempt() raises if even the last turn is too long
    n_messages = sum(message.role != "system" for message in request.messages[: starts[high]])
    notes.append(f"the first {n_messages} messages were left out: the context is too small")
    return best


def turn_starts(messages: Sequence[Message]) -> list[int]:
    """Return the index of the first message of each turn. A turn begins with a message of the
    user, or with the conversation.
    """
    starts = [index for index, message in enumerate(messages) if message.role == "user"]
    first = next(
        (index for index, message in enumerate(messages) if message.role != "system"), None
    )
    if first is not None and (not starts or first < starts[0]):
        starts.insert(0, first)
    return starts


def without_turns(
    messages: Sequence[Message], starts: Sequence[int], n_dropped: int
) -> list[Message]:
    """Return the messages without the first `n_dropped` turns, whose first messages have the
    indexes `starts`.
    """
    if not n_dropped:
        return list(messages)
    end = starts[n_dropped]
    return [message for message in messages[:end] if message.role == "system"] + list(
        messages[end:]
    )
