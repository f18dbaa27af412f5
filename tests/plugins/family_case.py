"""Test case of Ernie 4.5: a small random checkpoint that transformers makes."""

from tests.quant.families import Case

CASES = [Case("ernie4_5", "Ernie4_5ForCausalLM")]
