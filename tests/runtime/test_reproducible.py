"""The reproducible mode: bit-equal logits for any batches, threads, turns and strategies."""

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
from llmcli.runtime.binding.batch import BatchRows
from llmcli.runtime.binding.context import Context
from llmcli.runtime.binding.context_options import ContextOptions
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
CHANCE = default_sampling().with_values(
    {"temp": 1.5, "top_k": 0, "top_p": 1, "min_p": 0, "seed": 11}
)
# tokens computed one by one behind each prompt: what the chunks left in the cache shows there
DEPTHS = 5


def made(folder: Path, kind: str) -> Path:
    """A checkpoint quantized."""
    out = folder.with_suffix(f".{kind}.gguf")
    write.write_model(
        plan.plan_quantization(checkpoint_source.open_checkpoint(folder), kind), out, threads=1
    )
    return out


@pytest.fixture(scope="module")
def folder(stories: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama with heads of 32 and rows of 256: large enough for every quantized type."""
    return tiny_checkpoint.grown(
        stories, tmp_path_factory.mktemp("grown") / "model", hidden=256, layers=2, shards=1
    )


@pytest.fixture(scope="module", params=["Q8_0", "Q4_0"])
def weights(request: pytest.FixtureRequest, folder: Path) -> Path:
    """Types that both AVX2 and AMX lay out anew or not at all, and that no tiled kernel takes."""
    return made(folder, request.param)


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Gemma 3 whose windows of 64 move on within a prompt."""
    case = families.Case(
        "window",
        "Gemma3ForCausalLM",
        SMALL | {"head_dim": 32, "query_pre_attn_scalar": 32},
        norm=0.0,
    )
    return made(families.build(case, tmp_path_factory.mktemp("gemma") / "model"), "Q8_0")


def words(count: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(3, 500, count)]


@contextmanager
def opened(
    path: Path, slots: int = 1, threads: int = 1, n_ubatch: int = 512, n_ctx: int = 512
) -> Iterator[Context]:
    options = ContextOptions(n_ctx, 512, n_ubatch, slots, threads, threads, "q8_0", "q8_0", "on")
    with reproducible.open_reproducible(read_header.read_header(path), options) as (_, context):
        yield context


def feed(context: Context, tokens: list[int], chunk: int, slot: int = 0) -> list[bytes]:
    """The logits behind a prompt computed in pieces, then behind each of a few more tokens."""
    found = []
    pieces = [(at, tokens[at : at + chunk]) for at in range(0, len(tokens), chunk)]
    for at, part in [*pieces, *((len(tokens) + step, [9]) for step in range(DEPTHS))]:
        wants = [False] * (len(part) - 1) + [True]
        (row,) = context.decode(
            BatchRows(part, range(at, at + len(part)), [slot] * len(part), wants)
        )
        found.append(row.logits.tobytes())
    return found[len(pieces) - 1 :]


def test_a_prompt_in_chunks_is_the_whole_prompt(weights: Path) -> None:
    tokens = words(300)
    with opened(weights) as context:
        whole = feed(context, tokens, 512)
        for chunk in (1, 2, 3, 4, 7, 16, 63, 64, 65, 128):
            context.clear()
            assert feed(context, tokens, chunk) == whole, chunk


@pytest.mark.parametrize(("threads", "n_ubatch"), [(1, 16), (2, 65)])
def test_threads_and_micro_batches_change_nothing(
    threads: int, n_ubatch: int, weights: Path
) -> None:
    with opened(weights) as context:
        whole = feed(context, words(300), 512)
    with opened(weights, threads=threads, n_ubatch=n_ubatch) as context:
        assert feed(context, words(300), 512) == whole


def test_windows_that_have_moved_on_change_nothing(windowed: Path) -> None:
    with opened(windowed, n_ctx=1024) as context:
        whole = feed(context, words(900), 512)
    for n_ubatch, chunk in ((64, 512), (512, 70), (160, 512)):
        with opened(windowed, n_ubatch=n_ubatch, n_ctx=1024) as context:
            assert feed(context, words(900), chunk) == whole, (n_ubatch, chunk)


def test_a_sequence_in_a_batch_is_the_sequence_alone(weights: Path) -> None:
    prompts = [words(20 + 3 * number, seed=number) for number in range(8)]
    alone = []
    with opened(weights) as context:
        for prompt in prompts:
            context.clear()
            alone.append(feed(context, prompt, 512))
    for count in range(2, 9):
        with opened(weights, slots=8) as context:
            for slot in range(count):
                size = len(prompts[slot])
                context.decode(
                    BatchRows(
                        prompts[slot], range(size), [slot] * size, [False] * (size - 1) + [True]
                    )
                )
            for step in range(DEPTHS):
                places = [len(prompt) + step for prompt in prompts[:count]]
                rows = context.decode(BatchRows([9] * count, places, range(count), [True] * count))
                found = [row.logits.tobytes() for row in rows]
                assert found == [alone[slot][step + 1] for slot in range(count)], (count, step)


@contextmanager
def runner(path: Path, slots: int = 1, n_ctx: int = 512, n_ubatch: int = 512) -> Iterator[Runner]:
    options = reproducible.with_required_options(
        RunOptions(ctx_size=n_ctx, threads=1, ubatch_size=n_ubatch)
    )
    with open_runner(path, options, slots=slots) as made:
        yield made


def listen(runner: Runner) -> list[bytes]:
    """Every row of logits that the engine reads from now on."""
    heard: list[bytes] = []
    decode = runner.context.decode

    def told(rows: BatchRows) -> list[object]:
        found = decode(rows)
        heard.extend(row.logits.tobytes() for row in found)
        return found

    runner.context.decode = told  # type: ignore[method-assign,assignment]
    return heard


def answers(
    runner: Runner, tokens: list[int], samples: int = 1, **settings: object
) -> list[Answer]:
    asked = {"sampling": GREEDY, "max_tokens": 12, "ignore_eos": True, "logprobs": True} | settings
    reply = runner.reply(Request(tuple(tokens), **asked), samples)  # type: ignore[arg-type]
    for _ in reply:
        pass
    runner.engine.ledger.check()
    return reply.answers


def said(answer: Answer) -> list[int]:
    return [token.id for token in answer.tokens]


BEAMS = {"strategy": "beam", "search": BeamSettings(3)}


@pytest.mark.parametrize(("slots", "before"), [(1, {}), (3, {}), (3, BEAMS)])
def test_a_resumed_conversation_is_a_fresh_one(
    slots: int, before: dict[str, object], weights: Path
) -> None:
    """Cells kept from another turn, cut back from one that went elsewhere, or left behind by beams."""
    tokens = words(100)
    with runner(weights) as one:
        fresh = listen(one)
        (expected,) = answers(one, tokens)
    with runner(weights, slots=slots) as one:
        answers(one, [*tokens[:60], *words(40, seed=5)], **before)
        answers(one, tokens[:80], **before)
        resumed = listen(one)
        (found,) = answers(one, tokens)
        assert found.cached_tokens == (80 if slots == 1 else 0)
    assert (said(found), resumed) == (said(expected), fresh)


def test_samples_are_the_answers_of_their_seeds_alone(weights: Path) -> None:
    with runner(weights, slots=3) as one:
        together = answers(one, words(30), 3, sampling=CHANCE)
    assert [answer.seed for answer in together] == [11, 12, 13]
    for answer in together:
        with runner(weights, n_ubatch=7) as one:
            (alone,) = answers(one, words(30), sampling=CHANCE.with_values({"seed": answer.seed}))
        assert (said(alone), [t.logprob for t in alone.tokens]) == (
            said(answer),
            [t.logprob for t in answer.tokens],
        )


def test_one_beam_is_greedy(weights: Path) -> None:
    with runner(weights) as one:
        heard = listen(one)
        (greedy,) = answers(one, words(40))
        plain = heard[:]
        heard.clear()
        one.engine.ledger.evict_idle()
        (beam,) = answers(one, words(40), strategy="beam", search=BeamSettings(1))
        assert (said(beam), heard) == (said(greedy), plain)


def test_a_draft_model_changes_nothing_that_is_drawn(
    weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does how fast it is, which decides when it is asked."""
    monkeypatch.setattr("llmcli.runtime.draft_settings._pays", lambda curve, most: True)
    with runner(weights) as one:
        (plain,) = answers(one, words(30), sampling=CHANCE, max_tokens=40)
    options = reproducible.with_required_options(RunOptions(ctx_size=512, threads=1))
    with open_runner(weights, options, drafting=DraftSettings("off", weights)) as one:
        means = one.engine.resources
        assert means.speculation and means.speculation.is_reproducible
        (drafter,) = means.speculation.drafters
        drafted = set()
        for cost in (0.0, 0.001):
            drafter.one = cost
            cheap = replace(
                means.speculation, pass_cost=Steady(CHEAP), max_rows=means.speculation.exact_rows
            )
            one.engine.resources = replace(means, speculation=cheap)
            for temp in (1.5, 0.2):
                (found,) = answers(
                    one,
                    words(30),
                    sampling=CHANCE.with_values({"temp": temp}),
                    max_tokens=40,
                    strategy="speculative",
                )
                drafted.add(found.n_drafted)
                if temp == 1.5:
                    assert (said(found), [t.logprob for t in found.tokens]) == (
                        said(plain),
                        [t.logprob for t in plain.tokens],
                    )
        assert max(drafted) > 0


@pytest.mark.parametrize("native", [True, False])
def test_the_same_seed_says_the_same_again(native: bool, weights: Path) -> None:
    """Without the mode, too: one machine, one call after the other."""
    options = RunOptions(ctx_size=256, threads=1)
    texts = set()
    for _ in range(2):
        with open_runner(weights, options, native_sampling=native) as one:
            (answer,) = answers(one, words(30), sampling=CHANCE)
            texts.add((tuple(said(answer)), tuple(token.logprob for token in answer.tokens)))
            (other,) = answers(one, words(30), sampling=CHANCE.with_values({"seed": 12}))
            assert said(other) != said(answer)
    assert len(texts) == 1


def test_k_quants_keep_to_one_kernel(stories: Path, tmp_path: Path) -> None:
    """As they stand in the file, where tiled kernels would take eight rows; asked once a process,
    so in a fresh one.
    """
    path = made(
        tiny_checkpoint.grown(stories, tmp_path / "wide", hidden=1024, layers=2, shards=1), "Q4_K_M"
    )
    done = subprocess.run(
        [sys.executable, "-c", ALONE, str(path)],
        env=build_child_environ(GGML_CPU_TILED_MM="1"),
        check=False,
    )
    assert done.returncode == 0


ALONE = """
import sys
from pathlib import Path
from llmcli import config
from llmcli.runtime.binding.context_options import ContextOptions
from llmcli.runtime.binding.open_context import open_context
from llmcli.runtime.binding.model import open_model
from tests.runtime.test_reproducible import feed, words

config.disable_tiled_kernels()
options = ContextOptions(256, 256, 256, 1, 1, 1, "q8_0", "q8_0", "on", swa_full=True)
with open_model(Path(sys.argv[1]), gpu_layers=0, repack=False) as model, open_context(model, options) as context:
    whole = feed(context, words(60), 60)
    for chunk in (1, 4, 7, 9):
        context.clear()
        assert feed(context, words(60), chunk) == whole, chunk
"""


def test_run_tells_what_is_covered_and_cuts_as_it_is_told(folder: Path) -> None:
    weights, found = made(folder, "Q8_0"), []
    for flags in (["-ub", "512", "-t", "1"], ["-ub", "6", "-b", "11", "-t", "2"]):
        said = [
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
        command = [*main, "run", str(weights), "--reproducible", "--json", *said, *flags]
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
        found.append([(token["id"], token["logprob"]) for token in answer["tokens"]])
    assert found[0] == found[1]


def test_floats_are_refused(folder: Path, stories_gguf: Path) -> None:
    half = made(folder, "F16")
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


class Moody(FakeContext):
    """A context whose logits know how many rows were computed with theirs, from `many` on."""

    many = 8

    def clear(self) -> None:
        self.cells = [[] for _ in self.cells]

    def decode(self, rows: BatchRows) -> list[FakeRow]:
        shift = np.float32(len(rows) >= self.many)
        return [FakeRow(row.logits + shift) for row in super().decode(rows)]


@pytest.mark.parametrize(("many", "expected"), [(2, False), (4, False), (8, False), (10, True)])
def test_the_trial_finds_kernels_that_count_rows(many: int, expected: bool) -> None:
    context = Moody()
    context.many = many
    context.n_vocab = 256  # type: ignore[attr-defined]
    assert reproducible.is_batch_invariant(context) is expected  # type: ignore[arg-type]


def test_a_model_is_refused_where_no_layout_passes_the_trial(
    weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[Context] = []
    never: Callable[[Context], bool] = lambda context: bool(tried.append(context))  # noqa: E731
    monkeypatch.setattr(reproducible, "is_batch_invariant", never)
    with pytest.raises(UserError, match="how many tokens are computed at once"), opened(weights):
        pass
    assert 1 <= len(tried) <= 2  # where some layout cannot do it is not even tried
