"""What the hub, the library or the network said, in words of ours: one line, and the next thing to
type.

It knows their errors and nothing of what was being fetched.
"""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from llmcli.catalog.catalog import Spec
from llmcli.config import Config
from llmcli.errors import UserError
from llmcli.types import Watcher


class _Retries(logging.Handler):
    """Turns the library's remarks on its retries into one line of ours each."""

    def __init__(self, watcher: Watcher) -> None:
        super().__init__(logging.WARNING)
        self.watcher = watcher

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text.startswith(("Retrying in", "Rate limited")):
            self.watcher.note(f"the hub does not answer as it should; {text[0].lower()}{text[1:]}")


@contextmanager
def retries_noted(watcher: Watcher) -> Iterator[None]:
    """Let the watcher hear of the library's own retries, and nobody else."""
    logger = logging.getLogger("huggingface_hub")
    handler = _Retries(watcher)
    before, handlers = logger.propagate, logger.handlers
    logger.handlers, logger.propagate = [handler], False
    try:
        yield
    finally:
        logger.handlers, logger.propagate = handlers, before


@contextmanager
def in_words(spec: Spec, config: Config) -> Iterator[None]:
    """Tell what the hub or the network refused, and what to do about it."""
    import httpx2
    from huggingface_hub import errors

    try:
        yield
    except errors.HFValidationError:
        raise UserError(
            f"{spec.repo} is not a name that a hub repository can have", hint="write org/repo"
        ) from None
    except errors.HfHubHTTPError as error:
        raise _refused(error, spec, config) from None
    except (
        errors.LocalEntryNotFoundError,
        errors.OfflineModeIsEnabled,
        httpx2.TransportError,
    ) as error:
        raise UserError(
            f"no connection to {_elsewhere(error, config) or config.hub_endpoint}: {_reason(error)}",
            hint="check the network (proxy: HTTPS_PROXY, mirror: HF_ENDPOINT); what is here stays and is resumed",
        ) from None
    except httpx2.InvalidURL:
        raise UserError(
            f"{config.hub_endpoint} is not an address", hint="correct HF_ENDPOINT, or unset it"
        ) from None
    except (errors.FileMetadataError, json.JSONDecodeError):
        raise UserError(
            f"{config.hub_endpoint} does not answer like a hub",
            hint="check HF_ENDPOINT and the proxy's settings",
        ) from None
    except OSError as error:
        raise UserError(
            f"cannot write to {config.hub_cache}: {error.strerror or error}",
            hint="make room, or set HF_HOME to another disk",
        ) from None


def _refused(error: Exception, spec: Spec, config: Config) -> UserError:
    """The most specific message first: the library's classes inherit from one another."""
    from huggingface_hub import errors

    page = f"{config.hub_endpoint}/{spec.repo}"
    status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else 0
    if isinstance(error, errors.GatedRepoError):
        return UserError(
            f"{spec.repo} is gated: its owner wants terms accepted first",
            hint=f"accept them on {page}, then set HF_TOKEN to a token of that account",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return UserError(
            f"{spec.repo} has no revision {spec.revision or 'main'}",
            hint=f"branches and commits: {page}/commits",
        )
    if isinstance(error, errors.RemoteEntryNotFoundError):
        return UserError(
            f"a file of {spec.repo} is gone from the hub",
            hint=f"what is there: {page}/tree/{spec.revision or 'main'}",
        )
    if isinstance(error, errors.DisabledRepoError):
        return UserError(
            f"{spec.repo} was disabled by its owner or by the hub", hint="choose another repository"
        )
    if status == 401 and config.hub_token:
        return UserError(
            "the hub does not accept the token",
            hint="make a new one in the hub's settings and set HF_TOKEN, or unset it",
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return UserError(
            f"the hub has no public model {spec.repo}",
            hint="check the spelling; for a private one set HF_TOKEN",
        )
    if host := _elsewhere(error, config):
        return UserError(
            f"{host}, where the hub sends us for {spec.repo}, answers with status {status}",
            hint="type the same again; if it stays so, a proxy or firewall may keep that host away",
        )
    if status == 403:
        who = "the token" if config.hub_token else "nobody without a token"
        return UserError(
            f"{who} may not read {spec.repo}", hint="use one with read access to this repository"
        )
    if status == 429:
        return UserError(
            "the hub says: too many requests",
            hint="wait a few minutes, or set HF_TOKEN for a higher limit",
        )
    return UserError(
        f"the hub failed with status {status}",
        hint="try again later; what is here stays and is resumed",
    )


def _elsewhere(error: Exception, config: Config) -> str:
    """The host that an error came from where that is not the hub itself: it keeps large files on
    other hosts.
    """
    asked = getattr(error, "response", None) or getattr(
        error, "_request", None
    )  # the property may raise
    host = str(asked.url.host) if asked else ""
    return "" if host in config.hub_endpoint else host


def _reason(error: BaseException) -> str:
    cause = error.__cause__ or error
    return (str(cause) or type(cause).__name__).splitlines()[0]
