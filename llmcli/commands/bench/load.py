"""`llmcli bench load`: applies a load to a server and prints the latency and throughput of its
users.
"""

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from llmcli.commands.options.report import ChartSwitch, ReportFile
from llmcli.errors import UsageError

Values = list[str] | None
Servers = Annotated[
    list[str],
    typer.Argument(
        metavar="URL|REF [compare URL|REF]",
        help="A server's address; or a model, for which `llmcli serve` is started.",
    ),
]
Against = Annotated[
    str | None,
    typer.Option("--against", metavar="URL|REF", help="Compare with this server, in turns."),
]
Serve = Annotated[
    str, typer.Option("--serve", metavar="'-t 2 …'", help="Flags for a server that is started.")
]
Concurrency = Annotated[
    Values, typer.Option("--concurrency", help="Closed loop: requests at once (1,2,4); default 8.")
]
Rate = Annotated[
    Values,
    typer.Option("--rate", help="Open loop: requests per second, answered or not (0.5,1,2)."),
]
Arrivals = Annotated[
    str | None,
    typer.Option("--arrivals", help="Open loop: poisson, gamma (bursts) or constant [poisson]."),
]
Burst = Annotated[
    float | None,
    typer.Option(
        "--burstiness", min=0.01, max=1000, help="With gamma: 1 is Poisson, 4 bursts [4]."
    ),
]
FindMax = Annotated[
    str | None,
    typer.Option(
        "--find-max",
        metavar="WHAT",
        help="concurrency, rate or both: find the largest that meets --slo.",
    ),
]
Slo = Annotated[
    str | None,
    typer.Option("--slo", metavar="LIMITS", help="Limits in ms: ttft:2000,tpot:100 (also e2el)."),
]
Percent = Annotated[
    float | None,
    typer.Option(
        "--percent",
        min=1,
        max=100,
        help="Percent of the requests that must meet --slo in --find-max [95].",
    ),
]
Requests = Annotated[
    int | None,
    typer.Option("--requests", min=1, help="Measured requests per load; default 100."),
]
Seconds = Annotated[
    float | None, typer.Option("--seconds", min=0.1, help="Measure each load at least this long.")
]
Warmup = Annotated[
    int | None,
    typer.Option("--warmup", min=0, help="Requests that are not measured; default: one round."),
]
Turns = Annotated[
    int | None,
    typer.Option(
        "-r",
        "--repetitions",
        min=1,
        help="Runs of each load [1], of a comparison [8], of a search [<= 30].",
    ),
]
Mix = Annotated[
    str,
    typer.Option("--mix", help="Prompts: fixed (words), sonnet (verse), or a JSONL file."),
]
Prompt = Annotated[
    int, typer.Option("-p", "--n-prompt", min=1, help="Approximate tokens of a prompt.")
]
Gen = Annotated[int, typer.Option("-n", "--n-gen", min=1, help="Tokens of an answer.")]
Shared = Annotated[
    float,
    typer.Option("--shared", min=0, max=1, help="Fraction of each prompt that all share."),
]
Cancel = Annotated[
    float,
    typer.Option("--cancel", min=0, max=1, help="Fraction of the requests that are cancelled."),
]
Rpc = Annotated[
    str | None,
    typer.Option(
        "--rpc",
        metavar="HOST:PORT,…",
        help="Workers for a model that is served here.",
    ),
]
Endpoint = Annotated[str, typer.Option("--endpoint", help="chat or completions.")]
Model = Annotated[
    str, typer.Option("-m", "--model", help="Name to send; default: the server's first.")
]
Key = Annotated[str | None, typer.Option("--api-key", metavar="KEY", help="API key of the server.")]
KeyFile = Annotated[
    Path | None, typer.Option("--api-key-file", metavar="FILE", help="API key in a file.")
]
Cacert = Annotated[
    Path | None,
    typer.Option("--cacert", metavar="FILE", help="PEM file of the CA that signed the server."),
]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="Do not verify the server's TLS certificate.")
]
Timeout = Annotated[
    float, typer.Option("--timeout", min=0.1, help="Seconds until a request counts as failed.")
]
Body = Annotated[
    str, typer.Option("--body", metavar="JSON", help="Additional fields of each request's body.")
]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed of prompts and arrivals.")]
Output = Annotated[str, typer.Option("-o", "--output", help="md, csv, json or jsonl.")]
NoHistory = Annotated[
    bool, typer.Option("--no-history", help="Do not save the results for `bench history`.")
]
Offline = Annotated[bool, typer.Option("--offline", help="Make no connection beyond this machine.")]


def load(
    ctx: typer.Context,
    words: Servers,
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
    report_file: ReportFile = None,
    chart: ChartSwitch = None,
    offline: Offline = False,
    json: Annotated[bool, typer.Option("--json", help="Same as -o json.")] = False,
) -> None:
    """Measure the latency and throughput of a server, or of a model that is served.

    The server can be any with OpenAI's API. Prompts are distinct, so that a prefix cache helps only
    as far as --shared allows. --find-max searches for the most users (or requests per second)
    within limits such as --slo ttft:2000,tpot:100.
    """
    from llmcli.bench.load import request, run
    from llmcli.commands.options import report

    server, other = _parse_sides(words, against)
    report.check_report_path(report_file)
    given = request.LoadRequest(
        **{name: value for name, value in ctx.params.items() if name in request.FIELD_NAMES}
    )
    if rpc is not None:
        given = replace(
            given, serve=_add_workers(rpc, serve, [name for name in (server, other) if name])
        )
    run.run_load(server, other, given, "json" if json else output, (report_file, chart))


def _add_workers(rpc: str, flags: str, names: Sequence[str]) -> str:
    """Return the server flags with the workers; raises UsageError unless exactly one server is
    started.
    """
    started = [name for name in names if "://" not in name]
    if len(started) != 1:
        why = (
            "a worker serves one model at a time"
            if started
            else f"{names[0]} is running already, with its own workers"
        )
        raise UsageError(
            f"--rpc applies to one model that is served here: {why}", hint="leave out --rpc"
        )
    return f"{flags} --rpc {shlex.quote(rpc)}"


def _parse_sides(words: list[str], against: str | None) -> tuple[str, str | None]:
    """Return A and B of `A`, `A --against B` or `A compare B`; raises UsageError."""
    match words, against:
        case [one], _:
            return one, against
        case [one, "compare", other], None:
            return one, other
        case _:
            raise UsageError(
                f"expected one or two servers, not {' '.join(words)!r}",
                hint="llmcli bench load A --against B",
            )


BENCHES = (load,)
