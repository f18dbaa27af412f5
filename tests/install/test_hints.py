"""Hints fit the way in which llmcli was installed: only a checkout has scripts."""

import ast
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from llmcli.errors import UserError
from llmcli.runtime.binding.placement import rpc
from quant import installation

ROOT = Path(__file__).parents[2]
# files whose texts may name a script, because they ask first whether this is a checkout
ASKING = ("quant/installation.py", "llmcli/hardware/diagnostics.py")


def texts(path: Path) -> list[str]:
    """Return the texts of a module without its docstrings."""
    tree = ast.parse(path.read_text())
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and id(node) not in docstrings
    ]


def test_no_message_names_a_script_that_an_installed_copy_lacks() -> None:
    found = {
        f"{path.relative_to(ROOT)}: {text}"
        for source in ("llmcli", "quant")
        for path in (ROOT / source).rglob("*.py")
        if str(path.relative_to(ROOT)) not in ASKING
        for text in texts(path)
        if "scripts/" in text
    }
    assert found == set()


@pytest.fixture(params=["pip", "uv"])
def installer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Fake a copy that was installed by pip or uv, whose environments have no pip."""
    monkeypatch.setattr(installation, "is_checkout", lambda: False)
    find = installation.importlib.util.find_spec

    def find_spec(name: str):
        return (object() if request.param == "pip" else None) if name == "pip" else find(name)

    monkeypatch.setattr(installation.importlib.util, "find_spec", find_spec)
    return request.param


def test_an_installed_copy_is_completed_by_its_installer(installer: str) -> None:
    command = installation.install_llama_command("-DGGML_RPC=on")
    words = shlex.split(command)
    python = shlex.quote(sys.executable)
    start = {
        "pip": ["CMAKE_ARGS=-DGGML_RPC=on", python, "-m", "pip", "install"],
        "uv": ["CMAKE_ARGS=-DGGML_RPC=on", "uv", "pip", "install", "--python", python],
    }[installer]
    assert words[: len(start)] == start
    assert words[-1].startswith("llama-cpp-python")
    assert words[-1] != "llama-cpp-python"  # with the version that llmcli requires
    assert "install llmcli again" in installation.install_kernels_advice()


def test_a_checkout_is_completed_by_its_script() -> None:
    assert installation.install_llama_command("-DGGML_RPC=on") == "scripts/setup --again"
    assert installation.install_kernels_advice().endswith("run scripts/setup")


@pytest.mark.usefixtures("installer")
def test_a_build_without_rpc_is_refused_with_the_command_that_adds_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rpc, "_registry", lambda: None)
    assert not rpc.is_built()
    with pytest.raises(UserError, match="has no RPC backend") as refused:
        rpc._procedure("ggml_backend_rpc_add_server", None)
    assert "CMAKE_ARGS=-DGGML_RPC=on" in refused.value.hint


def test_a_missing_llama_cpp_is_an_error_with_the_command_that_installs_it() -> None:
    """In its own process, because llama.cpp is loaded once."""
    code = """
import sys
sys.modules["llama_cpp.llama_cpp"] = None  # importing it is an error
from quant import installation
installation.is_checkout = lambda: False
from llmcli.errors import UserError
from llmcli.runtime.binding import library
from quant.native import ggml
ggml.importlib.util.find_spec = lambda name, find=ggml.importlib.util.find_spec: (
    None if name == "llama_cpp" else find(name))
for function in (library.lib, ggml.open_library):
    try:
        function()
    except UserError as error:
        print(f"{error}|{error.hint}")
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    binding, native = (line.split("|") for line in done.stdout.splitlines())
    assert binding[0] == "llama-cpp-python is not installed here"
    assert native[0].startswith("libggml-base was not found")
    for _, hint in (binding, native):
        assert "pip install" in hint
        assert "llama-cpp-python" in hint.split()[-1]
