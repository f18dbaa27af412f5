"""ollama's endpoints `/api/tags`, `/api/ps`, `/api/show`, `/api/version` and `/api/embed`.

ollama's chat endpoints are in api/forms/ollama.py, those that pull and remove models in
ollama_models.py.
"""

import hashlib
import time
from datetime import UTC, datetime
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import Response

from llmcli.api.bodies.base import RequestBody, honored, ignored
from llmcli.api.errors import ApiError
from llmcli.api.forms.ollama import find_listed_name
from llmcli.api.request_settings import context_tokens
from llmcli.serve.http.api_keys import connected_client
from llmcli.serve.http.exchange import (
    cancel_on_disconnect,
    json_response,
    large_json_response,
    read_checked_body,
)
from llmcli.serve.http.routes.embeddings import answer_embeddings
from llmcli.serve.http.service import Route, Service

# The version of ollama that has this API. Some clients (such as VS Code) refuse an older version.
OLLAMA_VERSION = "0.12.6"
NEVER = "9999-12-31T00:00:00Z"  # the time at which a model that stays loaded is unloaded
INPUT_FIELD_NAMES = "input", "prompt"  # in /api/embed, in the older /api/embeddings


class ModelBody(RequestBody):
    """The name of a model."""

    origin: ClassVar[str] = "ollama"
    model: str | None = honored("the name of the served model")
    name: str | None = honored("the same as model")

    @property
    def requested(self) -> str:
        """The name. Raises ApiError if there is none."""
        if not (name := self.model or self.name):
            raise ApiError("name is missing", param="name")
        return name


class ShowBody(ModelBody):
    """The model to describe."""

    model: str | None = honored("any name")
    verbose: Any = ignored("the details are always the same")
    system: Any = ignored("ollama ignores it, too")
    template: Any = ignored("ollama ignores it, too")
    options: Any = ignored("ollama ignores it, too")


class OllamaEmbedBody(RequestBody):
    """Texts to embed."""

    origin: ClassVar[str] = "ollama"
    model: str | None = honored("any name")
    input: Any = honored("a text or a list of texts, for /api/embed")
    prompt: str | None = honored("a text, for /api/embeddings")
    truncate: bool | None = honored("true shortens a text that is too long; otherwise refused")
    dimensions: Any = honored("the number of values of a vector")
    keep_alive: Any = ignored(
        "a server of one model keeps it; a server of several unloads the model after this time"
    )
    options: Any = ignored("they have no effect on vectors")


def model_document(
    name: str, *, nbytes: int, changed: float, architecture: str, n_params: int, file_type: str
) -> dict[str, Any]:
    """Return a model as ollama lists it. `changed`: the Unix time of its last change."""
    count = f"{n_params / 1e9:.1f}B" if n_params >= 1e9 else f"{n_params / 1e6:.0f}M"
    return {
        "name": name,
        "model": name,
        "modified_at": datetime.fromtimestamp(changed, UTC).isoformat(),
        "size": nbytes,
        # ollama uses the hash of a manifest, which a GGUF file does not have
        "digest": hashlib.sha256(f"{name} {nbytes}".encode()).hexdigest(),
        "details": {
            "parent_model": "",
            "format": "gguf",
            "family": architecture,
            "families": [architecture] if architecture else [],
            "parameter_size": count,
            "quantization_level": file_type,
        },
    }


def _model_document(service: Service, name: str) -> dict[str, Any]:
    header = service.bridge.runner.header
    return model_document(
        name,
        nbytes=sum(tensor.nbytes for tensor in header.tensors),
        changed=service.settings.created,
        architecture=header.architecture,
        n_params=service.bridge.runner.model.n_params,
        file_type=header.file_type or "",
    )


async def list_models(service: Service, request: Request) -> Response:
    """Respond with an entry for each name of the model."""
    return json_response(
        {"models": [_model_document(service, name) for name in service.settings.names]}
    )


async def list_running(service: Service, request: Request) -> Response:
    """Respond with the loaded models: an entry for each name of the served model."""
    size = context_tokens(service.bridge.runner, service.settings)
    models = [
        {
            **_model_document(service, name),
            "expires_at": NEVER,
            "size_vram": 0,
            "context_length": size,
        }
        for name in service.settings.names
    ]
    return json_response({"models": models})


async def show_version(service: Service, request: Request) -> Response:
    """Respond with the version of ollama whose API this is."""
    return json_response({"version": OLLAMA_VERSION})


async def show_model(service: Service, request: Request) -> Response:
    """Respond with the details, metadata, capabilities and template of one model."""
    body = await read_checked_body(request, service.settings.max_body, ShowBody)
    runner, settings = service.bridge.runner, service.settings
    name = find_listed_name(body.requested, settings)
    capabilities = ["completion"] if runner.can_generate else ["embedding"]
    if runner.can_generate and runner.template is not None:
        capabilities += ["tools", *(["thinking"] if runner.template.thinking_variables else [])]
    architecture = runner.header.architecture
    document = _model_document(service, name)
    info = {
        "general.architecture": architecture,
        "general.parameter_count": runner.model.n_params,
        f"{architecture}.context_length": runner.header.context_length or runner.n_ctx,
        f"{architecture}.embedding_length": runner.model.n_embd,
    }
    return json_response(
        {
            "modelfile": f"FROM {name}",
            "parameters": f"num_ctx {context_tokens(runner, settings)}",
            "license": "",
            "template": runner.template.source if runner.template else "{{ .Prompt }}",
            "details": document["details"],
            "model_info": info,
            "capabilities": capabilities,
            "modified_at": document["modified_at"],
        }
    )


async def embed(service: Service, request: Request) -> Response:
    """Respond with the vectors of one or several texts. ollama's older path `/api/embeddings` takes
    one text in `prompt` and returns one vector.
    """
    started, notes = time.perf_counter_ns(), list[str]()
    body = await read_checked_body(request, service.settings.max_body, OllamaEmbedBody, notes)
    is_old_path = request.url.path.endswith("/embeddings")
    texts = body.prompt if is_old_path else body.input
    if texts is None:
        raise ApiError(
            f"{INPUT_FIELD_NAMES[is_old_path]} is missing", param=INPUT_FIELD_NAMES[is_old_path]
        )
    document: dict[str, Any] = {"input": texts, "dimensions": body.dimensions}
    document |= {"truncate_prompt_tokens": -1} if body.truncate else {}
    client = connected_client(request, service.settings.keys)
    answer: Any = (
        await cancel_on_disconnect(request.receive, answer_embeddings(service, document, client))
        if texts != []
        else {"data": [], "usage": {"prompt_tokens": 0}}
    )
    vectors = [item["embedding"] for item in answer["data"]]
    extra = {"notes": notes} if notes else {}
    if is_old_path:
        return json_response({"embedding": vectors[0], **extra})
    return await large_json_response(
        {
            "model": find_listed_name(body.model, service.settings),
            "embeddings": vectors,
            "total_duration": time.perf_counter_ns() - started,
            "load_duration": 0,
            "prompt_eval_count": answer["usage"]["prompt_tokens"],
            **extra,
        }
    )


ROUTES = (
    Route("/api/tags", list_models),
    Route("/api/ps", list_running),
    Route("/api/version", show_version),
    Route("/api/show", show_model, ("POST",), body_type=ShowBody),
    Route("/api/embed", embed, ("POST",), ("/api/embeddings",), body_type=OllamaEmbedBody),
)
