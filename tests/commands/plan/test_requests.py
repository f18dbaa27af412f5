"""`llmcli plan` of a checkpoint on the hub: the number of requests does not depend on the number of
matrices.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llmcli.catalog.hub import range_reader
from llmcli.catalog.hub.content_check import BLOCK_BYTES
from tests.fixtures.cli import Done
from tests.fixtures.fake_hub import Hub
from tests.quant import int4_checkpoint
from tests.quant.int4_checkpoint import Size

Llmcli = Callable[..., Done]
# Requests for weights: one kind of matrix for each of gate, up and down.
READS_OF_KINDS = {
    "compressed-tensors": 3,
    "gptq": 3,
    "awq": 0,
    "modelopt": 0,
    "bitsandbytes": 3,
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A local server in place of the Hugging Face hub. Tables are longer than what is read of every
    file in advance.
    """
    monkeypatch.setattr(range_reader, "HEAD_BYTES", BLOCK_BYTES)
    with Hub() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


@pytest.mark.parametrize("method", sorted(READS_OF_KINDS))
def test_a_plan_requests_tables_and_one_matrix_of_each_kind(
    method: str, llmcli: Llmcli, hub: Hub, stories: Path, tmp_path: Path
) -> None:
    size = Size(layers=4, experts=24)
    folder = tmp_path / "int4"
    int4_checkpoint.write_folder(stories, folder, method, size)
    files = list(int4_checkpoint.files(folder, method, size))
    assert all(len(file.head) > BLOCK_BYTES for file in files)
    small = {path.name: path.read_bytes() for path in folder.iterdir()}
    hub.add("org/int4", small | {file.path.name: file.content() for file in files})
    done = llmcli("plan", "org/int4", "--quant", "q4_k_m", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["quants"]
    requests = [path for _, path, _ in hub.requests if path.endswith(".safetensors")]
    # the beginning of a file, the rest of its table, and the tensors of some matrices
    assert len(requests) <= 2 * len(files) + READS_OF_KINDS[method]
    assert len(hub.requests) <= len(requests) + 2 * len(small) + 4
