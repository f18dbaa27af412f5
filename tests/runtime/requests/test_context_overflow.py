"""A full context with real caches: cells that stay equal those computed alone, or are moved as the
ledger records.
"""

from pathlib import Path

import pytest

from llmcli import config
from llmcli.chat.chat_session import ChatSession
from llmcli.chat.conversation.conversation import Conversation
from llmcli.chat.display.stream_writer import StreamWriter
from llmcli.chat.local_model import LocalModel
from llmcli.chat.settings import find_setting
from llmcli.errors import UserError
from llmcli.runtime.drafting.ngram import PromptLookup
from llmcli.runtime.engine.engine import Engine
from llmcli.runtime.engine.schedule import Schedule
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

# With these options a row of logits does not depend on the other rows of its batch
# (notes/runtime.md, 6.3).
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
def exact_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exact_model")
    floats = tiny_gguf.llama(folder / "f32.gguf", hidden=256, layers=2)
    out = folder / "q8_0.gguf"
    write.write_model(plan.plan_quantization(write.open_gguf(floats), "Q8_0"), out, threads=1)
    return out


def open_chat(runner: Runner, mode: str, predict: int) -> ChatSession:
    """Return a chat that handles a full context by `mode` and generates at most `predict` tokens
    per answer.
    """
    chat = ChatSession(
        "tiny",
        LocalModel(runner),
        Conversation(GREEDY, "be kind", predict),
        config.load_config(),
        UI(color=False),
        ignore_eos=True,
    )
    find_setting("on_full").set_value(chat, mode)
    return chat


def ask(chat: ChatSession, text: str) -> Answer:
    """Return the answer to one message, after checking the ledger."""
    answer = chat.ask(text, StreamWriter(silent=True))
    chat.runner.engine.ledger.check()
    return answer


def token_ids(answer: Answer) -> list[int]:
    return [token.id for token in answer.tokens]


def test_a_chat_that_recomputes_after_dropping_turns_answers_like_one_without_these_turns(
    exact_model: Path,
) -> None:
    with open_runner(exact_model, EXACT, template=TEMPLATE) as runner:
        runner.context.can_shift = False
        chat = open_chat(runner, "shift", 12)
        answers = [ask(chat, question) for question in QUESTIONS]
        dropped = chat.conversation.tree.dropped
        assert dropped and dropped < {1, 2, 3, 4}
        runner.engine.ledger.evict_idle()
        other = open_chat(runner, "stop", 12)
        for number in chat.conversation.tree.sent_turns()[:-1]:
            other.conversation.add_turn(
                chat.conversation.tree[number].question,
                chat.conversation.tree[number].answer,
                "length",
            )
        assert token_ids(ask(other, QUESTIONS[3])) == token_ids(answers[3])


def test_an_answer_continues_as_if_its_prompt_had_been_the_shorter_one(exact_model: Path) -> None:
    with open_runner(exact_model, EXACT, template=TEMPLATE) as runner:
        runner.context.can_shift = False
        chat = open_chat(runner, "shift", 8)
        ask(chat, QUESTIONS[0])
        chat.conversation.predict = 170
        prompt = chat.prompt_tokens(QUESTIONS[1])
        answer = ask(chat, QUESTIONS[1])
        assert (answer.finish, answer.overflow_stats.times, answer.overflow_stats.turns) == (
            "length",
            1,
            1,
        )
        n_before = runner.n_ctx + 1 - len(prompt)  # answer tokens before turns were dropped
        chat.conversation.undo_turn()
        shorter = chat.prompt_tokens(QUESTIONS[1])
        runner.engine.ledger.evict_idle()
        tokens = (*shorter, *token_ids(answer)[:n_before])
        reply = runner.reply(Request(tokens, GREEDY, 170 - n_before, ignore_eos=True))
        assert list(reply)
        assert token_ids(reply.answer) == token_ids(answer)[n_before:]


@pytest.mark.parametrize("mode", ["shift", "sinks"])
def test_the_ledger_agrees_with_the_cache_after_cells_were_moved(
    mode: str, exact_model: Path
) -> None:
    with open_runner(exact_model, EXACT, template=TEMPLATE, slots=2) as runner:
        chat = open_chat(runner, mode, 60)
        answers = [ask(chat, question) for question in (*QUESTIONS, *QUESTIONS)]
        assert {answer.finish for answer in answers} == {"length"}
        assert sum(answer.overflow_stats.recomputed for answer in answers) == 0
        assert runner.engine.ledger.used_cells == len(runner.engine.ledger.tokens[0]) <= 256
        assert bool(chat.conversation.tree.dropped) is (mode == "shift")


def test_a_model_with_a_sliding_window_can_drop_turns_and_use_sinks(tmp_path: Path) -> None:
    path = tiny_gguf.gemma3(tmp_path / "m.gguf", hidden=128, layers=6)
    with open_runner(path, PLAIN, template=TEMPLATE) as runner:
        for mode in ("shift", "sinks"):
            chat = open_chat(runner, mode, 60)
            assert {ask(chat, question).finish for question in (*QUESTIONS, *QUESTIONS)} == {
                "length"
            }
        chat.conversation.predict = 700
        assert ask(chat, "and then?").overflow_stats.times > 3


def test_recurrent_state_is_recomputed_and_refuses_sinks(tmp_path: Path) -> None:
    path = tiny_gguf.mamba(tmp_path / "m.gguf")
    with open_runner(path, PLAIN, template=TEMPLATE) as runner:
        chat = open_chat(runner, "shift", 30)
        answers = [ask(chat, question) for question in (*QUESTIONS, *QUESTIONS)]
        assert {answer.finish for answer in answers} == {"length"}
        assert chat.conversation.tree.dropped
        with pytest.raises(UserError, match="recurrent"):
            find_setting("on_full").set_value(chat, "sinks")


def test_drop_turns_drops_as_few_turns_as_needed_and_keeps_the_answer() -> None:
    turns = [[1] * 10, [2] * 20, [3] * 30, [4] * 5]
    shift = DropTurns(
        3, lambda n_dropped: [0] * 4 + [t for turn in turns[n_dropped:] for t in turn]
    )
    prompt = [0] * 4 + [t for turn in turns for t in turn]
    shorter = shift.shorten(prompt + [9] * 12, len(prompt), 0, 80)
    assert shorter is not None
    assert (shorter.dropped_turns, shorter.n_prompt) == (2, 39)
    assert shorter.tokens == [0] * 4 + [3] * 30 + [4] * 5 + [9] * 12
    more = shift.shorten(shorter.tokens + [9] * 30, 39, 2, 80)
    assert more is not None and (more.dropped_turns, more.n_prompt, len(more.tokens)) == (3, 9, 51)
    assert shift.shorten(more.tokens + [9] * 30, 9, 3, 80) is None
    assert shift.shorten([0] * 100, 100, 0, 9) is None  # the message alone is too long


def test_attention_sinks_drops_half_of_the_tokens_after_the_sinks() -> None:
    shorter = AttentionSinks(4).shorten(list(range(101)), 30, 0, 100)
    assert shorter is not None
    assert shorter.tokens == [*range(4), *range(53, 101)]
    assert (shorter.n_prompt, shorter.dropped_turns) == (4, 0)
    assert AttentionSinks(4).shorten(list(range(20)), 20, 0, 100) is None


def test_drafting_continues_after_tokens_were_dropped() -> None:
    """The model repeats a cycle of tokens, which prompt lookup drafts. The text must not depend on
    drafting.
    """
    answers = []
    for strategy in ("plain", "speculative"):
        context = FakeContext(
            n_ctx=64, reply=lambda tokens: ord("a") + (tokens[-1] - ord("a") + 1) % 12
        )
        model, speculation = FakeModel(), Speculation((PromptLookup(),), Steady(CHEAP), 16)
        engine = Engine(context, model, None, speculation)
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
        answers.append((answer.text, len(context.batches)))
    assert answers[0][0] == answers[1][0]
    assert answers[1][1] < answers[0][1] / 2


def test_no_checkpoint_is_due_in_a_shortened_text() -> None:
    context = FakeContext(
        64, n_batch=16, reply=lambda _: ord("a"), is_recurrent=True, can_shift=False
    )
    engine = Engine(context, FakeModel(), None, schedule=Schedule(host_bytes=1 << 20))
    prompt = tuple(b"a prompt of some length, to sing")
    asked: list[int] = []

    def record(nbytes: int) -> bool:
        asked.append(len(engine.ledger.tokens[0]))
        return True

    engine.ledger.before_checkpoint = record
    number = engine.submit(
        Request(prompt, GREEDY, 100, ignore_eos=True, overflow=AttentionSinks(4))
    )
    while engine.is_busy:
        engine.step()
        engine.ledger.check()
    answer = engine.pop_answer(number)
    assert (len(answer.tokens), answer.overflow_stats.times > 1) == (100, True)
    assert asked == [len(prompt) - 1]
