"""scripts/quality/teacher_text.py and train_teacher.py: batches of training texts, calibration
texts, refused sizes and product types.
"""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from scripts.quality import teacher_text

SCRIPTS = Path(__file__).parents[2] / "scripts" / "quality"


def corpus() -> teacher_text.Corpus:
    kinds = ("wiki", "plays", "code")
    texts = {name: np.arange(1, 500, dtype=np.uint16) for name in kinds}
    return teacher_text.Corpus(texts, {})


def test_batch_depends_on_seed_and_step_alone():
    first = corpus().batch(0, 7, 64, 16)
    assert first.shape == (4, 17)
    assert np.array_equal(first, corpus().batch(0, 7, 64, 16))
    assert not np.array_equal(first, corpus().batch(0, 8, 64, 16))
    assert not np.array_equal(first, corpus().batch(1, 7, 64, 16))


def test_every_window_begins_with_the_end_token():
    assert (corpus().batch(0, 0, 64, 16)[:, 0] == 0).all()


def test_portions_share_no_text():
    size = teacher_text.PORTIONS * teacher_text.PORTION_CHARS
    kinds = {"wiki": chr(0x4E00), "code": chr(0x3400), "plays": chr(0x1000)}
    texts = {
        name: "".join(chr(ord(first) + at // 1000) for at in range(size))
        for name, first in kinds.items()
    }
    portions = [
        set(teacher_text.portion(texts, number)) - {"\n"} for number in range(teacher_text.PORTIONS)
    ]
    assert all(portions) and not set.intersection(*portions)
    assert all("\u1000" not in portion for portion in portions)


def test_rows_that_fill_no_superblock_are_refused(tmp_path):
    pytest.importorskip("torch")
    command = [
        sys.executable,
        SCRIPTS / "train_teacher.py",
        tmp_path,
        "--text",
        tmp_path,
        "--hidden",
        "500",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "multiples of 256" in done.stderr


@pytest.mark.parametrize(
    ("device", "has", "kind"),
    [
        ("cpu", {"avx2": True, "avx512_bf16": False}, "float32"),
        ("cpu", {"amx_bf16": True}, "bfloat16"),
        ("cuda", {}, "bfloat16"),
    ],
)
def test_products_use_bfloat16_where_it_is_fast(device, has, kind, monkeypatch):
    torch = pytest.importorskip("torch")
    from scripts.quality import train_teacher

    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: has)
    assert train_teacher.product_type(device) == kind
