"""The prompts of `bench spec`: complete, different, and short enough for its context."""

import pytest

from llmcli.bench.spec.run import parse_tasks
from llmcli.bench.spec.task_kinds import TASK_FOLDER, TASK_NAMES, load_task_kind
from llmcli.errors import UserError


def test_each_file_is_a_kind_of_tasks():
    assert sorted(path.stem for path in TASK_FOLDER.glob("*.toml")) == sorted(TASK_NAMES)


@pytest.mark.parametrize("name", TASK_NAMES)
def test_the_prompts_of_a_kind(name: str):
    kind = load_task_kind(name)
    assert kind.description
    assert len(set(kind.prompts)) == len(kind.prompts) == 3
    assert all(prompt and prompt == prompt.strip() for prompt in kind.prompts)
    assert all(len(prompt) < 1000 for prompt in kind.prompts)


def test_tasks_are_chosen_by_name():
    assert [kind.name for kind in parse_tasks(None)] == list(TASK_NAMES)
    assert [kind.name for kind in parse_tasks("free, edit,free")] == ["free", "edit"]
    with pytest.raises(UserError, match="--tasks: unknown value 'poem'") as caught:
        parse_tasks("poem")
    assert caught.value.hint == "--tasks takes: summary edit extraction code free"
