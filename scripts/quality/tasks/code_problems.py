"""Small programming problems in HumanEval's form: the beginning of a function, and its tests.

`prompt` ends after the docstring; a model writes the body. `tests` are lines that call the function
and raise AssertionError if it is wrong.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class CodeProblem:
    """The beginning of a function, and lines that test the complete function."""

    prompt: str
    tests: str


def _problem(signature: str, purpose: str, *tests: str) -> CodeProblem:
    return CodeProblem(
        f'def {signature}:\n    """{purpose}"""\n', "".join(f"assert {test}\n" for test in tests)
    )


PROBLEMS = (
    _problem(
        "count_vowels(text: str) -> int",
        "Return how many of the letters a, e, i, o and u the text has, in either case.",
        "count_vowels('') == 0",
        "count_vowels('Aerial') == 4",
        "count_vowels('rhythm') == 0",
        "count_vowels('UNDO it') == 3",
    ),
    _problem(
        "second_largest(numbers: list[int]) -> int | None",
        "Return the second largest distinct number, or None if there are fewer than two.",
        "second_largest([3, 1, 2]) == 2",
        "second_largest([5, 5, 4]) == 4",
        "second_largest([7]) is None",
        "second_largest([2, 2]) is None",
        "second_largest([-1, -5, -3]) == -3",
    ),
    _problem(
        "is_leap_year(year: int) -> bool",
        "Return whether a year of the Gregorian calendar has 366 days.",
        "is_leap_year(2024)",
        "not is_leap_year(2023)",
        "not is_leap_year(1900)",
        "is_leap_year(2000)",
    ),
    _problem(
        "run_lengths(text: str) -> list[tuple[str, int]]",
        "Return each run of equal characters as the character and its length.",
        "run_lengths('') == []",
        "run_lengths('aab') == [('a', 2), ('b', 1)]",
        "run_lengths('abba') == [('a', 1), ('b', 2), ('a', 1)]",
    ),
    _problem(
        "digit_sum(number: int) -> int",
        "Return the sum of the decimal digits of an integer; its sign does not count.",
        "digit_sum(0) == 0",
        "digit_sum(1234) == 10",
        "digit_sum(-56) == 11",
    ),
    _problem(
        "flatten(items: list) -> list",
        "Return the elements of nested lists, of any depth, in one list.",
        "flatten([]) == []",
        "flatten([1, [2, [3, []]], 4]) == [1, 2, 3, 4]",
        "flatten([['a'], 'bc']) == ['a', 'bc']",
    ),
    _problem(
        "is_palindrome(text: str) -> bool",
        "Return whether the letters and digits of the text read the same backwards, without case.",
        "is_palindrome('A man, a plan, a canal: Panama')",
        "not is_palindrome('ab')",
        "is_palindrome('')",
        "is_palindrome('1221')",
    ),
    _problem(
        "greatest_common_divisor(a: int, b: int) -> int",
        "Return the largest integer that divides both positive integers.",
        "greatest_common_divisor(12, 18) == 6",
        "greatest_common_divisor(7, 5) == 1",
        "greatest_common_divisor(9, 9) == 9",
    ),
    _problem(
        "primes_below(limit: int) -> list[int]",
        "Return all prime numbers smaller than limit, in ascending order.",
        "primes_below(2) == []",
        "primes_below(3) == [2]",
        "primes_below(20) == [2, 3, 5, 7, 11, 13, 17, 19]",
    ),
    _problem(
        "rotate(items: list, steps: int) -> list",
        "Return the list with every element moved `steps` places to the right, around the end.",
        "rotate([1, 2, 3], 1) == [3, 1, 2]",
        "rotate([1, 2, 3], 4) == [3, 1, 2]",
        "rotate([1, 2, 3], 0) == [1, 2, 3]",
        "rotate([], 2) == []",
    ),
    _problem(
        "most_common_word(text: str) -> str",
        "Return the word that occurs most often, in lower case. Words are separated by spaces.",
        "most_common_word('a b a') == 'a'",
        "most_common_word('The cat the dog THE end') == 'the'",
    ),
    _problem(
        "transpose(rows: list[list[int]]) -> list[list[int]]",
        "Return the columns of a matrix as rows.",
        "transpose([[1, 2], [3, 4]]) == [[1, 3], [2, 4]]",
        "transpose([[1, 2, 3]]) == [[1], [2], [3]]",
        "transpose([]) == []",
    ),
    _problem(
        "balanced(text: str) -> bool",
        "Return whether every bracket of (), [] and {} is closed by its partner in order.",
        "balanced('')",
        "balanced('([]{})')",
        "not balanced('(]')",
        "not balanced('(()')",
        "not balanced('}')",
    ),
    _problem(
        "to_roman(number: int) -> str",
        "Return a number from 1 to 3999 in Roman numerals.",
        "to_roman(4) == 'IV'",
        "to_roman(9) == 'IX'",
        "to_roman(1994) == 'MCMXCIV'",
        "to_roman(3888) == 'MMMDCCCLXXXVIII'",
    ),
    _problem(
        "binary_search(numbers: list[int], wanted: int) -> int",
        "Return the index of `wanted` in a sorted list of distinct numbers, or -1.",
        "binary_search([1, 3, 5], 3) == 1",
        "binary_search([1, 3, 5], 4) == -1",
        "binary_search([], 1) == -1",
        "binary_search([2], 2) == 0",
    ),
    _problem(
        "caesar(text: str, shift: int) -> str",
        "Move each letter a-z and A-Z by `shift` places in the alphabet, around its end.",
        "caesar('abc', 1) == 'bcd'",
        "caesar('xyz', 3) == 'abc'",
        "caesar('Hi, Zoe!', 2) == 'Jk, Bqg!'",
        "caesar('bcd', -1) == 'abc'",
    ),
    _problem(
        "merge_sorted(first: list[int], second: list[int]) -> list[int]",
        "Return the numbers of two sorted lists in one sorted list.",
        "merge_sorted([1, 4], [2, 3]) == [1, 2, 3, 4]",
        "merge_sorted([], [1]) == [1]",
        "merge_sorted([1, 1], [1]) == [1, 1, 1]",
    ),
    _problem(
        "chunks(items: list, size: int) -> list[list]",
        "Split a list into parts of `size` elements; the last one may be shorter.",
        "chunks([1, 2, 3, 4, 5], 2) == [[1, 2], [3, 4], [5]]",
        "chunks([], 3) == []",
        "chunks([1], 3) == [[1]]",
    ),
    _problem(
        "fibonacci(count: int) -> list[int]",
        "Return the first `count` Fibonacci numbers, beginning with 0 and 1.",
        "fibonacci(0) == []",
        "fibonacci(1) == [0]",
        "fibonacci(6) == [0, 1, 1, 2, 3, 5]",
    ),
    _problem(
        "are_anagrams(first: str, second: str) -> bool",
        "Return whether both texts have the same letters equally often; case and spaces are ignored.",
        "are_anagrams('listen', 'Silent')",
        "are_anagrams('a gentleman', 'elegant man')",
        "not are_anagrams('aab', 'abb')",
    ),
    _problem(
        "longest_increasing_run(numbers: list[int]) -> int",
        "Return the length of the longest stretch of neighbors that strictly increase.",
        "longest_increasing_run([]) == 0",
        "longest_increasing_run([1, 2, 2, 3, 4]) == 3",
        "longest_increasing_run([5, 4, 3]) == 1",
    ),
    _problem(
        "format_duration(seconds: int) -> str",
        "Return seconds as H:MM:SS, such as 1:02:03 for 3723.",
        "format_duration(3723) == '1:02:03'",
        "format_duration(59) == '0:00:59'",
        "format_duration(36000) == '10:00:00'",
    ),
    _problem(
        "invert(mapping: dict[str, int]) -> dict[int, list[str]]",
        "Return for each value the sorted list of its keys.",
        "invert({'a': 1, 'b': 2, 'c': 1}) == {1: ['a', 'c'], 2: ['b']}",
        "invert({}) == {}",
    ),
    _problem(
        "pascal_row(number: int) -> list[int]",
        "Return row `number` of Pascal's triangle; row 0 is [1].",
        "pascal_row(0) == [1]",
        "pascal_row(1) == [1, 1]",
        "pascal_row(4) == [1, 4, 6, 4, 1]",
    ),
    _problem(
        "parse_query(text: str) -> dict[str, str]",
        "Return the names and values of a query such as 'a=1&b=2'. A name without = has ''.",
        "parse_query('a=1&b=2') == {'a': '1', 'b': '2'}",
        "parse_query('x') == {'x': ''}",
        "parse_query('') == {}",
    ),
    _problem(
        "edit_distance(first: str, second: str) -> int",
        "Return how many insertions, deletions and replacements of characters make them equal.",
        "edit_distance('kitten', 'sitting') == 3",
        "edit_distance('', 'abc') == 3",
        "edit_distance('same', 'same') == 0",
    ),
    _problem(
        "overlap(first: tuple[int, int], second: tuple[int, int]) -> int",
        "Return the length that two intervals (start, end) have in common, 0 if none.",
        "overlap((0, 5), (3, 9)) == 2",
        "overlap((0, 2), (2, 4)) == 0",
        "overlap((1, 9), (3, 4)) == 1",
        "overlap((5, 6), (0, 1)) == 0",
    ),
    _problem(
        "snake_case(name: str) -> str",
        "Turn a CamelCase name into snake_case, such as HttpServer into http_server.",
        "snake_case('HttpServer') == 'http_server'",
        "snake_case('word') == 'word'",
        "snake_case('AbC') == 'ab_c'",
    ),
    _problem(
        "median(numbers: list[float]) -> float",
        "Return the median of a list that is not empty: the mean of the middle two if it is even.",
        "median([3, 1, 2]) == 2",
        "median([4, 1, 3, 2]) == 2.5",
        "median([7]) == 7",
    ),
    _problem(
        "unique(items: list) -> list",
        "Return the elements without repetitions, in the order in which they first occur.",
        "unique([3, 1, 3, 2, 1]) == [3, 1, 2]",
        "unique([]) == []",
    ),
)
