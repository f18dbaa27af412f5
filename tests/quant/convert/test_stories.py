"""A trained model converted in F32 and BF16 generates the greedy tokens of transformers."""

import shutil
from pathlib import Path

import llama_cpp
import numpy as np
import pytest

from quant.checkpoint.folder import CheckpointFolder
from quant.convert import checkpoint_source
from quant.model_file import read_header
from quant.quantize import plan, write
from tests.quant import tiny_checkpoint

SHARED = Path(__file__).parents[4] / "shared" / "assets" / "stories260K"
PROMPT, COUNT = "Once upon a time", 64


@pytest.fixture(params=["F32", "BF16"])
def checkpoint(request: pytest.FixtureRequest, stories: Path, tmp_path: Path) -> tuple[Path, str]:
    """The folder of the stories260K checkpoint in F32 or rounded to BF16, and the name of its
    type.
    """
    if request.param == "F32":
        return stories, "F32"
    folder = shutil.copytree(stories, tmp_path / "hf-bf16")
    tiny_checkpoint.edit(folder / "config.json", torch_dtype="bfloat16")
    tensors = tiny_checkpoint.read(stories / "model.safetensors")
    tiny_checkpoint.save(
        folder / "model.safetensors",
        {name: round_to_bf16(values) for name, values in tensors.items()},
        "BF16",
    )
    return folder, "BF16"


def round_to_bf16(values: np.ndarray) -> np.ndarray:
    """Return F32 values rounded to BF16: to the nearest value, ties to even."""
    bits = values.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def generate(path: Path) -> str:
    """Return the prompt and llama.cpp's greedy continuation, without flash attention."""
    model = llama_cpp.Llama(
        str(path), n_ctx=256, n_threads=1, n_threads_batch=1, flash_attn=False, verbose=False
    )
    ids = model.tokenize(PROMPT.encode())
    generated: list[int] = []
    for token in model.generate(ids, temp=0.0):
        generated.append(token)
        if len(generated) == COUNT:
            break
    text = model.detokenize(ids + generated).decode()
    model.close()
    return text


def test_greedy_tokens_equal_transformers(checkpoint: tuple[Path, str], tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed: there is no oracle")
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed: there is no oracle"
    )
    folder, dtype = checkpoint
    out = tmp_path / "story.gguf"
    write.write_model(
        plan.plan_quantization(checkpoint_source.open_checkpoint(folder), dtype), out, threads=1
    )
    assert read_header.read_header(out).file_type == dtype
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    generated = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=COUNT, do_sample=False
    )
    assert generated.shape[1] == ids.shape[1] + COUNT
    assert generate(out).strip() == tokenizer.decode(generated[0], skip_special_tokens=True).strip()


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_stories_checkpoint_equals_the_published_weights(dtype: str, stories: Path) -> None:
    file = SHARED / f"hf-{dtype.lower()}" / "model.safetensors"
    if not file.is_file():
        pytest.skip("../shared/assets/stories260K is not here")
    from quant.checkpoint import safetensors

    published = safetensors.load_tensors(CheckpointFolder(file.parent))
    ours = tiny_checkpoint.read(stories / "model.safetensors")
    assert published.keys() == ours.keys()
    for name, values in ours.items():
        expected = tiny_checkpoint.encode(
            round_to_bf16(values) if dtype == "BF16" else values, dtype
        )
        assert published[name].read(0, values.size // values.shape[-1]).tobytes() == expected, name
