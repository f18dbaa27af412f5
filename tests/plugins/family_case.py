"""Test case of Helium: a small random checkpoint that transformers makes."""

from tests.quant.families import Case

CASES = [Case("helium", "HeliumForCausalLM", {"head_dim": 32})]
