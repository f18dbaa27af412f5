"""Dense Ernie 4.5: a Llama whose checkpoints already have interleaved rotary pairs."""

from dataclasses import replace

from quant.convert.archs.llama import LLAMA

ERNIE = replace(LLAMA, name="ernie4_5", kind="ERNIE4_5", hf=("Ernie4_5ForCausalLM",), ops={})

ARCHS = (ERNIE,)
