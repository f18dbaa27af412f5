"""llama-server's endpoints `/props`, `/slots` and `/apply-template`, and its actions on single slots.
The responses contain no texts of other clients' requests.
"""

from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import Response

from llmcli.api.bodies.base import RequestBody, honored
from llmcli.api.errors import ApiError
from llmcli.api.forms.conversation_form import ChatBody, apply_template
from llmcli.api.request_settings import context_tokens
from llmcli.runtime.binding.library import llama_cpp_version
from llmcli.runtime.runner import Runner
from llmcli.runtime.text.chat_template import TOOL_TEMPLATE
from llmcli.serve.engine_thread import slot_files
from llmcli.serve.http import api_keys
from llmcli.serve.http.exchange import json_response, read_body, read_checked_body
from llmcli.serve.http.service import Route, Service

SLOT_ACTIONS = "save", "restore", "erase"


class SlotBody(RequestBody):
    """The file of a saved slot."""

    origin: ClassVar[str] = "llama-server"
    filename: str = honored("the name of a file in the folder of --slot-save-path", ...)


async def show_props(service: Service, request: Request) -> Response:
    """Respond with the properties of the model, the defaults of requests, and the number of answers
    that run at once.
    """
    runner, settings = service.bridge.runner, service.settings
    template = runner.template
    params = settings.sampling.as_dict()
    n_ctx = context_tokens(runner, settings)
    disabled = dict(settings.disabled_paths)
    accepts_system = template is not None and await service.bridge.run_in_worker(
        template.accepts_system
    )
    return json_response(
        {
            "default_generation_settings": {
                "n_ctx": n_ctx,
                "speculative": runner.engine.resources.speculation is not None,
                "is_processing": service.bridge.n_open > 0,
                "params": {
                    **params,
                    "temperature": params["temp"],
                    "max_tokens": settings.max_tokens,
                    "stop": list(settings.stops),
                },
            },
            "total_slots": service.bridge.parallel,
            "model_alias": settings.model_name,
            "model_ftype": runner.header.file_type,
            "model_path": str(runner.header.files[0]),
            "modalities": {"vision": False, "video": False, "audio": False},
            "chat_template": template.source if template else "",
            **(
                {"chat_template_tool_use": template.named[TOOL_TEMPLATE]}
                if template and TOOL_TEMPLATE in template.named
                else {}
            ),
            "chat_template_caps": {
                "supports_system_role": accepts_system,
                "supports_tools": template is not None and "tools" in template.variables,
                "supports_thinking": template is not None and bool(template.thinking_variables),
            },
            "endpoint_slots": "/slots" not in disabled,
            "endpoint_props": False,
            "endpoint_metrics": "/metrics" not in disabled,
            "ui": "/" not in disabled,
            "bos_token": template.bos if template else "",
            "eos_token": template.eos if template else "",
            "build_info": f"llama-cpp-python {llama_cpp_version()}",
            "is_sleeping": False,
        }
    )


async def show_slots(service: Service, request: Request) -> Response:
    """Respond with the sequences in the KV cache, in the format of llama-server's slots."""
    bridge = service.bridge
    n_ctx = context_tokens(bridge.runner, service.settings)
    return json_response(
        await bridge.run_on_engine_thread(
            lambda: _slot_documents(bridge.runner, bridge.parallel, n_ctx)
        )
    )


async def change_slot(service: Service, request: Request) -> Response:
    """Save the cached tokens of a slot to a file, restore them from one, or erase them."""
    settings, bridge = service.settings, service.bridge
    if settings.slot_folder is None:
        raise ApiError("slots cannot be saved here; start the server with --slot-save-path", 501)
    action = request.query_params.get("action", "")
    if action not in SLOT_ACTIONS:
        raise ApiError(f"action must be one of {', '.join(SLOT_ACTIONS)}", param="action")
    name = request.path_params["slot"]
    if not (name.isascii() and name.isdigit() and len(name) < 6):
        raise ApiError(f"{name[:40]!r} is no slot: it must be a number", param="id_slot")
    slot = int(name)
    if action == "erase":
        erased = await slot_files.erase_slot(bridge, slot)
        return json_response({"id_slot": slot, "n_erased": erased.n_tokens})
    body = await read_checked_body(request, settings.max_body, SlotBody)
    path = slot_files.file_in(settings.slot_folder, body.filename)
    head = {"id_slot": slot, "filename": path.name}
    if action == "save":
        saved = await slot_files.save_slot(bridge, slot, path)
        counts = {"n_saved": saved.n_tokens, "n_written": saved.n_bytes}
        return json_response({**head, **counts, "timings": {"save_ms": saved.milliseconds}})
    client = api_keys.connected_client(request, settings.keys)
    scope = "" if bridge.runner.engine.schedule.share_prefixes else client
    restored = await slot_files.restore_slot(bridge, slot, path, scope)
    counts = {"n_restored": restored.n_tokens, "n_read": restored.n_bytes}
    return json_response({**head, **counts, "timings": {"restore_ms": restored.milliseconds}})


async def show_prompt(service: Service, request: Request) -> Response:
    """Respond with the prompt text that the chat template makes from a conversation."""
    document = await read_body(request, service.settings.max_body)
    bridge = service.bridge
    notes: list[str] = []
    text = await bridge.run_in_worker(
        apply_template, document, bridge.runner, service.settings, notes
    )
    return json_response({"prompt": text, **({"notes": notes} if notes else {})})


def _slot_documents(runner: Runner, parallel: int, n_ctx: int) -> list[dict[str, Any]]:
    """Return the state of each slot: of as many as there may be answers, and of all further ones
    that hold tokens. `n_ctx`: the largest number of tokens of a prompt and its answer.
    """
    ledger = runner.engine.ledger
    last = max((slot for slot, tokens in enumerate(ledger.tokens) if tokens), default=-1)
    n_slots = min(len(ledger.tokens), max(parallel, last + 1))
    return [
        {
            "id": slot,
            "n_ctx": n_ctx,
            "speculative": runner.engine.resources.speculation is not None,
            "is_processing": ledger.is_busy(slot),
            "n_prompt_tokens": len(ledger.tokens[slot]),
        }
        for slot in range(n_slots)
    ]


ROUTES = (
    Route("/props", show_props, further_paths=("/v1/props",)),
    Route("/slots", show_slots, further_paths=("/v1/slots",)),
    Route("/slots/{slot}", change_slot, ("POST",), body_type=SlotBody),
    Route("/apply-template", show_prompt, ("POST",), body_type=ChatBody),
)
