"""A draft model: its drafts, its cells follow the text, and other vocabularies are refused."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from llmcli.errors import UserError
from llmcli.runtime.draft_settings import DraftSettings
from llmcli.runtime.drafting.draft_model import DraftModel
from llmcli.runtime.drafting.vocabulary_match import require_same_vocabulary
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
DRAWN = default_sampling().with_values({"temp": 0.8, "seed": 4})
VERSE = b"the quick brown fox jumps over the lazy dog and runs away"


def reciting(reply: bytes, prompt: int) -> Callable[[list[int]], int]:
    return lambda tokens: reply[at] if 0 <= (at := len(tokens) - prompt) < len(reply) else EOS


def pair(drafted: bytes, prompt: int = 3, **more: int) -> tuple[Engine, DraftModel, FakeContext]:
    """An engine whose model says VERSE, guessed for by one that says `drafted`."""
    model = FakeModel()
    words = model
    small = FakeContext(n_ctx=512, reply=reciting(drafted, prompt), **more)
    drafter = DraftModel(small, words, 0.01, 0.0)  # reading is free
    big = FakeContext(n_ctx=512, reply=reciting(VERSE, prompt))
    return Engine(big, words, None, Speculation((drafter,), Steady(CHEAP), 16)), drafter, small


def finish(machine: Engine, request: Request) -> Answer:
    number = machine.submit(request)
    for _ in range(500):
        if not machine.is_busy:
            return machine.pop_answer(number)
        machine.step()
        machine.ledger.check()
    raise AssertionError("it never ended")


@pytest.mark.parametrize(
    "drafted", [VERSE, VERSE.replace(b"fox", b"cow"), b"something else altogether"]
)
@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_the_text_is_the_model_s_and_the_draft_s_cells_are_its_beginning(
    drafted: bytes, sampling: Sampling
):
    machine, drafter, small = pair(drafted)
    answer = finish(machine, Request(tuple(b"ask"), sampling, strategy="speculative"))
    assert answer.text == VERSE.decode()
    said = [*b"ask", *VERSE]
    drafter.read([1], min(len(drafter.tokens), 10))  # it is cut where it is told to
    assert [token for _, token in small.cells[0]] == drafter.tokens == [*said[:10], 1]
    assert (answer.n_accepted or 0) > (30 if drafted != b"something else altogether" else -1)


def test_what_the_draft_model_holds_of_the_conversation_is_not_read_again():
    machine, _, small = pair(VERSE)
    finish(machine, Request(tuple(b"ask"), GREEDY, strategy="speculative"))
    before = sum(small.batches)
    again = tuple(b"ask" + VERSE + b"?")
    finish(machine, Request(again, GREEDY, max_tokens=2, strategy="speculative"))
    assert sum(small.batches) - before <= 20


def test_a_long_prompt_is_read_in_chunks_and_a_cancelled_answer_stops_there():
    prompt = bytes(range(97, 123)) * 12
    machine, _, small = pair(VERSE, len(prompt))
    number = machine.submit(Request(tuple(prompt), GREEDY, strategy="speculative"))
    small.before = lambda count: machine.cancel(number)
    while machine.is_busy:
        machine.step()
    assert machine.pop_answer(number).finish == "cancelled"
    assert len(small.batches) <= 5


def test_drafts_that_fail_are_given_up_and_tried_again_later():
    _, drafter, _ = pair(b"")
    ahead = drafter.start(Request((1,), GREEDY), 0)
    for _ in range(10):
        ahead.record_result(3, 0)
    assert drafter.chance < 0.35
    chances = []
    for _ in range(1500):
        ahead.follow(Sequence(1, Request((1,), GREEDY), None, 0, 0.0, tokens=[1, 2]))  # type: ignore[arg-type]
        chances.append(drafter.chance)
    assert chances[0] < 0.35 < 0.8 < chances[-1]


@pytest.fixture(scope="module")
def stories_q8(stories: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("q8") / "stories.gguf"
    write.write_model(
        plan.plan_quantization(checkpoint_source.open_checkpoint(stories), "Q8_0"), out, threads=1
    )
    return out


def answered(runner: Runner, strategy: str, sampling: Sampling) -> Answer:
    prompt = runner.encode_text("Once upon a time")
    reply = runner.reply(Request(prompt, sampling, 60, ignore_eos=True, strategy=strategy))
    for _ in reply:
        runner.engine.ledger.check()
    return reply.answer


def test_a_real_model_that_drafts_for_itself_is_believed(
    stories_q8: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("llmcli.runtime.draft_settings._pays", lambda curve, most: True)
    options = RunOptions(ctx_size=256, threads=1)
    with open_runner(stories_q8, options, drafting=DraftSettings("off", stories_q8)) as runner:
        means = runner.engine.resources
        assert means.speculation
        (drafter,) = means.speculation.drafters
        drafter.one = 0.001
        runner.engine.resources = replace(
            means, speculation=Speculation((drafter,), Steady(CHEAP), 16)
        )
        plain, guessed = (
            answered(runner, strategy, GREEDY) for strategy in ("plain", "speculative")
        )
        assert guessed.text == plain.text
        assert guessed.n_accepted >= 0.9 * guessed.n_drafted > 30
        drawn = answered(
            runner, "speculative", default_sampling().with_values({"temp": 1.0, "seed": 2})
        )
        assert drawn.n_accepted >= 0.8 * drawn.n_drafted > 20


def test_another_vocabulary_is_refused_by_the_first_difference(stories_q8: Path, tmp_path: Path):
    mine = read_header.read_header(stories_q8)
    other = read_header.read_header(tiny_gguf.llama(tmp_path / "other.gguf"))
    with pytest.raises(
        UserError, match="vocabulary is different: it has 300 tokens, but the model has 512"
    ) as error:
        require_same_vocabulary(mine, other)
    assert "--model-draft" in error.value.hint
    with (
        pytest.raises(UserError, match="its vocabulary is different"),
        open_runner(
            stories_q8,
            RunOptions(ctx_size=256, threads=1),
            drafting=DraftSettings("off", other.path),
        ),
    ):
        pass
    require_same_vocabulary(mine, mine)
