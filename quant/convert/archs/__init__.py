"""ARCHS: the model families that can be converted, by the model's class name in config.json."""

from quant.convert.parts.base import Arch
from quant.registry import collect

ARCHS: dict[str, Arch] = {
    hf: arch for arch in collect(__name__, "ARCHS", key="hf").values() for hf in arch.hf
}
