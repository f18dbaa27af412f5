"""The quantization part of llmcli. llmcli checks at its start that this is the package that it imports
as `quant`, because other projects use the name, too.
"""

BELONGS_TO = "llmcli"
