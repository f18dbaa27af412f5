"""Helium: a Llama whose checkpoints already have interleaved rotary pairs."""

from dataclasses import replace

from quant.convert.archs.llama import LLAMA

HELIUM = replace(LLAMA, hf=("HeliumForCausalLM",), ops={})

ARCHS = (HELIUM,)
