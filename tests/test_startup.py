"""Start-up of llmcli: commands import no heavy modules that they do not need."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from llmcli.commands.cli import COMMANDS_OF_MODULE, MODULE_OF_COMMAND, load_commands

ROOT = Path(__file__).parents[1]
HEAVY = {
    "torch",
    "llama_cpp",
    "transformers",
    "numpy",
    "gguf",
    "tokenizers",
    "prompt_toolkit",
    "pydantic",
    "rich",
    "huggingface_hub",
    "jinja2",
    "llguidance",
    "starlette",
    "uvicorn",
    "websockets",
    "asyncio",
    "aiohttp",
    "plotext",
    "tomlkit",
}
HEAVY_IN_COMPLETION = HEAVY - {"pydantic"}  # Typer reads arguments with it
COMPLETION = {"_LLMCLI_COMPLETE": "complete_bash", "COMP_WORDS": "llmcli ", "COMP_CWORD": "1"}


def start(*arguments: str, **environment: str) -> tuple[str, set[str]]:
    """Run llmcli in a new process. Return its stdout and the top-level modules that it imported."""
    program = "import sys; sys.argv[0] = 'llmcli'; from llmcli.app import main; main()"
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", program, *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | environment,
        check=True,
    )
    names = {line.rsplit("|", 1)[1].strip() for line in done.stderr.splitlines() if "|" in line}
    return done.stdout, {name.split(".")[0] for name in names}


@pytest.mark.parametrize("argument", ["--help", "--version"])
def test_help_and_version_load_no_heavy_module(argument: str) -> None:
    out, modules = start(argument)
    assert "llmcli" in out
    assert "typer" in modules  # the list of modules is not empty
    assert modules & HEAVY == set()


def test_the_table_of_modules_has_every_command() -> None:
    folder = ROOT / "llmcli" / "commands"
    files = {path: path.stem for path in folder.glob("*.py")}
    files |= {path: path.parent.name for path in folder.glob("*/__init__.py")}
    files |= {path: f"{path.parent.name}.command" for path in folder.glob("*/command.py")}
    register = "def register(app: typer.Typer) -> None:"
    assert set(COMMANDS_OF_MODULE) == {
        name for path, name in files.items() if register in path.read_text(encoding="utf-8")
    }
    for module, words in COMMANDS_OF_MODULE.items():
        summaries = {
            name: command.get_short_help_str(200) for name, command in load_commands(module).items()
        }
        assert summaries == words
    assert len(MODULE_OF_COMMAND) == sum(map(len, COMMANDS_OF_MODULE.values()))


LOADED = """
import sys
from llmcli.app import main
sys.argv = ["llmcli", "list"]
try:
    main()
finally:
    sys.stderr.write(" ".join(sys.modules))
"""


def test_a_command_loads_no_other_command() -> None:
    command = [sys.executable, "-c", LOADED]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    names = set(done.stderr.split())
    assert "llmcli.commands.models" in names
    assert names.isdisjoint(
        {
            "llmcli.commands.chat.command",
            "llmcli.commands.serve",
            "llmcli.commands.quantize.command",
        }
    )


def test_a_misspelled_command_gets_a_suggestion() -> None:
    command = [sys.executable, "-m", "llmcli.app", "quantise"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, "did you mean `llmcli quantize`?" in done.stderr) == (2, True)


def test_shell_completion_loads_nothing_heavy() -> None:
    _, modules = start(**COMPLETION)
    assert "typer" in modules
    assert modules & HEAVY_IN_COMPLETION == set()


def test_completion_of_bench_offers_subcommands_and_models_and_loads_nothing_heavy() -> None:
    def complete(line: str) -> list[str]:
        count = len(line.split(" ")) - 1
        out, modules = start(
            _LLMCLI_COMPLETE="complete_bash", COMP_WORDS=line, COMP_CWORD=str(count)
        )
        assert modules & HEAVY_IN_COMPLETION == set()
        return out.split()

    words = complete("llmcli bench ")
    assert {"roofline", "history", "smollm2:135m"} <= set(words)
    assert "speed" not in words
    assert complete("llmcli bench roof") == ["roofline"]
    assert "--sampling" in complete("llmcli bench --sam")
    assert "roofline" not in complete("llmcli bench -p 512 ")


@pytest.mark.parametrize(
    "line",
    [
        "llmcli chat qwen2.5-c",
        "llmcli pull qwen2.5-c",
        "llmcli quantize qwen2.5-c",
        "llmcli run x -md qwen2.5-c",
        "llmcli serve -m qwen2.5-c",
        "llmcli eval x --base qwen2.5-c",
        "llmcli plan x --model-draft qwen2.5-c",
    ],
)
def test_names_of_models_are_completed(line: str) -> None:
    count = len(line.split(" ")) - 1
    out, _ = start(_LLMCLI_COMPLETE="complete_bash", COMP_WORDS=line, COMP_CWORD=str(count))
    assert out.split() == ["qwen2.5-coder:0.5b", "qwen2.5-coder:1.5b"]


def test_a_heavy_import_would_be_noticed() -> None:
    command = [sys.executable, "-X", "importtime", "-c", "import numpy"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert any(line.endswith(" numpy") for line in done.stderr.splitlines())


def test_running_a_model_loads_no_grammar_engine() -> None:
    command = [
        sys.executable,
        "-X",
        "importtime",
        "-c",
        "import llmcli.runtime.runner, llmcli.chat.input_loop",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    names = {line.rsplit("|", 1)[1].strip() for line in done.stderr.splitlines() if "|" in line}
    assert "llmcli.runtime.constraint.compile" in names
    assert "llguidance" not in names


def test_quantize_loads_no_modules_that_run_models(stories_gguf: Path, tmp_path: Path) -> None:
    program = "import sys; from llmcli.app import main; sys.argv[0] = 'llmcli'; main()"
    words = [
        "quantize",
        str(stories_gguf),
        "-t",
        "Q8_0",
        "-o",
        str(tmp_path / "out.gguf"),
        "--json",
    ]
    command = [sys.executable, "-X", "importtime", "-c", program, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    names = {line.rsplit("|", 1)[1].strip() for line in done.stderr.splitlines() if "|" in line}
    assert "quant.quantize.pipeline" in names
    unwanted = "llama_cpp", "torch", "llmcli.runtime", "llmcli.bench"
    assert [name for name in names if name.startswith(unwanted)] == []


INTERRUPTED_IMPORT = """
import sys
class Pressed:
    def find_spec(self, name, *more):
        if name == "llmcli.commands.models":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Pressed())
from llmcli.app import main
main()
"""


# Ctrl-C before the command is known, and while its module is imported.
@pytest.mark.parametrize("module", ["cli", "models"])
def test_ctrl_c_during_imports_prints_no_traceback(module: str) -> None:
    command = [
        sys.executable,
        "-c",
        INTERRUPTED_IMPORT.replace("commands.models", f"commands.{module}"),
        "list",
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stdout, done.stderr.strip()) == (130, "", "")


BROKEN = """
import sys
sys.modules["llmcli.config"] = None
from llmcli.app import main
main()
"""


def test_a_failed_import_is_reported_with_its_module() -> None:
    command = [sys.executable, "-c", BROKEN, "list"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 1
    assert "llmcli.config" in done.stderr.splitlines()[-1]
    assert "UnboundLocalError" not in done.stderr
