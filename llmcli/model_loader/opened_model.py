"""`OpenedModel`: a loaded model with the defaults of its catalog entry."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llmcli.runtime.runner import Runner


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A loaded model, with the system text and the settings of its alias in the catalog."""

    name: str
    runner: Runner
    file_bytes: int  # size of the model's files
    system: str | None = None  # default system text
    settings: Mapping[str, Any] = field(default_factory=dict)  # default sampling settings
    sha256: str = ""  # of the model's files; "" for a path that was never pulled
