#!/usr/bin/env python3
"""Measure how much of their prompts the users of a server find in its caches.

usage: .venv/bin/python scripts/benchmarks/prefix_reuse.py [REF] [-np 32] [-c 40960] [--users 32]
       [--tokens 700] [--rounds 3] [--answer 16] [-t 1] [--host-bytes BYTES]
       [--idle-offload room|measured|always]

Users send chats in turn, one request at a time. In each round a user sends all of the conversation
so far and a few new tokens. REF is opened as `serve` opens it. Without REF, a stand-in of 128 KiB
per token is used, whose states have their true size but take no memory, and whose work takes time
only on a clock of its own: 10 ms a token, 5 GB/s for copies. The script prints a line
for each round: the share of the prompts that was reused, without the new tokens of the turn, which
no cache can have; the seconds; and where the conversations are.
"""

import argparse
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from llmcli.config import load_config
from llmcli.model_loader.open_server_model import open_server_model
from llmcli.model_loader.run_flags import RunFlags
from llmcli.runtime.engine.engine import Engine
from llmcli.runtime.engine.schedule import Schedule
from llmcli.runtime.requests.beam_settings import NO_SEARCH
from llmcli.runtime.requests.request import Request, RunOptions
from llmcli.runtime.sampling import default_sampling
from llmcli.ui import UI
from tests.fixtures.fakes import FakeClock, FakeModel, TimedContext

STAND_IN_TOKEN_BYTES = 128 << 10
SPARE_SLOTS = 4  # sequences for cached prefixes beside those of the answers, as serve has them
NEW_TOKENS = 8  # tokens that a user adds in each turn
GREEDY = default_sampling().with_values({"temp": 0})


@contextmanager
def opened_engine(args: argparse.Namespace) -> Iterator[tuple[Engine, range]]:
    """Open the model or the stand-in. Yield its engine, and the ids of ordinary tokens."""
    if args.ref is None:
        clock = time.perf_counter = FakeClock()
        context = TimedContext(
            clock=clock,
            n_ctx=args.ctx,
            n_seq_max=args.parallel + SPARE_SLOTS,
            n_batch=512,
            reply=lambda tokens: 97 + len(tokens) % 26,
            token_bytes=STAND_IN_TOKEN_BYTES,
        )
        schedule = Schedule(
            args.parallel,
            max_gap_seconds=0.5,
            host_bytes=args.host_bytes or 0,
            idle_offload=args.idle_offload or "room",
        )
        engine = Engine(
            context, FakeModel(), None, schedule=schedule, token_bytes=STAND_IN_TOKEN_BYTES
        )
        yield engine, range(256)
        return
    options = RunOptions(ctx_size=args.ctx, threads=args.threads, threads_batch=args.threads)
    flags = RunFlags(options, {}, NO_SEARCH)
    with open_server_model(args.ref, flags, load_config(), UI(), args.parallel) as model:
        engine = model.runner.engine
        if args.host_bytes is not None:
            engine.schedule = replace(
                engine.schedule, host_bytes=args.host_bytes, measure_host_bytes=None
            )
        if args.idle_offload is not None:
            engine.schedule = replace(engine.schedule, idle_offload=args.idle_offload)
        yield engine, range(300, min(20_000, model.runner.model.n_vocab))


def main() -> None:
    """Run all rounds and print their figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ref", nargs="?")
    parser.add_argument("-np", "--parallel", type=int, default=32)
    parser.add_argument("-c", "--ctx", type=int, default=40_960)
    parser.add_argument("-t", "--threads", type=int, default=1)
    parser.add_argument("--host-bytes", type=int, help="budget for states in host memory")
    parser.add_argument("--idle-offload", choices=("room", "measured", "always"))
    for name, value in (("users", 32), ("tokens", 700), ("rounds", 3), ("answer", 16)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    rng = random.Random(0)
    with opened_engine(args) as (engine, ordinary_tokens):
        chats = [rng.choices(ordinary_tokens, k=args.tokens) for _ in range(args.users)]
        for number in range(args.rounds):
            n_reused, n_reusable, start_time = 0, 0, time.perf_counter()
            for chat in chats:
                request = Request(tuple(chat), GREEDY, args.answer, ignore_eos=True)
                sequence = engine.submit(request)
                while engine.is_busy:
                    engine.step()
                answer = engine.pop_answer(sequence)
                n_reused += answer.cached_tokens
                # the last token of an answer is not in the cache
                n_reusable += len(chat) - NEW_TOKENS - 1 if number else len(chat)
                chat += [token.id for token in answer.tokens]
                chat += rng.choices(ordinary_tokens, k=NEW_TOKENS)
            seconds = time.perf_counter() - start_time
            print(
                f"round {number + 1}: {n_reused / n_reusable:6.1%} of the prompts reused, {seconds:.1f} s,"
                f" {engine.ledger.used_cells:,} of {engine.ledger.size:,} cells used,"
                f" {engine.scheduler.idle_offload.nbytes / 2**20:,.0f} MiB in host memory",
                flush=True,
            )
        engine.check()
        n_budget_bytes = engine.scheduler.offload_store.max_bytes
        print(
            f"{args.users} users, {len(engine.ledger.tokens)} slots,"
            f" budget {n_budget_bytes / 2**20:,.0f} MiB"
        )


if __name__ == "__main__":
    main()
