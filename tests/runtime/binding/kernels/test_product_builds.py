"""The products for other instructions give the bits of those for AVX2, and attention nearly the same
results. Instructions that this CPU may lack are emulated (scripts/build/emulated_vnni.h).
"""

from pathlib import Path

import pytest

from scripts.build import check_c_portability
from scripts.build.check_c_portability import (
    ATTENTION_RESULTS,
    PRODUCT_BUILDS,
    PRODUCT_RESULTS,
    Compiler,
    has_results,
)


@pytest.fixture(scope="module")
def compilers() -> list[Compiler]:
    found = [compiler for compiler in check_c_portability.find_compilers() if compiler.can_link]
    if not found:
        pytest.skip("there is no C compiler here")
    return found


def run(
    results: str,
    build: tuple[str, tuple[str, ...], str],
    compilers: list[Compiler],
    folder: Path,
) -> list[str]:
    """Return the lines of a program that is compiled with the options of a build."""
    name, options, machine = build
    suitable = [each for each in compilers if each.machine == machine]
    if not suitable:
        pytest.skip(f"there is no C compiler for {machine} here")
    program = folder / "results"
    assert not check_c_portability.build_results(results, suitable[0], options, program)
    lines = check_c_portability.run_program(suitable[0], program, name)
    if lines is None:
        pytest.skip(f"this machine cannot run {name}")
    return lines


@pytest.mark.parametrize("build", PRODUCT_BUILDS[1:], ids=[name for name, *_ in PRODUCT_BUILDS[1:]])
@pytest.mark.parametrize(
    ("results", "least"),
    [(PRODUCT_RESULTS, 100), (ATTENTION_RESULTS, 9)],
    ids=["products", "attention"],
)
def test_other_instructions_give_the_same_results(
    results: str,
    least: int,
    build: tuple[str, tuple[str, ...], str],
    compilers: list[Compiler],
    tmp_path: Path,
) -> None:
    reference = run(results, PRODUCT_BUILDS[0], compilers, tmp_path)
    assert len(reference) >= least
    assert has_results(run(results, build, compilers, tmp_path), reference)
