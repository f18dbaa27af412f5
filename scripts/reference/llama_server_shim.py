"""Takes the place of the llama-server binary in llama-server's own tests (llama_server_tests.py).

It is called with llama-server's options and becomes `llmcli serve` with the same meaning, or the real
llama-server if LLAMA_SERVER_REAL names it. Models that would be downloaded are replaced by the
stand-ins in the folder LLAMA_SERVER_MODELS.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

# What a test asks for (--hf-repo, --hf-file) -> the name of the stand-in.
STAND_INS = {
    ("ggml-org/test-model-stories260K", ""): "stories260K",
    ("ggml-org/test-model-stories260K-infill", ""): "stories260K-infill",
    ("ggml-org/models", "tinyllamas/stories260K.gguf"): "stories260K",
    ("ggml-org/models", "bert-bge-small/ggml-model-f16.gguf"): "bert-bge-small",
    ("ggml-org/models", "jina-reranker-v1-tiny-en/ggml-model-f16.gguf"): "reranker",
    ("ggml-org/tinygemma3-GGUF:Q8_0", ""): "tinygemma3",
}

# Options of llama-server without a value that `llmcli serve` has not, and does not need.
IGNORED = {
    "--cont-batching",  # always
    "--embedding",  # always
    "--jinja",  # always
    "--no-jinja",
    "--swa-full",
    "--no-cache-idle-slots",
    "--backend_sampling",
}
# Options with a value that `llmcli serve` has not, and does not need.
IGNORED_WITH_VALUE = {"--cache-ram", "--tags"}
# Options without a value -> those of `llmcli serve`.
SWITCHES = {
    "--reranking": ["--pooling", "rank"],
    "--metrics": [],
    "--slots": [],
    "--no-slots": ["--no-slots"],
    "--no-ui": ["--no-ui"],
    "--context-shift": ["--context-shift"],
    "--verbose": ["--verbose"],
}
# Options with a value -> their name in `llmcli serve`.
RENAMED = {"--chat-template-file": "--chat-template", "--n-predict": "-n"}
COMMON = {
    "--port",
    "--temp",
    "--seed",
    "--host",
    "--model",
    "--model-draft",
    "--batch-size",
    "--ubatch-size",
    "--threads",
    "--n-gpu-layers",
    "--pooling",
    "--ctx-size",
    "--parallel",
    "-ctk",
    "-ctv",
    "-fa",
    "--slot-save-path",
    "--api-key",
    "--reasoning",
    "--reasoning-format",
    "--chat-template",
}


def main() -> None:
    """Replace this process by the server. Exit with 1 for an option that neither has."""
    words = list(_with_stand_ins(sys.argv[1:]))
    if threads := os.environ.get("LLAMA_SERVER_THREADS"):
        words += ["--threads", threads]
    if real := os.environ.get("LLAMA_SERVER_REAL"):
        os.execv(real, [real, *words])
    os.execv(sys.executable, [sys.executable, "-m", "llmcli.app", "serve", *translate(words)])


def _with_stand_ins(words: list[str]) -> Iterator[str]:
    """Yield llama-server's options with --hf-repo and --hf-file replaced by the stand-in's file."""
    options = iter(words)
    repo = file = ""
    for word in options:
        if word == "--hf-repo":
            repo = next(options)
        elif word == "--hf-file":
            file = next(options)
        elif word != "--offline":  # the stand-in is a file
            yield word
    if repo:
        name = STAND_INS.get((repo, file))
        if name is None:
            raise SystemExit(f"there is no stand-in for {repo} {file}")
        yield from ("--model", str(Path(os.environ["LLAMA_SERVER_MODELS"]) / f"{name}.gguf"))


def translate(words: list[str]) -> list[str]:
    """Return the options of `llmcli serve` for those of llama-server."""
    options = iter(words)
    translated: list[str] = ["--trust"]
    given: dict[str, str] = {}
    has_metrics, is_unified = False, False
    for word in options:
        if word in SWITCHES:
            translated += SWITCHES[word]
            has_metrics |= word == "--metrics"
        elif word == "--kv-unified":
            is_unified = True
        elif word in IGNORED_WITH_VALUE:
            next(options)
        elif word == "--alias":
            for name in sorted(next(options).split(",")):
                translated += ["--alias", name]
        elif word in RENAMED or word in COMMON:
            given[word] = next(options)
            translated += [RENAMED.get(word, word), given[word]]
        elif word not in IGNORED:
            raise SystemExit(f"llmcli serve has no {word}")
    if "--model" not in given:
        raise SystemExit("llmcli serve has no router: it needs a model")
    if not has_metrics:
        translated += ["--no-metrics"]
    if not is_unified and "--ctx-size" in given and "--parallel" in given:
        # without --kv-unified, llama-server gives each slot an equal part of the context
        size = int(given["--ctx-size"]) // int(given["--parallel"])
        translated += ["--kv-unified-per-slot", str(size)]
    if "--chat-template" not in translated and _has_no_template(given["--model"]):
        translated += ["--chat-template", "chatml"]  # llama-server's default
    return translated


def _has_no_template(model: str) -> bool:
    """Return whether a stand-in generates text and has no chat template."""
    return Path(model).stem not in ("bert-bge-small", "reranker")


if __name__ == "__main__":
    main()
