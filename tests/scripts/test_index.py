"""scripts/README.md lists every script."""

from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
SECTIONS = (SCRIPTS / "README.md").read_text().split("\n## ")


@pytest.mark.parametrize(
    "folder",
    sorted(path.name for path in SCRIPTS.iterdir() if path.is_dir() and path.name[0] != "_"),
)
def test_index_lists_the_files_of_a_folder(folder: str) -> None:
    (section,) = (text for text in SECTIONS if text.startswith(f"{folder}/"))
    files = {path.name for path in (SCRIPTS / folder).iterdir() if path.is_file()}
    assert {name for name in files if f"`{name}`" not in section} == set()
    listed = {word for word in section.split("`")[1::2] if word.endswith(".py") and "/" not in word}
    assert listed <= files


def test_index_lists_the_commands() -> None:
    names = {path.name for path in SCRIPTS.iterdir() if path.is_file()} - {"README.md"}
    assert {name for name in names if f"`scripts/{name}`" not in SECTIONS[1]} == set()
