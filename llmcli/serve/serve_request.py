"""The settings of `llmcli serve` as one value."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmcli.model_loader.run_flags import RunFlags

if TYPE_CHECKING:
    from llmcli.config import Config
    from llmcli.ui import UI


@dataclass(frozen=True, slots=True)
class ServeRequest:
    """The settings of `llmcli serve`, as a value that can be sent to another process.

    - `ref`: the name or path of the model.
    - `parallel`: the number of answers that run at once; `max_waiting`: of further answers that may
      wait.
    - `settings`: the fields of ServerSettings that do not depend on the model.
    - `pooling`: how token vectors are combined to an embedding; None: as the model file says.
    - `stream_interval_seconds`: the longest time for which tokens of a stream are held back to send
      them together.
    - `is_private`: clients do not share cached prefixes, so that response times tell nothing about
      the prompts of others.
    - `context_per_answer`: the largest number of tokens of a prompt and its answer; None: those of
      the context.
    - `prefix_folder`: the folder of the prefix cache on disk; None: no such cache.
      `prefix_folder_bytes`: its quota.
    """

    ref: str
    run_flags: RunFlags
    config: "Config"
    ui: "UI"
    parallel: int
    max_waiting: int
    settings: dict[str, Any]
    pooling: str | None = None
    stream_interval_seconds: float = 0.0
    is_private: bool = False
    context_per_answer: int | None = None
    prefix_folder: Path | None = None
    prefix_folder_bytes: int = 0
