"""llama-server's endpoints `/props`, `/slots` and `/apply-template`. The responses contain no texts
of other clients' requests.
"""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llmcli.api.forms.openai_chat import ChatForm
from llmcli.runtime.binding.library import llama_cpp_version
from llmcli.runtime.kv_cache.usage import measure_cache_usage
from llmcli.runtime.runner import Runner
from llmcli.serve.http.exchange import build_form, json_response, read_body
from llmcli.serve.http.service import Route, Service


async def show_props(service: Service, request: Request) -> Response:
    """Respond with the properties of the model, the defaults of requests, and the number of answers
    that run at once.
    """
    runner, settings = service.bridge.runner, service.settings
    template = runner.template
    params = settings.sampling.as_dict()
    n_ctx = settings.max_context or runner.n_ctx
    return json_response(
        {
            "default_generation_settings": {
                "n_ctx": n_ctx,
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
            "endpoint_slots": True,
            "endpoint_props": False,
            "endpoint_metrics": True,
            "bos_token": template.bos if template else "",
            "eos_token": template.eos if template else "",
            "build_info": f"llama-cpp-python {llama_cpp_version()}",
            "is_sleeping": False,
        }
    )


async def show_slots(service: Service, request: Request) -> Response:
    """Respond with the sequences in the KV cache, in the format of llama-server's slots."""
    return json_response(
        await service.bridge.run_on_engine_thread(lambda: _slot_documents(service.bridge.runner))
    )


async def apply_template(service: Service, request: Request) -> Response:
    """Respond with the prompt text that the chat template makes from a conversation."""
    document = await read_body(request, service.settings.max_body)
    form: Any = await build_form(service.bridge, ChatForm.path, document, service.settings)
    model = service.bridge.runner.model
    raw = b"".join(model.piece(token, special=True) for token in form.requests[0].tokens)
    return json_response({"prompt": raw.decode("utf-8", "replace")})


def _slot_documents(runner: Runner) -> list[dict[str, Any]]:
    speculative = runner.engine.resources.speculation is not None
    return [
        {
            "id": sequence.slot,
            "n_ctx": runner.n_ctx,
            "speculative": speculative,
            "is_processing": sequence.is_running,
            "n_prompt_tokens": sequence.tokens,
        }
        for sequence in sorted(
            measure_cache_usage(runner.engine.ledger).sequences, key=lambda sequence: sequence.slot
        )
    ]


ROUTES = (
    Route("/props", show_props, further_paths=("/v1/props",)),
    Route("/slots", show_slots, further_paths=("/v1/slots",)),
    Route("/apply-template", apply_template, ("POST",)),
)
