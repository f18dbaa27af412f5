"""Text into markup, escaped unless it is markup already. One way in: `element`."""

import html
import re

from llmcli.ui import visible

# What neither XML nor UTF-8 can hold: halves of surrogate pairs, two noncharacters.
UNFIT = re.compile("[\ud800-\udfff\ufffe\uffff]")
VOID = ("meta", "br", "hr")  # HTML gives these no end


class Markup(str):
    """Text that is markup and goes into a page as it is; only `element` and its callers here make
    it.
    """

    __slots__ = ()


def escape(text: str) -> Markup:
    """Any text as text of HTML and XML: a name from a file's header, a path, an error."""
    return Markup(html.escape(UNFIT.sub("\ufffd", visible(text)), quote=True))


def element(name: str, /, *children: str | None, **attributes: str | float | None) -> Markup:
    """One element; text among its children and attributes is escaped, None left out.

    `class_` is class, `stroke_width` is stroke-width.
    """
    words = [name]
    for key, value in attributes.items():
        if value is not None:
            shown = (
                f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
            )
            words.append(f'{key.rstrip("_").replace("_", "-")}="{escape(shown)}"')
    inside = "".join(
        one if isinstance(one, Markup) else escape(one) for one in children if one is not None
    )
    return Markup(
        f"<{' '.join(words)}/>" if name in VOID else f"<{' '.join(words)}>{inside}</{name}>"
    )


def join(*pieces: Markup) -> Markup:
    """Markup after markup."""
    return Markup("".join(pieces))
