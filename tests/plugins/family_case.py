"""Ernie 4.5: a small random checkpoint, made by transformers."""

from tests.quant.families import Case

CASES = [Case("ernie4_5", "Ernie4_5ForCausalLM")]
