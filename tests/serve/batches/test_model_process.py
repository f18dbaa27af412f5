"""Batches of a server whose model runs in a child process that is restarted when it dies."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import openai
import pytest

from llmcli.api.server_settings import ServerSettings
from llmcli.serve import server
from llmcli.serve.engine_thread.bridge import EngineBridge
from llmcli.serve.processes.front import FrontServer
from llmcli.serve.processes.supervised_process import SupervisedProcess
from tests.fixtures.batches import chat_line, create, read_rows, upload, wait, wait_for_lines
from tests.serve.processes.test_supervised_process import open_stories_model

N_LINES = 20


@contextmanager
def open_with_files(path: Path, folder: Path) -> Iterator[tuple[EngineBridge, ServerSettings]]:
    """Open the model in the other process. The function is pickled by name."""
    with open_stories_model(path) as (bridge, settings):
        yield bridge, replace(settings, files_folder=folder)


def test_a_batch_goes_on_when_the_process_of_its_model_is_killed(
    stories_gguf: Path, tmp_path: Path
) -> None:
    settings, ready = ServerSettings(("tiny",), max_body=100_000), threading.Event()
    child = SupervisedProcess(
        partial(open_with_files, stories_gguf, tmp_path / "files"), lambda text: None
    )
    with closing(child), server.open_listener("127.0.0.1", 0) as listener:
        child.start()
        http_server = server.HttpServer(FrontServer(child, settings), settings, ready.set)
        thread = threading.Thread(target=http_server.run, args=([listener],))
        thread.start()
        try:
            assert ready.wait(30)
            url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
            with openai.OpenAI(base_url=url, api_key="x", max_retries=0) as api:
                with pytest.raises(openai.APIStatusError, match="limit of 100,000 bytes"):
                    upload(api, b"x" * 200_000)  # the front server reads the whole body
                lines = [
                    chat_line(f"{number}", max_tokens=60, ignore_eos=True)
                    for number in range(N_LINES)
                ]
                batch = wait_for_lines(api, create(api, *lines), 3)
                os.kill(child.pid, signal.SIGKILL)
                batch = wait(api, api.batches.retrieve(batch.id))
                assert batch.status == "completed"
                rows = read_rows(api, batch.output_file_id)
                assert [row["custom_id"] for row in rows] == [f"{n}" for n in range(N_LINES)]
                assert len(list(api.files.list())) == 2
        finally:
            http_server.should_exit = True
            thread.join(30)
            assert not thread.is_alive()
