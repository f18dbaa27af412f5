"""Removes Claude Code's billing header from a system text.

Claude Code begins the system text of each request with a line of the form
`x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch=fa690;`, as a block of its
own or in front of the text. The value of `cch` is new in each request, and the end of `cc_version`
in each conversation. With it, no later token is found in the cache, and the model does not need it.
It is therefore left out as a whole, and the prompt does not depend on its length.
"""

import re
from collections.abc import Mapping
from typing import Any

# The name and only fields `name=value;` after it, at the very beginning of the text. Other texts,
# also similar ones, are for the model.
_HEADER = re.compile(
    r"x-anthropic-billing-header:(?:[ \t]*\w{1,64}=[^;=\s]{0,256};){1,32}[ \t]*(?:\r?\n)?"
)


def remove_billing_header(text: str) -> str:
    """Return a system text without the billing header at its beginning."""
    found = _HEADER.match(text)
    return text[found.end() :] if found else text


def cacheable_system(system: Any) -> Any:
    """Return the field `system` of a request's JSON object, a text or a list of blocks, without the
    billing header. A value of another form is returned as it is.
    """
    if isinstance(system, str):
        return remove_billing_header(system)
    if not isinstance(system, list):
        return system
    return [
        {**block, "text": remove_billing_header(block["text"])}
        if isinstance(block, Mapping) and isinstance(block.get("text"), str)
        else block
        for block in system
    ]
