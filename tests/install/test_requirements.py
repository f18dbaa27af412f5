"""Every package that is imported is declared, and only public modules of huggingface_hub are used."""

import ast
import functools
import importlib
import importlib.metadata
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
SOURCES = ("llmcli", "quant")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# top-level module -> name of its package, where they differ
PACKAGES = {
    "mcp_types": "mcp-types",
    "huggingface_hub": "huggingface-hub",
    "llama_cpp": "llama-cpp-python",
    "prompt_toolkit": "prompt-toolkit",
    "pynvml": "nvidia-ml-py",
    "pydantic_core": "pydantic",  # pydantic pins it exactly
    "yaml": "pyyaml",
    "grpc": "grpcio",
    "google": "protobuf",
}
OWN = {*SOURCES, "llmcli_kernels"}


@functools.cache
def imports() -> tuple[tuple[str, str], ...]:
    """Return the file and the dotted name of each absolute import, including those in functions."""
    return tuple(_find_imports())


def _find_imports() -> Iterator[tuple[str, str]]:
    for source in SOURCES:
        for path in sorted((ROOT / source).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    names = [f"{node.module}.{alias.name}" for alias in node.names]
                else:
                    continue
                for name in names:
                    yield str(path.relative_to(ROOT)), name


def test_every_imported_package_is_declared() -> None:
    optional = [text for extra in PROJECT["optional-dependencies"].values() for text in extra]
    declared = {Requirement(text).name.lower() for text in [*PROJECT["dependencies"], *optional]}
    tops = {name.partition(".")[0] for _, name in imports()} - OWN - set(sys.stdlib_module_names)
    assert "httpx2" in tops
    tops.add("llama_cpp")  # runtime/binding/library.py imports it by its name
    imported = {PACKAGES.get(top, top).lower() for top in tops}
    assert imported - declared == set()
    assert {Requirement(text).name.lower() for text in PROJECT["dependencies"]} - imported == set()


def hub_imports() -> list[str]:
    return sorted({name for _, name in imports() if name.partition(".")[0] == "huggingface_hub"})


def test_no_private_module_of_huggingface_hub_is_imported() -> None:
    assert len(hub_imports()) > 5
    private = [
        name
        for name in hub_imports()
        if any(word.startswith("_") and not word.startswith("__") for word in name.split("."))
    ]
    assert private == []


@pytest.mark.parametrize("name", hub_imports())
def test_what_is_imported_from_huggingface_hub_exists(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    found = getattr(importlib.import_module(module), attribute, None)
    assert found is not None or importlib.import_module(name)


def test_functions_of_huggingface_hub_do_what_llmcli_relies_on() -> None:
    import httpx2
    from huggingface_hub import get_session, hf_hub_url
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    assert isinstance(get_session(), httpx2.Client)
    url = hf_hub_url("org/repo", "folder/a b.gguf", revision="main", endpoint="http://hub.test")
    assert url == "http://hub.test/org/repo/resolve/main/folder/a%20b.gguf"
    for good in ("repo", "org/repo", "org/Qwen2.5-0.5B"):
        validate_repo_id(good)
    for bad in ("", "a/b/c", "org/re po", "-x", "org/..", "a" * 200):
        with pytest.raises(HFValidationError):
            validate_repo_id(bad)
