"""The process in which a script of llama.cpp's converter runs.

Nothing of the checkpoint is run as code, and no connection is made. The process stops once, after
the header of the GGUF is complete and before the first weight is read, until llmcli has checked the
header and sends a line. It ends when llmcli ends.
"""

import json
import os
import runpy
import shutil
import signal
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

REMOTE_CODE_MARK = "llmcli: this checkpoint needs Python code of its own"
NETWORK_MARK = "llmcli: the converter must not use the network"
FORMAT_MARK = "llmcli: this version of transformers cannot be kept from running code"
NETWORK_EVENTS = (
    "socket.connect",
    "socket.getaddrinfo",
    "socket.gethostbyname",
    "socket.sendto",
    "socket.sendmsg",
)


@dataclass(frozen=True, slots=True)
class ConverterRun:
    """What the process has to run.

    - `folder`: that of the converter.
    - `script`: the file of it to run, and its arguments, `words`.
    - `header`: the file that gets a copy of the GGUF's header. It has the size of the whole GGUF,
      with a hole in place of the weights.
    - `metadata`: keys and strings that are added to the metadata of the GGUF.
    """

    folder: str
    script: str
    words: tuple[str, ...]
    header: str
    metadata: Mapping[str, str] = field(default_factory=dict)


class RemoteCodeError(Exception):
    """An error raised when a checkpoint can only be read by Python code that comes with it."""


def main() -> None:
    """Run the script that the JSON object in the first argument describes."""
    request = ConverterRun(**json.loads(sys.argv[1]))
    run = threading.Event()
    threading.Thread(target=_wait_for_line, args=(run,), daemon=True).start()
    script = Path(request.folder, request.script)
    sys.argv = [str(script), *request.words]
    sys.path[:0] = [request.folder, str(Path(request.folder, "gguf-py"))]
    sys.addaudithook(_refuse_network)
    _refuse_code()
    _pause_after_header(request, run)
    runpy.run_path(str(script), run_name="__main__")


def _wait_for_line(run: threading.Event) -> NoReturn:
    """Set `run` when llmcli has sent a line, and end this process group when llmcli has ended."""
    while os.read(0, 1):  # without sys.stdin, whose lock this thread would keep at the exit
        run.set()
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


def _refuse_network(event: str, arguments: tuple[Any, ...]) -> None:
    """Raise OSError for every connection to another host."""
    if event not in NETWORK_EVENTS:
        return
    import socket

    # The first argument is a socket or the name of a host. Other sockets stay on this machine.
    family = getattr(arguments[0], "family", socket.AF_INET)
    if family in (socket.AF_INET, socket.AF_INET6):
        raise OSError(NETWORK_MARK)


def _refuse_code() -> None:
    """Keep transformers and torch from running code of a checkpoint, whatever the scripts of the
    converter allow. Where a checkpoint has code and transformers knows its class, too, the class of
    transformers is used.

    Ends the process if transformers does not have the functions that decide about it.
    """
    import torch
    from transformers import dynamic_module_utils

    names = ("resolve_trust_remote_code", "get_class_from_dynamic_module")
    if not all(hasattr(dynamic_module_utils, name) for name in names):
        raise SystemExit(FORMAT_MARK)
    load = torch.load

    def resolve(
        trust_remote_code: object,
        model_name: object,
        has_local_code: bool,
        has_remote_code: bool,
        *others: object,
        **options: object,
    ) -> bool:
        if has_remote_code and not has_local_code:
            raise RemoteCodeError(REMOTE_CODE_MARK)
        return False

    def refuse(*arguments: object, **options: object) -> NoReturn:
        raise RemoteCodeError(REMOTE_CODE_MARK)

    def load_weights(*arguments: Any, **options: Any) -> Any:
        return load(*arguments, **{**options, "weights_only": True})

    dynamic_module_utils.resolve_trust_remote_code = resolve
    dynamic_module_utils.get_class_from_dynamic_module = refuse
    torch.load = load_weights


def _pause_after_header(request: ConverterRun, run: threading.Event) -> None:
    """Let the writer of the converter's gguf package add keys, and stop when the header is
    complete.
    """
    import gguf

    writer = gguf.GGUFWriter
    write_header, write_table = writer.write_header_to_file, writer.write_ti_data_to_file

    def write_header_to_file(self: Any, *arguments: Any, **options: Any) -> None:
        for key, text in request.metadata.items():
            self.add_string(key, text)
        write_header(self, *arguments, **options)

    def write_ti_data_to_file(self: Any) -> None:
        write_table(self)
        self.flush()
        (file,) = self.fout
        size = self.ggml_pad(file.tell(), self.data_alignment) + sum(
            self.ggml_pad(tensor.nbytes, self.data_alignment) for tensor in self.tensors[0].values()
        )
        _copy_header(Path(file.name), Path(request.header), size)
        run.wait()

    writer.write_header_to_file = write_header_to_file
    writer.write_ti_data_to_file = write_ti_data_to_file


def _copy_header(file: Path, target: Path, size: int) -> None:
    """Copy the file, extended to `size` bytes, to `target`, which appears only when it is
    complete.
    """
    part = target.with_suffix(".part")
    shutil.copyfile(file, part)
    os.truncate(part, size)
    part.replace(target)
