"""OpenedModel: a loaded model with the defaults of its catalog entry."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llmcli.runtime.runner import Runner


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """An open model, with the system text and settings of its catalog entry."""

    name: str
    runner: Runner
    file_bytes: int
    system: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
