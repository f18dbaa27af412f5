"""A full pool with real models: preempted and restored sequences have the same tokens and bit-equal
log-probabilities as alone.
"""

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

RANDOM_SAMPLING = default_sampling().with_values({"temp": 1.2, "top_k": 0, "top_p": 1, "min_p": 0})


def requests(count: int, rng: random.Random, vocabulary: int, beams: bool = False) -> list[Request]:
    """Return random requests, many of which have a common prefix. With `beams`, some of them use
    beam search.
    """
    stems = [rng.choices(range(3, vocabulary), k=length) for length in (80, 40, 0)]
    made = []
    for number in range(count):
        prompt = (*rng.choice(stems), *rng.choices(range(3, vocabulary), k=rng.randint(1, 60)))
        options = (
            {"strategy": "beam", "search": BeamSettings(beams=2)}
            if beams and number % 9 == 4
            else {}
        )
        sampling = RANDOM_SAMPLING.with_values({"seed": number})
        made.append(
            Request(prompt, sampling, rng.randint(1, 60), ignore_eos=True, logprobs=True, **options)
        )
    return made


def ids_and_logprobs(answer: Answer | None) -> list[tuple[int, float | None]]:
    assert answer is not None and answer.finish == "length"
    return [(token.id, token.logprob) for token in answer.tokens]


def answer_alone(runner: Runner, request: Request) -> list[tuple[int, float | None]]:
    """Return the answer to a request while no other request runs."""
    reply = runner.reply(request)
    for _ in reply:
        pass
    return ids_and_logprobs(reply.answer)


@pytest.fixture(scope="module")
def weights(stories: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_checkpoint.random_llama(
        stories, tmp_path_factory.mktemp("grown") / "model", hidden=256, layers=2, shards=1
    )
    out = folder.with_suffix(".Q8_0.gguf")
    write.write_model(
        plan.plan_quantization(checkpoint_source.open_checkpoint(folder), "Q8_0"), out, threads=1
    )
    return out


@pytest.mark.parametrize(("swap", "count"), [(1 << 30, 24), (0, 8)])
def test_preempted_requests_have_the_same_answers_as_alone(
    swap: int, count: int, weights: Path
) -> None:
    options = reproducible.with_required_options(RunOptions(ctx_size=256, threads=1))
    rng = random.Random(3)
    with open_runner(weights, options) as runner:
        all_requests = requests(count, rng, runner.model.n_vocab)
        expected = [answer_alone(runner, request) for request in all_requests]
    with open_runner(weights, options, slots=6) as runner:
        runner.engine.schedule = Schedule(max_chunk_rows=32, host_bytes=swap)
        storm_result = storm(runner.engine, all_requests, rng)
        assert storm_result.preempted
        assert [
            ids_and_logprobs(storm_result.answers[number]) for number in range(count)
        ] == expected
        runner.engine.ledger.evict_idle()
        runner.engine.check()
        assert runner.engine.stats.used_cells == 0


@pytest.mark.parametrize(
    ("options", "schedule"),
    [
        (
            RunOptions(ctx_size=256, threads=1),
            Schedule(max_running=5, max_gap_seconds=0.01, min_offload_rows=16, host_bytes=1 << 30),
        ),
        (
            RunOptions(ctx_size=256, threads=1, flash_attn="off", prefill_cells=128),
            Schedule(max_running=5, max_gap_seconds=0.01, min_prefill_rows=48, host_bytes=1 << 30),
        ),
    ],
    ids=["offloaded", "prefill context"],
)
def test_all_requests_end_and_the_ledger_agrees_when_idle_cells_are_offloaded(
    weights: Path, options: RunOptions, schedule: Schedule
) -> None:
    rng = random.Random(4)
    with open_runner(weights, options, slots=7) as runner:
        runner.engine.schedule = schedule
        storm_result = storm(
            runner.engine, requests(20, rng, runner.model.n_vocab, beams=True), rng, cancelled=0.005
        )
        assert storm_result.preempted
        assert {answer.finish for answer in storm_result.answers.values() if answer} <= {
            "length",
            "cancelled",
        }


def test_a_sequence_with_recurrent_state_is_preempted_and_continued(tmp_path: Path) -> None:
    rng = random.Random(5)
    with open_runner(
        tiny_gguf.mamba(tmp_path / "mamba.gguf"), RunOptions(ctx_size=256, threads=1), slots=5
    ) as runner:
        runner.engine.schedule = Schedule(host_bytes=1 << 30)
        storm_result = storm(runner.engine, requests(12, rng, runner.model.n_vocab), rng)
        assert storm_result.preempted
        assert {answer.finish for answer in storm_result.answers.values() if answer} == {"length"}


def test_samples_that_share_their_prompt_have_the_same_answers_as_alone(weights: Path) -> None:
    options = reproducible.with_required_options(RunOptions(ctx_size=1024, threads=1))
    rng = random.Random(6)
    with open_runner(weights, options) as runner:
        all_requests = requests(12, rng, runner.model.n_vocab)
        with_other_seeds = [
            replace(request, sampling=RANDOM_SAMPLING.with_values({"seed": number + 1}))
            for number, request in enumerate(all_requests)
        ]
        expected = [
            answer_alone(runner, request)
            for pair in zip(all_requests, with_other_seeds, strict=True)
            for request in pair
        ]
    with open_runner(weights, options, slots=5) as runner:
        ids = [
            number
            for request in all_requests
            for number in runner.engine.submit_samples(request, 2)
        ]
        while runner.engine.is_busy:
            runner.engine.step()
            runner.engine.check()
        assert [ids_and_logprobs(runner.engine.pop_answer(number)) for number in ids] == expected


def test_requests_beside_a_beam_search_have_the_same_answers_as_alone(weights: Path) -> None:
    options, rng = (
        reproducible.with_required_options(RunOptions(ctx_size=1024, threads=1)),
        random.Random(1),
    )
    with open_runner(weights, options, slots=2) as runner:
        all_requests = requests(12, rng, runner.model.n_vocab)
        all_requests = [
            replace(request, strategy="beam", search=BeamSettings(beams=2))
            if number % 4 == 1
            else request
            for number, request in enumerate(all_requests)
        ]
        expected = [answer_alone(runner, request) for request in all_requests]
    with open_runner(weights, options, slots=8) as runner:
        storm_result = storm(runner.engine, all_requests, rng)
        assert [ids_and_logprobs(storm_result.answers[number]) for number in range(12)] == expected
