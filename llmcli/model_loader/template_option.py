"""The value of `--chat-template`: a name of llama.cpp, a file, or Jinja text."""

from llmcli import text_input
from llmcli.errors import UserError
from llmcli.runtime.text.named_templates import find_template, template_names


def read_template_option(value: str) -> str:
    """Return the Jinja text for a value of `--chat-template`. Raises UserError for a value that is
    none of the three, and for a file that cannot be read.
    """
    if template := find_template(value):
        return template
    try:
        return text_input.read_template(value)
    except UserError as error:
        if "{" in value or "/" in value or "." in value:
            raise
        names = ", ".join(template_names())
        raise UserError(
            str(error), hint=f"--chat-template takes a file, Jinja text, or a name: {names}"
        ) from None
