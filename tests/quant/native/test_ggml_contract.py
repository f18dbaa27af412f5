"""Tests of the table of what quant relies on in libggml-base."""

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from quant import installation
from quant.errors import UserError
from quant.native import ggml, ggml_contract


class StandIn:
    """The library with some functions replaced; None removes one."""

    def __init__(self, **changes: Any) -> None:
        self._changes = changes

    def __getattr__(self, name: str) -> Any:
        if name in self._changes and self._changes[name] is None:
            raise AttributeError(name)
        return self._changes.get(name) or getattr(ggml.open_library(), name)


def renamed(number: int) -> bytes:
    return b"none" if number == 42 else ggml.TYPE_NAMES[number].encode()


def other_blocks(number: int) -> Any:
    traits = ggml.open_library().ggml_get_type_traits(number)[0]
    size = traits.type_size + (ggml.TYPE_NAMES[number] == "Q4_K")
    return [SimpleNamespace(blck_size=traits.blck_size, type_size=size)]


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"ggml_quantize_chunk": None}, "libggml-base has no function ggml_quantize_chunk"),
        ({"ggml_type_name": renamed}, "tensor type 42 is none instead of Q2_0"),
        (
            {"ggml_get_type_traits": other_blocks},
            "a block of Q4_K has 256 values in 145 bytes instead of 256 in 144",
        ),
    ],
)
def test_each_kind_of_difference_is_one_line(
    changes: dict[str, Any], difference: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ggml_contract, "installed_version", lambda: "0.3.34")
    with pytest.raises(UserError) as refused:
        ggml_contract.check_library(StandIn(**changes), ggml.TYPE_NAMES)
    assert str(refused.value) == (
        f"llmcli needs llama-cpp-python 0.3.36; this is 0.3.34 ({difference})"
    )
    assert refused.value.hint.startswith(installation.install_llama_command())


def test_the_table_covers_all_types() -> None:
    assert list(ggml_contract.BLOCK_SIZES) == list(ggml.TYPE_NAMES.values())
    ggml_contract.check_library(ggml.open_library(), ggml.TYPE_NAMES)


def test_structures_refuse_unknown_attributes() -> None:
    with pytest.raises(AttributeError):
        ggml_contract.TypeTraits().type_bytes = 1
    assert ctypes.sizeof(ggml_contract.TypeTraits) == 48
