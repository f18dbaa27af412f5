"""The products for other instructions give the bits of those for AVX2, and attention nearly the same
results. Instructions that this CPU may lack are emulated (scripts/build/emulated_vnni.h).
"""

from collections.abc import Mapping
from pathlib import Path

import pytest

from scripts.build import check_c_portability
from scripts.build.check_c_portability import (
    ATTENTION_RESULTS,
    PRODUCT_BUILDS,
    PRODUCT_RESULTS,
    has_results,
)


def run(build: tuple[str, tuple[str, ...], str], folder: Path) -> dict[str, list[str]]:
    """Return the lines of the programs that are compiled with the options of a build. Skip the test
    if it cannot be compiled or run here.
    """
    name, options, machine = build
    compiler = next(
        (
            each
            for each in check_c_portability.find_compilers()
            if each.can_link and each.machine == machine
        ),
        None,
    )
    if compiler is None:
        pytest.skip(f"there is no C compiler for {machine} here")
    programs, problem = check_c_portability.build_results(compiler, options, folder)
    assert not problem
    lines = {
        results: check_c_portability.run_program(compiler, program, name)
        for results, program in programs.items()
    }
    known = {results: found for results, found in lines.items() if found is not None}
    if len(known) < len(lines):
        pytest.skip(f"this machine cannot run {name}")
    return known


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, list[str]]:
    lines = run(PRODUCT_BUILDS[0], tmp_path_factory.mktemp("reference"))
    assert len(lines[PRODUCT_RESULTS]) >= 100
    assert len(lines[ATTENTION_RESULTS]) >= 9
    return lines


@pytest.mark.parametrize("build", PRODUCT_BUILDS[1:], ids=[name for name, *_ in PRODUCT_BUILDS[1:]])
def test_other_instructions_give_the_same_results(
    build: tuple[str, tuple[str, ...], str], reference: Mapping[str, list[str]], tmp_path: Path
) -> None:
    lines = run(build, tmp_path)
    for results in (PRODUCT_RESULTS, ATTENTION_RESULTS):
        assert has_results(lines[results], reference[results])
