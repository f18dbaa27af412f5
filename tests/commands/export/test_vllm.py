"""`llmcli export vllm`: which weights are exported, which files are written, and what is
refused.
"""

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.fixtures.cli import Done

Llmcli = Callable[..., Done]


def test_an_alias_exports_the_float_weights_and_the_flags(llmcli: Llmcli) -> None:
    done = llmcli(
        "export",
        "vllm",
        "smollm2:135m",
        "-c",
        "4096",
        "-tp",
        "3",
        "-np",
        "64",
        "--temp",
        "0.2",
        "-s",
        "7",
    )
    assert done.code == 0
    words = shlex.split(done.out)
    assert words[:3] == ["vllm", "serve", "HuggingFaceTB/SmolLM2-135M-Instruct"]
    flags = dict(zip(words[3::2], words[4::2], strict=True))
    assert flags == {
        "--served-model-name": "smollm2:135m",
        "--max-model-len": "4096",
        "--kv-cache-dtype": "auto",
        "--max-num-seqs": "64",
        "--tensor-parallel-size": "3",
        "--seed": "7",
        "--override-generation-config": '{"temperature": 0.2}',
    }


@pytest.mark.parametrize(
    ("ref", "model", "floats"),
    [
        ("smollm2:135m-hf", "HuggingFaceTB/SmolLM2-135M-Instruct", True),
        ("org/some-model", "org/some-model", True),
        ("org/Some-GGUF:Q4_K_M", "org/Some-GGUF:Q4_K_M", False),
    ],
)
def test_a_model_name_becomes_a_hub_repository(
    llmcli: Llmcli, ref: str, model: str, floats: bool
) -> None:
    done = llmcli("export", "vllm", ref, "--json", "--offline")
    assert json.loads(done.out)["config"]["model"] == model
    assert ("vllm-gguf-plugin" in done.err) == (not floats)


def test_a_gguf_file_is_exported_unless_original_names_its_source(
    llmcli: Llmcli, stories_gguf: Path
) -> None:
    done = llmcli("export", "vllm", str(stories_gguf), "--json")
    assert json.loads(done.out)["config"]["model"] == str(stories_gguf)
    assert "vllm-gguf-plugin" in done.err
    done = llmcli(
        "export",
        "vllm",
        str(stories_gguf),
        "--json",
        "--original",
        "karpathy/tinyllamas",
        "-a",
        "tales",
    )
    document = json.loads(done.out)
    assert document["config"] == {
        "model": "karpathy/tinyllamas",
        "served-model-name": "tales",
        "max-model-len": 512,
        "kv-cache-dtype": "auto",
    }


def test_the_output_folder_has_a_config_a_template_and_a_start_script(
    llmcli: Llmcli, stories: Path, tmp_path: Path
) -> None:
    out, template = tmp_path / "there", "{% if x %}'\"#: é{% endif %}\n"
    done = llmcli(
        "export",
        "vllm",
        str(stories),
        "-o",
        str(out),
        "--chat-template",
        template,
        "-ctk",
        "q8_0",
        "-ctv",
        "q8_0",
    )
    assert shlex.split(done.out) == ["sh", str(out / "serve.sh")]
    assert yaml.safe_load((out / "config.yaml").read_text()) == {
        "model": str(stories),
        "served-model-name": "stories260K",
        "max-model-len": 512,
        "kv-cache-dtype": "fp8",
        "chat-template": "chat_template.jinja",
    }
    assert (out / "chat_template.jinja").read_text() == template
    assert (out / "serve.sh").stat().st_mode & 0o111


@pytest.mark.parametrize(
    ("words", "messages"),
    [
        (["--mirostat", "2", "-sys", "hi"], ("--mirostat", "--system goes as a message")),
        (["-ctk", "q4_0", "-ctv", "q4_0"], ("K q4_0 and V q4_0",)),
        (["--beams", "3"], ("use_beam_search",)),
        (["--reproducible"], ("--reproducible",)),
        (["-tp", "3"], ("8 attention heads", "2, 4, 8")),
        (["-c", "4096"], ("512 tokens",)),
    ],
)
def test_options_that_vllm_lacks_are_refused_by_name(
    llmcli: Llmcli, stories: Path, words: list[str], messages: tuple[str, ...]
) -> None:
    done = llmcli("export", "vllm", str(stories), *words)
    assert (done.code, done.out) == (1, "")
    for message in messages:
        assert message in done.err
