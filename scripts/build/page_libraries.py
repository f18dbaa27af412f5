#!/usr/bin/env python3
"""Refresh the libraries of the chat page: files of npm packages that lie in the wheel.

usage: .venv/bin/python scripts/build/page_libraries.py [--check | NAME@VERSION ...]

llmcli/serve/http/page/vendor/libraries.json lists each package with its version, npm's integrity
value, and the files that are taken from it with their SHA-256. Without arguments the files are
taken anew from the packages, with the versions and integrity values of the list. NAME@VERSION first
changes the version of a package, and writes its new values into the list. --check compares the
files with the list, without a network; the exit code is 1 if they differ.
"""

import base64
import hashlib
import inspect
import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

VENDOR = Path(__file__).resolve().parents[2] / "llmcli/serve/http/page/vendor"
LIST = VENDOR / "libraries.json"


def main(arguments: list[str]) -> None:
    """Check or refresh the files, as the arguments say."""
    if arguments in (["-h"], ["--help"]):
        print(inspect.cleandoc(__doc__ or "").split("\n\n", 1)[1])
        return
    libraries = read_list()
    if arguments == ["--check"]:
        if problems := find_problems(libraries):
            sys.exit("\n".join([*problems, f"run {sys.argv[0]} to take them from npm again"]))
        return
    for argument in arguments:
        name, _, version = argument.rpartition("@")
        if name not in libraries:
            sys.exit(f"{argument}: write NAME@VERSION with one of {', '.join(libraries)}")
        libraries[name] = {**libraries[name], "version": version, "integrity": None}
    for name, library in libraries.items():
        refresh(name, library)
    LIST.write_text(json.dumps(libraries, indent=2) + "\n", encoding="utf-8")


def read_list() -> dict[str, Any]:
    """Return the entries of libraries.json by the name of the package."""
    libraries: dict[str, Any] = json.loads(LIST.read_text(encoding="utf-8"))
    return libraries


def find_problems(libraries: dict[str, Any], folder: Path = VENDOR) -> list[str]:
    """Return a line for each file that is missing, is not listed, or has other bytes than listed."""
    listed = {
        name: entry["sha256"]
        for library in libraries.values()
        for name, entry in library["files"].items()
    }
    present = {path.name: path for path in folder.iterdir() if path.name != LIST.name}
    problems = [f"{name} is not in {LIST.name}" for name in sorted(present.keys() - listed.keys())]
    for name, sha256 in listed.items():
        if name not in present:
            problems.append(f"{name} is missing")
        elif hashlib.sha256(present[name].read_bytes()).hexdigest() != sha256:
            problems.append(f"{name} has been changed: its SHA-256 is not that of {LIST.name}")
    return problems


def refresh(name: str, library: dict[str, Any]) -> None:
    """Take a package's files from npm. `library` is its entry of the list, and gets the new SHA-256
    of each file. If it has an integrity value, the package must have the same; otherwise it gets
    the package's.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = ["npm", "pack", "--silent", f"{name}@{library['version']}"]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        (archive,) = Path(folder).glob("*.tgz")
        digest = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
        integrity = f"sha512-{digest}"
        if library["integrity"] not in (None, integrity):
            sys.exit(f"{name}@{library['version']} is not the package that was taken before")
        library["integrity"] = integrity
        with tarfile.open(archive) as package:
            for file, entry in library["files"].items():
                member = package.extractfile(f"package/{entry['member']}")
                assert member is not None
                data = member.read()
                (VENDOR / file).write_bytes(data)
                entry["sha256"] = hashlib.sha256(data).hexdigest()


if __name__ == "__main__":
    main(sys.argv[1:])
