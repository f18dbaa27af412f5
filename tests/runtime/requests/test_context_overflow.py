"""A full context on real caches: the kept cells equal those computed alone or shifted."""

from pathlib import Path

import pytest

from llmcli import config
from llmcli.chat.chat_session import ChatSession
from llmcli.chat.conversation.conversation import Conversation
from llmcli.chat.display.stream_writer import StreamWriter
from llmcli.chat.settings import find_setting
from llmcli.errors import UserError
from llmcli.runtime.drafting.ngram import PromptLookup
from llmcli.runtime.engine.engine import Engine
from llmcli.runtime.requests.context_overflow import AttentionSinks, DropTurns
from llmcli.runtime.requests.request import Answer, Request, RunOptions
from llmcli.runtime.runner import Runner, open_runner
from llmcli.runtime.sampling import default_sampling
from llmcli.runtime.strategies.base import Speculation
from llmcli.ui import UI
from quant.quantize import plan, write
from tests.fixtures.drafts import CHEAP, Steady
from tests.fixtures.fakes import TEMPLATE, FakeContext, FakeModel
from tests.quant import tiny_gguf

# With these a row of logits does not depend on the batch it was computed in (notes/runtime.md,
# 6.3).
EXACT = RunOptions(
    ctx_size=256,
    threads=1,
    batch_size=256,
    flash_attn="on",
    cache_type_k="q8_0",
    cache_type_v="q8_0",
    gemm="ggml",
)
PLAIN = RunOptions(ctx_size=256, threads=1, batch_size=256)
GREEDY = default_sampling().with_values({"temp": 0})
QUESTIONS = (
    "who are you?",
    "where do you come from?",
    "what is it like there?",
    "why did you leave?",
)


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exact")
    floats = tiny_gguf.llama(folder / "f32.gguf", hidden=256, layers=2)
    out = folder / "q8_0.gguf"
    write.write_model(plan.plan_quantization(write.open_gguf(floats), "Q8_0"), out, threads=1)
    return out


def talk(runner: Runner, mode: str, predict: int) -> ChatSession:
    made = ChatSession(
        "tiny",
        runner,
        Conversation(GREEDY, "be kind", predict),
        config.load_config(),
        UI(color=False),
        ignore_eos=True,
    )
    find_setting("on_full").set_value(made, mode)
    return made


def ask(one: ChatSession, text: str) -> Answer:
    answer = one.ask(text, StreamWriter(silent=True))
    one.runner.engine.ledger.check()
    return answer


def ids(answer: Answer) -> list[int]:
    return [token.id for token in answer.tokens]


def test_where_turns_are_computed_anew_the_text_is_that_of_a_chat_without_them(exact: Path) -> None:
    with open_runner(exact, EXACT, template=TEMPLATE) as runner:
        runner.context.can_shift = False
        one = talk(runner, "shift", 12)
        said = [ask(one, question) for question in QUESTIONS]
        left = one.conversation.tree.dropped
        assert left and left < {1, 2, 3, 4}
        runner.engine.ledger.evict_idle()
        other = talk(runner, "stop", 12)
        for number in one.conversation.tree.sent_turns()[:-1]:
            other.conversation.add_turn(
                one.conversation.tree[number].question,
                one.conversation.tree[number].answer,
                "length",
            )
        assert ids(ask(other, QUESTIONS[3])) == ids(said[3])


def test_an_answer_goes_on_as_from_the_shorter_prompt(exact: Path) -> None:
    with open_runner(exact, EXACT, template=TEMPLATE) as runner:
        runner.context.can_shift = False
        one = talk(runner, "shift", 8)
        ask(one, QUESTIONS[0])
        one.conversation.predict = 170
        whole = one.prompt_tokens(QUESTIONS[1])
        answer = ask(one, QUESTIONS[1])
        assert (answer.finish, answer.overflow_stats.times, answer.overflow_stats.turns) == (
            "length",
            1,
            1,
        )
        before = runner.n_ctx + 1 - len(whole)
        one.conversation.undo_turn()
        shorter = one.prompt_tokens(QUESTIONS[1])
        runner.engine.ledger.evict_idle()
        tokens = (*shorter, *ids(answer)[:before])
        reply = runner.reply(Request(tokens, GREEDY, 170 - before, ignore_eos=True))
        assert len(list(reply)) > 0
        assert ids(reply.answer) == ids(answer)[before:]


@pytest.mark.parametrize("mode", ["shift", "sinks"])
def test_cells_that_move_leave_a_cache_that_the_ledger_knows(mode: str, exact: Path) -> None:
    with open_runner(exact, EXACT, template=TEMPLATE, slots=2) as runner:
        one = talk(runner, mode, 60)
        answers = [ask(one, question) for question in (*QUESTIONS, *QUESTIONS)]
        assert {answer.finish for answer in answers} == {"length"}
        assert sum(answer.overflow_stats.recomputed for answer in answers) == 0
        assert runner.engine.ledger.used_cells == len(runner.engine.ledger.tokens[0]) <= 256
        assert bool(one.conversation.tree.dropped) is (mode == "shift")


def test_a_window_model_shifts_and_streams(tmp_path: Path) -> None:
    path = tiny_gguf.gemma3(tmp_path / "m.gguf", hidden=128, layers=6)
    with open_runner(path, PLAIN, template=TEMPLATE) as runner:
        for mode in ("shift", "sinks"):
            one = talk(runner, mode, 60)
            assert {ask(one, question).finish for question in (*QUESTIONS, *QUESTIONS)} == {
                "length"
            }
        one.conversation.predict = 700
        assert ask(one, "and then?").overflow_stats.times > 3


def test_recurrent_state_is_computed_anew_and_takes_no_sinks(tmp_path: Path) -> None:
    path = tiny_gguf.mamba(tmp_path / "m.gguf")
    with open_runner(path, PLAIN, template=TEMPLATE) as runner:
        one = talk(runner, "shift", 30)
        answers = [ask(one, question) for question in (*QUESTIONS, *QUESTIONS)]
        assert {answer.finish for answer in answers} == {"length"}
        assert one.conversation.tree.dropped
        with pytest.raises(UserError, match="recurrent"):
            find_setting("on_full").set_value(one, "sinks")


def test_as_few_turns_leave_as_give_room_and_all_of_the_answer_stays() -> None:
    turns = [[1] * 10, [2] * 20, [3] * 30, [4] * 5]
    shift = DropTurns(3, lambda gone: [0] * 4 + [t for turn in turns[gone:] for t in turn])
    prompt = [0] * 4 + [t for turn in turns for t in turn]
    shorter = shift.shorten(prompt + [9] * 12, len(prompt), 0, 80)
    assert shorter is not None
    assert (shorter.dropped_turns, shorter.n_prompt) == (2, 39)
    assert shorter.tokens == [0] * 4 + [3] * 30 + [4] * 5 + [9] * 12
    more = shift.shorten(shorter.tokens + [9] * 30, 39, 2, 80)
    assert more is not None and (more.dropped_turns, more.n_prompt, len(more.tokens)) == (3, 9, 51)
    assert shift.shorten(more.tokens + [9] * 30, 9, 3, 80) is None
    assert shift.shorten([0] * 100, 100, 0, 9) is None  # the message alone is too long


def test_half_of_the_window_leaves_and_the_sinks_stay() -> None:
    shorter = AttentionSinks(4).shorten(list(range(101)), 30, 0, 100)
    assert shorter is not None
    assert shorter.tokens == [*range(4), *range(53, 101)]
    assert (shorter.n_prompt, shorter.dropped_turns) == (4, 0)
    assert AttentionSinks(4).shorten(list(range(20)), 20, 0, 100) is None


def test_guesses_go_on_where_the_window_moves() -> None:
    """Text that turns in circles is guessed; what is guessed never depends on what has left."""
    said = []
    for strategy in ("plain", "speculative"):
        context = FakeContext(
            n_ctx=64, reply=lambda tokens: ord("a") + (tokens[-1] - ord("a") + 1) % 12
        )
        model, means = FakeModel(), Speculation((PromptLookup(),), Steady(CHEAP), 16)
        engine = Engine(context, model, None, means)
        number = engine.submit(
            Request(
                tuple(b"sing: a"),
                GREEDY,
                500,
                ignore_eos=True,
                strategy=strategy,
                overflow=AttentionSinks(4),
                can_move_cells=True,
            )
        )
        while engine.is_busy:
            engine.step()
            engine.ledger.check()
        answer = engine.pop_answer(number)
        assert (answer.finish, len(answer.tokens), answer.overflow_stats.recomputed) == (
            "length",
            500,
            0,
        )
        said.append((answer.text, len(context.batches)))
    assert said[0][0] == said[1][0]
    assert said[1][1] < said[0][1] / 2
