"""The process in which the load of a model file is rehearsed. It may crash, hang or be killed.

It prints the name of each stage before it begins, and a JSON object at the end. stderr gets the
errors of llama.cpp's log and the message of an abort.
"""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from llmcli.errors import UserError
from llmcli.hardware.limited_process import ProcessLimits, apply_limits
from llmcli.model_loader.rehearsal.verdicts import COMPUTING, FORMATTING, LOADING


@dataclass(frozen=True, slots=True)
class ChildRequest:
    """What the process has to do. `computes`: whether to load the weights and compute tokens.
    `latent`: whether the model has latent attention. `template`: the chat template of the file, or
    "". `requires_numbers`: whether infinite and undefined results are refused.
    """

    path: str
    computes: bool
    threads: int
    latent: bool
    data_bytes: int
    cpu_seconds: int
    template: str = ""
    requires_numbers: bool = False


def main() -> NoReturn:
    """Run the rehearsal that the JSON object on stdin describes. The process ends at once, because
    freeing the model would take time.
    """
    request = ChildRequest(**json.load(sys.stdin))
    apply_limits(ProcessLimits(request.data_bytes, request.cpu_seconds, 0.0))
    result: dict[str, Any] = {"refusal": None}
    try:
        _rehearse(request)
    except UserError as error:
        result = {"refusal": [str(error), error.hint]}
    except MemoryError:
        result = {"refusal": ["there is not enough memory", ""]}
    _print(json.dumps(result))
    sys.stderr.flush()
    os._exit(0)


def _rehearse(request: ChildRequest) -> None:
    """Run the stages. Raises UserError if llama.cpp refuses the file."""
    from llmcli.runtime.binding import library
    from llmcli.runtime.binding.trials import rehearsal

    library.load_alone()
    path = Path(request.path)
    _print(LOADING)
    bos, eos = rehearsal.rehearse_layout(path, request.threads, latent=request.latent)
    if request.computes:
        _print(COMPUTING)
        rehearsal.rehearse_pass(
            path,
            request.threads,
            latent=request.latent,
            requires_numbers=request.requires_numbers,
        )
    if request.template:
        _print(FORMATTING)
        _format_probes(request.template, bos, eos)


def _format_probes(source: str, bos: str, eos: str) -> None:
    """Render some conversations with the chat template. A template that refuses them is no error
    here: its message is printed when the template is used.
    """
    from contextlib import suppress

    from llmcli.runtime.text.chat_template import ChatTemplate
    from llmcli.runtime.text.template_check import PROBE_CONVERSATIONS

    template = ChatTemplate(source, bos=bos, eos=eos)
    for messages in PROBE_CONVERSATIONS.values():
        with suppress(UserError):
            template.render(messages)


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
