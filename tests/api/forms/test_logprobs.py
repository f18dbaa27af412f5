"""`echo` with `logprobs`: the log-probabilities of a prompt's tokens, which evaluation programs
request.
"""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from llmcli import config
from llmcli.model_loader.open_model import ModelSwitcher
from llmcli.model_loader.run_flags import RunFlags
from llmcli.planning import resolve_options
from llmcli.runtime.binding.contexts.context_options import ContextOptions
from llmcli.runtime.binding.contexts.open_context import open_context
from llmcli.runtime.requests.beam_settings import NO_SEARCH
from llmcli.runtime.requests.request import Request, RunOptions
from llmcli.runtime.runner import Runner
from llmcli.runtime.sampling import default_sampling
from llmcli.runtime.scoring.chunk_scorer import ChunkScorer, chunk_context_options
from llmcli.ui import UI
from tests.api.forms.test_openai_chat import client
from tests.fixtures.fakes import EOS
from tests.fixtures.server import Served

# The tolerance of 0.02 is above the differences between batches, and far below the difference that
# a wrong token makes.
TEXT = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park with her dog. "


def score_second_half(runner: Runner, ids: list[int]) -> list[float]:
    """Return the log-probabilities of the second half of a text, computed like `llmcli eval`."""
    options = chunk_context_options(ContextOptions(n_ctx=len(ids)), runner.model.n_vocab, 1)
    with open_context(runner.model, options) as context:
        scorer = ChunkScorer(runner.model, context)
        rows = np.concatenate(
            [block[0].copy() for block in scorer.blocks(np.array([ids], np.int32))]
        )
    rows -= np.logaddexp.reduce(rows.astype(np.float64), axis=1, keepdims=True)
    return [float(row[token]) for row, token in zip(rows, ids[len(ids) // 2 + 1 :], strict=True)]


def create_completion(served: Served, prompt: Any, **more: Any) -> Any:
    with client(served) as api:
        return api.completions.create(
            model="tiny", prompt=prompt, echo=True, logprobs=2, **more
        ).choices


def test_prompt_logprobs_equal_those_of_eval(tiny: Served) -> None:
    runner = tiny.bridge.runner
    ids = list(runner.encode_prompt(TEXT * 4))[:96]
    expected = score_second_half(runner, ids)
    for more in (
        {"max_tokens": 0},
        {"max_tokens": 1},
        {"max_tokens": 0},
    ):  # the prompt is in the cache from the second request on
        (choice,) = create_completion(tiny, ids, **more)
        lists, count = choice.logprobs, len(ids) + more["max_tokens"]
        assert [
            len(entry)
            for entry in (lists.tokens, lists.token_logprobs, lists.top_logprobs, lists.text_offset)
        ] == [count] * 4
        assert lists.token_logprobs[0] is None and lists.top_logprobs[0] is None
        found = lists.token_logprobs[len(ids) // 2 + 1 : len(ids)]
        assert found == pytest.approx(expected, abs=2e-2)
        for name, value, top in zip(
            lists.tokens[1:], lists.token_logprobs[1:], lists.top_logprobs[1:], strict=True
        ):
            assert top[name] == value <= max(top.values())
            assert 2 <= len(top) <= 3


def test_several_prompts_of_a_request_have_complete_logprobs(tiny: Served) -> None:
    ids = list(tiny.bridge.runner.encode_prompt(TEXT * 4))
    prompts = [ids[:60], ids[:60], ids[:61], ids[20:70], ids[:2], ids[:1]]
    choices = create_completion(tiny, prompts, max_tokens=1)
    separate = [create_completion(tiny, prompt, max_tokens=1)[0] for prompt in prompts]
    for prompt, choice, single in zip(prompts, choices, separate, strict=True):
        assert len(choice.logprobs.token_logprobs) == len(prompt) + 1
        assert choice.logprobs.token_logprobs[1:] == pytest.approx(
            single.logprobs.token_logprobs[1:], abs=2e-2
        )


def test_text_offsets_are_positions_in_the_text(tiny: Served) -> None:
    (choice,) = create_completion(tiny, TEXT, max_tokens=3)
    lists = choice.logprobs
    assert choice.text.startswith(TEXT)
    for name, offset in zip(lists.tokens[2:], lists.text_offset[2:], strict=True):
        assert choice.text[offset : offset + len(name)] == name


def test_samples_share_the_logprobs_of_their_prompt(tiny: Served) -> None:
    choices = create_completion(tiny, TEXT, max_tokens=2, n=3, temperature=1, seed=1)
    (separate,) = create_completion(tiny, TEXT, max_tokens=0)
    count = len(separate.logprobs.tokens)
    for choice in choices:
        assert choice.logprobs.token_logprobs[1:count] == pytest.approx(
            separate.logprobs.token_logprobs[1:], abs=2e-2
        )


def test_the_end_token_is_listed(serve: Callable[..., Served]) -> None:
    """lm-eval leaves out the last entry, which must not belong to the prompt."""
    (choice,) = create_completion(serve(lambda tokens: EOS), "ask", max_tokens=1)
    assert choice.text == "ask" and choice.finish_reason == "stop"
    assert choice.logprobs.tokens == ["<s>", "a", "s", "k", "</s>"]
    assert choice.logprobs.text_offset == [0, 0, 1, 2, 3]


def test_a_stream_sends_prompt_logprobs_first(tiny: Served) -> None:
    ids = list(tiny.bridge.runner.encode_prompt(TEXT * 4))
    prompts = [ids[:60], ids[:1], ids[:61]]
    for more in ({"max_tokens": 3, "n": 2, "seed": 1}, {"max_tokens": 0}):
        complete = create_completion(tiny, prompts, **more)
        with client(tiny) as api:
            stream = api.completions.create(
                model="tiny", prompt=prompts, echo=True, logprobs=2, stream=True, **more
            )
            chunks = [chunk.choices[0] for chunk in stream]
        for number, expected in enumerate(complete):
            matching = [entry for entry in chunks if entry.index == number]
            first, streamed = (
                matching[0].logprobs,
                [entry.logprobs for entry in matching if entry.logprobs],
            )
            assert len(first.tokens) == len(prompts[number * len(prompts) // len(complete)])
            assert (
                "".join(entry.text for entry in matching) == expected.text
                and matching[-1].finish_reason == expected.finish_reason
            )
            for name in ("tokens", "text_offset"):
                found = [value for lists in streamed for value in getattr(lists, name)]
                assert found == getattr(expected.logprobs, name)
            values = [value for lists in streamed for value in lists.token_logprobs]
            assert values[0] is None
            assert values[1:] == pytest.approx(expected.logprobs.token_logprobs[1:], abs=2e-2)
            tops = [
                top
                for lists in streamed
                for top in lists.top_logprobs or [None] * len(lists.tokens)
            ]
            assert tops[0] is None and all(2 <= len(top) <= 3 for top in tops[1:])


def test_a_prompt_is_scored_in_several_batches(
    stories_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_flags = RunFlags(RunOptions(ctx_size=512, threads=1), {}, NO_SEARCH)
    models = ModelSwitcher(
        run_flags, config.load_config(), UI(color=False), is_chat=True, parallel=2
    )
    with closing(models):
        runner = models.open(str(stories_gguf)).runner
        passes: list[int] = []
        for context in (runner.context, runner.engine.prefill_reader.context):
            decode = context.decode
            monkeypatch.setattr(
                context,
                "decode",
                lambda rows, decode=decode: passes.append(len(rows)) or decode(rows),
            )
        ids = runner.encode_prompt(TEXT * 10)[:300]
        reply = runner.reply(
            Request(ids, default_sampling(), max_tokens=0, score_prompt=True, logprobs=True)
        )
        assert list(reply)[-1].finish == "length"
        assert len(reply.answer.prompt_scores) == 299
        assert sum(passes) == 300 and len(passes) == 3
    rows = {
        n_vocab: resolve_options.scoring_outputs(
            SimpleNamespace(
                tensors=[SimpleNamespace(name="token_embd.weight", shape=(64, n_vocab))]
            )
        )
        for n_vocab in (32_000, 128_256, 262_144)
    }
    assert rows == {32_000: 128, 128_256: 64, 262_144: 0}
