"""Run many random requests in an engine with a small KV pool, and check the cells after each step.

usage: .venv/bin/python scripts/load/storm.py MODEL.gguf [--requests 300] [--cells 512]
       [--slots 8] [--running 6] [--seed 0] [--threads 1] [--host-bytes BYTES] [--alike]

Some prompts share beginnings; priorities and clients differ. Some requests are cancelled or
dropped, and some use beam search. After each step, the ledger's cell count must equal llama.cpp's.
At the end, after idle cells are evicted, the pool must be empty. With `--alike` the reproducible
mode is on, no request is cancelled, and each answer must equal the answer to the same request
alone: the same tokens, and the same bits of their log-probabilities. Models with any kind of memory
work, also recurrent ones and those with sliding windows.
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


def requests(runner: Runner, args: argparse.Namespace, rng: random.Random) -> list[Request]:
    """Return random requests. Each needs at most a third of the pool, so that three can fill it."""
    ordinary_tokens, max_tokens = range(3, min(20_000, runner.model.n_vocab)), args.cells // 6
    stems = [rng.choices(ordinary_tokens, k=length) for length in (max_tokens, max_tokens // 2, 0)]
    beams = runner.engine.ledger.can_fork and not args.alike
    requests = []
    for number in range(args.requests):
        prompt = (*rng.choice(stems), *rng.choices(ordinary_tokens, k=rng.randint(1, max_tokens)))
        search = (
            {"strategy": "beam", "search": BeamSettings(beams=3)}
            if beams and rng.random() < 0.05
            else {}
        )
        sampling = CHANCE.with_values({"seed": number})
        requests.append(
            Request(
                prompt,
                sampling,
                rng.randint(1, max_tokens),
                ignore_eos=True,
                logprobs=True,
                client=rng.choice("abc"),
                priority=rng.choice((0, 0, 0, 1, 2)),
                **search,
            )
        )
    return requests


def token_logprobs(answer: Answer | None) -> list[tuple[int, float | None]]:
    """Return the token ids of an answer with their log-probabilities, or [] for None."""
    return [(token.id, token.logprob) for token in answer.tokens] if answer else []


def tokens_alone(runner: Runner, request: Request) -> list[tuple[int, float | None]]:
    """Run a request without any other; return the token ids with their log-probabilities."""
    reply = runner.reply(request)
    for _ in reply:
        pass
    return token_logprobs(reply.answer)


def main() -> None:
    """Parse the flags, run the requests and print. Raises AssertionError if a check fails; the seed
    is printed before the run.
    """
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
        ("host-bytes", 1 << 29),
    ):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    options = RunOptions(ctx_size=args.cells, threads=args.threads)
    options = reproducible.with_required_options(options) if args.alike else options
    with open_runner(args.model, options, slots=args.slots) as runner:
        all_requests = requests(runner, args, rng)
        idle = rng.choice(("room", "measured", "always"))
        runner.engine.schedule = Schedule(
            max_running=args.running,
            max_gap_seconds=0.1,
            host_bytes=args.host_bytes,
            idle_offload=idle,
        )
        print(
            f"seed {args.seed}: {args.requests} requests, {runner.n_ctx} cells, finished answers leave them: {idle}",
            flush=True,
        )
        began, end_chance = time.perf_counter(), 0.0 if args.alike else 0.002
        result = storm(
            runner.engine, all_requests, rng, cancelled=end_chance, dropped=end_chance / 3
        )
        seconds = time.perf_counter() - began
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
    finishes = [answer.finish for answer in result.answers.values() if answer]
    assert set(finishes) <= {"length", "cancelled"}, set(finishes)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    finish_counts = {name: finishes.count(name) for name in sorted(set(finishes))}
    print(
        f"{result.steps} steps in {seconds:.1f} s; {finish_counts}; {load.n_preemptions} preempted and resumed; {peak} MiB at most"
    )
    if args.alike:
        with open_runner(args.model, options) as runner:
            differing = [
                number
                for number, request in enumerate(all_requests)
                if tokens_alone(runner, request) != token_logprobs(result.answers[number])
            ]
        print(
            f"{len(all_requests) - len(differing)} of {len(all_requests)} answers equal those of the requests alone"
        )
        assert not differing, differing


if __name__ == "__main__":
    main()
