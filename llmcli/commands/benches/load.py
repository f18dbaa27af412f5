"""`llmcli bench load`: parse, put a load on a server, print what its users waited."""

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from llmcli.commands.reporting import Charts, Report
from llmcli.errors import UsageError

Values = list[str] | None
Words = Annotated[
    list[str],
    typer.Argument(
        metavar="URL|REF [compare URL|REF]",
        help="A server's address, or a model: `llmcli serve` is started for it.",
    ),
]
Against = Annotated[
    str | None,
    typer.Option("--against", metavar="URL|REF", help="Compare with this one, in turns."),
]
Serve = Annotated[
    str, typer.Option("--serve", metavar="'-t 2 …'", help="Flags of the server that is started.")
]
Concurrency = Annotated[
    Values, typer.Option("--concurrency", help="Closed loop: so many at once (1,2,4); default 8.")
]
Rate = Annotated[
    Values,
    typer.Option("--rate", help="Open loop: so many a second, whatever is answered (0.5,1,2)."),
]
Arrivals = Annotated[
    str | None,
    typer.Option(
        "--arrivals", help="Of an open loop: poisson, gamma (bursts) or constant [poisson]."
    ),
]
Burst = Annotated[
    float | None,
    typer.Option("--burstiness", min=0.01, max=1000, help="Of gamma: 1 is Poisson, 4 bursts [4]."),
]
FindMax = Annotated[
    str | None,
    typer.Option(
        "--find-max",
        metavar="WHAT",
        help="concurrency, rate or both: the largest that keeps --slo.",
    ),
]
Slo = Annotated[
    str | None,
    typer.Option("--slo", metavar="LIMITS", help="A promise in ms: ttft:2000,tpot:100 (e2el too)."),
]
Percent = Annotated[
    float | None,
    typer.Option(
        "--percent", min=1, max=100, help="Of the requests must keep --slo in --find-max [95]."
    ),
]
Requests = Annotated[
    int | None,
    typer.Option("--requests", min=1, help="Measured requests of each load; default 100."),
]
Seconds = Annotated[
    float | None, typer.Option("--seconds", min=0.1, help="Measure each load at least so long.")
]
Warmup = Annotated[
    int | None,
    typer.Option("--warmup", min=0, help="Requests that do not count; default: one round."),
]
Turns = Annotated[
    int | None,
    typer.Option(
        "-r", "--repetitions", min=1, help="Of each load [1], a comparison [8], a search [<= 30]."
    ),
]
Mix = Annotated[
    str,
    typer.Option("--mix", help="What is asked: fixed (words), sonnet (verse), or a JSONL file."),
]
Prompt = Annotated[int, typer.Option("-p", "--n-prompt", min=1, help="Tokens of a prompt, about.")]
Gen = Annotated[int, typer.Option("-n", "--n-gen", min=1, help="Tokens of an answer.")]
Shared = Annotated[
    float,
    typer.Option("--shared", min=0, max=1, help="Part of each prompt that all have in common."),
]
Cancel = Annotated[
    float, typer.Option("--cancel", min=0, max=1, help="Part of the clients that go away early.")
]
Rpc = Annotated[
    str | None,
    typer.Option(
        "--rpc", metavar="HOST:PORT,…", help="Of the model that is served: part of it lies there."
    ),
]
Endpoint = Annotated[str, typer.Option("--endpoint", help="chat or completions.")]
Model = Annotated[
    str, typer.Option("-m", "--model", help="Name to send; default: the server's first.")
]
Key = Annotated[
    str | None, typer.Option("--api-key", metavar="KEY", help="A key that the server wants.")
]
KeyFile = Annotated[
    Path | None, typer.Option("--api-key-file", metavar="FILE", help="The same, from a file.")
]
Cacert = Annotated[
    Path | None,
    typer.Option("--cacert", metavar="FILE", help="PEM of who signed the server's TLS."),
]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="Do not check the server's certificate.")
]
Timeout = Annotated[
    float, typer.Option("--timeout", min=0.1, help="Seconds until a request has failed.")
]
Body = Annotated[
    str, typer.Option("--body", metavar="JSON", help="More fields of each request's body.")
]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Of prompts and arrivals.")]
Output = Annotated[str, typer.Option("-o", "--output", help="md, csv, json or jsonl.")]
NoHistory = Annotated[
    bool, typer.Option("--no-history", help="Keep nothing of it for `bench history`.")
]
Offline = Annotated[bool, typer.Option("--offline", help="Make no connection beyond this machine.")]


def load(
    ctx: typer.Context,
    words: Words,
    against: Against = None,
    serve: Serve = "",
    rpc: Rpc = None,
    concurrency: Concurrency = None,
    rate: Rate = None,
    arrivals: Arrivals = None,
    burstiness: Burst = None,
    find_max: FindMax = None,
    slo: Slo = None,
    percent: Percent = None,
    requests: Requests = None,
    seconds: Seconds = None,
    warmup: Warmup = None,
    repetitions: Turns = None,
    mix: Mix = "fixed",
    n_prompt: Prompt = 512,
    n_gen: Gen = 128,
    shared: Shared = 0.0,
    cancel: Cancel = 0.0,
    endpoint: Endpoint = "chat",
    model: Model = "",
    api_key: Key = None,
    api_key_file: KeyFile = None,
    cacert: Cacert = None,
    insecure: Insecure = False,
    timeout: Timeout = 600.0,
    body: Body = "",
    seed: Seed = 1,
    output: Output = "md",
    no_history: NoHistory = False,
    report_file: Report = None,
    chart: Charts = None,
    offline: Offline = False,
    json: Annotated[bool, typer.Option("--json", help="The same as -o json.")] = False,
) -> None:
    """Measure what users of a server wait: any that speaks OpenAI's API, or a model that is served
    for it.

    Prompts are distinct, so that a prefix cache helps no more than --shared says. --find-max looks
    for the most users (or requests a second) for whom a promise holds: --slo ttft:2000,tpot:100.
    """
    from llmcli.commands import loading, reporting

    server, other = _sides(words, against)
    reporting.check(report_file)
    given = loading.Given(
        **{name: value for name, value in ctx.params.items() if name in loading.FIELDS}
    )
    if rpc is not None:
        given = replace(given, serve=_over(rpc, serve, [name for name in (server, other) if name]))
    loading.run(server, other, given, "json" if json else output, (report_file, chart))


def _over(rpc: str, flags: str, names: Sequence[str]) -> str:
    """The flags of a server whose model lies on workers; raises UsageError where none, or several,
    would be started.
    """
    started = [name for name in names if "://" not in name]
    if len(started) != 1:
        why = (
            "a worker serves one model at a time"
            if started
            else f"{names[0]} runs already, with its own workers"
        )
        raise UsageError(
            f"--rpc is for one model that is served here: {why}", hint="leave out --rpc"
        )
    return f"{flags} --rpc {shlex.quote(rpc)}"


def _sides(words: list[str], against: str | None) -> tuple[str, str | None]:
    """A and B of `A`, `A --against B`, `A compare B`; raises UsageError."""
    match words, against:
        case [one], _:
            return one, against
        case [one, "compare", other], None:
            return one, other
        case _:
            raise UsageError(
                f"cannot make two servers of {' '.join(words)!r}",
                hint="llmcli bench load A --against B",
            )


BENCHES = (load,)
