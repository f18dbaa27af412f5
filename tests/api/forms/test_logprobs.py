"""`echo` with `logprobs`: probabilities of the prompt's tokens, as evaluation programs request
them.
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
from llmcli.runtime.binding.context_options import ContextOptions
from llmcli.runtime.binding.open_context import open_context
from llmcli.runtime.requests.beam_settings import NO_SEARCH
from llmcli.runtime.requests.request import Request, RunOptions
from llmcli.runtime.runner import Runner
from llmcli.runtime.sampling import default_sampling
from llmcli.runtime.scoring.chunk_scorer import ChunkScorer, chunk_context_options
from llmcli.ui import UI
from tests.api.forms.test_openai_chat import client
from tests.fixtures.fakes import EOS
from tests.fixtures.server import Served

# Within 0.02: which rows share a pass moves a log-probability by 0.004, a wrong token by 1 and
# more.
TEXT = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park with her dog. "


def scored(runner: Runner, ids: list[int]) -> list[float]:
    """Log-probabilities of the second half of a text, as eval scores it."""
    options = chunk_context_options(ContextOptions(n_ctx=len(ids)), runner.model.n_vocab, 1)
    with open_context(runner.model, options) as context:
        scorer = ChunkScorer(runner.model, context)
        rows = np.concatenate(
            [block[0].copy() for block in scorer.blocks(np.array([ids], np.int32))]
        )
    rows -= np.logaddexp.reduce(rows.astype(np.float64), axis=1, keepdims=True)
    return [float(row[token]) for row, token in zip(rows, ids[len(ids) // 2 + 1 :], strict=True)]


def ask(served: Served, prompt: Any, **more: Any) -> Any:
    with client(served) as asked:
        return asked.completions.create(
            model="tiny", prompt=prompt, echo=True, logprobs=2, **more
        ).choices


def test_a_prompts_tokens_have_the_log_probabilities_that_eval_finds(tiny: Served) -> None:
    runner = tiny.bridge.runner
    ids = list(runner.encode_prompt(TEXT * 4))[:96]
    wanted = scored(runner, ids)
    for more in (
        {"max_tokens": 0},
        {"max_tokens": 1},
        {"max_tokens": 0},
    ):  # the cache holds it from the second on
        (choice,) = ask(tiny, ids, **more)
        about, count = choice.logprobs, len(ids) + more["max_tokens"]
        assert [
            len(one)
            for one in (about.tokens, about.token_logprobs, about.top_logprobs, about.text_offset)
        ] == [count] * 4
        assert about.token_logprobs[0] is None and about.top_logprobs[0] is None
        found = about.token_logprobs[len(ids) // 2 + 1 : len(ids)]
        assert found == pytest.approx(wanted, abs=2e-2)
        for name, value, top in zip(
            about.tokens[1:], about.token_logprobs[1:], about.top_logprobs[1:], strict=True
        ):
            assert top[name] == value <= max(top.values())
            assert 2 <= len(top) <= 3


def test_each_of_several_prompts_at_once_is_told_whole(tiny: Served) -> None:
    ids = list(tiny.bridge.runner.encode_prompt(TEXT * 4))
    prompts = [ids[:60], ids[:60], ids[:61], ids[20:70], ids[:2], ids[:1]]
    choices = ask(tiny, prompts, max_tokens=1)
    alone = [ask(tiny, prompt, max_tokens=1)[0] for prompt in prompts]
    for prompt, one, other in zip(prompts, choices, alone, strict=True):
        assert len(one.logprobs.token_logprobs) == len(prompt) + 1
        assert one.logprobs.token_logprobs[1:] == pytest.approx(
            other.logprobs.token_logprobs[1:], abs=2e-2
        )


def test_a_text_is_told_with_the_places_of_its_tokens(tiny: Served) -> None:
    (choice,) = ask(tiny, TEXT, max_tokens=3)
    about = choice.logprobs
    assert choice.text.startswith(TEXT)
    for name, at in zip(about.tokens[2:], about.text_offset[2:], strict=True):
        assert choice.text[at : at + len(name)] == name


def test_samples_share_what_their_prompt_was_told(tiny: Served) -> None:
    choices = ask(tiny, TEXT, max_tokens=2, n=3, temperature=1, seed=1)
    (alone,) = ask(tiny, TEXT, max_tokens=0)
    count = len(alone.logprobs.tokens)
    for choice in choices:
        assert choice.logprobs.token_logprobs[1:count] == pytest.approx(
            alone.logprobs.token_logprobs[1:], abs=2e-2
        )


def test_an_end_is_a_token_among_them(serve: Callable[..., Served]) -> None:
    """Whoever leaves out the last of them, as lm-eval does, must not lose one of the prompt's."""
    (choice,) = ask(serve(lambda tokens: EOS), "ask", max_tokens=1)
    assert choice.text == "ask" and choice.finish_reason == "stop"
    assert choice.logprobs.tokens == ["<s>", "a", "s", "k", "</s>"]
    assert choice.logprobs.text_offset == [0, 0, 1, 2, 3]


def test_a_stream_tells_them_first(tiny: Served) -> None:
    ids = list(tiny.bridge.runner.encode_prompt(TEXT * 4))
    prompts = [ids[:60], ids[:1], ids[:61]]
    for more in ({"max_tokens": 3, "n": 2, "seed": 1}, {"max_tokens": 0}):
        whole = ask(tiny, prompts, **more)
        with client(tiny) as asked:
            stream = asked.completions.create(
                model="tiny", prompt=prompts, echo=True, logprobs=2, stream=True, **more
            )
            chunks = [chunk.choices[0] for chunk in stream]
        for number, wanted in enumerate(whole):
            mine = [one for one in chunks if one.index == number]
            first, told = mine[0].logprobs, [one.logprobs for one in mine if one.logprobs]
            assert len(first.tokens) == len(prompts[number * len(prompts) // len(whole)])
            assert (
                "".join(one.text for one in mine) == wanted.text
                and mine[-1].finish_reason == wanted.finish_reason
            )
            for name in ("tokens", "text_offset"):
                found = [value for about in told for value in getattr(about, name)]
                assert found == getattr(wanted.logprobs, name)
            values = [value for about in told for value in about.token_logprobs]
            assert values[0] is None
            assert values[1:] == pytest.approx(wanted.logprobs.token_logprobs[1:], abs=2e-2)
            tops = [
                top for about in told for top in about.top_logprobs or [None] * len(about.tokens)
            ]
            assert tops[0] is None and all(2 <= len(top) <= 3 for top in tops[1:])


def test_a_server_scores_a_prompt_by_tiles_of_rows(
    stories_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = RunFlags(RunOptions(ctx_size=512, threads=1), {}, NO_SEARCH)
    models = ModelSwitcher(given, config.load_config(), UI(color=False), is_chat=True, parallel=2)
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
        words: resolve_options.scoring_outputs(
            SimpleNamespace(tensors=[SimpleNamespace(name="token_embd.weight", shape=(64, words))])
        )
        for words in (32_000, 128_256, 262_144)
    }
    assert rows == {32_000: 128, 128_256: 64, 262_144: 0}
