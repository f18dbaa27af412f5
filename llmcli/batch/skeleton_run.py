"""Answers a single prompt by Skeleton-of-Thought (skeleton_of_thought.py), without an input file
or a journal.
"""

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
    """The answer to a prompt.

    - `document`: the body of an OpenAI chat completion.
    - `points`: a dict with `point` (the title) and `text` for each point of the outline. None if
      the model wrote too few points and the prompt was answered without an outline.
    - `seed`: the seed that was used. `tokens`: number of drawn tokens.
    - `seconds`: time from the request to the complete answer.
    """

    document: "Document"
    points: list[dict[str, str]] | None
    seed: int
    tokens: int
    seconds: float

    @property
    def text(self) -> str:
        """The text of the complete answer."""
        return str(self.document["choices"][0]["message"]["content"])


def answer_by_skeleton(
    ref: str, prompt: str, run_flags: RunFlags, config: "Config", ui: "UI"
) -> SkeletonResult | None:
    """Open the model `ref`, answer the prompt and return the answer. Return None if the user
    interrupted the run. Raises UserError if the model cannot be opened or the request fails.
    """
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
        executor = BatchExecutor(
            hosted.runner, MAX_POINTS, lambda index, result: results.append(result)
        )
        executor.run(iter([task]))
        seconds = time.perf_counter() - started_at
    if executor.is_stopped:
        return None
    (result,) = results
    if isinstance(result, UserError):
        raise UserError(str(result), hint=result.hint) from result
    return SkeletonResult(result, result.get("skeleton"), seed, executor.tokens, seconds)
