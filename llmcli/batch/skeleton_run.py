"""Answers one prompt by Skeleton-of-Thought: an outline, then all its points in parallel."""

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmcli.errors import UserError
from llmcli.model_loader.run_flags import RunFlags

if TYPE_CHECKING:
    from llmcli.api.forms.base import Document
    from llmcli.config import Config
    from llmcli.ui import UI


@dataclass(frozen=True, slots=True)
class SkeletonResult:
    """The joined answer to a prompt.

    `document`: the answer as a document of OpenAI's chat completions. `points`: the points with
    their texts; None if the model wrote no complete outline, so that the answer is a plain one.
    `seconds`: time from the request to the answer.
    """

    document: "Document"
    points: list[dict[str, str]] | None
    seed: int
    tokens: int
    seconds: float

    @property
    def text(self) -> str:
        """The text of the answer."""
        return str(self.document["choices"][0]["message"]["content"])


def answer_by_skeleton(
    ref: str, prompt: str, run_flags: RunFlags, config: "Config", ui: "UI"
) -> SkeletonResult | None:
    """Return the joined answer; None if the run was stopped. Raises UserError."""
    from llmcli.api.forms import FORMS
    from llmcli.batch import run
    from llmcli.batch.executor import BatchExecutor, BatchTask
    from llmcli.batch.request_line import CHAT_PATH
    from llmcli.batch.skeleton_of_thought import MAX_POINTS, skeleton
    from llmcli.model_loader import open_server_model
    from llmcli.runtime.sampling.chain import resolve_seed

    results: list[Document | UserError] = []
    with open_server_model.open_server_model(
        ref, run_flags, config, ui, MAX_POINTS, max_gap_seconds=None
    ) as hosted:
        seed = resolve_seed(hosted.sampling.seed)
        settings = run.build_settings(hosted, run_flags, seed)
        body = {"messages": [{"role": "user", "content": prompt}]}
        started_at = time.perf_counter()
        task = BatchTask.begin(0, skeleton(FORMS[CHAT_PATH](body, hosted.runner, settings)))
        work = BatchExecutor(hosted.runner, MAX_POINTS, lambda index, found: results.append(found))
        work.run(iter([task]))
        seconds = time.perf_counter() - started_at
    if work.is_stopped:
        return None
    (result,) = results
    if isinstance(result, UserError):
        raise UserError(str(result), hint=result.hint) from result
    return SkeletonResult(result, result.get("skeleton"), seed, work.tokens, seconds)
