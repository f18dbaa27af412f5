"""The files of a hub repository that make up its model."""

import pytest

from llmcli.catalog.hub.choose_files import HubFile, choose_files
from llmcli.catalog.spec import Spec
from llmcli.errors import UserError


def choose(*names: str, quant: str = "") -> list[str]:
    """Return the names of the chosen files of a repository with files of these names."""
    blobs = [HubFile(name, 1000, "") for name in names]
    spec = Spec("hub", repo="someone/tiny", quant=quant)
    return [file.name for file in choose_files(spec, blobs).files]


def test_files_that_are_no_models_are_passed_over() -> None:
    extra = ("mmproj-F16.gguf", "tiny-imatrix.gguf", "mtp-tiny-Q4_K_M.gguf", "._tiny-Q4_K_M.gguf")
    assert choose("tiny-Q4_K_M.gguf", *extra) == ["tiny-Q4_K_M.gguf"]
    assert choose("tiny-Q4_K_M.gguf", *extra, quant="Q4_K_M") == ["tiny-Q4_K_M.gguf"]


def test_models_with_imatrix_or_mtp_in_their_names_are_models() -> None:
    names = ["tiny-MTP-Q4_K_M.gguf", "tiny.IQ3_XS.imatrix.gguf"]
    assert choose(*names, quant="Q4_K_M") == names[:1]
    assert choose(*names, quant="tiny.IQ3_XS.imatrix.gguf") == names[1:]


def test_a_file_that_is_no_model_is_chosen_if_it_is_named() -> None:
    assert choose("tiny-Q8_0.gguf", "mmproj-F16.gguf", quant="mmproj-F16.gguf") == [
        "mmproj-F16.gguf"
    ]


def test_hidden_files_are_no_part_of_a_checkpoint() -> None:
    names = ["config.json", "tokenizer.json", "weights.safetensors"]
    chosen = choose(*names, "._weights.safetensors", "._config.json")
    assert sorted(chosen) == names


def test_a_repository_of_an_adapter_is_called_a_lora() -> None:
    with pytest.raises(UserError, match="someone/tiny is a LoRA adapter") as raised:
        choose("adapter_config.json", "adapter_model.safetensors", "tokenizer.json")
    assert "merge" in raised.value.hint
    with pytest.raises(UserError, match=r"has weights but no config\.json"):
        choose("model.safetensors")
