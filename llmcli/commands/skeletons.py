"""`llmcli run --skeleton`: one prompt answered by its outline, all points at once."""

import time
from typing import TYPE_CHECKING

import typer

from llmcli.commands.flags import Flags
from llmcli.errors import UserError

if TYPE_CHECKING:
    from llmcli.config import Config
    from llmcli.ui import UI


def answer(ref: str, prompt: str, given: Flags, config: "Config", ui: "UI") -> None:
    """Print the joined text, or the document; raises Refusal, and typer.Exit where it was stopped."""
    from llmcli.commands import batch, hosting
    from llmcli.runtime.sampling.chain import concrete_seed
    from llmcli.serve.batch.asked import CHAT
    from llmcli.serve.batch.skeleton import MOST, skeleton
    from llmcli.serve.batch.work import Task, Work
    from llmcli.serve.registry import forms
    from llmcli.serve.schema.base import Document
    from quant.errors import Refusal

    came: list[Document | Refusal] = []
    with hosting.host(ref, given, config, ui, MOST, gap=None) as hosted:
        seed = concrete_seed(hosted.sampling.seed)
        settings = batch.settings(hosted, given, seed)
        body = {"messages": [{"role": "user", "content": prompt}]}
        began = time.perf_counter()
        task = Task.begin(0, skeleton(forms()[CHAT](body, hosted.runner, settings)))
        work = Work(hosted.runner, MOST, lambda index, found: came.append(found))
        work.run(iter([task]))
        seconds = time.perf_counter() - began
    if work.stopped:
        raise typer.Exit(130)
    (found,) = came
    if isinstance(found, Refusal):
        raise UserError(str(found), hint=found.hint) from found
    if ui.json:
        ui.result(
            {
                "text": found["choices"][0]["message"]["content"],
                "finish": found["choices"][0]["finish_reason"],
                "skeleton": found.get("skeleton"),
                "seed": seed,
                "usage": found["usage"],
                "elapsed_ms": seconds * 1000,
            }
        )
        return
    ui.text(found["choices"][0]["message"]["content"])
    told = (
        f"{len(found['skeleton'])} points at once"
        if "skeleton" in found
        else "no outline came: the plain answer"
    )
    ui.note(f"[{told} · {work.tokens} tok in {seconds:.1f} s · {work.tokens / seconds:.1f} tok/s]")
