"""Settings of a server: frozen, the same for every request."""

from dataclasses import dataclass
from pathlib import Path

from llmcli.runtime.sampling import Sampling, default_sampling


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """`names`: what a request may call the model; the first is its own name. `sampling`, `system`,
    `stops` and `max_tokens` are defaults of a request. `most_tokens` limits every answer,
    `most_context` prompt and answer together (None: the cache does). Without `keys` no request
    needs one. `cors`: origins whose pages may send requests; `allow_hosts`: further names of the
    server. `max_body` is in bytes, `drain` in seconds.
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
