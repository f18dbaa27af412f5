"""HTML and XML markup, in which all text is escaped. All markup is built by `build_element`."""

import html
import re

from llmcli.ui import escape_controls

# Characters that XML or UTF-8 cannot encode: surrogates and two noncharacters.
UNENCODABLE = re.compile("[\ud800-\udfff\ufffe\uffff]")
VOID_ELEMENTS = ("meta", "br", "hr")  # HTML elements without an end tag


class Markup(str):
    """Text that is markup already, so it is not escaped again. Create it only by the functions of
    this module, or from constants.
    """

    __slots__ = ()


def escape(text: str) -> Markup:
    """Return a text, such as a model name or a path, escaped for HTML and XML."""
    return Markup(html.escape(UNENCODABLE.sub("\ufffd", escape_controls(text)), quote=True))


def build_element(name: str, /, *children: str | None, **attributes: str | float | None) -> Markup:
    """Return one element as markup. Attribute values, and children that are plain text, are
    escaped. Children and attributes that are None are left out.

    An attribute's name is written as a Python name: `class_` becomes class, `stroke_width` becomes
    stroke-width.
    """
    words = [name]
    for key, value in attributes.items():
        if value is not None:
            shown = (
                f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
            )
            words.append(f'{key.rstrip("_").replace("_", "-")}="{escape(shown)}"')
    inside = "".join(
        child if isinstance(child, Markup) else escape(child)
        for child in children
        if child is not None
    )
    return Markup(
        f"<{' '.join(words)}/>"
        if name in VOID_ELEMENTS
        else f"<{' '.join(words)}>{inside}</{name}>"
    )


def join_markup(*pieces: Markup) -> Markup:
    """Return the concatenation of pieces of markup."""
    return Markup("".join(pieces))
