"""The tasks of `bench spec`: kinds of prompts that differ in how much an answer repeats its prompt.
Each kind is a file of the folder tasks/.
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path

TASK_FOLDER = Path(__file__).with_name("tasks")
TASK_NAMES = ("summary", "edit", "extraction", "code", "free")


@dataclass(frozen=True, slots=True)
class TaskKind:
    """Prompts of one kind. `description`: what the answers are."""

    name: str
    description: str
    prompts: tuple[str, ...]


def load_task_kind(name: str) -> TaskKind:
    """Return the prompts of the kind `name`, one of TASK_NAMES."""
    fields = tomllib.loads((TASK_FOLDER / f"{name}.toml").read_text("utf-8"))
    return TaskKind(
        name, fields["description"], tuple(prompt.strip() for prompt in fields["prompts"])
    )
