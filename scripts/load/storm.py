"""Run many random requests over a small cell pool, and compare the cells with llama.cpp after each
step.

usage: .venv/bin/python scripts/load/storm.py MODEL.gguf [--requests 300] [--cells 512]
       [--slots 8] [--running 6] [--seed 0] [--threads 1] [--swap BYTES] [--alike]

Some prompts share beginnings; priorities and clients differ. Some requests are cancelled or
dropped, some search with beams. The pool must be empty after idle cells are evicted. With `--alike`
the reproducible mode is on, nothing is cancelled, and each answer must equal the one that the
request gets alone: the same tokens, and the same bits of their log-probabilities. Models with any
memory work, also recurrent ones and sliding windows.
"""

import argparse
import random
import resource
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from llmcli.runtime import reproducible
from llmcli.runtime.engine.schedule import Schedule
from llmcli.runtime.requests.beam_settings import BeamSettings
from llmcli.runtime.requests.request import Answer, Request, RunOptions
from llmcli.runtime.runner import Runner, open_runner
from llmcli.runtime.sampling import default_sampling
from tests.fixtures.full_pool import storm

CHANCE = default_sampling().with_values({"temp": 1.1})


def requests(runner: Runner, given: argparse.Namespace, rng: random.Random) -> list[Request]:
    """Return requests of at most a third of the pool each, so that three fill it."""
    words, most = range(3, min(20_000, runner.model.n_vocab)), given.cells // 6
    stems = [rng.choices(words, k=length) for length in (most, most // 2, 0)]
    beams = runner.engine.ledger.can_fork and not given.alike
    made = []
    for number in range(given.requests):
        prompt = (*rng.choice(stems), *rng.choices(words, k=rng.randint(1, most)))
        more = (
            {"strategy": "beam", "search": BeamSettings(beams=3)}
            if beams and rng.random() < 0.05
            else {}
        )
        sampling = CHANCE.with_values({"seed": number})
        made.append(
            Request(
                prompt,
                sampling,
                rng.randint(1, most),
                ignore_eos=True,
                logprobs=True,
                client=rng.choice("abc"),
                priority=rng.choice((0, 0, 0, 1, 2)),
                **more,
            )
        )
    return made


def said(answer: Answer | None) -> list[tuple[int, float | None]]:
    """Return the tokens of an answer and their log-probabilities."""
    return [(token.id, token.logprob) for token in answer.tokens] if answer else []


def alone(runner: Runner, request: Request) -> list[tuple[int, float | None]]:
    """Return the tokens that a request gets alone."""
    reply = runner.reply(request)
    for _ in reply:
        pass
    return said(reply.answer)


def main() -> None:
    """Run once; an AssertionError names the failure, and the seed is printed first."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--alike", action="store_true")
    for name, value in (
        ("requests", 300),
        ("cells", 512),
        ("slots", 8),
        ("running", 6),
        ("seed", 0),
        ("threads", 1),
        ("swap", 1 << 28),
    ):
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()
    rng = random.Random(given.seed)
    options = RunOptions(ctx_size=given.cells, threads=given.threads)
    options = reproducible.with_required_options(options) if given.alike else options
    with open_runner(given.model, options, slots=given.slots) as runner:
        asked = requests(runner, given, rng)
        idle = rng.choice((None, given.cells // 8))
        runner.engine.schedule = Schedule(
            max_running=given.running,
            max_gap_seconds=0.1,
            swap_bytes=given.swap,
            max_idle_cells=idle,
        )
        print(
            f"seed {given.seed}: {given.requests} requests, {runner.n_ctx} cells, idle at most {idle}",
            flush=True,
        )
        begun, cuts = time.perf_counter(), 0.0 if given.alike else 0.002
        made = storm(runner.engine, asked, rng, cancelled=cuts, dropped=cuts / 3)
        spent = time.perf_counter() - begun
        runner.engine.ledger.evict_idle()
        runner.engine.check()
        load = runner.engine.stats
        assert (
            load.used_cells
            == load.n_running
            == load.n_waiting
            == runner.engine.scheduler.swap.nbytes
            == 0
        ), load
    ends = [answer.finish for answer in made.answers.values() if answer]
    assert set(ends) <= {"length", "cancelled"}, set(ends)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    told = {name: ends.count(name) for name in sorted(set(ends))}
    print(
        f"{made.steps} steps in {spent:.1f} s; {told}; {load.n_preemptions} preempted and resumed; {peak} MiB at most"
    )
    if given.alike:
        with open_runner(given.model, options) as runner:
            wrong = [
                number
                for number, one in enumerate(asked)
                if alone(runner, one) != said(made.answers[number])
            ]
        print(
            f"{len(asked) - len(wrong)} of {len(asked)} answers equal those of the requests alone"
        )
        assert not wrong, wrong


if __name__ == "__main__":
    main()
