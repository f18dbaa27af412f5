"""`llmcli run --skeleton`: answers one prompt by its outline, with all points in parallel."""

import time
from typing import TYPE_CHECKING

import typer

from llmcli.errors import UserError
from llmcli.model_loader.run_flags import Flags

if TYPE_CHECKING:
    from llmcli.config import Config
    from llmcli.ui import UI


def answer(ref: str, prompt: str, given: Flags, config: "Config", ui: "UI") -> None:
    """Print the joined answer, or its JSON document.

    Raises UserError, and typer.Exit if it was stopped.
    """
    from llmcli.api.forms.base import Document
    from llmcli.api.registry import forms
    from llmcli.batch import run
    from llmcli.batch.executor import Task, Work
    from llmcli.batch.request_line import CHAT
    from llmcli.batch.skeleton_of_thought import MOST, skeleton
    from llmcli.model_loader import open_server_model
    from llmcli.runtime.sampling.chain import concrete_seed
    from quant.errors import Refusal

    results: list[Document | Refusal] = []
    with open_server_model.host(ref, given, config, ui, MOST, gap=None) as hosted:
        seed = concrete_seed(hosted.sampling.seed)
        settings = run.settings(hosted, given, seed)
        body = {"messages": [{"role": "user", "content": prompt}]}
        started_at = time.perf_counter()
        task = Task.begin(0, skeleton(forms()[CHAT](body, hosted.runner, settings)))
        work = Work(hosted.runner, MOST, lambda index, found: results.append(found))
        work.run(iter([task]))
        seconds = time.perf_counter() - started_at
    if work.stopped:
        raise typer.Exit(130)
    (result,) = results
    if isinstance(result, Refusal):
        raise UserError(str(result), hint=result.hint) from result
    if ui.json:
        ui.result(
            {
                "text": result["choices"][0]["message"]["content"],
                "finish": result["choices"][0]["finish_reason"],
                "skeleton": result.get("skeleton"),
                "seed": seed,
                "usage": result["usage"],
                "elapsed_ms": seconds * 1000,
            }
        )
        return
    ui.text(result["choices"][0]["message"]["content"])
    summary = (
        f"{len(result['skeleton'])} points at once"
        if "skeleton" in result
        else "no outline was generated: plain answer"
    )
    ui.note(
        f"[{summary} · {work.tokens} tok in {seconds:.1f} s · {work.tokens / seconds:.1f} tok/s]"
    )
