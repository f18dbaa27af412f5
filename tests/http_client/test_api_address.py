"""Addresses of servers as users type them."""

import pytest

from llmcli.errors import UserError
from llmcli.http_client.api_address import parse_base_url


@pytest.mark.parametrize(
    ("typed", "base"),
    [
        ("http://h:8080", "http://h:8080/v1"),
        ("http://h:8080/v1/", "http://h:8080/v1"),
        ("https://h/api/v1/chat/completions", "https://h/api/v1"),
    ],
)
def test_addresses_are_normalized_to_the_base_url(typed: str, base: str) -> None:
    assert parse_base_url(typed) == base


@pytest.mark.parametrize("typed", ["ftp://h", "http://", "http://h:99999", "http://[::1"])
def test_an_invalid_address_is_refused(typed: str) -> None:
    with pytest.raises(UserError, match="is not a server address"):
        parse_base_url(typed)
