"""GBNF grammars in llguidance and in llama.cpp's own engine, and errors of the parser."""

from pathlib import Path

import numpy as np
import pytest

from llmcli.errors import UserError
from llmcli.runtime.binding.grammar import NativeGrammars
from llmcli.runtime.binding.model import open_model
from llmcli.runtime.constraint import gbnf
from llmcli.runtime.constraint.base import Constraint, Matcher, accepts
from llmcli.runtime.constraint.compile import GrammarCompiler
from llmcli.runtime.constraint.llguidance import TokenizerWrapper
from tests.runtime.constraint.words import gbnf as compile_gbnf

JSON = r"""
root ::= object   # as llama.cpp's own
value ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array ::=
  "[" ws ( value
    ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""
CASES = {
    "json": (JSON, '{"name": "Zoë", "age": [1, -2.5, true]}'),
    "letters that begin alike": ('root ::= ("a" "bc" | "ab" "d" | [a-c]+ "!")', "abca!"),
    "counts": ('root ::= [0-9]{2} "-"{1,} ("x" | "yy"){0,3} end\nend ::= "."?', "12--xyyx."),
    "any character": ('root ::= "<" . .? ">" [^>]*', "<é->rest of it"),
    "other scripts": (
        r'root ::= [ぁ-ゟァ-ヿ]+ "\u3002" [\U0001F600-\U0001F64F]?',
        "こんにちは。😀",
    ),
    "an empty rule": ('root ::= none "a"* none\nnone ::= ""', "aaa"),
    "right recursion": ('root ::= "(" root ")" | "x"', "((x))"),
}


@pytest.fixture(scope="module")
def engines(stories_gguf: Path):
    """Return a model with a SentencePiece vocabulary, and a compiler for both engines."""
    with open_model(stories_gguf, vocab_only=True) as model:
        native = NativeGrammars(model)
        yield model, GrammarCompiler(model, native.compile)
        native.close()


def allowed_tokens(matcher: Matcher, size: int) -> list[int]:
    return np.flatnonzero(np.unpackbits(matcher.mask(), count=size, bitorder="little")).tolist()


@pytest.mark.parametrize("name", CASES)
def test_both_engines_allow_the_same_tokens_at_every_step(name: str, engines) -> None:
    model, grammars = engines
    text, answer = CASES[name]
    pieces = [model.piece(token) for token in range(model.n_vocab)]
    tokens = TokenizerWrapper(
        pieces, [model.eos], lambda text: model.tokenize(text, special=False)
    )(answer)
    assert b"".join(pieces[token] for token in tokens) == answer.encode()
    matchers = [
        grammars(Constraint("gbnf", text, engine)).start() for engine in ("llguidance", "llama")
    ]
    # llama.cpp also allows bytes that never occur in UTF-8, and it never allows NUL
    different_bytes = {
        token
        for token, piece in enumerate(pieces)
        if piece == b"\0" or (len(piece) == 1 and piece >= b"\xf5")
    }
    for token in [*tokens, None]:
        one, other = (
            sorted(set(allowed_tokens(matcher, model.n_vocab)) - different_bytes)
            for matcher in matchers
        )
        # of several divisions of forced text into tokens, llguidance allows only the tokenizer's
        assert one == other or (len(one) == 1 and set(one) < set(other))
        assert matchers[0].is_accepting == matchers[1].is_accepting == any(map(model.is_end, one))
        if token is not None:
            assert token in other
            assert matchers[0].allows(token) or len(one) == 1
            for matcher in matchers:
                assert matcher.allows(token)
                matcher.accept(token)
    assert matchers[0].is_accepting
    for matcher in matchers:
        matcher.rewind(len(tokens) - 1)
        assert matcher.allows(tokens[1])
        matcher.rewind(1)
        assert matcher.allows(tokens[0])
        matcher.close()


def test_control_tokens_are_not_allowed_as_text(engines) -> None:
    model, grammars = engines
    for engine in ("llguidance", "llama"):
        grammar = grammars(Constraint("gbnf", "root ::= .*", engine))
        allowed = allowed_tokens(grammar.start(), model.n_vocab)
        assert model.bos not in allowed
        assert model.eos in allowed


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no rule called root"),
        ('start ::= "a"', "no rule called root"),
        ('root ::= "a" b', "line 1, column 14: there is no rule called b"),
        ('root ::= "a"\nroot ::= "b"', "line 2, column 1: the rule root is there twice"),
        ('root ::= "a', "column 12: the text ends"),
        ("root ::= [a", "the text ends"),
        ("root ::= []", "an empty character class"),
        ("root ::= [z-a]", "the range z-a is empty"),
        ('root ::= ("a"', "expected )"),
        ('root ::= "a")', "expected the end of the rule"),
        ("root = 3", "expected ::="),
        (r'root ::= "\q"', r"there is no escape \q"),
        (r'root ::= "\x4"', r"\x takes 2 hexadecimal digits"),
        (r'root ::= "\uD800"', r"\uD800 is no character"),
        ('root ::= "a"{2001}', "more than 2000 repetitions"),
        ('root ::= "a"{3,2}', "the maximum is below"),
        ('root ::= "a"{x}', "expected a number"),
        ("root ::= " + "(" * 100_000, "groups within groups"),
        ('root ::= "a"' + "*+?" * 50_000, "repetitions of repetitions"),
        ("root ::= <[5]>", "need --grammar-engine llama"),
        ('root ::= "a\0b"', "NUL"),
        ("root ::= " + '"a" ' * 100_000, "characters"),
    ],
)
def test_error_has_the_position_of_the_mistake(text: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        gbnf.to_lark(text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        'root ::= root "a" | "a"',
        "root ::= (((",
        "root ::= <[99999]",
        'root ::= a\na ::= b\nb ::= a "x"',
    ],
)
def test_grammar_that_llama_cpp_refuses_is_an_error(text: str, engines) -> None:
    with pytest.raises(UserError, match="grammar"):
        engines[1](Constraint("gbnf", text, "llama"))


def test_llama_cpp_allows_single_tokens_in_a_grammar(
    engines, capfd: pytest.CaptureFixture[str]
) -> None:
    model, grammars = engines
    matcher = grammars(Constraint("gbnf", "root ::= <[300]> !<[301]>", "llama")).start()
    assert allowed_tokens(matcher, model.n_vocab) == [300]
    matcher.accept(300)
    assert 301 not in allowed_tokens(matcher, model.n_vocab)
    assert 302 in allowed_tokens(matcher, model.n_vocab)
    matcher.close()
    with pytest.raises(UserError, match="<nothing> is no token of this model"):
        grammars(Constraint("gbnf", "root ::= <nothing>", "llama"))
    assert capfd.readouterr().err == ""


def test_llama_cpp_refuses_schemas_and_fast_forced_text(engines) -> None:
    for constraint in (
        Constraint("json_schema", "{}", "llama"),
        Constraint("gbnf", "root ::= .", "llama", "fast"),
    ):
        with pytest.raises(UserError, match=r"llama\.cpp's engine"):
            engines[1](constraint)


def test_grammar_with_too_many_parts_is_an_error() -> None:
    with pytest.raises(UserError, match="more than 65,535 parts"):
        compile_gbnf("root ::= " + '"ab" ' * 40_000)


def test_llguidance_allows_left_recursion() -> None:
    assert accepts(compile_gbnf('root ::= root "a" | "b"'), list(b"baaa"))
