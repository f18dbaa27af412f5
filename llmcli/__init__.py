"""From a file to tokens: pull, quantize, chat, bench."""

__version__ = "0.1.0"
