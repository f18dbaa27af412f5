"""Fixtures and helpers for tests that fetch models from a fake hub."""

from pathlib import Path

import pytest

from tests.fixtures.fake_hub import Hub

REPO = "someone/Tiny-GGUF"


@pytest.fixture
def gguf_hub(hub: Hub, gguf: bytes) -> Hub:
    """A hub whose repository REPO has two GGUFs of one model, a helper GGUF and a pickle."""
    hub.add(
        REPO,
        {
            "tiny-Q4_K_M.gguf": gguf,
            "tiny-Q8_0.gguf": gguf + bytes(32),
            "mmproj-Q4_K_M.gguf": b"x",
            "a.bin": b"x",
        },
    )
    return hub


def checkpoint_files(folder: Path) -> dict[str, bytes]:
    """Return the files of a checkpoint folder by name, with a pickle, code and a README added."""
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "NOTICE"}
    return files | {
        "pytorch_model.bin": b"pickle",
        "modeling_evil.py": b"code",
        "README.md": b"words",
    }
