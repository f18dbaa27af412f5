"""A full pool on llama.cpp: a preempted and restored sequence has bit-equal logits."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from llmcli.runtime import reproducible
from llmcli.runtime.engine.schedule import Schedule
from llmcli.runtime.requests.beam_settings import BeamSettings
from llmcli.runtime.requests.request import Answer, Request, RunOptions
from llmcli.runtime.runner import Runner, open_runner
from llmcli.runtime.sampling import default_sampling
from quant.convert import checkpoint_source
from quant.quantize import plan, write
from tests.fixtures.full_pool import storm
from tests.quant import tiny_checkpoint, tiny_gguf

CHANCE = default_sampling().with_values({"temp": 1.2, "top_k": 0, "top_p": 1, "min_p": 0})


def requests(count: int, rng: random.Random, vocabulary: int, beams: bool = False) -> list[Request]:
    stems = [rng.choices(range(3, vocabulary), k=length) for length in (80, 40, 0)]
    made = []
    for number in range(count):
        prompt = (*rng.choice(stems), *rng.choices(range(3, vocabulary), k=rng.randint(1, 60)))
        more = (
            {"strategy": "beam", "search": BeamSettings(beams=2)}
            if beams and number % 9 == 4
            else {}
        )
        sampling = CHANCE.with_values({"seed": number})
        made.append(
            Request(prompt, sampling, rng.randint(1, 60), ignore_eos=True, logprobs=True, **more)
        )
    return made


def said(answer: Answer | None) -> list[tuple[int, float | None]]:
    assert answer is not None and answer.finish == "length"
    return [(token.id, token.logprob) for token in answer.tokens]


def alone(runner: Runner, request: Request) -> list[tuple[int, float | None]]:
    reply = runner.reply(request)
    for _ in reply:
        pass
    return said(reply.answer)


@pytest.fixture(scope="module")
def weights(stories: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_checkpoint.grown(
        stories, tmp_path_factory.mktemp("grown") / "model", hidden=256, layers=2, shards=1
    )
    out = folder.with_suffix(".Q8_0.gguf")
    write.write_model(
        plan.plan_quantization(checkpoint_source.open_checkpoint(folder), "Q8_0"), out, threads=1
    )
    return out


@pytest.mark.parametrize(("swap", "count"), [(1 << 30, 24), (0, 8)])
def test_everybody_says_what_they_would_say_alone(swap: int, count: int, weights: Path) -> None:
    options = reproducible.with_required_options(RunOptions(ctx_size=256, threads=1))
    rng = random.Random(3)
    with open_runner(weights, options) as runner:
        asked = requests(count, rng, runner.model.n_vocab)
        expected = [alone(runner, request) for request in asked]
    with open_runner(weights, options, slots=6) as runner:
        runner.engine.schedule = Schedule(max_chunk_rows=32, swap_bytes=swap)
        made = storm(runner.engine, asked, rng)
        assert made.preempted
        assert [said(made.answers[number]) for number in range(count)] == expected
        runner.engine.ledger.evict_idle()
        runner.engine.check()
        assert runner.engine.stats.used_cells == 0


@pytest.mark.parametrize(
    ("options", "schedule"),
    [
        (
            RunOptions(ctx_size=256, threads=1),
            Schedule(max_running=5, max_gap_seconds=0.01, min_offload_rows=16),
        ),
        (
            RunOptions(ctx_size=256, threads=1, flash_attn="off", prefill_cells=128),
            Schedule(max_running=5, max_gap_seconds=0.01, min_prefill_rows=48),
        ),
    ],
    ids=["aside", "apart"],
)
def test_with_floats_and_forgetting_everybody_ends_and_the_books_agree(
    weights: Path, options: RunOptions, schedule: Schedule
) -> None:
    rng = random.Random(4)
    with open_runner(weights, options, slots=7) as runner:
        runner.engine.schedule = schedule
        made = storm(
            runner.engine, requests(20, rng, runner.model.n_vocab, beams=True), rng, cancelled=0.005
        )
        assert made.preempted
        assert {answer.finish for answer in made.answers.values() if answer} <= {
            "length",
            "cancelled",
        }


def test_recurrent_state_gives_way_and_comes_back(tmp_path: Path) -> None:
    rng = random.Random(5)
    with open_runner(
        tiny_gguf.mamba(tmp_path / "mamba.gguf"), RunOptions(ctx_size=256, threads=1), slots=5
    ) as runner:
        runner.engine.schedule = Schedule()
        made = storm(runner.engine, requests(12, rng, runner.model.n_vocab), rng)
        assert made.preempted
        assert {answer.finish for answer in made.answers.values() if answer} == {"length"}


def test_samples_that_share_their_prompt_are_what_each_is_alone(weights: Path) -> None:
    options = reproducible.with_required_options(RunOptions(ctx_size=1024, threads=1))
    rng = random.Random(6)
    with open_runner(weights, options) as runner:
        asked = requests(12, rng, runner.model.n_vocab)
        other = [
            replace(one, sampling=CHANCE.with_values({"seed": number + 1}))
            for number, one in enumerate(asked)
        ]
        expected = [
            alone(runner, request) for both in zip(asked, other, strict=True) for request in both
        ]
    with open_runner(weights, options, slots=5) as runner:
        ids = [one for request in asked for one in runner.engine.submit_samples(request, 2)]
        while runner.engine.is_busy:
            runner.engine.step()
            runner.engine.check()
        assert [said(runner.engine.pop_answer(one)) for one in ids] == expected


def test_a_search_of_beams_leaves_no_holes_for_others(weights: Path) -> None:
    options, rng = (
        reproducible.with_required_options(RunOptions(ctx_size=1024, threads=1)),
        random.Random(1),
    )
    with open_runner(weights, options, slots=2) as runner:
        asked = requests(12, rng, runner.model.n_vocab)
        asked = [
            replace(one, strategy="beam", search=BeamSettings(beams=2)) if number % 4 == 1 else one
            for number, one in enumerate(asked)
        ]
        expected = [alone(runner, request) for request in asked]
    with open_runner(weights, options, slots=8) as runner:
        made = storm(runner.engine, asked, rng)
        assert [said(made.answers[number]) for number in range(12)] == expected
