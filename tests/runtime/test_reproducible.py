"""The reproducible mode: logits have the same bits for any batches, threads, earlier turns and
strategies.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llmcli.config import build_child_environ
from llmcli.errors import UserError
from llmcli.runtime import kv_size, reproducible
from llmcli.runtime.binding.contexts.context import Context
from llmcli.runtime.binding.contexts.context_options import ContextOptions
from llmcli.runtime.binding.rows.batch import BatchRows
from llmcli.runtime.draft_settings import DraftSettings
from llmcli.runtime.requests.beam_settings import BeamSettings
from llmcli.runtime.requests.request import Answer, Request, RunOptions
from llmcli.runtime.runner import Runner, open_runner
from llmcli.runtime.sampling import default_sampling
from quant.convert import checkpoint_source
from quant.model_file import read_header
from quant.quantize import plan, write
from tests.fixtures.drafts import CHEAP, Steady
from tests.fixtures.fakes import FakeContext, FakeRow
from tests.quant import families, tiny_checkpoint
from tests.quant.families.gemma3 import SMALL

GREEDY = default_sampling().with_values({"temp": 0})
SAMPLED = default_sampling().with_values(
    {"temp": 1.5, "top_k": 0, "top_p": 1, "min_p": 0, "seed": 11}
)
# Tokens that are computed one by one after each prompt. Their logits depend on all cells that the
# prompt's passes have written.
EXTRA_TOKENS = 5


def quantize_checkpoint(folder: Path, kind: str) -> Path:
    """Quantize a checkpoint to the type `kind`, and return the file next to it."""
    out = folder.with_suffix(f".{kind}.gguf")
    write.write_model(
        plan.plan_quantization(checkpoint_source.open_checkpoint(folder), kind), out, threads=1
    )
    return out


@pytest.fixture(scope="module")
def folder(stories: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a random Llama with heads of 32 and rows of 256, which are long enough for
    every quantized type.
    """
    return tiny_checkpoint.random_llama(
        stories, tmp_path_factory.mktemp("grown") / "model", hidden=256, layers=2, shards=1
    )


@pytest.fixture(scope="module", params=["Q8_0", "Q4_0"])
def weights(request: pytest.FixtureRequest, folder: Path) -> Path:
    """A model file in a type that llama.cpp treats alike on CPUs with AVX2 and with AMX: it repacks
    the type on both or on neither, and has no tiled kernel for it.
    """
    return quantize_checkpoint(folder, request.param)


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model file of a tiny Gemma 3 with windows of 64 tokens, shorter than the prompts."""
    case = families.Case(
        "window",
        "Gemma3ForCausalLM",
        SMALL | {"head_dim": 32, "query_pre_attn_scalar": 32},
        norm=0.0,
    )
    return quantize_checkpoint(
        families.build(case, tmp_path_factory.mktemp("gemma") / "model"), "Q8_0"
    )


def random_tokens(count: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(3, 500, count)]


@contextmanager
def open_context(
    path: Path, slots: int = 1, threads: int = 1, n_ubatch: int = 512, n_ctx: int = 512
) -> Iterator[Context]:
    options = ContextOptions(n_ctx, 512, n_ubatch, slots, threads, threads, "q8_0", "q8_0", "on")
    with reproducible.open_reproducible(read_header.read_header(path), options) as (_, context):
        yield context


def feed(context: Context, tokens: list[int], chunk: int, slot: int = 0) -> list[bytes]:
    """Compute a prompt in passes of `chunk` tokens, then EXTRA_TOKENS more tokens. Return the bytes
    of the logits after the prompt and after each extra token.
    """
    logits = []
    pieces = [(start, tokens[start : start + chunk]) for start in range(0, len(tokens), chunk)]
    for start, piece in [*pieces, *((len(tokens) + step, [9]) for step in range(EXTRA_TOKENS))]:
        with_logits = [False] * (len(piece) - 1) + [True]
        (row,) = context.decode(
            BatchRows(piece, range(start, start + len(piece)), [slot] * len(piece), with_logits)
        )
        logits.append(row.logits.tobytes())
    return logits[len(pieces) - 1 :]


def test_the_size_of_prompt_chunks_changes_nothing(weights: Path) -> None:
    tokens = random_tokens(300)
    with open_context(weights) as context:
        whole = feed(context, tokens, 512)
        for chunk in (1, 2, 3, 4, 7, 16, 63, 64, 65, 128):
            context.clear()
            assert feed(context, tokens, chunk) == whole, chunk


@pytest.mark.parametrize(("threads", "n_ubatch"), [(1, 16), (2, 65)])
def test_threads_and_micro_batches_change_nothing(
    threads: int, n_ubatch: int, weights: Path
) -> None:
    with open_context(weights) as context:
        whole = feed(context, random_tokens(300), 512)
    with open_context(weights, threads=threads, n_ubatch=n_ubatch) as context:
        assert feed(context, random_tokens(300), 512) == whole


def test_chunks_change_nothing_with_sliding_windows(windowed: Path) -> None:
    with open_context(windowed, n_ctx=1024) as context:
        whole = feed(context, random_tokens(900), 512)
    for n_ubatch, chunk in ((64, 512), (512, 70), (160, 512)):
        with open_context(windowed, n_ubatch=n_ubatch, n_ctx=1024) as context:
            assert feed(context, random_tokens(900), chunk) == whole, (n_ubatch, chunk)


def test_other_sequences_in_a_batch_change_nothing(weights: Path) -> None:
    prompts = [random_tokens(20 + 3 * number, seed=number) for number in range(8)]
    alone = []
    with open_context(weights) as context:
        for prompt in prompts:
            context.clear()
            alone.append(feed(context, prompt, 512))
    for count in range(2, 9):
        with open_context(weights, slots=8) as context:
            for slot in range(count):
                size = len(prompts[slot])
                context.decode(
                    BatchRows(
                        prompts[slot], range(size), [slot] * size, [False] * (size - 1) + [True]
                    )
                )
            for step in range(EXTRA_TOKENS):
                positions = [len(prompt) + step for prompt in prompts[:count]]
                rows = context.decode(
                    BatchRows([9] * count, positions, range(count), [True] * count)
                )
                logits = [row.logits.tobytes() for row in rows]
                assert logits == [alone[slot][step + 1] for slot in range(count)], (count, step)


@contextmanager
def runner(path: Path, slots: int = 1, n_ctx: int = 512, n_ubatch: int = 512) -> Iterator[Runner]:
    options = reproducible.with_required_options(
        RunOptions(ctx_size=n_ctx, threads=1, ubatch_size=n_ubatch)
    )
    with open_runner(path, options, slots=slots) as opened:
        yield opened


def record_logits(runner: Runner) -> list[bytes]:
    """Return a list to which the bytes of every row of logits are appended from now on."""
    recorded: list[bytes] = []
    decode = runner.context.decode

    def recording_decode(rows: BatchRows) -> list[object]:
        rows_of_logits = decode(rows)
        recorded.extend(row.logits.tobytes() for row in rows_of_logits)
        return rows_of_logits

    runner.context.decode = recording_decode  # type: ignore[method-assign,assignment]
    return recorded


def answers(
    runner: Runner, tokens: list[int], samples: int = 1, **settings: object
) -> list[Answer]:
    fields = {"sampling": GREEDY, "max_tokens": 12, "ignore_eos": True, "logprobs": True} | settings
    reply = runner.reply(Request(tuple(tokens), **fields), samples)  # type: ignore[arg-type]
    for _ in reply:
        pass
    runner.engine.ledger.check()
    return reply.answers


def token_ids(answer: Answer) -> list[int]:
    return [token.id for token in answer.tokens]


BEAMS = {"strategy": "beam", "search": BeamSettings(3)}


@pytest.mark.parametrize(("slots", "before"), [(1, {}), (3, {}), (3, BEAMS)])
def test_cells_of_earlier_turns_change_nothing(
    slots: int, before: dict[str, object], weights: Path
) -> None:
    """The prompt reuses cells of an earlier turn, of a turn that continued differently, or of a
    beam search.
    """
    tokens = random_tokens(100)
    with runner(weights) as opened:
        fresh = record_logits(opened)
        (expected,) = answers(opened, tokens)
    with runner(weights, slots=slots) as opened:
        answers(opened, [*tokens[:60], *random_tokens(40, seed=5)], **before)
        answers(opened, tokens[:80], **before)
        resumed = record_logits(opened)
        (answer,) = answers(opened, tokens)
        assert answer.cached_tokens == (80 if slots == 1 else 0)
    assert (token_ids(answer), resumed) == (token_ids(expected), fresh)


def test_several_samples_equal_single_answers_with_their_seeds(weights: Path) -> None:
    with runner(weights, slots=3) as opened:
        samples = answers(opened, random_tokens(30), 3, sampling=SAMPLED)
    assert [answer.seed for answer in samples] == [11, 12, 13]
    for answer in samples:
        with runner(weights, n_ubatch=7) as opened:
            (alone,) = answers(
                opened, random_tokens(30), sampling=SAMPLED.with_values({"seed": answer.seed})
            )
        assert (token_ids(alone), [t.logprob for t in alone.tokens]) == (
            token_ids(answer),
            [t.logprob for t in answer.tokens],
        )


def test_beam_search_with_one_beam_is_greedy_decoding(weights: Path) -> None:
    with runner(weights) as opened:
        recorded = record_logits(opened)
        (greedy,) = answers(opened, random_tokens(40))
        plain = recorded[:]
        recorded.clear()
        opened.engine.ledger.evict_idle()
        (beam,) = answers(opened, random_tokens(40), strategy="beam", search=BeamSettings(1))
        assert (token_ids(beam), recorded) == (token_ids(greedy), plain)


def test_a_draft_model_does_not_change_the_sampled_tokens(
    weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its speed, which determines how often it drafts, does not change them either."""
    monkeypatch.setattr("llmcli.runtime.open_speculation._pays", lambda curve, most: True)
    with runner(weights) as opened:
        (plain,) = answers(opened, random_tokens(30), sampling=SAMPLED, max_tokens=40)
    options = reproducible.with_required_options(RunOptions(ctx_size=512, threads=1))
    with open_runner(weights, options, drafting=DraftSettings("off", weights)) as opened:
        resources = opened.engine.resources
        assert resources.speculation and resources.speculation.is_reproducible
        (drafter,) = resources.speculation.drafters
        drafted = set()
        for cost in (0.0, 0.001):
            drafter.guess_seconds = cost
            cheap = replace(
                resources.speculation,
                pass_cost=Steady(CHEAP),
                max_rows=resources.speculation.exact_rows,
            )
            opened.engine.resources = replace(resources, speculation=cheap)
            for temp in (1.5, 0.2):
                (speculative,) = answers(
                    opened,
                    random_tokens(30),
                    sampling=SAMPLED.with_values({"temp": temp}),
                    max_tokens=40,
                    strategy="speculative",
                )
                drafted.add(speculative.n_drafted)
                if temp == 1.5:
                    assert (token_ids(speculative), [t.logprob for t in speculative.tokens]) == (
                        token_ids(plain),
                        [t.logprob for t in plain.tokens],
                    )
        assert max(drafted) > 0


@pytest.mark.parametrize("native", [True, False])
def test_the_same_seed_gives_the_same_answer(native: bool, weights: Path) -> None:
    """Repeated calls on one machine give equal answers without the reproducible mode, too."""
    options = RunOptions(ctx_size=256, threads=1)
    texts = set()
    for _ in range(2):
        with open_runner(weights, options, native_sampling=native) as opened:
            (answer,) = answers(opened, random_tokens(30), sampling=SAMPLED)
            texts.add((tuple(token_ids(answer)), tuple(token.logprob for token in answer.tokens)))
            (other_seed,) = answers(
                opened, random_tokens(30), sampling=SAMPLED.with_values({"seed": 12})
            )
            assert token_ids(other_seed) != token_ids(answer)
    assert len(texts) == 1


def test_k_quants_use_one_kernel_for_any_number_of_rows(stories: Path, tmp_path: Path) -> None:
    """Without repacking, llama.cpp would use a tiled kernel from eight rows on. It reads the
    variable that disables this kernel once per process, so the test needs a new process.
    """
    path = quantize_checkpoint(
        tiny_checkpoint.random_llama(stories, tmp_path / "wide", hidden=1024, layers=2, shards=1),
        "Q4_K_M",
    )
    done = subprocess.run(
        [sys.executable, "-c", CHUNKS_PROGRAM, str(path)],
        env=build_child_environ(GGML_CPU_TILED_MM="1"),
        check=False,
    )
    assert done.returncode == 0


CHUNKS_PROGRAM = """
import sys
from pathlib import Path
from llmcli import config
from llmcli.runtime.binding.contexts.context_options import ContextOptions
from llmcli.runtime.binding.contexts.open_context import open_context
from llmcli.runtime.binding.model import open_model
from llmcli.runtime.binding.placement.model_placement import ModelPlacement
from tests.runtime.test_reproducible import feed, random_tokens

config.disable_tiled_kernels()
options = ContextOptions(256, 256, 256, 1, 1, 1, "q8_0", "q8_0", "on", swa_full=True)
opened = open_model(Path(sys.argv[1]), ModelPlacement(0, repack=False))
with opened as model, open_context(model, options) as context:
    whole = feed(context, random_tokens(60), 60)
    for chunk in (1, 4, 7, 9):
        context.clear()
        assert feed(context, random_tokens(60), chunk) == whole, chunk
"""


def test_run_prints_the_guarantee_and_gives_the_same_bits_with_other_batches(folder: Path) -> None:
    weights, results = quantize_checkpoint(folder, "Q8_0"), []
    for flags in (["-ub", "512", "-t", "1"], ["-ub", "6", "-b", "11", "-t", "2"]):
        arguments = [
            "-p",
            "Once upon a time there was " * 6,
            "--raw",
            "-n",
            "8",
            "-c",
            "256",
            "--ignore-eos",
            "-s",
            "3",
        ]
        main = [sys.executable, "-c", "from llmcli.app import main; main()"]
        command = [*main, "run", str(weights), "--reproducible", "--json", *arguments, *flags]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=True,
            env=build_child_environ(GGML_CPU_TILED_MM="1"),
        )
        assert reproducible.GUARANTEE in done.stderr
        answer = json.loads(done.stdout)
        assert answer["reproducible"] is True
        results.append([(token["id"], token["logprob"]) for token in answer["tokens"]])
    assert results[0] == results[1]


def test_float_weights_are_refused(folder: Path, stories_gguf: Path) -> None:
    half = quantize_checkpoint(folder, "F16")
    with pytest.raises(UserError, match=r"token_embd\.weight is F16, as are 14 more,") as caught:
        reproducible.check_model(read_header.read_header(half))
    assert "--q8_0" in caught.value.hint
    with pytest.raises(UserError, match="is F32"):
        reproducible.check_model(read_header.read_header(stories_gguf))
    with pytest.raises(UserError, match="this model's heads have 8") as caught:
        kv_size.check_cache(
            read_header.read_header(stories_gguf).metadata, "q8_0", "q8_0", reproducible=True
        )
    assert "leave out --reproducible" in caught.value.hint


class BatchDependentContext(FakeContext):
    """A context whose logits differ if at least `n_rows` rows are computed in one pass."""

    n_rows = 8

    def clear(self) -> None:
        self.cells = [[] for _ in self.cells]

    def decode(self, rows: BatchRows) -> list[FakeRow]:
        shift = np.float32(len(rows) >= self.n_rows)
        return [FakeRow(row.logits + shift) for row in super().decode(rows)]


@pytest.mark.parametrize(("n_rows", "expected"), [(2, False), (4, False), (8, False), (10, True)])
def test_the_trial_finds_kernels_that_depend_on_the_number_of_rows(
    n_rows: int, expected: bool
) -> None:
    context = BatchDependentContext()
    context.n_rows = n_rows
    context.n_vocab = 256  # type: ignore[attr-defined]
    assert reproducible.is_batch_invariant(context) is expected  # type: ignore[arg-type]


def test_float_weights_of_recurrent_models_need_a_single_sequence(tmp_path: Path) -> None:
    """llama.cpp computes two sequences with recurrent state in one micro-batch, even one of a row."""
    pytest.importorskip("transformers", reason="transformers is not installed: it makes the models")
    case = next(case for case in families.cases() if case.hf == "Qwen3_5ForCausalLM")
    case = replace(case, settings=case.settings | {"head_dim": 64})
    folder = families.build(case, tmp_path / "model")
    half, quantized = (quantize_checkpoint(folder, kind) for kind in ("F16", "Q8_0"))
    with (
        pytest.raises(UserError, match="how many tokens are computed at once") as caught,
        open_context(half, slots=2),
    ):
        pass
    assert "--parallel 1" in caught.value.hint
    with open_context(half) as context:
        whole = feed(context, random_tokens(20), 20)
        context.clear()
        assert feed(context, random_tokens(20), 3) == whole
    with open_context(quantized, slots=2) as context:
        alone = feed(context, random_tokens(20), 20)
        context.clear()
        feed(context, random_tokens(15, seed=1), 15, slot=1)
        context.trim(0, 0)
        tokens = random_tokens(20)
        for position, token in enumerate(tokens):
            rows = context.decode(
                BatchRows([token, 7], [position, 20 + position], [0, 1], [True] * 2)
            )
        assert rows[0].logits.tobytes() == alone[0]


def test_a_model_is_refused_if_no_layout_passes_the_trial(
    weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[Context] = []
    never: Callable[[Context], bool] = lambda context: bool(tried.append(context))  # noqa: E731
    monkeypatch.setattr(reproducible, "is_batch_invariant", never)
    with (
        pytest.raises(UserError, match="how many tokens are computed at once"),
        open_context(weights),
    ):
        pass
    assert 1 <= len(tried) <= 2  # layouts that cannot be reproducible are not tried
