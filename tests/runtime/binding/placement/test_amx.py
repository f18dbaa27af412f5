"""A build whose AMX kernels crash is recognized, and models are loaded without them."""

from pathlib import Path

import pytest

from llmcli.runtime.binding import library
from llmcli.runtime.binding.model import open_model
from llmcli.runtime.binding.placement import amx, devices
from quant import installation
from tests.quant import tiny_gguf

BUILT_BY = b"\x7fELF...\0GCC: (Debian %s-14) %s\0more\0"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Fake a machine with AMX and a build by a given compiler."""

    def fake(
        compiler: bytes,
        *,
        mended: bool = False,
        has_amx: bool = True,
        name: str = "libggml-cpu.so.0",
    ) -> None:
        path = tmp_path / name
        path.write_bytes(compiler)
        symbols = type("Symbols", (), {amx.MARK: 1} if mended else {})
        monkeypatch.setattr(devices, "repacks_for_amx", lambda: has_amx)
        monkeypatch.setattr(amx, "ggml", symbols)
        monkeypatch.setattr(amx, "library_files", lambda: [(path, path.stat())])
        amx.is_build_faulty.cache_clear()

    yield fake
    amx.is_build_faulty.cache_clear()


@pytest.mark.parametrize(
    ("version", "is_faulty"),
    [
        ("11.4.0", True),
        ("12.2.0", True),
        ("12.4.0", False),
        ("13.2.1", True),
        ("13.3.0", False),
        ("14.2.0", False),
        ("15.1.0", False),
    ],
)
def test_versions_of_gcc_with_the_bug_are_recognized(
    machine, version: str, is_faulty: bool
) -> None:
    text = version.encode()
    machine(BUILT_BY % (text, text))
    assert amx.is_build_faulty() == is_faulty
    assert amx.repacks_weights() == (not is_faulty)


def test_a_library_for_one_kind_of_cpu_is_read_too(machine) -> None:
    """As a build with GGML_CPU_ALL_VARIANTS has it."""
    machine(BUILT_BY % (b"12.2.0", b"12.2.0"), name="libggml-cpu-sapphirerapids.so")
    assert amx.is_build_faulty()


def test_mended_builds_other_compilers_and_other_processors_are_left_alone(machine) -> None:
    machine(BUILT_BY % (b"12.2.0", b"12.2.0"), mended=True)
    assert not amx.is_build_faulty()
    machine(b"\0Apple clang version 15.0.0\0")
    assert not amx.is_build_faulty()
    machine(BUILT_BY % (b"12.2.0", b"12.2.0"), has_amx=False)
    assert not amx.is_build_faulty()
    assert not amx.repacks_weights()


def test_models_are_loaded_without_amx_by_a_faulty_build(
    machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_gguf.llama(tmp_path / "tiny.gguf", hidden=64, ff=96, layers=1)
    lib = library.lib()
    load, seen = lib.llama_model_load_from_file, []

    def record(name: bytes, params):
        seen.append(bool(params.use_extra_bufts))
        return load(name, params)

    monkeypatch.setattr(lib, "llama_model_load_from_file", record)
    for version in (b"12.2.0", b"14.2.0"):
        machine(BUILT_BY % (version, version))
        with open_model(path):
            pass
    assert seen == [False, True]


def test_the_compiler_of_the_installed_library_is_read() -> None:
    files = [path for path, _ in library.library_files() if path.name == "libggml-cpu.so"]
    if not files:
        pytest.skip("the library of this system has another name")
    versions = amx.gcc_versions(files[0].read_bytes())
    assert versions or b"clang version" in files[0].read_bytes()


def test_the_repair_needs_no_script_outside_a_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    assert amx.repair_command() == "scripts/setup --again"
    monkeypatch.setattr(installation, "is_checkout", lambda: False)
    command = amx.repair_command()
    assert "scripts/" not in command
    assert f"-include {Path(amx.__file__).with_name('tile-config.h')}" in command
