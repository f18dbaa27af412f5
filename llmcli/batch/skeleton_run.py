"""`llmcli run --skeleton`: answers one prompt by its outline, with all points in parallel."""

import time
from typing import TYPE_CHECKING

import typer

from llmcli.model_loader.run_flags import RunFlags

if TYPE_CHECKING:
    from llmcli.config import Config
    from llmcli.ui import UI


def print_skeleton_answer(
    ref: str, prompt: str, run_flags: RunFlags, config: "Config", ui: "UI"
) -> None:
    """Print the joined answer, or its JSON document.

    Raises UserError, and typer.Exit if it was stopped.
    """
    from llmcli.api.forms.base import Document
    from llmcli.api.registry import forms
    from llmcli.batch import run
    from llmcli.batch.executor import BatchExecutor, BatchTask
    from llmcli.batch.request_line import CHAT_PATH
    from llmcli.batch.skeleton_of_thought import MAX_POINTS, skeleton
    from llmcli.model_loader import open_server_model
    from llmcli.runtime.sampling.chain import resolve_seed
    from quant.errors import UserError

    results: list[Document | UserError] = []
    with open_server_model.open_server_model(
        ref, run_flags, config, ui, MAX_POINTS, max_gap_seconds=None
    ) as hosted:
        seed = resolve_seed(hosted.sampling.seed)
        settings = run.build_settings(hosted, run_flags, seed)
        body = {"messages": [{"role": "user", "content": prompt}]}
        started_at = time.perf_counter()
        task = BatchTask.begin(0, skeleton(forms()[CHAT_PATH](body, hosted.runner, settings)))
        work = BatchExecutor(hosted.runner, MAX_POINTS, lambda index, found: results.append(found))
        work.run(iter([task]))
        seconds = time.perf_counter() - started_at
    if work.is_stopped:
        raise typer.Exit(130)
    (result,) = results
    if isinstance(result, UserError):
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
