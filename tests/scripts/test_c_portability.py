"""The C files compile without SSE2 and give the same results; kernel_results.c calls each function."""

import re
import shutil
from pathlib import Path

import pytest

from scripts.build import check_c_portability as portability
from scripts.build import kernels


def test_kernel_results_call_every_exported_function() -> None:
    exported = {
        name
        for source in kernels.KERNEL_SOURCES
        for name in re.findall(
            r"^EXPORT [^;{]*?(llmcli_\w+)\(", Path(kernels.ROOT, source).read_text(), re.M
        )
    }
    called = set(re.findall(r"\b(llmcli_\w+)", portability.RESULTS.read_text()))
    assert len(exported) > 20
    assert exported == called


@pytest.fixture(scope="module")
def compilers() -> list[portability.Compiler]:
    found = portability.find_compilers()
    if not found:
        pytest.skip("there is no C compiler here")
    return found


def test_every_installed_compiler_takes_all_files_with_all_flags(
    compilers: list[portability.Compiler], capsys: pytest.CaptureFixture[str]
) -> None:
    native = [one for one in compilers if one.machine == portability.NATIVE and one.can_link][:1]
    assert portability.check_syntax(native), capsys.readouterr().out


def test_code_without_sse2_gives_the_same_results(
    compilers: list[portability.Compiler], tmp_path: Path
) -> None:
    """As does the code of a cross compiler for aarch64, if it and qemu are installed."""
    native = next((one for one in compilers if one.machine == portability.NATIVE), None)
    if native is None or native.machine != "x86_64" or not native.can_link:
        pytest.skip("this test compares code of x86-64")
    builds = [(native, ()), (native, ("-U__SSE2__",))]
    if shutil.which("qemu-aarch64"):
        builds += [(one, ()) for one in compilers if one.machine == "aarch64" and one.runner][:1]
    results = []
    for number, (compiler, options) in enumerate(builds):
        program = tmp_path / str(number)
        problem = portability.build_program(compiler, options, False, tmp_path, program)
        assert not problem
        lines = portability.run_program(compiler, program, compiler.name)
        assert lines is not None
        results.append(lines)
    assert len(results[0]) > 1_500
    assert all(lines == results[0] for lines in results)


def test_differences_that_no_rule_allows_are_failures(capsys: pytest.CaptureFixture[str]) -> None:
    reference = [
        "exact widen/all/1 0a 0 0",
        "lanes few/normal/1 0b 3 0",
        "float look/normal/1 0c 2 0",
    ]
    other = [
        "exact widen/all/1 0a 0 0",
        "lanes few/normal/1 00 3 0",
        "float look/normal/1 00 2.000001 0",
    ]
    assert portability.compare("gcc, x86-64-v3, as shipped", other, reference)
    assert not portability.compare("gcc, SSE2, as shipped", other, reference)
    far = [*other[:2], "float look/normal/1 00 2.1 0"]
    assert not portability.compare("gcc, x86-64-v3, as shipped", far, reference)
    assert not portability.compare("gcc, SSE2, contracted off", reference[:2], reference)
    assert not portability.compare(
        "a, x86-64-v4, as shipped", ["exact widen/all/1 00 0 0", *other[1:]], reference
    )
    assert "FAILED" in capsys.readouterr().out
