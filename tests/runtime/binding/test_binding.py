"""The binding on the real model: the tokens of the high-level API, and no call that aborts."""

import signal
import threading

import pytest

from llmcli.errors import UserError
from llmcli.runtime.binding.batch import BatchRows, reserved_outputs
from llmcli.runtime.binding.context import Aborted
from llmcli.runtime.binding.context_options import ContextOptions
from llmcli.runtime.binding.model import open_model
from llmcli.runtime.binding.open_context import open_context
from llmcli.runtime.requests.request import Request, RunOptions
from llmcli.runtime.runner import open_runner
from llmcli.runtime.sampling import default_sampling
from llmcli.types import Message

pytestmark = pytest.mark.model
GREEDY = default_sampling().with_values({"temp": 0})
QUESTION = [Message("user", "What is the capital of France?")]


def options(**more) -> RunOptions:
    return RunOptions(**{"ctx_size": 1024, "threads": 1, "batch_size": 512, **more})


def ids_of(runner, request: Request) -> list[int]:
    reply = runner.reply(request)
    for _ in reply:
        pass
    return [token.id for token in reply.answer.tokens]


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_greedy_text_equals_the_high_level_api(smollm2, kind):
    from llama_cpp import Llama

    with open_runner(
        smollm2, options(flash_attn="on", cache_type_k=kind, cache_type_v=kind)
    ) as runner:
        prompt = runner.encode_chat(QUESTION)
        ours = ids_of(runner, Request(prompt, GREEDY, max_tokens=64))
    number = {"f16": 1, "q8_0": 8}[kind]
    high = Llama(
        str(smollm2),
        n_ctx=1024,
        n_batch=512,
        n_ubatch=512,
        n_threads=1,
        n_threads_batch=1,
        flash_attn=True,
        type_k=number,
        type_v=number,
        verbose=False,
    )
    theirs = []
    for token in high.generate(list(prompt), temp=0.0, top_k=1):
        if token == high.token_eos() or len(theirs) == 64:
            break
        theirs.append(token)
    high.close()
    assert ours == theirs
    assert len(ours) == 64


def test_a_resumed_turn_says_what_a_fresh_one_says_with_q8_0_kv(smollm2):
    wanted = options(cache_type_k="q8_0", cache_type_v="q8_0", flash_attn="on")
    with open_runner(smollm2, wanted) as runner:
        first = runner.reply(Request(runner.encode_chat(QUESTION), GREEDY, max_tokens=12))
        for _ in first:
            pass
        turns = [
            *QUESTION,
            Message("assistant", first.answer.text),
            Message("user", "And of Italy?"),
        ]
        second = runner.reply(Request(runner.encode_chat(turns), GREEDY, max_tokens=12))
        for _ in second:
            pass
        runner.engine.ledger.check()
        assert second.answer.cached_tokens > len(runner.encode_chat(QUESTION)) - 4
    with open_runner(smollm2, wanted) as fresh:
        assert ids_of(fresh, Request(fresh.encode_chat(turns), GREEDY, max_tokens=12)) == [
            token.id for token in second.answer.tokens
        ]


def test_the_same_seed_gives_the_same_text_and_the_native_chain_ends_it(smollm2):
    everything = {
        "repeat_penalty": 1.1,
        "dry_multiplier": 0.8,
        "xtc_probability": 0.5,
        "dynatemp_range": 0.3,
        "logit_bias": "28+1,29-inf",
    }
    with open_runner(smollm2, options()) as runner:
        prompt = runner.encode_chat(QUESTION)
        for more in ({"repeat_penalty": 1.1}, everything, {"mirostat": 1}, {"mirostat": 2}):
            seeded = default_sampling().with_values({"seed": 7, **more})
            one, other = (ids_of(runner, Request(prompt, seeded, max_tokens=8)) for _ in range(2))
            assert one == other


def test_ctrl_c_stops_a_long_prompt_at_once_and_the_cells_stay_in_order(smollm2):
    with open_runner(smollm2, options(ctx_size=4096, batch_size=2048)) as runner:
        prompt = tuple(runner.model.tokenize("one two three four five " * 300, special=False))[
            :1900
        ]
        reply = runner.reply(Request(prompt, GREEDY))
        threading.Timer(0.3, signal.raise_signal, [signal.SIGINT]).start()
        assert [event.finish for event in reply][-1] == "cancelled"
        assert runner.engine.ledger.used_cells < len(
            prompt
        )  # it is one pass of several seconds, and was cut
        runner.engine.ledger.check()
        assert ids_of(runner, Request(prompt[:20], GREEDY, max_tokens=2))


def test_many_sequences_in_one_batch_say_what_each_says_alone(smollm2):
    from llmcli.runtime.binding.sampler import NativeChains
    from llmcli.runtime.engine.engine import Engine

    questions = ["Name a colour.", "Name a country.", "Count to five."]
    kind = ContextOptions(2048, 512, 512, 3, 1, 1, "q8_0", "q8_0", "on")
    with open_model(smollm2) as model:
        prompts = [
            tuple(
                model.tokenize(
                    f"<|im_start|>user\n{q}<|im_end|>\n<|im_start|>assistant\n", special=True
                )
            )
            for q in questions
        ]
        texts = []
        for together in (True, False):
            with open_context(model, kind) as context:
                words = model
                engine = Engine(context, words, NativeChains(model.n_vocab))
                answers = []
                for group in [prompts] if together else [[prompt] for prompt in prompts]:
                    numbers = [
                        engine.submit(Request(prompt, GREEDY, max_tokens=10)) for prompt in group
                    ]
                    while engine.is_busy:
                        engine.step()
                    answers += [engine.pop_answer(number) for number in numbers]
                engine.ledger.check()
                texts.append([answer.text for answer in answers])
    assert texts[0] == texts[1]


def test_settings_that_llama_cpp_would_refuse_are_told_in_words(smollm2):
    with open_model(smollm2) as model:
        for wrong in (
            {"type_k": "q9"},
            {"flash_attn": "perhaps"},
            {"type_v": "q8_0", "flash_attn": "off"},
            {"n_seq_max": 999},
        ):
            with (
                pytest.raises(UserError) as caught,
                open_context(model, ContextOptions(512, **wrong)),
            ):
                pass
            assert caught.value.hint


def test_an_unknown_architecture_is_told_in_llama_cpp_s_words(tmp_path, stories_gguf):
    raw = stories_gguf.read_bytes()
    strange = tmp_path / "strange.gguf"
    key = b"general.architecture" + (8).to_bytes(4, "little") + (5).to_bytes(8, "little")
    assert key + b"llama" in raw
    strange.write_bytes(raw.replace(key + b"llama", key + b"lamma", 1))
    with pytest.raises(UserError, match="lamma"), open_model(strange):
        pass


def test_an_interrupt_that_comes_just_before_a_pass_stops_it(stories_gguf):
    rows = BatchRows(range(1, 33), range(32), [0] * 32, [False] * 31 + [True])
    with (
        open_model(stories_gguf) as model,
        open_context(model, ContextOptions(256, 32, 32)) as context,
    ):
        context.interrupt()
        with pytest.raises(Aborted):
            context.decode(rows)
        context.trim(0, 0)
        assert len(context.decode(rows)) == 1


@pytest.mark.parametrize("wanted", [*range(1, 70), 255, 256, 512])
def test_the_rows_that_are_reserved_leave_what_follows_them_on_cache_lines(wanted):
    """Each row's place takes four bytes, and all of them are padded to 32."""
    made = reserved_outputs(wanted)
    assert wanted <= made <= wanted + 8
    assert -(-4 * made // 32) * 32 % 64 == 0
