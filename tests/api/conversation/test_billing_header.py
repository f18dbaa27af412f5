"""Claude Code's billing header is left out of system texts, and nothing else is.

The headers are those of recorded requests: llama.cpp pull request 20623, vllm-mlx pull request 277,
claude-code issue 68900, and versions that send no `cch`.
"""

import pytest

from llmcli.api.conversation.billing_header import cacheable_system, remove_billing_header

CLAUDE = "You are Claude Code, Anthropic's official CLI for Claude."
HEADERS = (
    "x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch=fa690;",
    "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=sdk-cli; cch=0aaa9;",
    "x-anthropic-billing-header: cc_version=2.1.161.abc; cc_entrypoint=cli;",
    "x-anthropic-billing-header: cc_version=2.1.71.752; cc_entrypoint=cli; cc_workload=cron;",
    "x-anthropic-billing-header: cch=0123456789abcdef;",
)


@pytest.mark.parametrize("header", HEADERS)
def test_the_header_is_removed_from_the_beginning_of_a_text(header: str) -> None:
    assert remove_billing_header(header) == ""
    assert remove_billing_header(f"{header}\n{CLAUDE}") == CLAUDE
    assert remove_billing_header(f"{header}\r\n{CLAUDE}") == CLAUDE
    assert remove_billing_header(f"{header}{CLAUDE}") == CLAUDE
    # a second paragraph, which the client has set apart, stays apart
    assert remove_billing_header(f"{header}\n\n{CLAUDE}") == f"\n{CLAUDE}"


@pytest.mark.parametrize(
    "text",
    [
        "",
        CLAUDE,
        f"{CLAUDE}\n{HEADERS[0]}",
        f" {HEADERS[0]}",
        "x-anthropic-billing-header: is what we look for in logs",
        "x-anthropic-billing-header:",
        "x-anthropic-other-header: cch=fa690;",
        "X-Anthropic-Billing-Header: cch=fa690;",
    ],
)
def test_other_texts_stay(text: str) -> None:
    assert remove_billing_header(text) == text


def test_the_header_of_a_raw_field_is_removed_and_other_values_are_kept() -> None:
    blocks = [{"type": "text", "text": HEADERS[0]}, {"type": "text", "text": CLAUDE}]
    others = [{"type": "text", "text": HEADERS[1]}, {"type": "text", "text": CLAUDE}]
    assert cacheable_system(blocks) == cacheable_system(others) != blocks
    assert cacheable_system(f"{HEADERS[0]}\n{CLAUDE}") == CLAUDE
    for value in (None, 3, [3, {"text": 3}, {}], {"text": HEADERS[0]}):
        assert cacheable_system(value) == value
