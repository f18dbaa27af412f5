"""scripts/quality/tasks: continuations, functions that models write, and codes in long texts."""

import pytest

from scripts.quality.tasks import code_completion, greedy_agreement, retrieval
from scripts.quality.tasks.code_problems import PROBLEMS


def test_continuations_are_compared_token_by_token() -> None:
    first, second = ["a", "b", "c", "d"], ["a", "b", "x", "d"]
    assert greedy_agreement.equal_beginning(first, second) == 2
    assert greedy_agreement.equal_places(first, second) == 0.75
    assert greedy_agreement.equal_beginning(first, first) == 4
    assert greedy_agreement.equal_beginning(first, first[:2]) == 2


def test_beginnings_are_spread_over_the_text() -> None:
    text = "\n".join(f"line {number} {'x' * 90}" for number in range(200))
    passages = greedy_agreement.beginnings(text, 4)
    assert len(set(passages)) == 4
    assert all(passage.startswith("line ") and len(passage) > 300 for passage in passages)


@pytest.mark.parametrize(
    ("body", "passed"),  # the last two would pass without limits
    [
        ("    return sum(letter in 'aeiou' for letter in text.lower())\n", True),
        ("    return len(text)\n", False),
        ("    this is no Python\n", False),
        ("    while True: pass\n", False),
        (
            "    bytearray(1 << 30)\n    return sum(letter in 'aeiouAEIOU' for letter in text)\n",
            False,
        ),
        (
            "    open('f', 'w').write('x' * 10**6)\n    return sum(c in 'aeiouAEIOU' for c in text)\n",
            False,
        ),
    ],
)
def test_a_function_is_run_with_its_tests_within_limits(
    body: str, passed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code_completion, "CPU_SECONDS", 1)
    (problem,) = (problem for problem in PROBLEMS if "count_vowels" in problem.prompt)
    assert code_completion.passes(problem, body) == passed


def test_no_problem_is_passed_by_an_empty_function() -> None:
    assert not any(code_completion.passes(problem, "    return None\n") for problem in PROBLEMS)
    for problem in PROBLEMS:
        compile(f"{problem.prompt}    pass\n{problem.tests}", "problem", "exec")


def test_a_code_stands_at_its_place_in_the_text() -> None:
    text = "".join(f"Paragraph {number}.\n" for number in range(100))
    prompts = [retrieval.case(text, number, 5) for number in range(5)]
    assert len({code for _, code in prompts}) == 5
    for number, (prompt, code) in enumerate(prompts):
        assert prompt.count(code) == 1
        assert abs(prompt.index(code) / len(text) - number / 4) < 0.1
        assert retrieval.case(text, number, 5) == (prompt, code)
