"""Builds HTML and SVG elements from Python strings and escapes all text in them. Markup for charts
and pages must be built only with `build_element`, so that untrusted text cannot inject elements.
"""

import html
import re

from llmcli.ui import escape_controls

# Characters that UTF-8 or XML does not allow: surrogates, and two noncharacters.
UNENCODABLE = re.compile("[\ud800-\udfff\ufffe\uffff]")
VOID_ELEMENTS = ("meta", "br", "hr")  # HTML elements without an end tag


class Markup(str):
    """A string that is already escaped markup, so that `build_element` does not escape it again.
    Create it only with the functions of this module or from constants.
    """

    __slots__ = ()


def escape(text: str) -> Markup:
    """Escape a text for HTML and XML. Control characters are shown as visible escapes, and
    characters that cannot be encoded become U+FFFD.
    """
    return Markup(html.escape(UNENCODABLE.sub("\ufffd", escape_controls(text)), quote=True))


def build_element(name: str, /, *children: str | None, **attributes: str | float | None) -> Markup:
    """Return the element `name` with the given children and attributes, as markup. Attribute
    values and children of the plain type str are escaped. Children and attributes that are None
    are left out.

    Attribute names are Python names: `class_` becomes class, `stroke_width` becomes stroke-width.
    """
    tag = [name]
    for key, value in attributes.items():
        if value is not None:
            text = (
                f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
            )
            tag.append(f'{key.rstrip("_").replace("_", "-")}="{escape(text)}"')
    content = "".join(
        child if isinstance(child, Markup) else escape(child)
        for child in children
        if child is not None
    )
    return Markup(
        f"<{' '.join(tag)}/>" if name in VOID_ELEMENTS else f"<{' '.join(tag)}>{content}</{name}>"
    )


def join_markup(*elements: Markup) -> Markup:
    """Return the elements one after another as a single Markup. (`"".join` would return a str,
    which is escaped when it becomes a child.)
    """
    return Markup("".join(elements))
