"""Which GGUF names are those of language models."""

import pytest

from llmcli.catalog.names.gguf_names import is_model_name


@pytest.mark.parametrize(
    "path",
    [
        "model.gguf",
        "MODEL.GGUF",
        "folder/Model-Q4_K_M.gguf",
        "mmproj-folder/model.gguf",
        "big-00001-of-00003.gguf",
        "DeepSeek-V3-MTP-Q4_K_M.gguf",  # a model that kept its draft head
        "Qwen3-Imatrix-Q4_K_M.gguf",
        "qwen3.Q4_K_M.imatrix.gguf",  # quantized with an importance matrix
        "qwen3-iq3_xs-imatrix-00001-of-00002.gguf",
        "eagle.gguf",
    ],
)
def test_model_is_recognized(path: str) -> None:
    assert is_model_name(path)


@pytest.mark.parametrize(
    "path",
    [
        "model.safetensors",
        "gguf",
        "._model.gguf",  # macOS writes such files next to others
        "folder/.model.gguf",
        "big-00002-of-00003.gguf",
        "mmproj-F16.gguf",
        "mmproj-model-f16.gguf",
        "gemma-3-4b-it.mmproj-Q8_0.gguf",
        "Model-mmproj-BF16-00001-of-00002.gguf",
        "imatrix.gguf",
        "imatrix_unsloth.gguf",
        "Qwen3-4B-imatrix.gguf",
        "Qwen3-4B.imatrix-00001-of-00002.gguf",
        "mtp-Qwen3-Q8_0.gguf",
        "eagle3-llama.gguf",
    ],
)
def test_file_that_is_no_language_model_is_recognized(path: str) -> None:
    assert not is_model_name(path)
