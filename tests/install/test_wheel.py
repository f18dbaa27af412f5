"""A wheel of llmcli, installed into a new environment outside the checkout, pulls, quantizes and
runs a model, with its own C code, and without it if there was no compiler.

The environment sees the packages of the tests' environment (a .pth file), so that llama.cpp is not
built again. scripts/build/check_installs.py installs everything from source.
"""

import importlib.util
import json
import os
import site
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

from scripts.build import kernels
from tests.fixtures.fake_hub import Hub
from tests.quant import tiny_gguf

ROOT = Path(__file__).parents[2]
REPO = "someone/tiny"


class Installed(NamedTuple):
    """A wheel and the environment in which it is installed."""

    wheel: Path
    python: Path

    def llmcli(self, folder: Path, *arguments: str, **variables: str) -> tuple[int, str, str]:
        """Run the installed command in `folder`. Return its exit code, stdout and stderr."""
        done = subprocess.run(
            [self.python.with_name("llmcli"), *arguments],
            capture_output=True,
            text=True,
            cwd=folder,
            env=clean_environment() | {"LLMCLI_HOME": str(folder / "home")} | variables,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr


def clean_environment() -> dict[str, str]:
    """Return the environment without what leads Python to the checkout."""
    return {name: text for name, text in os.environ.items() if not name.startswith("PYTHON")}


def install(folder: Path, **variables: str) -> Installed:
    """Build a wheel with these environment variables, and install it into a new environment."""
    if importlib.util.find_spec("hatchling") is None:
        pytest.skip("the build back end is not installed: scripts/setup --dev")
    environment = clean_environment() | variables
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run(
        [*build, "--wheel-dir", str(folder), str(ROOT)],
        env=environment,
        cwd=folder,
        capture_output=True,
        check=True,
    )
    (wheel,) = folder.glob("llmcli-*.whl")
    venv = folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    python = venv / "bin" / "python"
    command = [*pip, "--python", str(python), "install", "--quiet", "--no-index", "--no-deps"]
    subprocess.run([*command, str(wheel)], cwd=folder, capture_output=True, check=True)
    packages = next((venv / "lib").glob("python*")) / "site-packages"
    seen = [path for path in sys.path if Path(path).name == "site-packages"]
    (packages / "tests.pth").write_text("\n".join([*seen, *site.getsitepackages()]) + "\n")
    return Installed(wheel, python)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return install(tmp_path_factory.mktemp("wheel"))


@pytest.fixture
def hub(tmp_path: Path):
    gguf = tiny_gguf.llama(tmp_path / "source.gguf", hidden=64, ff=96, layers=1).read_bytes()
    with Hub() as server:
        server.add(REPO, {"tiny-F32.gguf": gguf})
        yield server


def use(installed: Installed, folder: Path, hub: Hub) -> str:
    """Pull a model, quantize it with a search, and run it. Return what quantizing printed on
    stderr.
    """
    folder.mkdir()
    variables = {"HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "hub")}
    code, _, err = installed.llmcli(folder, "pull", REPO, **variables)
    assert code == 0, err
    code, _, printed = installed.llmcli(
        folder, "quantize", REPO, "--q4_0", "--method", "search", "-o", "q.gguf", **variables
    )
    assert code == 0, printed
    run = ["run", "./q.gguf", "hello", "--raw", "-n", "4", "-t", "1", "--ignore-eos", "--json"]
    code, out, err = installed.llmcli(folder, *run)
    assert code == 0, err
    assert json.loads(out)["timing"]["generated_tokens"] == 4
    return printed


def test_an_installed_wheel_pulls_quantizes_and_runs(
    installed: Installed, tmp_path: Path, hub: Hub
) -> None:
    code = "import llmcli, quant; print(llmcli.__file__, quant.__file__)"
    done = subprocess.run(
        [installed.python, "-c", code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=clean_environment(),
        check=True,
    )
    assert str(ROOT) not in done.stdout
    printed = use(installed, tmp_path / "work", hub)
    assert ("with numpy" in printed) == (kernels.find_compiler() is None)


def test_the_wheel_has_the_compiled_code_for_every_level_of_cpu(
    installed: Installed, tmp_path: Path
) -> None:
    if kernels.find_compiler() is None:
        pytest.skip("there is no C compiler here")
    names = zipfile.ZipFile(installed.wheel).namelist()
    report = json.loads(zipfile.ZipFile(installed.wheel).read("llmcli_kernels/built.json"))
    built = {f"llmcli_kernels/{library.name}{kernels.suffix()}" for library in kernels.libraries()}
    missing = {f"llmcli_kernels/{name}{kernels.suffix()}" for name in report["failed"]}
    assert built - missing <= set(names)
    assert "llmcli/runtime/binding/tile-config.h" in names
    assert installed.wheel.name.startswith("llmcli-")
    assert "-py3-none-" in installed.wheel.name
    assert not installed.wheel.name.endswith("-any.whl")
    code, out, err = installed.llmcli(tmp_path, "doctor", "--json")
    assert code == 0, err
    parts = {part["what"]: part for part in json.loads(out)["parts"]}
    assert parts["search of scales"]["active"]
    assert parts["scans of logits"]["active"]
    hints = [part["hint"] or "" for part in parts.values()]
    assert not [hint for hint in hints if "scripts/" in hint]


def test_a_wheel_without_a_compiler_works_and_says_what_is_lost(tmp_path: Path, hub: Hub) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "wheel").mkdir()
    installed = install(tmp_path / "wheel", PATH=str(tmp_path / "empty"), CC="")
    assert installed.wheel.name.endswith("-py3-none-any.whl")
    printed = use(installed, tmp_path / "work", hub)
    assert printed.count("scales are searched with numpy") == 1
    assert "no C compiler was found" in printed
    code, _, err = installed.llmcli(tmp_path, "doctor")
    assert code == 0
    assert "C code is not used as it could be" in err
    assert "install llmcli again from its source" in err
