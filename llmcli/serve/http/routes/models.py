"""`/v1/models`: the served model, in OpenAI's format, with an entry for each of its names."""

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from llmcli.api.errors import unknown_model
from llmcli.api.request_settings import context_tokens
from llmcli.serve.http.service import Route, Service


def _model_document(service: Service, name: str) -> dict[str, Any]:
    runner, settings = service.bridge.runner, service.settings
    meta = {
        "n_vocab": runner.model.n_vocab,
        "n_ctx": context_tokens(runner, settings),
        "n_ctx_train": runner.header.context_length,
        "n_params": runner.model.n_params,
        "size": sum(tensor.nbytes for tensor in runner.header.tensors),
        "file_type": runner.header.file_type,
        "chat": runner.template is not None,
        "generates": runner.can_generate,
    }
    return {
        "id": name,
        "object": "model",
        "created": settings.created,
        "owned_by": "llmcli",
        "meta": meta,
    }


async def list_models(service: Service, request: Request) -> Response:
    """Respond with a list that has an entry for each name of the model."""
    return JSONResponse(
        {
            "object": "list",
            "data": [_model_document(service, name) for name in service.settings.names],
        }
    )


async def show_model(service: Service, request: Request) -> Response:
    """Respond with the entry of one name, or with 404 if the model does not have this name."""
    name = request.path_params["name"]
    if name not in service.settings.names and name not in _file_names(service):
        raise unknown_model(name, service.settings.names)
    return JSONResponse(_model_document(service, name))


def _file_names(service: Service) -> set[str]:
    """Return the names under which the model's file is known: its path, and the file's name with
    and without the suffix.
    """
    path = service.bridge.runner.header.files[0]
    return {str(path), path.name, path.stem}


ROUTES = (
    Route("/v1/models", list_models, further_paths=("/models",)),
    Route("/v1/models/{name:path}", show_model),
)
