"""CORS headers, with which web pages of other origins may read the server's responses."""

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from llmcli.api.server_settings import ServerSettings


def with_cors(app: ASGIApp, settings: ServerSettings) -> ASGIApp:
    """Wrap an application so that web pages of the origins in `settings.cors` may read its
    responses. Without such origins, return the application unchanged.
    """
    if not settings.cors:
        return app
    return CORSMiddleware(
        app,
        allow_origins=list(settings.cors),
        allow_methods=["*"],
        allow_headers=["*"],
        allow_private_network=True,
    )
