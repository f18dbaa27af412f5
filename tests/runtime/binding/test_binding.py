"""The binding with a real model: its tokens equal those of the high-level API, and no call
aborts.
"""

import signal
import threading

import pytest

from llmcli.errors import UserError
from llmcli.runtime.binding.contexts.context import Aborted
from llmcli.runtime.binding.contexts.context_options import ContextOptions
from llmcli.runtime.binding.contexts.open_context import open_context
from llmcli.runtime.binding.model import open_model
from llmcli.runtime.binding.rows.batch import BatchRows, reserved_outputs
from llmcli.runtime.requests.request import Request, RunOptions
from llmcli.runtime.runner import open_runner
from llmcli.runtime.sampling import default_sampling
from llmcli.types import Message

pytestmark = pytest.mark.model
GREEDY = default_sampling().with_values({"temp": 0})
QUESTION = [Message("user", "What is the capital of France?")]


def options(**changes) -> RunOptions:
    return RunOptions(**{"ctx_size": 1024, "threads": 1, "batch_size": 512, **changes})


def generate_ids(runner, request: Request) -> list[int]:
    reply = runner.reply(request)
    for _ in reply:
        pass
    return [token.id for token in reply.answer.tokens]


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_greedy_text_equals_that_of_the_high_level_api(smollm2, kind):
    from llama_cpp import Llama

    with open_runner(
        smollm2, options(flash_attn="on", cache_type_k=kind, cache_type_v=kind)
    ) as runner:
        prompt = runner.encode_chat(QUESTION)
        ours = generate_ids(runner, Request(prompt, GREEDY, max_tokens=64))
    number = {"f16": 1, "q8_0": 8}[kind]
    llama = Llama(
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
    for token in llama.generate(list(prompt), temp=0.0, top_k=1):
        if token == llama.token_eos() or len(theirs) == 64:
            break
        theirs.append(token)
    llama.close()
    assert ours == theirs
    assert len(ours) == 64


def test_an_answer_from_cached_tokens_equals_one_computed_afresh_with_q8_0_kv(smollm2):
    requested = options(cache_type_k="q8_0", cache_type_v="q8_0", flash_attn="on")
    with open_runner(smollm2, requested) as runner:
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
    with open_runner(smollm2, requested) as fresh:
        assert generate_ids(fresh, Request(fresh.encode_chat(turns), GREEDY, max_tokens=12)) == [
            token.id for token in second.answer.tokens
        ]


def test_the_same_seed_gives_the_same_text(smollm2):
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
            first, second = (
                generate_ids(runner, Request(prompt, seeded, max_tokens=8)) for _ in range(2)
            )
            assert first == second


def test_ctrl_c_stops_a_long_prompt_and_leaves_the_ledger_consistent(smollm2):
    with open_runner(smollm2, options(ctx_size=4096, batch_size=2048)) as runner:
        prompt = tuple(runner.model.tokenize("one two three four five " * 300, special=False))[
            :1900
        ]
        reply = runner.reply(Request(prompt, GREEDY))
        threading.Timer(0.3, signal.raise_signal, [signal.SIGINT]).start()
        assert [event.finish for event in reply][-1] == "cancelled"
        # the prompt is one pass of several seconds, which was interrupted
        assert runner.engine.ledger.used_cells < len(prompt)
        runner.engine.ledger.check()
        assert generate_ids(runner, Request(prompt[:20], GREEDY, max_tokens=2))


def test_sequences_in_one_batch_have_the_same_answers_as_alone(smollm2):
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
                vocabulary = model
                engine = Engine(context, vocabulary, NativeChains(model.n_vocab))
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


def test_settings_that_llama_cpp_does_not_support_raise_a_user_error(smollm2):
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


def test_an_unknown_architecture_raises_llama_cpp_s_error_message(tmp_path, stories_gguf):
    raw = stories_gguf.read_bytes()
    strange = tmp_path / "strange.gguf"
    key = b"general.architecture" + (8).to_bytes(4, "little") + (5).to_bytes(8, "little")
    assert key + b"llama" in raw
    strange.write_bytes(raw.replace(key + b"llama", key + b"lamma", 1))
    with pytest.raises(UserError, match="lamma"), open_model(strange):
        pass


def test_an_interrupt_just_before_a_pass_stops_this_pass(stories_gguf):
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


@pytest.mark.parametrize("requested", [*range(1, 70), 255, 256, 512])
def test_the_data_after_the_reserved_outputs_starts_on_a_cache_line(requested):
    """Each reserved row takes four bytes in an input of the pass, which is padded to 32 bytes."""
    reserved = reserved_outputs(requested)
    assert requested <= reserved <= requested + 8
    assert -(-4 * reserved // 32) * 32 % 64 == 0
