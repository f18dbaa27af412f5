"""The settings of a server, which do not change while it runs."""

from dataclasses import dataclass
from pathlib import Path

from llmcli.runtime.sampling import Sampling, default_sampling


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """The settings of a server.

    - `names`: the model names that a request may use; the first is the model's own name.
    - `sampling`, `system`, `stops`, `max_tokens`: defaults for requests that do not set them.
    - `most_tokens`: largest number of tokens of any answer.
    - `most_context`: largest number of tokens of a prompt and its answer; None for the whole
      context.
    - `keys`: API keys; if empty, requests need no key.
    - `cors`: origins of web pages that may send requests.
    - `allow_hosts`: additional host names of the server.
    - `max_body`: largest request body, in bytes.
    - `drain`: seconds that running answers have to finish at shutdown.
    """

    names: tuple[str, ...]
    created: int = 0
    sampling: Sampling = default_sampling()  # noqa: RUF009 (frozen)
    system: str | None = None
    stops: tuple[str, ...] = ()
    max_tokens: int | None = None
    most_tokens: int | None = None
    most_context: int | None = None
    keys: tuple[str, ...] = ()
    cors: tuple[str, ...] = ()
    allow_hosts: tuple[str, ...] = ()
    max_body: int = 8 << 20
    drain: float = 30.0
    host: str = "127.0.0.1"
    port: int = 8080
    grpc_port: int | None = None
    ssl_key: Path | None = None
    ssl_cert: Path | None = None

    @property
    def model_name(self) -> str:
        """The model's own name."""
        return self.names[0]
