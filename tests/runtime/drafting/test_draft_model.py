"""Drafting with a draft model: its drafts, its cached tokens, and the refusal of another
vocabulary.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from llmcli.errors import UserError
from llmcli.runtime.binding.contexts.context import Aborted, NoSlot
from llmcli.runtime.draft_settings import DraftSettings
from llmcli.runtime.drafting.base import Draft
from llmcli.runtime.drafting.draft_files.vocabulary_match import require_same_vocabulary
from llmcli.runtime.drafting.draft_model import DraftModel
from llmcli.runtime.engine.engine import Engine
from llmcli.runtime.requests.request import Answer, Request, RunOptions
from llmcli.runtime.requests.sequence import Sequence
from llmcli.runtime.runner import Runner, open_runner
from llmcli.runtime.sampling import Sampling, default_sampling
from llmcli.runtime.strategies.base import Speculation
from quant.convert import checkpoint_source
from quant.model_file import read_header
from quant.quantize import plan, write
from tests.fixtures.drafts import CHEAP, Steady
from tests.fixtures.fakes import EOS, FakeContext, FakeModel
from tests.quant import tiny_gguf

GREEDY = default_sampling().with_values({"temp": 0})
SAMPLED = default_sampling().with_values({"temp": 0.8, "seed": 4})
VERSE = b"the quick brown fox jumps over the lazy dog and runs away"


def make_reply(text: bytes, prompt: int) -> Callable[[list[int]], int]:
    """Return a reply function of a FakeContext that generates `text` after a prompt of `prompt`
    tokens.
    """
    return lambda tokens: text[at] if 0 <= (at := len(tokens) - prompt) < len(text) else EOS


def make_pair(
    drafted: bytes, prompt: int = 3, **context_options: int
) -> tuple[Engine, DraftModel, FakeContext]:
    """Return an engine whose model generates VERSE, its drafter, whose model generates `drafted`,
    and the drafter's context.
    """
    model = FakeModel()
    draft_context = FakeContext(n_ctx=512, reply=make_reply(drafted, prompt), **context_options)
    drafter = DraftModel(draft_context, model, 0.01, 0.0)  # reading takes no time
    context = FakeContext(n_ctx=512, reply=make_reply(VERSE, prompt))
    speculation = Speculation((drafter,), Steady(CHEAP), 16)
    return Engine(context, model, None, speculation), drafter, draft_context


def finish(engine: Engine, request: Request) -> Answer:
    number = engine.submit(request)
    for _ in range(500):
        if not engine.is_busy:
            return engine.pop_answer(number)
        engine.step()
        engine.ledger.check()
    raise AssertionError("the answer does not end")


@pytest.mark.parametrize(
    "drafted", [VERSE, VERSE.replace(b"fox", b"cow"), b"something else altogether"]
)
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "drawn"])
def test_the_text_is_that_of_the_model_and_the_draft_context_caches_its_start(
    drafted: bytes, sampling: Sampling
):
    engine, drafter, draft_context = make_pair(drafted)
    answer = finish(engine, Request(tuple(b"ask"), sampling, strategy="speculative"))
    assert answer.text == VERSE.decode()
    tokens = [*b"ask", *VERSE]
    drafter.read([1], min(len(drafter.tokens), 10))
    assert [token for _, token in draft_context.cells[0]] == drafter.tokens == [*tokens[:10], 1]
    n_most, n_least = (60, 31) if drafted != b"something else altogether" else (5, 0)
    assert n_least <= (answer.n_accepted or 0) <= n_most


@pytest.mark.parametrize("error", [Aborted("no"), NoSlot("no"), UserError("llama.cpp failed")])
def test_an_error_of_the_draft_model_does_not_end_the_answer(error: Exception):
    engine, drafter, draft_context = make_pair(VERSE)
    n_passes = 0

    def fail(count: int) -> None:
        nonlocal n_passes
        n_passes += 1
        if n_passes == 3:
            raise error

    draft_context.before = fail
    answer = finish(engine, Request(tuple(b"ask"), GREEDY, strategy="speculative"))
    assert answer.text == VERSE.decode()
    assert n_passes >= 3
    is_over = isinstance(error, UserError)
    assert drafter.failure is (error if is_over else None)
    assert (n_passes > 3) != is_over
    assert max(draft_context.batches) <= 4  # the text is not read again


def test_tokens_cached_in_the_draft_context_are_not_computed_again():
    engine, _, draft_context = make_pair(VERSE)
    finish(engine, Request(tuple(b"ask"), GREEDY, strategy="speculative"))
    before = sum(draft_context.batches)
    again = tuple(b"ask" + VERSE + b"?")
    finish(engine, Request(again, GREEDY, max_tokens=2, strategy="speculative"))
    assert sum(draft_context.batches) - before <= 20


def test_a_long_prompt_is_computed_in_chunks_and_cancelling_stops_between_them():
    prompt = bytes(range(97, 123)) * 12
    engine, _, draft_context = make_pair(VERSE, len(prompt))
    number = engine.submit(Request(tuple(prompt), GREEDY, strategy="speculative"))
    draft_context.before = lambda count: engine.cancel(number)
    while engine.is_busy:
        engine.step()
    assert engine.pop_answer(number).finish == "cancelled"
    assert len(draft_context.batches) <= 5


def test_after_wrong_drafts_the_chance_falls_and_rises_again_later():
    _, drafter, _ = make_pair(b"")
    drafts = drafter.start(Request((1,), GREEDY), 0)
    for _ in range(10):
        drafts.record_result(Draft.chain([1, 2, 3]), [0])
    assert drafter.acceptance.chances(1)[0][0] < 0.35
    chances: list[float] = []
    for _ in range(1500):
        drafts.follow(Sequence(1, Request((1,), GREEDY), None, 0, 0.0, tokens=[1, 2]))  # type: ignore[arg-type]
        chances += drafter.acceptance.chances(1)[0]
    assert chances[0] < 0.35 < 0.8 < chances[-1]


@pytest.fixture(scope="module")
def stories_q8(stories: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("q8") / "stories.gguf"
    write.write_model(
        plan.plan_quantization(checkpoint_source.open_checkpoint(stories), "Q8_0"), out, threads=1
    )
    return out


def answer_with(runner: Runner, strategy: str, sampling: Sampling) -> Answer:
    prompt = runner.encode_text("Once upon a time")
    reply = runner.reply(Request(prompt, sampling, 60, ignore_eos=True, strategy=strategy))
    for _ in reply:
        runner.engine.ledger.check()
    return reply.answer


def test_almost_all_drafts_of_the_same_model_are_accepted(
    stories_q8: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("llmcli.runtime.open_speculation._pays", lambda curve, most: True)
    options = RunOptions(ctx_size=256, threads=1)
    with open_runner(stories_q8, options, drafting=DraftSettings("off", stories_q8)) as runner:
        resources = runner.engine.resources
        assert resources.speculation
        (drafter,) = resources.speculation.drafters
        drafter.guess_seconds = 0.001
        runner.engine.resources = replace(
            resources, speculation=Speculation((drafter,), Steady(CHEAP), 16)
        )
        plain, drafted = (
            answer_with(runner, strategy, GREEDY) for strategy in ("plain", "speculative")
        )
        assert drafted.text == plain.text
        assert drafted.n_accepted >= 0.9 * drafted.n_drafted > 30
        sampled = answer_with(
            runner, "speculative", default_sampling().with_values({"temp": 1.0, "seed": 2})
        )
        assert sampled.n_accepted >= 0.8 * sampled.n_drafted > 20


def test_another_vocabulary_is_refused_with_the_first_difference(stories_q8: Path, tmp_path: Path):
    model = read_header.read_header(stories_q8)
    other = read_header.read_header(tiny_gguf.llama(tmp_path / "other.gguf"))
    with pytest.raises(
        UserError, match="vocabulary is different: it has 300 tokens, but the model has 512"
    ) as error:
        require_same_vocabulary(model, other)
    assert error.value.hint == "--model-draft takes a smaller model of the same family"
    with pytest.raises(UserError) as error:
        require_same_vocabulary(model, other, "little:1m")
    assert error.value.hint == "--model-draft little:1m"
    with (
        pytest.raises(UserError, match="its vocabulary is different"),
        open_runner(
            stories_q8,
            RunOptions(ctx_size=256, threads=1),
            drafting=DraftSettings("off", other.path),
        ),
    ):
        pass
    require_same_vocabulary(model, model)
