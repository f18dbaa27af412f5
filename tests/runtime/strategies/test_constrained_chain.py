"""Sampler chains inside a grammar, token masks, and the tag after which a grammar starts."""

import numpy as np
import pytest

from llmcli.errors import UserError
from llmcli.runtime.constraint.base import single_token
from llmcli.runtime.sampling import default_sampling
from llmcli.runtime.sampling.chain import SamplerChain, make_chain
from llmcli.runtime.strategies.constrained_chain import GuidedChain, mask_logits, pieces_until_tag
from tests.fixtures.fakes import EOS, N_VOCAB, FakeModel, FakeRow
from tests.runtime.constraint.words import gbnf, schema

VOWELS = 'root ::= [aeiou]+ "!"'
SETTINGS = (
    {},
    {"temp": 0},
    {"temp": 0, "repeat_penalty": 1.5},
    {"top_k": 3, "top_p": 0.5},
    {"mirostat": 2},
    {"temp": 1.5, "top_k": 0, "top_p": 1, "min_p": 0},
)


def make_plain_chain(settings: dict[str, float], seed: int = 7) -> SamplerChain:
    return make_chain(default_sampling().with_values(settings), seed, None, FakeModel())


def random_logits(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 3, N_VOCAB).astype(np.float32)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_draw_equals_that_of_the_chain_on_masked_logits(
    settings: dict[str, float],
) -> None:
    guided = GuidedChain(make_plain_chain(settings), gbnf(VOWELS).start(), 3)
    plain_chain, matcher = make_plain_chain(settings), gbnf(VOWELS).start()
    tokens = [*b"ask"]
    for step in range(40):
        row = FakeRow(random_logits(step))
        masked = row.logits.copy()
        allowed = [token for token in range(N_VOCAB) if matcher.allows(token)]
        masked[np.setdiff1d(np.arange(N_VOCAB), allowed)] = -np.inf
        token = guided.draw(row, tokens)
        assert np.array_equal(row.logits, random_logits(step)), "the logits are restored"
        expected = plain_chain.draw(FakeRow(masked), tokens) if len(allowed) > 1 else allowed[0]
        assert token == expected
        if token == EOS:
            break
        tokens.append(token)
        matcher.accept(token)
    else:
        pytest.fail("the answer did not end")
    assert bytes(tokens[3:]).endswith(b"!")


def test_end_token_is_allowed_only_where_the_grammar_accepts() -> None:
    matcher = gbnf('root ::= "a" "b"?').start()
    assert not matcher.allows(EOS)
    matcher.accept(ord("a"))
    assert matcher.allows(EOS)
    assert matcher.is_accepting
    assert not matcher.is_complete
    matcher.accept(ord("b"))
    assert matcher.is_complete
    chain = GuidedChain(make_plain_chain({}), matcher, 0)
    assert chain.draw(FakeRow(random_logits(1)), []) == EOS


def test_matcher_is_rewound_to_the_tokens_that_are_still_in_the_text() -> None:
    chain = GuidedChain(make_plain_chain({"temp": 0}), schema({"enum": ["ab", "ac"]}).start(), 1)
    logits = np.zeros(N_VOCAB, np.float32)
    logits[ord("c")] = 5
    assert chain.draw(FakeRow(logits), [9, *b'"a']) == ord("c")
    assert chain.draw(FakeRow(logits), [9, *b'"ab']) == ord('"')
    assert chain.draw(FakeRow(logits), [9, *b'"ac']) == ord('"'), "the last token was replaced"
    assert chain.draw(FakeRow(logits), [9, *b'"a']) == ord("c")
    assert chain.draw(FakeRow(logits), [9]) == ord('"')


@pytest.mark.parametrize("size", [257, 1000, 4096])
@pytest.mark.parametrize("legal", [0.001, 0.5, 0.999, 1])
def test_mask_changes_only_forbidden_logits_and_restores_them(size: int, legal: float) -> None:
    random = np.random.default_rng(size)
    logits = random.normal(size=size).astype(np.float32)
    allowed = random.random(size) < legal
    allowed[random.integers(size)] = True
    before = logits.copy()
    restore = mask_logits(logits, np.packbits(allowed, bitorder="little"))
    assert np.array_equal(np.isfinite(logits), allowed)
    assert np.array_equal(logits[allowed], before[allowed])
    restore()
    assert np.array_equal(logits, before)


def test_mask_that_allows_no_token_is_an_error() -> None:
    with pytest.raises(UserError, match="no token of the model"):
        mask_logits(random_logits(1), np.zeros(-(-N_VOCAB // 8), np.uint8))


@pytest.mark.parametrize(
    ("tag", "pieces", "count"),
    [
        ("", [b"a"], 0),
        ("</t>", [b"a", b"<", b"/t", b">", b"b"], 4),
        ("</t>", [b"a</t>b"], 1),
        ("</t>", [b"</t"], None),
    ],
)
def test_number_of_pieces_until_a_tag(tag: str, pieces: list[bytes], count: int | None) -> None:
    assert pieces_until_tag(tag, pieces) == count


@pytest.mark.parametrize(
    ("bits", "token"),
    [([0, 0, 0], None), ([0, 1, 0], 8), ([0, 0, 128], 23), ([0, 3, 0], None), ([1, 0, 1], None)],
)
def test_single_token_of_a_mask(bits: list[int], token: int | None) -> None:
    assert single_token(np.array(bits, np.uint8)) == token
