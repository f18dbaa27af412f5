"""A system or a package that llmcli cannot work with is an error in one line, before anything else
is imported.
"""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run_python(code: str, *paths: Path) -> subprocess.CompletedProcess[str]:
    """Run code with these folders and the checkout on Python's path."""
    start = f"import sys; sys.path[:0] = {[str(path) for path in (*paths, ROOT)]!r}\n"
    command = [sys.executable, "-c", start + code]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_windows_is_pointed_to_wsl_before_a_module_that_it_lacks_is_imported() -> None:
    done = run_python(
        """
sys.modules["fcntl"] = sys.modules["resource"] = None  # importing one is an error
from llmcli import app
sys.platform = "win32"
app.main()
"""
    )
    assert done.returncode == 1, done.stderr
    error, hint = done.stderr.splitlines()
    assert error == "error: llmcli does not run on Windows itself"
    assert "wsl --install" in hint


@pytest.mark.parametrize("name", ["quant.py", "quant/__init__.py"])
def test_another_package_named_quant_is_an_error(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.touch()
    done = run_python("from llmcli import app; app.main()", tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    error, hint = done.stderr.splitlines()
    assert error == f"error: Python finds another package `quant` than llmcli's: {path}"
    assert "PYTHONPATH" in hint


def test_a_folder_named_quant_without_code_is_not_taken_for_a_package(tmp_path: Path) -> None:
    """Python prefers a package with __init__.py, wherever it is."""
    (tmp_path / "quant").mkdir()
    code = "sys.argv = ['llmcli', '--version']; from llmcli import app; app.main()"
    done = run_python(code, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_files_of_another_program_in_the_place_of_quant_are_an_error(tmp_path: Path) -> None:
    """As after `pip install` of a project whose package has the same name."""
    (tmp_path / "quant").mkdir()
    (tmp_path / "quant" / "__init__.py").write_text("VERSION = 3\n")
    (tmp_path / "llmcli").mkdir()
    for name in ("__init__.py", "app.py", "start_checks.py"):
        (tmp_path / "llmcli" / name).write_text((ROOT / "llmcli" / name).read_text())
    done = run_python("from llmcli import app; app.main()", tmp_path)
    assert done.returncode == 1
    error, hint = done.stderr.splitlines()
    assert error == (
        f"error: another program has replaced llmcli's package `quant` ({tmp_path / 'quant'})"
    )
    assert "environment of its own" in hint
