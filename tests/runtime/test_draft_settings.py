"""Speculative decoding with a real quantized model gives the same bits as plain decoding."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from llmcli.chat.display.answer_report import _describe_drafts
from llmcli.runtime import reproducible
from llmcli.runtime.binding.contexts.context_options import ContextOptions
from llmcli.runtime.binding.contexts.open_context import open_context
from llmcli.runtime.binding.model import open_model
from llmcli.runtime.binding.rows.batch import BatchRows
from llmcli.runtime.draft_settings import DraftSettings
from llmcli.runtime.drafting.ngram import PromptLookup
from llmcli.runtime.requests.context_overflow import AttentionSinks
from llmcli.runtime.requests.request import Answer, Request, RunOptions
from llmcli.runtime.runner import Runner, open_runner
from llmcli.runtime.sampling import Sampling, default_sampling
from llmcli.runtime.strategies.base import Speculation
from quant.convert import checkpoint_source
from quant.quantize import plan, write
from tests.fixtures.drafts import CHEAP, Knowing, Steady
from tests.quant import tiny_checkpoint

GREEDY = default_sampling().with_values({"temp": 0})
WARM = default_sampling().with_values({"temp": 1.2, "seed": 11})
PENALIZED = default_sampling().with_values(
    {"temp": 0.9, "seed": 5, "repeat_penalty": 1.2, "dry_multiplier": 0.5}
)
PROMPT = "Lily has a dog. Lily has a cat. Lily has a dog. Lily has a cat."


@pytest.fixture(scope="module", params=["Q8_0", "Q4_0", "Q4_K_M"])
def runner(
    request: pytest.FixtureRequest, stories: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Runner]:
    """A runner of a small random Llama with heads of 64, whose KV cache can be quantized."""
    temporary = tmp_path_factory.mktemp("grown")
    folder, file = (
        tiny_checkpoint.random_llama(stories, temporary / "folder", layers=2),
        temporary / "model.gguf",
    )
    write.write_model(
        plan.plan_quantization(checkpoint_source.open_checkpoint(folder), request.param),
        file,
        threads=1,
    )
    options = reproducible.with_required_options(RunOptions(ctx_size=1024, threads=2))
    with open_runner(file, options, raw=True, drafting=DraftSettings()) as opened:
        yield opened


def answer(
    runner: Runner, sampling: Sampling, strategy: str, prompt: tuple[int, ...], tokens: int = 48
) -> Answer:
    request = Request(prompt, sampling, tokens, ignore_eos=True, logprobs=True, strategy=strategy)
    reply = runner.reply(request)
    for _ in reply:
        runner.engine.ledger.check()
    return reply.answer


def use_drafter(runner: Runner, drafter: PromptLookup | Knowing) -> None:
    resources = runner.engine.resources
    runner.engine.resources = replace(
        resources, speculation=Speculation((drafter,), Steady(CHEAP), 16)
    )


@pytest.mark.parametrize("sampling", [GREEDY, WARM, PENALIZED], ids=["greedy", "warm", "penalized"])
@pytest.mark.parametrize("length", [20, 300])
def test_speculative_answers_equal_plain_ones_to_the_last_bit(
    runner: Runner, sampling: Sampling, length: int
):
    prompt = (runner.encode_text(PROMPT) * 20)[:length]
    plain = answer(runner, sampling, "plain", prompt)
    ids = [token.id for token in plain.tokens]
    for drafter in (PromptLookup(), Knowing(ids, 0.85, chance=0.99, n_vocab=runner.model.n_vocab)):
        use_drafter(runner, drafter)
        speculative = answer(runner, sampling, "speculative", prompt)
        assert [(t.id, t.text, t.logprob) for t in speculative.tokens] == [
            (t.id, t.text, t.logprob) for t in plain.tokens
        ]
    assert speculative.n_accepted > 20


def test_speculation_is_the_default_only_with_a_quantized_cache(runner: Runner):
    options = replace(runner.options, cache_type_k="f16", reproducible=False)
    with open_runner(runner.header.path, options, raw=True, drafting=DraftSettings()) as floats:
        assert floats.default_strategy() == "plain"
        assert floats.context.n_outputs == 1
    assert runner.context.n_outputs == 16


def test_the_output_buffer_has_the_requested_number_of_rows(stories_gguf: Path):
    with (
        open_model(stories_gguf) as model,
        open_context(model, ContextOptions(256, n_outputs=8)) as context,
    ):
        assert context.output_bytes == 4 * model.n_vocab
        rows = list(context.decode(BatchRows([5] * 8, range(8), [0] * 8, [True] * 8)))
        assert len({row.address for row in rows}) == 8
        assert context.output_bytes == 8 * 4 * model.n_vocab
        with pytest.raises(AssertionError, match="outputs"):
            context.decode(BatchRows([5] * 9, range(8, 17), [0] * 9, [True] * 9))


def test_ngram_drafts_are_switched_without_loading_the_model_again(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("llmcli.runtime.open_speculation._pays", lambda curve, most: True)
    strategies = {
        "f16": {"auto": "plain", "on": "speculative"},
        "q8_0": {"auto": "speculative", "on": "speculative"},
    }
    for cache_type, expected in strategies.items():
        options = replace(runner.options, cache_type_k=cache_type, cache_type_v=cache_type)
        with open_runner(
            runner.header.path, options, raw=True, drafting=DraftSettings("on")
        ) as opened:
            for value, strategy in {"off": "plain", **expected}.items():
                assert opened.set_ngram_draft(value)
                assert (opened.ngram_draft, opened.default_strategy()) == (value, strategy)
                speculation = opened.engine.resources.speculation
                if value == "auto" and speculation:  # only drafts that change no bit
                    assert speculation.is_reproducible and speculation.max_branches == 1
    with open_runner(
        runner.header.path, options, raw=True, drafting=DraftSettings("off")
    ) as without:
        assert not without.set_ngram_draft("on")
        assert without.ngram_draft == "off"


@pytest.mark.parametrize("cache_type", ["f16", "q8_0"])
def test_the_pool_is_switched_like_prompt_lookup(
    cache_type: str, runner: Runner, monkeypatch: pytest.MonkeyPatch
):
    """A named method drafts with every cache. The timing line does not call it of no use when it is
    switched off.
    """
    monkeypatch.setattr("llmcli.runtime.open_speculation._pays", lambda curve, most: True)
    options = replace(runner.options, cache_type_k=cache_type, cache_type_v=cache_type)
    options = replace(options, reproducible=False)
    drafting = DraftSettings(method="pool")
    with open_runner(runner.header.path, options, raw=True, drafting=drafting) as opened:
        prompt, max_rows = opened.encode_text(PROMPT), opened.engine.resources.speculation.max_rows
        for value, strategy in {"off": "plain", "on": "speculative", "auto": "speculative"}.items():
            assert opened.set_ngram_draft(value)
            assert opened.default_strategy() == strategy
            found = answer(opened, GREEDY, opened.default_strategy(), prompt, 2)
            assert bool(_describe_drafts(opened, found)) == (strategy == "speculative")
        assert opened.engine.resources.speculation.max_rows == max_rows == 16


def test_speculative_and_plain_answers_are_equal_beyond_the_context(runner: Runner):
    """Both strategies drop and move the same cells when the context is full."""
    options, texts = replace(runner.options, ctx_size=256), []
    with open_runner(runner.header.path, options, raw=True, drafting=DraftSettings("on")) as opened:
        prompt = (opened.encode_text(PROMPT) * 20)[:150]
        for strategy in ("plain", "speculative"):
            resources = opened.engine.resources
            opened.engine.resources = replace(
                resources, speculation=Speculation((PromptLookup(),), Steady(CHEAP), 16)
            )
            request = Request(
                prompt, GREEDY, 300, ignore_eos=True, strategy=strategy, overflow=AttentionSinks(4)
            )
            reply = opened.reply(request)
            for _ in reply:
                opened.engine.ledger.check()
            texts.append((reply.answer.text, reply.answer.finish, len(reply.answer.tokens)))
    assert texts[0] == texts[1]
