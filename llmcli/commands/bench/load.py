"""`llmcli bench load`: applies a load to a server, and prints latency and throughput."""

import shlex
from collections.abc import Sequence
from typing import Annotated

import typer

from llmcli.bench.load.request import (
    EndpointSettings,
    LengthSettings,
    LevelSettings,
    LoadRequest,
    PromptSettings,
    SearchSettings,
)
from llmcli.commands.command_line.command_context import start_command
from llmcli.commands.options.groups import option_group, with_option_groups
from llmcli.commands.options.report import ReportOptions
from llmcli.errors import UsageError

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
    str, typer.Option("--serve", metavar="'-t 2 ...'", help="Flags for a server that is started.")
]
LevelOptions = Annotated[
    LevelSettings,
    option_group(
        concurrency=typer.Option(
            "--concurrency", help="Closed loop: requests at once (1,2,4); default 8."
        ),
        rate=typer.Option(
            "--rate", help="Open loop: requests per second, answered or not (0.5,1,2)."
        ),
        arrivals=typer.Option(
            "--arrivals", help="Open loop: poisson, gamma (bursts) or constant [poisson]."
        ),
        burstiness=typer.Option(
            "--burstiness", min=0.01, max=1000, help="With gamma: 1 is Poisson, 4 bursts [4]."
        ),
    ),
]
SearchOptions = Annotated[
    SearchSettings,
    option_group(
        find_max=typer.Option(
            "--find-max",
            metavar="WHAT",
            help="concurrency, rate or both: find the largest that meets --slo.",
        ),
        slo=typer.Option(
            "--slo", metavar="LIMITS", help="Limits in ms: ttft:2000,tpot:100 (also ttfo, e2el)."
        ),
        percent=typer.Option(
            "--percent",
            min=1,
            max=100,
            help="Percent of the requests that must meet --slo in --find-max [95].",
        ),
    ),
]
LengthOptions = Annotated[
    LengthSettings,
    option_group(
        requests=typer.Option("--requests", min=1, help="Measured requests per load; default 100."),
        seconds=typer.Option("--seconds", min=0.1, help="Measure each load at least this long."),
        warmup=typer.Option(
            "--warmup", min=0, help="Requests that are not measured; default: one round."
        ),
        repetitions=typer.Option(
            "-r",
            "--repetitions",
            min=1,
            help="Runs of each load [1], of a comparison [8], of a search [<= 30].",
        ),
    ),
]
PromptOptions = Annotated[
    PromptSettings,
    option_group(
        mix=typer.Option("--mix", help="Prompts: fixed (words), sonnet (verse), or a JSONL file."),
        n_prompt=typer.Option("-p", "--n-prompt", min=1, help="Approximate tokens of a prompt."),
        n_gen=typer.Option("-n", "--n-gen", min=1, help="Tokens of an answer."),
        shared=typer.Option(
            "--shared", min=0, max=1, help="Fraction of each prompt that all share."
        ),
        cancel=typer.Option(
            "--cancel", min=0, max=1, help="Fraction of the requests that are cancelled."
        ),
    ),
]
Rpc = Annotated[
    str | None,
    typer.Option(
        "--rpc",
        metavar="HOST:PORT,...",
        help="Workers for a model that is served here.",
    ),
]
EndpointOptions = Annotated[
    EndpointSettings,
    option_group(
        endpoint=typer.Option("--endpoint", help="chat or completions."),
        model=typer.Option("-m", "--model", help="Name to send; default: the server's first."),
        api_key=typer.Option("--api-key", metavar="KEY", help="API key of the server."),
        api_key_file=typer.Option("--api-key-file", metavar="FILE", help="API key in a file."),
        cacert=typer.Option(
            "--cacert", metavar="FILE", help="PEM file of the CA that signed the server."
        ),
        insecure=typer.Option("--insecure", help="Do not verify the server's TLS certificate."),
        timeout=typer.Option(
            "--timeout", min=0.1, help="Seconds until a request counts as failed."
        ),
        body=typer.Option(
            "--body", metavar="JSON", help="Additional fields of each request's body."
        ),
    ),
]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed of prompts and arrivals.")]
Output = Annotated[str, typer.Option("-o", "--output", help="md, csv, json or jsonl.")]
NoHistory = Annotated[
    bool, typer.Option("--no-history", help="Do not save the results for `bench history`.")
]
Offline = Annotated[bool, typer.Option("--offline", help="Make no connection beyond this machine.")]


def load(
    words: Servers,
    *,
    against: Against = None,
    serve: Serve = "",
    rpc: Rpc = None,
    levels: LevelOptions,
    search: SearchOptions,
    length: LengthOptions,
    prompts: PromptOptions,
    target: EndpointOptions,
    seed: Seed = 1,
    output: Output = "md",
    no_history: NoHistory = False,
    reporting: ReportOptions,
    offline: Offline = False,
    json: Annotated[bool, typer.Option("--json", help="Same as -o json.")] = False,
) -> None:
    """Measure the latency and throughput of a server, or of a model that is served.

    Any server with OpenAI's API can be measured. Prompts are distinct, so that a prefix cache helps
    only as far as --shared allows. --find-max searches for the largest number of users (or requests
    per second) within limits such as --slo ttft:2000,tpot:100.
    """
    from llmcli.bench.load.run import run_load
    from llmcli.bench.result_rows import OUTPUT_FORMATS
    from llmcli.commands.bench.reports.load import print_results

    output = "json" if json else output
    if output not in OUTPUT_FORMATS:
        raise UsageError(f"-o {output!r} is unknown", hint=f"-o takes: {' '.join(OUTPUT_FORMATS)}")
    servers = _parse_servers(words, against)
    reporting.check_path()
    request = LoadRequest(
        servers,
        levels,
        search,
        length,
        prompts,
        target,
        serve if rpc is None else _add_workers(rpc, serve, servers),
        seed,
        keep_history=not no_history,
    )
    config, ui = start_command(output != "md", offline)
    result = run_load(request, config, ui)
    print_results(result, request, output, reporting, ui)


def _add_workers(rpc: str, flags: str, names: Sequence[str]) -> str:
    """Return `flags`, the flags of a started server, with `--rpc` and the workers added.

    Raises UsageError unless exactly one server is started here, because a worker serves one model
    at a time. `names`: the servers to measure; a URL is a server that is already running.
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


def _parse_servers(words: list[str], against: str | None) -> tuple[str, ...]:
    """Return the servers to measure: one, or two of `A --against B` or `A compare B`. Raises
    UsageError for any other words.
    """
    match words, against:
        case [server], None:
            return (server,)
        case ([server], str(server_b)) | ([server, "compare", server_b], None):
            return server, server_b
        case _:
            raise UsageError(
                f"expected one or two servers, not {' '.join(words)!r}",
                hint="llmcli bench load A --against B",
            )


BENCHES = (with_option_groups(load),)
