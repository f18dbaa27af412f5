"""Imports point downward, and each foreign library has one door."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
RANK = {
    "app": 7,
    "commands": 6,
    "chat": 5,
    "bench": 5,
    "serve": 5,
    "hardware": 4,
    "runtime": 3,
    "catalog": 3,
    "ui": 3,
    "config": 1,
    "types": 0,
    "errors": 0,
    "units": 0,
    "strict": 0,
    "utf8": 1,
    "terminal": 0,
    "__init__": 0,
}
DOORS = {
    "torch": ("quant/native/array_backends.py", "quant/checkpoint/pickles.py"),
    "yaml": ("quant/checkpoint/model_card.py",),
    "gguf": ("quant/",),
    "ctypes": ("quant/native/ggml.py", "llmcli/runtime/binding/"),
    "llama_cpp": ("llmcli/runtime/binding/",),
    "llguidance": ("llmcli/runtime/constraint/llguidance.py",),
    "jinja2": ("llmcli/runtime/text/chat_template.py", "llmcli/runtime/text/jinja_sandbox.py"),
    "tokenizers": (
        "quant/tokenizer/verify/reference_tokenizer.py",
        "quant/tokenizer/verify/known_differences.py",
    ),
    "prompt_toolkit": ("llmcli/chat/terminal/repl.py",),
    "typer": ("llmcli/commands/",),
    "rich": ("llmcli/ui.py", "llmcli/chat/display/stream_writer.py"),
    "huggingface_hub": ("llmcli/catalog/sources/hub.py", "llmcli/catalog/hub/"),
    "platformdirs": ("llmcli/config.py",),
    "starlette": ("llmcli/serve/",),
    "threadpoolctl": ("quant/native/blas_threads.py",),
    "uvicorn": (
        "llmcli/serve/server.py",
        "llmcli/serve/http/http_connection.py",
        "llmcli/serve/http/websocket_connection.py",
    ),
    "websockets": ("llmcli/serve/",),
    "grpc": ("llmcli/serve/",),
    "google": ("llmcli/serve/",),
    "ray": ("llmcli/hardware/rpc_workers.py", "llmcli/serve/"),
    "aiohttp": ("llmcli/bench/",),
    "subprocess": ("llmcli/catalog/sources/wheel.py", "llmcli/hardware/"),
}
# The modules of quant that all of llmcli may import.
OPEN = {"registry", "errors", "native", "container", "blob", "pickled", "writer"}


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: absolute imports only"
            if node.module in ("quant", "llmcli"):
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
            elif node.module:
                yield node.module


def part(name: str) -> str:
    return name.split(".")[1] if "." in name else "__init__"


def broken(root: Path) -> Iterator[str]:
    for path in sorted([*root.glob("llmcli/**/*.py"), *root.glob("quant/**/*.py")]):
        file = path.relative_to(root).as_posix()
        here = part(file.removesuffix(".py").replace("/", "."))
        ours = file.startswith("llmcli/")
        for name in imports(path):
            top, there = name.split(".")[0], part(name)
            if not ours and top == "llmcli":
                yield f"{file} imports {name}: quant stands below llmcli"
            if top in DOORS and not file.startswith(DOORS[top]):
                yield f"{file} imports {name}: its door is {DOORS[top]}"
            if (
                ours
                and top == "llmcli"
                and there != here
                and RANK.get(there, 0) >= RANK[here]
                and there != "__version__"
            ):
                yield f"{file} imports {name}: upward or sideways"
            if ours and top == "quant" and there not in OPEN and here != "commands":
                yield f"{file} imports {name}: only commands may"
        source = path.read_text()
        if "os.environ" in source and file != "llmcli/config.py":
            yield f"{file} reads os.environ: its door is llmcli/config.py"


def test_imports_point_downward_and_go_through_one_door() -> None:
    assert list(broken(ROOT)) == []


def test_planted_mistakes_are_found(tmp_path: Path) -> None:
    for file, text in {
        "quant/a.py": "import llmcli.types\n",
        "llmcli/runtime/b.py": "from llmcli.chat import repl\n",
        "llmcli/catalog/c.py": "import torch\n",
        "llmcli/ui.py": "from llmcli import runtime\n",
        "llmcli/bench/d.py": "from quant import recipe\nimport os\nos.environ['A']\n",
    }.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    found = "\n".join(broken(tmp_path))
    for file in (
        "quant/a.py",
        "runtime/b.py",
        "catalog/c.py",
        "llmcli/ui.py",
        "bench/d.py imports quant.recipe",
        "reads os.environ",
    ):
        assert file in found
