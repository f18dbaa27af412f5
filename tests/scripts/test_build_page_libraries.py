"""The vendored libraries of the chat page are the files of the list, with their licenses."""

import shutil
from pathlib import Path

from llmcli.serve.http.routes.page import SCRIPTS
from scripts.build.page_libraries import VENDOR, find_problems, read_list


def test_the_files_are_those_of_the_list() -> None:
    libraries = read_list()
    assert find_problems(libraries) == []
    for library in libraries.values():
        assert library["integrity"].startswith("sha512-")
        assert any("LICENSE" in name for name in library["files"])
    listed = {name for library in libraries.values() for name in library["files"]}
    used = {name.removeprefix("vendor/") for name in SCRIPTS if name.startswith("vendor/")}
    assert used == {name for name in listed if "LICENSE" not in name}


def test_a_changed_a_missing_and_a_foreign_file_are_found(tmp_path: Path) -> None:
    folder = tmp_path / "vendor"
    shutil.copytree(VENDOR, folder)
    with (folder / "purify.min.js").open("a") as file:
        file.write(" ")
    (folder / "marked.LICENSE").unlink()
    (folder / "more.js").write_text("")
    assert sorted(line.split()[0] for line in find_problems(read_list(), folder)) == [
        "marked.LICENSE",
        "more.js",
        "purify.min.js",
    ]
