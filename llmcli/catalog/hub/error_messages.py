"""Converts errors of the hub and of the network to UserErrors with one line of text and a hint."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from llmcli.catalog.hub.exchange import RETRY_HINT, HubUnreachable, RefusedRequest
from llmcli.catalog.spec import Spec
from llmcli.config import Config
from llmcli.errors import UserError

# Statuses with which a hub answers a valid request. All others mean that it is not working, or that
# the answer is not the hub's.
ANSWER_STATUSES = (401, 403, 404, 410, 451)


@contextmanager
def explain_error(spec: Spec, config: Config) -> Iterator[None]:
    """Convert errors of the hub, the network and the cache's disk in the with block to UserErrors:
    to HubUnreachable if the hub does not answer. `spec`: the repository that is accessed.
    """
    import httpx2
    from huggingface_hub import errors

    try:
        yield
    except errors.HFValidationError:
        raise UserError(
            f"{spec.repo} is not a valid repository name", hint="write org/repo"
        ) from None
    except RefusedRequest as error:
        raise _explain_refusal(error, spec, config) from None
    except errors.OfflineModeIsEnabled:
        raise UserError(
            "HF_HUB_OFFLINE forbids to ask the hub", hint="unset it and try again"
        ) from None
    except httpx2.HTTPError as error:
        host = _redirect_host(_failed_host(error), config) or config.hub_endpoint
        raise HubUnreachable(
            f"no connection to {host}: {_first_line(error)}",
            hint="check the network (proxy: HTTPS_PROXY, mirror: HF_ENDPOINT); "
            "downloaded data is kept, and the download resumes",
        ) from None
    except httpx2.InvalidURL:
        raise UserError(
            f"{config.hub_endpoint} is not a valid address",
            hint="correct HF_ENDPOINT, or unset it",
        ) from None
    except OSError as error:
        is_forbidden = error.errno in (errno.EROFS, errno.EACCES, errno.EPERM)
        raise UserError(
            f"cannot write to {config.hub_cache}: {error.strerror or error}",
            hint="add --offline to use what is there, or set HF_HOME to a folder that you can write"
            if is_forbidden
            else "free disk space, or set HF_HOME to another disk",
        ) from None


def _explain_refusal(error: RefusedRequest, spec: Spec, config: Config) -> UserError:
    """Return the UserError for a status with which the hub refused a request."""
    page = f"{config.hub_endpoint}/{spec.repo}"
    if error.code == "GatedRepo":
        return UserError(
            f"{spec.repo} is gated: you must accept its terms first",
            hint=f"accept them on {page}, then set HF_TOKEN to a token of that account",
        )
    if error.code == "RevisionNotFound":
        return UserError(
            f"{spec.repo} has no revision {spec.revision or 'main'}",
            hint=f"see the branches and commits: {page}/commits",
        )
    if error.code == "EntryNotFound":
        return UserError(
            f"a file of {spec.repo} is no longer on the hub",
            hint=f"see the current files: {page}/tree/{spec.revision or 'main'}",
        )
    if error.message == "Access to this resource is disabled.":
        return UserError(
            f"{spec.repo} was disabled by its owner or by the hub", hint="choose another repository"
        )
    is_token_refused = error.message == "Invalid credentials in Authorization header"
    if error.status == 401 and (config.hub_token or is_token_refused):
        return UserError(
            "the hub rejects the token",
            hint="create a new one in the hub's settings and set HF_TOKEN, or unset it",
        )
    if host := _redirect_host(error.host, config):
        return HubUnreachable(
            f"{host}, to which the hub redirects for {spec.repo}, "
            f"answers with status {error.status}",
            hint="run the same command again; if it fails again, "
            "a proxy or firewall may block that host",
        )
    # The hub answers with 401 for a repository that does not exist, because it may be a private one.
    if error.code == "RepoNotFound" or error.status == 401:
        return UserError(
            f"the hub has no public model {spec.repo}",
            hint="check the spelling; for a private model, set HF_TOKEN",
        )
    if error.status == 403:
        return UserError(
            f"the token has no access to {spec.repo}"
            if config.hub_token
            else f"{spec.repo} needs a token",
            hint="use a token with read access to this repository",
        )
    if error.status == 429:
        return HubUnreachable(
            "the hub refuses the request: too many requests",
            hint="wait a few minutes, or set HF_TOKEN for a higher limit",
        )
    kind = UserError if error.status in ANSWER_STATUSES else HubUnreachable
    return kind(f"the hub failed with status {error.status}", hint=RETRY_HINT)


def _failed_host(error: Exception) -> str:
    """Return the host of the request that failed, or "" if the error does not have it."""
    # The property error.request can raise, so the attribute behind it is read.
    request = getattr(error, "_request", None)
    return str(request.url.host) if request else ""


def _redirect_host(host: str, config: Config) -> str:
    """Return `host` if it is not the hub itself but one to which the hub has redirected, otherwise
    "". The hub stores large files on other hosts.
    """
    return "" if host == urlsplit(config.hub_endpoint).hostname else host


def _first_line(error: BaseException) -> str:
    """Return the first line of the text of an error's cause, or of the error itself."""
    cause = error.__cause__ or error
    return (str(cause) or type(cause).__name__).splitlines()[0]
