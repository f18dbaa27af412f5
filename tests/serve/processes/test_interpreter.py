import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
from llmcli.serve.processes.interpreter import start_fork_server

context = start_fork_server()
process = context.Process(target=exec, args=("import sys; print('llmcli.serve.http.app' in sys.modules)",))
process.start()
process.join()
print(context.get_start_method(), process.exitcode)
"""


def run_program(**environment: str) -> list[str]:
    """Run the program, which starts a process, and return the lines that both print."""
    words = [sys.executable, "-c", PROGRAM]
    return subprocess.run(
        words, env=environment, capture_output=True, text=True, check=True
    ).stdout.splitlines()


@pytest.mark.skipif(sys.platform != "linux", reason="the fork server is used on Linux only")
def test_a_process_starts_with_the_modules_imported(tmp_path: Path) -> None:
    assert run_program() == ["True", "forkserver 0"]


def test_a_temporary_folder_with_a_long_name_gives_a_new_interpreter(tmp_path: Path) -> None:
    folder = tmp_path / ("f" * 120)
    folder.mkdir()
    assert run_program(TMPDIR=str(folder)) == ["False", "spawn 0"]
