"""The requests of an API call as those of a client."""

from dataclasses import replace

from llmcli.api.forms.base import ApiForm
from llmcli.api.server_settings import ServerSettings
from llmcli.runtime.requests.request import Request

PRIORITY_NOTE = (
    "priority has no effect: this server starts waiting requests in turn; a priority below 0 is"
    " obeyed"
)


def client_requests(form: ApiForm, client: str, settings: ServerSettings) -> list[Request]:
    """Return the engine's requests of a call for a client. A priority above 0 counts only if the
    operator allows it, because it lets the client overtake all others; otherwise it becomes 0, and
    a note in the answer says so. A priority below 0 harms no other client.
    """
    requests = [replace(request, client=client) for request in form.requests]
    if settings.may_raise_priority(client) or all(request.priority <= 0 for request in requests):
        return requests
    if PRIORITY_NOTE not in form.notes:
        form.notes.append(PRIORITY_NOTE)
    return [replace(request, priority=min(0, request.priority)) for request in requests]
