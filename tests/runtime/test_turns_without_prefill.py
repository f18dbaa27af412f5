"""Chats with models whose state cannot be cut: undo, edits, branches and other answers compute only
new tokens, and have the logits of a fresh context.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from llmcli.runtime import reproducible
from llmcli.runtime.draft_settings import DraftSettings
from llmcli.runtime.kv_cache import offload, offload_store
from llmcli.runtime.requests.beam_settings import BeamSettings
from llmcli.runtime.requests.request import Answer, Request, RunOptions
from llmcli.runtime.runner import Runner, open_runner
from llmcli.runtime.sampling import default_sampling
from llmcli.runtime.strategies.base import Speculation
from quant.convert import checkpoint_source
from quant.quantize import plan, write
from tests.fixtures.drafts import CHEAP, Knowing, Steady
from tests.quant import families, tiny_gguf

GREEDY = default_sampling().with_values({"temp": 0})
HYBRIDS = ("Qwen3_5ForCausalLM", "NemotronHForCausalLM", "Lfm2ForCausalLM")
WINDOWS = ("Gemma3ForCausalLM", "GptOssForCausalLM")
HEADS = {"Lfm2ForCausalLM": None}  # of another width than 64; None: hidden_size / heads
TURNS = 20
N_ANSWER = 7


@pytest.fixture(scope="module", params=["mamba", *HYBRIDS, *WINDOWS])
def model_file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("turns")
    out = folder / "m.gguf"
    if request.param == "mamba":
        return tiny_gguf.mamba(out)
    pytest.importorskip("transformers", reason="transformers is not installed: it makes the models")
    case = next(case for case in families.cases() if case.hf == request.param)
    # a q8_0 cache needs heads of whole blocks
    case = replace(case, settings=case.settings | {"head_dim": HEADS.get(request.param, 64)})
    families.build(case, folder / "tiny")
    source = checkpoint_source.open_checkpoint(folder / "tiny")
    write.write_model(plan.plan_quantization(source, "Q8_0"), out, threads=1)
    return out


@contextmanager
def open_small(
    path: Path, host_bytes: int, is_reproducible: bool, n_ctx: int = 1024
) -> Iterator[Runner]:
    options = RunOptions(ctx_size=n_ctx, threads=1, batch_size=128, ubatch_size=128)
    if is_reproducible:
        options = reproducible.with_required_options(options)
    with open_runner(path, options, slots=1) as runner:
        runner.engine.schedule = replace(runner.engine.schedule, host_bytes=host_bytes)
        yield runner


@dataclass
class Turn:
    """A turn of a conversation: all tokens of its prompt, and those of its answer."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...] = ()

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.prompt + self.answer


def random_prompt(count: int) -> tuple[int, ...]:
    rng = random.Random(3)
    return tuple(rng.randrange(3, 250) for _ in range(count))


def answer(runner: Runner, prompt: tuple[int, ...]) -> Answer:
    stream = runner.reply(
        Request(prompt, GREEDY, max_tokens=N_ANSWER, logprobs=True, top_logprobs=5, ignore_eos=True)
    )
    list(stream)
    runner.engine.check()
    return stream.answer


def values(answer: Answer) -> list[object]:
    return [(token.id, token.logprob) for token in answer.tokens] + list(answer.top_logprobs)


@dataclass
class Step:
    """A turn of `play`: what it was, how many tokens its prompt adds, how many were computed, and
    whether its logits are those of a fresh context (None: not compared).
    """

    kind: str
    n_new: int
    n_computed: int
    is_equal: bool | None


def play(runner: Runner, fresh: Runner | None, turns: int, n_prompt: int = 90) -> Iterator[Step]:
    """Play turns of random tokens: continue, undo, edit, branch, and answer again. `fresh`: a runner
    that computes every prompt from its start.
    """
    rng = random.Random(5)
    vocabulary = runner.model.n_vocab
    history: list[Turn] = []
    for number in range(turns):
        kind = rng.choice(["continue", "undo", "edit", "branch", "again"]) if number else "new"
        new = tuple(rng.randrange(3, vocabulary) for _ in range(9))
        if kind == "new":
            turn, n_new = (
                Turn(tuple(rng.randrange(3, vocabulary) for _ in range(n_prompt))),
                n_prompt,
            )
        elif kind == "again":
            turn, n_new = Turn(history[-1].prompt), 1
        else:
            back = {"continue": 1, "undo": 2, "edit": 2}.get(kind, rng.randint(1, number))
            base = history[-min(back, len(history))]
            # the last token of an answer is not computed before the text continues
            turn, n_new = Turn(base.tokens + new), len(new) + 1
        result = answer(runner, turn.prompt)
        is_equal = None
        if fresh is not None:
            fresh.engine.ledger.evict_idle()
            is_equal = values(result) == values(answer(fresh, turn.prompt))
        yield Step(kind, n_new, result.prompt_tokens - result.cached_tokens, is_equal)
        turn.answer = tuple(token.id for token in result.tokens)
        history.append(turn)


@pytest.mark.parametrize("is_reproducible", [True, False])
def test_turns_compute_only_new_tokens(
    model_file: Path, is_reproducible: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a tiny model computes a token faster than its state is copied
    monkeypatch.setattr(offload, "is_worth_storing", lambda cost: True)
    monkeypatch.setattr(offload_store, "is_worth_restoring", lambda cost: True)
    with (
        open_small(model_file, 256 << 20, is_reproducible) as runner,
        open_small(model_file, 0, is_reproducible) as fresh,
    ):
        for step in play(runner, fresh if is_reproducible else None, TURNS):
            assert step.is_equal is not False, step
            # Without holes in its cells, a window that keeps all of them has no complete states,
            # and other branches are computed again.
            if runner.context.has_complete_states or step.kind in ("continue", "again"):
                assert step.n_computed <= step.n_new, step
        store = runner.engine.scheduler.offload_store
        assert store.nbytes <= store.max_bytes
        assert bool(store.nbytes) == runner.context.has_complete_states


def test_beams_and_samples_share_the_prompt(model_file: Path) -> None:
    """The score of a beam is that of its tokens, scored as a prompt."""
    # the same kernels for one row and for many: a flipped choice of experts changes a score by 0.3
    options = RunOptions(
        ctx_size=1024,
        threads=1,
        batch_size=128,
        ubatch_size=128,
        scoring_outputs=128,
        flash_attn="on",
        cache_type_k="q8_0",
        cache_type_v="q8_0",
        gemm="ggml",
    )
    prompt = random_prompt(60)
    beams = Request(
        prompt,
        GREEDY,
        max_tokens=6,
        strategy="beam",
        search=BeamSettings(beams=3, length_penalty=0.0),
        ignore_eos=True,
    )
    with open_runner(model_file, options, slots=4) as runner:
        runner.engine.schedule = replace(runner.engine.schedule, host_bytes=256 << 20)
        stream = runner.reply(beams)
        list(stream)
        runner.engine.check()
        for hypothesis in stream.answer.beams:
            scored = answer_scores(runner, prompt + hypothesis.tokens)
            assert sum(scored[-len(hypothesis.tokens) :]) == pytest.approx(
                hypothesis.score, abs=0.1
            )
        several = runner.reply(Request(prompt, default_sampling(), max_tokens=6), 3)
        list(several)
        runner.engine.check()
        assert [result.cached_tokens for result in several.answers[1:]] == [len(prompt)] * 2


def answer_scores(runner: Runner, tokens: tuple[int, ...]) -> list[float]:
    stream = runner.reply(Request(tokens, GREEDY, max_tokens=1, score_prompt=True, logprobs=True))
    list(stream)
    return [score.logprob for score in stream.answer.prompt_scores]


def test_drafts_in_the_reproducible_mode_change_nothing(model_file: Path) -> None:
    """The mode computes recurrent state token by token. llama.cpp keeps no states to go back to in
    such small micro-batches, and would end the process.
    """
    options = reproducible.with_required_options(
        RunOptions(ctx_size=1024, threads=1, batch_size=128, ubatch_size=128)
    )
    request = Request(random_prompt(60), GREEDY, max_tokens=20, logprobs=True)
    with open_runner(model_file, options, drafting=DraftSettings("on")) as runner:
        runner.engine.schedule = replace(runner.engine.schedule, host_bytes=256 << 20)
        assert runner.context.n_rs_seq == 0
        plain = runner.reply(request)
        list(plain)
        tokens = [token.id for token in plain.answer.tokens]
        drafter = Knowing(tokens, right=0.5)
        runner.engine.resources = replace(
            runner.engine.resources,
            speculation=Speculation((drafter,), Steady(CHEAP), 16, 16, is_reproducible=True),
        )
        drafted = runner.reply(replace(request, strategy="speculative"))
        list(drafted)
        runner.engine.check()
        assert values(drafted.answer) == values(plain.answer)
        assert drafter.results
