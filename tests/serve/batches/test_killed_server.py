"""A batch of a real `llmcli serve` that is killed: no line is lost or answered twice."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from quant.convert import checkpoint_source
from quant.quantize import plan, write
from tests.fixtures.batches import chat_line, create, read_rows, read_texts, wait
from tests.quant import tiny_checkpoint

ROOT = Path(__file__).parents[3]
N_LINES = 60


@pytest.fixture
def model(stories: Path, tmp_path: Path) -> Path:
    """A random model whose heads are large enough for --reproducible."""
    checkpoint = tiny_checkpoint.random_llama(
        stories, tmp_path / "model", hidden=256, layers=2, shards=1
    )
    source = checkpoint_source.open_checkpoint(checkpoint)
    write.write_model(plan.plan_quantization(source, "Q8_0"), tmp_path / "q8.gguf", threads=1)
    return tmp_path / "q8.gguf"


@contextmanager
def serve(model: Path, folder: Path) -> Iterator[tuple[subprocess.Popen[str], OpenAI]]:
    """Run `llmcli serve`, with a client."""
    flags = ["--port", "0", "--json", "-t", "1", "-np", "4", "-a", "tiny", "-c", "1024"]
    flags += ["--reproducible", "--files-folder", str(folder), "--temp", "0"]
    flags += ["--chat-template", "{{ messages[0].content }}"]
    words = [sys.executable, "-m", "llmcli.app", "serve", str(model), *flags]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT
    ) as process:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        try:
            with OpenAI(base_url=f"{ready['url']}/v1", api_key="x", max_retries=0) as api:
                yield process, api
        finally:
            process.kill()


def rows() -> list[dict[str, Any]]:
    # the last lines take long, so that no server has answered all of them before it is killed
    return [
        chat_line(
            f"row {number}",
            f"Once {number} upon",
            max_tokens=10 + number % 20 if number < N_LINES - 8 else 150,
        )
        for number in range(N_LINES)
    ]


def count_records(folder: Path, batch_id: str) -> int:
    """Return the number of lines in the journal of a batch."""
    journal = folder / f".{batch_id}.jsonl.journal"
    return journal.read_bytes().count(b"\n") - 1 if journal.exists() else 0


def test_a_killed_server_goes_on_with_its_batch(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "files"
    with serve(model, tmp_path / "others") as (process, api):
        whole = read_texts(api, wait(api, create(api, *rows())))
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    assert len(whole) == N_LINES
    with serve(model, folder) as (process, api):
        batch = create(api, *rows())  # killed as soon as it is created
        process.kill()
        process.wait()
    for n_records in (1, 20, 45):
        with serve(model, folder) as (process, api):
            while process.poll() is None and count_records(folder, batch.id) < n_records:
                os.sched_yield()
            process.kill()
            process.wait()
        assert n_records <= count_records(folder, batch.id) < N_LINES
    with serve(model, folder) as (process, api):
        batch = wait(api, api.batches.retrieve(batch.id))
        assert batch.status == "completed"
        found = read_rows(api, batch.output_file_id)
        assert [row["custom_id"] for row in found] == [row["custom_id"] for row in rows()]
        assert read_texts(api, batch) == whole
        assert len(list(api.files.list())) == 2
        counts = batch.request_counts
        assert counts is not None
        assert (counts.total, counts.completed, counts.failed) == (N_LINES, N_LINES, 0)
        assert batch.error_file_id is None
    names = {path.name for path in folder.iterdir()} - {".lock"}
    assert len(names) == 5  # two files, each with its description, and that of the batch
