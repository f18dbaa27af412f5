"""The values of the keyword `format`, as patterns that a grammar can follow.

A format is enforced by a pattern, by llguidance's own grammar, or for integers by bounds. Some
formats say nothing about the value, such as "password". Every other format cannot be enforced.
"""

from dataclasses import dataclass

# llguidance's own formats. The others that it has accept leap seconds at any time, 29 February in
# any year, and host names that begin with xn-- whatever follows.
NATIVE_FORMATS = frozenset({"duration", "email", "ipv4", "ipv6", "uuid", "uri"})
# Formats of OpenAPI, pydantic, schemars and form builders that do not narrow the value.
FREE_FORMATS = frozenset(
    [
        "password",
        "binary",
        "double",
        "float",
        "decimal",
        "path",
        "file-path",
        "directory-path",
        "file",
        "folder",
        "string",
        "text",
        "textarea",
        "multiline",
        "multi-line",
        "markdown",
        "html",
        "code",
        "unknown",
        "number",
        "integer",
        # zod's checks of parts of a text, which come with a pattern
        "includes",
        "starts_with",
        "ends_with",
        "template_literal",
    ]
)
INTEGER_BOUNDS = {
    **{f"int{size}": (-(1 << size - 1), (1 << size - 1) - 1) for size in (8, 16, 32, 64, 128)},
    **{f"uint{size}": (0, (1 << size) - 1) for size in (8, 16, 32, 64, 128)},
    "uint": (0, None),
}

YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
FOURTH = "(?:0[48]|[2468][048]|[13579][26])"  # two digits of a multiple of 4, but not 00
DATE = (
    f"(?:{YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    f"|(?:[0-9]{{2}}{FOURTH}|{FOURTH}00)-02-29)"
)
# Models need no leap second, and only 23:59:60 UTC can be one.
CLOCK = "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\\.[0-9]{1,9})?"
OFFSET = "(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
# A label of a host name: no hyphen at its ends, nor in its third and fourth place together, where
# hyphens announce an encoded international name.
ALNUM, NAME = "[A-Za-z0-9]", "[A-Za-z0-9-]"
LABEL = (
    f"(?:{ALNUM}(?:{NAME}?{ALNUM})?|{ALNUM}{NAME}{NAME}{ALNUM}"
    f"|{ALNUM}{NAME}(?:{ALNUM}{NAME}|-{ALNUM}){NAME}{{0,58}}{ALNUM})"
)
HOSTNAME = rf"{LABEL}(?:\.{LABEL})*"
UNRESERVED = r"A-Za-z0-9\-._~!$&'()*+,;="
PERCENT = "%[0-9A-Fa-f]{2}"
SEGMENT = f"(?:[{UNRESERVED}:@]|{PERCENT})*"
FULL_SEGMENT = f"(?:[{UNRESERVED}:@]|{PERCENT})+"
FIRST_SEGMENT = f"(?:[{UNRESERVED}@]|{PERCENT})+"  # of a relative path: without a colon
QUERY = f"(?:[{UNRESERVED}:@/?]|{PERCENT})*"
AUTHORITY = f"(?:(?:[{UNRESERVED}:]|{PERCENT})*@)?(?:[{UNRESERVED}]|{PERCENT})*(?::[0-9]*)?"
URI_REFERENCE = (
    f"(?:[A-Za-z][A-Za-z0-9+.\\-]*:)?//{AUTHORITY}(?:/{SEGMENT})*(?:\\?{QUERY})?(?:#{QUERY})?"
    f"|[A-Za-z][A-Za-z0-9+.\\-]*:(?:/?{FULL_SEGMENT}(?:/{SEGMENT})*|/)?"
    f"(?:\\?{QUERY})?(?:#{QUERY})?"
    f"|(?:/(?:{FULL_SEGMENT}(?:/{SEGMENT})*)?|{FIRST_SEGMENT}(?:/{SEGMENT})*)?"
    f"(?:\\?{QUERY})?(?:#{QUERY})?"
)
# The characters beyond ASCII that RFC 3987 allows in an IRI, less its private ones.
INTERNATIONAL = r"\u00a0-\ud7ff\uf900-\ufdcf\ufdf0-\uffef\x{10000}-\x{2fffd}"
POINTER = "(?:/(?:[^/~]|~[01])*)*"
IPV4_NUMBER = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
IPV4 = rf"(?:{IPV4_NUMBER}\.){{3}}{IPV4_NUMBER}"
HEX = "[0-9A-Fa-f]{1,4}"
IPV6 = "|".join(
    [
        f"(?:{HEX}:){{7}}{HEX}",
        *(
            f"(?:(?:{HEX}:){{0,{before}}}{HEX})?::(?:(?:{HEX}:){{0,{5 - before}}}{HEX})?"
            for before in range(6)
        ),
        f"(?:{HEX}:){{6}}{HEX}::",
    ]
)
PREFIX_32, PREFIX_128 = "(?:[12]?[0-9]|3[0-2])", "(?:[1-9]?[0-9]|1[01][0-9]|12[0-8])"
BASE64 = "(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?"
UUID = "[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}"
URL_PATH = f"{AUTHORITY}(?:/{SEGMENT})*(?:\\?{QUERY})?(?:#{QUERY})?"


@dataclass(frozen=True, slots=True)
class StringFormat:
    """How a grammar follows a format of strings: by a pattern for the whole string, and by a
    maximum number of characters.
    """

    pattern: str
    max_length: int | None = None

    @property
    def keywords(self) -> dict[str, object]:
        """Return the keywords of JSON Schema that enforce the format."""
        keywords: dict[str, object] = {"pattern": f"^(?:{self.pattern})$"}
        if self.max_length is not None:
            keywords["maxLength"] = self.max_length
        return keywords


def _expand_international(pattern: str) -> str:
    """Return the pattern of a URI as that of an IRI, which may have characters beyond ASCII."""
    return pattern.replace(UNRESERVED, UNRESERVED + INTERNATIONAL)


STRING_FORMATS = {
    name: StringFormat(pattern)
    for name, pattern in {
        "date": DATE,
        "time": CLOCK + OFFSET,
        "date-time": f"{DATE}[tT]{CLOCK}{OFFSET}",
        # without an offset, as Python's isoformat writes naive times
        "local-date-time": f"{DATE}[tT]{CLOCK}",
        "local-time": CLOCK,
        "year": YEAR,
        "year-month": f"{YEAR}-(?:0[1-9]|1[0-2])",
        "uri-reference": URI_REFERENCE,
        "iri-reference": _expand_international(URI_REFERENCE),
        "iri": _expand_international(
            f"[A-Za-z][A-Za-z0-9+.\\-]*:(?://{URL_PATH}"
            f"|/?{FULL_SEGMENT}(?:/{SEGMENT})*(?:\\?{QUERY})?(?:#{QUERY})?)"
        ),
        "uri-template": (
            r"(?:[A-Za-z0-9\-._~:/?#\[\]@!$&()*+,;=]|%[0-9A-Fa-f]{2}"
            r"|\{[+#./;?&]?[A-Za-z0-9_]+(?:\*|:[1-9][0-9]{0,3})?"
            r"(?:,[A-Za-z0-9_]+(?:\*|:[1-9][0-9]{0,3})?)*\})*"
        ),
        "idn-email": r"[A-Za-z0-9_+\-\p{L}\p{N}]+(?:\.[A-Za-z0-9_+\-\p{L}\p{N}]+)*@" + HOSTNAME,
        "url": f"https?://{HOSTNAME}(?::[0-9]{{1,5}})?(?:/{SEGMENT})*(?:\\?{QUERY})?(?:#{QUERY})?",
        "json-pointer": POINTER,
        "json-pointer-uri-fragment": "#" + POINTER,
        "relative-json-pointer": f"(?:0|[1-9][0-9]*)(?:#|{POINTER})",
        "guid": UUID,
        "uuid4": (
            "[0-9A-Fa-f]{8}-[0-9A-Fa-f]{4}-4[0-9A-Fa-f]{3}-[89ABab][0-9A-Fa-f]{3}-[0-9A-Fa-f]{12}"
        ),
        "byte": BASE64,
        "base64": BASE64,
        "base64url": "[A-Za-z0-9_-]*",
        "hex": "(?:[0-9A-Fa-f]{2})*",
        "ip": f"{IPV4}|{IPV6}",
        "ipvanyaddress": f"{IPV4}|{IPV6}",
        "ipv4network": f"{IPV4}/{PREFIX_32}",
        "ipv4interface": f"{IPV4}/{PREFIX_32}",
        "ipv6network": f"(?:{IPV6})/{PREFIX_128}",
        "ipv6interface": f"(?:{IPV6})/{PREFIX_128}",
        "ipvanynetwork": f"{IPV4}/{PREFIX_32}|(?:{IPV6})/{PREFIX_128}",
        "ipvanyinterface": f"{IPV4}/{PREFIX_32}|(?:{IPV6})/{PREFIX_128}",
        "cidrv4": f"{IPV4}/{PREFIX_32}",
        "cidrv6": f"(?:{IPV6})/{PREFIX_128}",
        "mac": "[0-9A-Fa-f]{2}(?::[0-9A-Fa-f]{2}){5}",
        "color": "#(?:[0-9A-Fa-f]{3}|[0-9A-Fa-f]{6})",
        "e164": r"\+[1-9][0-9]{6,14}",
        "cuid": "[cC][0-9a-zA-Z]{8,24}",
        "cuid2": "[a-z][0-9a-z]{1,31}",
        "ulid": "[0-7][0-9A-HJKMNP-TV-Z]{25}",
        "xid": "[0-9a-v]{20}",
        "ksuid": "[A-Za-z0-9]{27}",
        "nanoid": "[A-Za-z0-9_-]{21}",
        "jwt": r"[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]*",
        "lowercase": r"\P{Lu}*",
        "uppercase": r"\P{Ll}*",
    }.items()
} | {
    # RFC 1034: 253 characters
    "hostname": StringFormat(HOSTNAME, 253),
    "host-name": StringFormat(HOSTNAME, 253),
}
