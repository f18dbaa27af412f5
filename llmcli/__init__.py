"""Run language models from GGUF files: pull, quantize, chat, serve and bench."""

__version__ = "0.1.0"
