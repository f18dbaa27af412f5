"""Converts errors of the hub, of huggingface_hub and of the network to UserErrors with one line of
text and a hint.
"""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from llmcli.catalog.spec import Spec
from llmcli.config import Config
from llmcli.errors import UserError
from llmcli.types import ProgressDisplay


class _RetryHandler(logging.Handler):
    """A log handler that prints messages of huggingface_hub about retries as notes."""

    def __init__(self, watcher: ProgressDisplay) -> None:
        super().__init__(logging.WARNING)
        self.watcher = watcher

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text.startswith(("Retrying in", "Rate limited")):
            self.watcher.note(f"the hub does not respond properly; {text[0].lower()}{text[1:]}")


@contextmanager
def note_retries(watcher: ProgressDisplay) -> Iterator[None]:
    """While the with block runs, print log messages of huggingface_hub about retries as notes for
    the user. Its other log messages are discarded.
    """
    logger = logging.getLogger("huggingface_hub")
    handler = _RetryHandler(watcher)
    propagate, handlers = logger.propagate, logger.handlers
    logger.handlers, logger.propagate = [handler], False
    try:
        yield
    finally:
        logger.handlers, logger.propagate = handlers, propagate


@contextmanager
def explain_error(spec: Spec, config: Config) -> Iterator[None]:
    """Convert errors of the hub, the network and the cache's disk in the with block to UserErrors.
    `spec`: the repository that is accessed.
    """
    import httpx2
    from huggingface_hub import errors

    try:
        yield
    except errors.HFValidationError:
        raise UserError(
            f"{spec.repo} is not a valid repository name", hint="write org/repo"
        ) from None
    except errors.HfHubHTTPError as error:
        raise _explain_refusal(error, spec, config) from None
    except (
        errors.LocalEntryNotFoundError,
        errors.OfflineModeIsEnabled,
        httpx2.TransportError,
    ) as error:
        host = _redirect_host(error, config) or config.hub_endpoint
        raise UserError(
            f"no connection to {host}: {_first_line(error)}",
            hint="check the network (proxy: HTTPS_PROXY, mirror: HF_ENDPOINT); "
            "downloaded data is kept, and the download resumes",
        ) from None
    except httpx2.InvalidURL:
        raise UserError(
            f"{config.hub_endpoint} is not a valid address",
            hint="correct HF_ENDPOINT, or unset it",
        ) from None
    except (errors.FileMetadataError, json.JSONDecodeError):
        raise UserError(
            f"{config.hub_endpoint} does not answer like a hub",
            hint="check HF_ENDPOINT and the proxy settings",
        ) from None
    except OSError as error:
        raise UserError(
            f"cannot write to {config.hub_cache}: {error.strerror or error}",
            hint="free disk space, or set HF_HOME to another disk",
        ) from None


def _explain_refusal(error: Exception, spec: Spec, config: Config) -> UserError:
    """Return the UserError for an HTTP status with which the hub refused a request. The error
    classes of huggingface_hub inherit from each other, so the most specific are checked first.
    """
    from huggingface_hub import errors

    page = f"{config.hub_endpoint}/{spec.repo}"
    status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else 0
    if isinstance(error, errors.GatedRepoError):
        return UserError(
            f"{spec.repo} is gated: you must accept its terms first",
            hint=f"accept them on {page}, then set HF_TOKEN to a token of that account",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return UserError(
            f"{spec.repo} has no revision {spec.revision or 'main'}",
            hint=f"see the branches and commits: {page}/commits",
        )
    if isinstance(error, errors.RemoteEntryNotFoundError):
        return UserError(
            f"a file of {spec.repo} is no longer on the hub",
            hint=f"see the current files: {page}/tree/{spec.revision or 'main'}",
        )
    if isinstance(error, errors.DisabledRepoError):
        return UserError(
            f"{spec.repo} was disabled by its owner or by the hub", hint="choose another repository"
        )
    if status == 401 and config.hub_token:
        return UserError(
            "the hub rejects the token",
            hint="create a new one in the hub's settings and set HF_TOKEN, or unset it",
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return UserError(
            f"the hub has no public model {spec.repo}",
            hint="check the spelling; for a private model, set HF_TOKEN",
        )
    if host := _redirect_host(error, config):
        return UserError(
            f"{host}, to which the hub redirects for {spec.repo}, answers with status {status}",
            hint="run the same command again; if it fails again, "
            "a proxy or firewall may block that host",
        )
    if status == 403:
        return UserError(
            f"the token has no access to {spec.repo}"
            if config.hub_token
            else f"{spec.repo} needs a token",
            hint="use a token with read access to this repository",
        )
    if status == 429:
        return UserError(
            "the hub refuses the request: too many requests",
            hint="wait a few minutes, or set HF_TOKEN for a higher limit",
        )
    return UserError(
        f"the hub failed with status {status}",
        hint="try again later; downloaded data is kept, and the download resumes",
    )


def _redirect_host(error: Exception, config: Config) -> str:
    """Return the host that caused an error if it is not the hub itself but one to which the hub has
    redirected, otherwise "". The hub stores large files on other hosts.
    """
    # The property error.request can raise, so the attribute behind it is read.
    request = getattr(error, "response", None) or getattr(error, "_request", None)
    host = str(request.url.host) if request else ""
    return "" if host in config.hub_endpoint else host


def _first_line(error: BaseException) -> str:
    """Return the first line of the text of an error's cause, or of the error itself."""
    cause = error.__cause__ or error
    return (str(cause) or type(cause).__name__).splitlines()[0]
