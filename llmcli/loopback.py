"""Recognizes the addresses by which this machine reaches itself."""

from urllib.parse import urlsplit

LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")


def is_loopback(url: str) -> bool:
    """Return whether a URL is that of a server on this machine."""
    return urlsplit(url).hostname in LOOPBACK_HOSTS
