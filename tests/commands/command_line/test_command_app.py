"""Every path of the command line is read in the same way."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest

from llmcli.text_input import expand_path
from tests.commands.test_help import COMMANDS
from tests.fixtures.cli import Done
from tests.quant import tiny_gguf


def has_path(kind: Any) -> bool:
    return kind is Path or any(map(has_path, get_args(kind)))


PATHS = [
    pytest.param(parameter, context, id=f"{name} {parameter.name}")
    for name, command, context in COMMANDS
    for parameter in command.params
    if has_path(parameter.type_descriptor.annotation)
]


def test_there_are_paths() -> None:
    assert len(PATHS) > 20


@pytest.mark.parametrize(("parameter", "context"), PATHS)
@pytest.mark.parametrize("typed", ["~/x", "./~x", "./~", "a/~x", "x"])
def test_a_tilde_is_the_home_folder_only_at_the_start_of_what_is_typed(
    parameter: Any, context: Any, typed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/me")
    value = [typed] if parameter.multiple or parameter.nargs == -1 else typed
    read = parameter.process_value(context, value)
    assert read == ([expand_path(typed)] if value is not typed else expand_path(typed))


def test_files_whose_names_begin_with_a_tilde(
    llmcli: Callable[..., Done], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder := tmp_path / "here").mkdir()
    (home := tmp_path / "me").mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(home))
    tiny_gguf.llama(Path("./~"), hidden=64, ff=64, layers=1)
    done = llmcli("quantize", "./~", "--q4_0", "-o", "./~q", "--plan-out", "./~plan.json")
    assert done.code == 0, done.err
    done = llmcli("quantize", "./~", "--plan", "./~plan.json", "-o", "~/q.gguf")
    assert done.code == 0, done.err
    assert sorted(path.name for path in folder.iterdir()) == ["~", "~plan.json", "~q"]
    assert [path.name for path in home.iterdir() if path.is_file()] == ["q.gguf"]
