"""What lets the pages of other origins read an answer (CORS), for whoever writes it: the
application, or its front.
"""

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from llmcli.serve.settings import Settings


def readable(app: ASGIApp, settings: Settings) -> ASGIApp:
    """An application whose answers the pages of `settings.cors` may read; as it is where there are
    none.
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
