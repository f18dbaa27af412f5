"""OpenedModel: name, runner, system text, settings."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llmcli.runtime.runner import Runner


@dataclass(frozen=True, slots=True)
class Opened:
    """A model ready to answer, and the system text and settings that its name brings along."""

    name: str
    runner: Runner
    file_bytes: int
    system: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
