"""The structure of llmcli and quant: layers of imports, third-party libraries, public names.

Imports point to lower layers and have no circles. Each third-party library is imported by few
files. Class names are unique, and public names are none of the words in FORBIDDEN.
"""

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = ("llmcli", "quant")

# Layers, the lowest first. A package imports packages of lower layers, never a sibling.
LAYERS: dict[str, tuple[tuple[str, ...], ...]] = {
    "": (("quant",), ("llmcli",)),
    "llmcli": (
        (
            "types",
            "errors",
            "start_checks",
            "units",
            "strict_json",
            "terminal_mode",
            "reading_speed",
            "loopback",
            "word_wrap",
            "__init__",
        ),
        ("config", "atomic_files", "text_input"),
        ("file_lock", "terminal_status"),
        ("ui",),
        ("runtime",),
        ("api", "charts", "http_client", "tool_servers"),
        ("catalog",),
        ("hardware",),
        ("planning",),
        ("model_loader",),
        ("batch", "bench", "chat"),
        ("serve",),
        ("workflows",),
        ("commands",),
        ("app",),
    ),
    "llmcli/runtime": (
        ("interrupt", "compute_thread", "kv_size", "state_file_format", "vocabulary"),
        ("sampling", "constraint"),
        ("binding",),
        ("interruptible_pass", "model_identity"),
        ("kv_cache", "text"),
        ("disk_cache",),
        ("requests",),
        ("drafting",),
        ("strategies",),
        ("engine",),
        ("scoring",),
        ("draft_settings", "reproducible"),
        ("open_speculation",),
        ("runner",),
        ("kv_state_file", "sinks_support"),
        ("open_disk_cache",),
    ),
    "llmcli/workflows": (
        ("evaluation",),
        ("calibration",),
        ("certification",),
        ("quantization",),
        ("pareto",),
    ),
    "quant": (
        (
            "errors",
            "installation",
            "registry",
            "relative_error",
            "json_dataclasses",
            "link_safety",
            "__init__",
        ),
        ("disk_space", "record_log"),
        ("native",),
        ("gguf", "formats", "recipes"),
        ("source",),
        ("checkpoint",),
        ("tokenizer",),
        ("model_file",),
        ("convert", "calibration", "certificate", "evaluation"),
        ("methods",),
        ("quantize",),
        ("folds", "allocation"),
    ),
    "quant/convert": (
        ("parts", "gguf_tables", "general_metadata"),
        ("archs",),
        ("checkpoint_source",),
    ),
}
# Modules of quant that every package of llmcli may import. Only QUANT_USERS may import the others.
QUANT_FOR_ALL = (
    "quant.errors",
    "quant.installation",
    "quant.json_dataclasses",
    "quant.link_safety",
    "quant.registry",
    "quant.native",
    "quant.gguf",
    "quant.model_file",
    "quant.source.blob",
    "quant.checkpoint.adapters",
    "quant.checkpoint.pickles",
    "quant.checkpoint.safetensors",
)
QUANT_USERS = ("llmcli/commands/", "llmcli/workflows/", "llmcli/model_loader/")
# Third-party library (or ctypes, subprocess) -> the only files and folders that may import it.
DOORS = {
    "aiohttp": ("llmcli/http_client/",),
    "ctypes": ("quant/native/", "llmcli/runtime/binding/"),
    "gguf": ("quant/", "llmcli/model_loader/llama_converter/child.py"),
    "google": ("llmcli/serve/grpc/",),
    "grpc": ("llmcli/serve/grpc/",),
    "huggingface_hub": ("llmcli/catalog/sources/hub.py", "llmcli/catalog/hub/"),
    "jinja2": ("llmcli/runtime/text/",),
    "jsonschema": ("llmcli/tool_servers/tool_list.py",),
    "llama_cpp": ("llmcli/runtime/binding/",),
    "llguidance": ("llmcli/runtime/constraint/llguidance.py",),
    "mcp": ("llmcli/tool_servers/protocol/",),
    "mcp_types": ("llmcli/tool_servers/protocol/",),
    "platformdirs": ("llmcli/config.py",),
    "plotext": ("llmcli/charts/terminal_chart.py",),
    "pydantic": ("llmcli/api/",),
    "pydantic_core": ("llmcli/api/",),
    "prompt_toolkit": ("llmcli/chat/terminal/repl.py",),
    "pynvml": ("llmcli/hardware/gpu_usage.py",),
    "ray": (
        "llmcli/hardware/ray_cluster.py",
        "llmcli/serve/processes/ray_replicas.py",
        "llmcli/batch/ray_actors.py",
    ),
    "rich": ("llmcli/ui.py", "llmcli/word_wrap.py", "llmcli/chat/display/"),
    "starlette": ("llmcli/serve/http/", "llmcli/serve/processes/"),
    "subprocess": (
        "llmcli/catalog/sources/wheel.py",
        "llmcli/catalog/pip_download.py",
        "llmcli/bench/load/local_server.py",
        "llmcli/chat/clipboard.py",
        "llmcli/hardware/",
    ),
    "threadpoolctl": ("quant/native/blas_threads.py",),
    "tokenizers": ("quant/tokenizer/verify/",),
    "tomlkit": ("llmcli/catalog/aliases.py",),
    "torch": (
        "quant/native/array_backends.py",
        "quant/checkpoint/pickles.py",
        "llmcli/model_loader/llama_converter/child.py",
    ),
    "transformers": ("llmcli/model_loader/llama_converter/child.py",),
    "typer": ("llmcli/commands/",),
    "uvicorn": ("llmcli/serve/server.py", "llmcli/serve/http/"),
    "websockets": ("llmcli/serve/http/", "llmcli/serve/processes/"),
    "yaml": ("quant/checkpoint/model_card.py",),
}
FORBIDDEN = frozenset(
    [
        "wish",
        "told",
        "tell",
        "made",
        "part",
        "found",
        "asked",
        "given",
        "known",
        "own",
        "some",
        "one",
        "other",
        "both",
        "whole",
        "rest",
        "left",
        "apart",
        "beside",
        "together",
        "room",
        "place",
        "way",
        "put",
        "take",
        "look",
        "side",
    ]
)


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def source_files(root: Path) -> dict[str, Path]:
    """Return the files of all modules in SOURCES by dotted name. A package is its __init__.py."""
    modules = {}
    for top in SOURCES:
        for path in sorted(root.glob(f"{top}/**/*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules


def imported_names(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (module, name) for every import of a file, including those inside functions and for
    types only. The name of `import module` is "".
    """
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: absolute imports only"
            yield from ((node.module or "", alias.name) for alias in node.names)


def import_graph(root: Path) -> dict[str, set[str]]:
    """Return for each module of SOURCES the set of modules of SOURCES that it imports."""
    modules = source_files(root)
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        graph[module] = set()
        for source, name in imported_names(path):
            target = f"{source}.{name}" if f"{source}.{name}" in modules else source
            if target in modules and target != module:
                graph[module].add(target)
    return graph


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the circles of a graph: its strongly connected components of more than one node
    (Tarjan's algorithm).
    """
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in sorted(graph.get(node, ())):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            component = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(component) > 1:
                found.append(sorted(component))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return found


def folder_graphs(graph: dict[str, set[str]]) -> dict[str, dict[str, set[str]]]:
    """Return, for every folder, the graph of imports between its direct children, which are modules
    and sub-packages.

    Imports between a package's __init__.py and modules inside this package do not count.
    """
    folders: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for module, targets in graph.items():
        for target in targets:
            ours, theirs = module.split("."), target.split(".")
            depth = 0
            while depth < min(len(ours), len(theirs)) and ours[depth] == theirs[depth]:
                depth += 1
            if depth == len(ours) or depth == len(theirs):
                continue  # a package's __init__.py and a module inside it
            folders["/".join(ours[:depth])][ours[depth]].add(theirs[depth])
    return folders


def upward_imports(graph: dict[str, set[str]]) -> Iterator[str]:
    """Yield a message for each import that does not point to a lower layer."""
    ranks = {
        folder: {name: rank for rank, names in enumerate(layers) for name in names}
        for folder, layers in LAYERS.items()
    }
    for module, targets in sorted(graph.items()):
        for target in sorted(targets):
            ours, theirs = module.split("."), target.split(".")
            depth = 0
            while depth < min(len(ours), len(theirs)) and ours[depth] == theirs[depth]:
                depth += 1
            rank = ranks.get("/".join(ours[:depth]))
            if rank is None or depth == len(ours):
                continue
            here = ours[depth]
            there = theirs[depth] if depth < len(theirs) else "__init__"
            if here not in rank or there not in rank:
                yield f"{module} imports {target}: {here} or {there} has no layer"
            elif rank[there] >= rank[here]:
                yield f"{module} imports {target}: upward or sideways"


def forbidden_imports(root: Path) -> Iterator[str]:
    """Yield a message for each import of a library or of quant by a file that may not import it,
    and for each file that reads the environment besides llmcli/config.py.
    """
    for path in source_files(root).values():
        file = path.relative_to(root).as_posix()
        for source, name in imported_names(path):
            top = source.split(".")[0]
            dotted = f"{source}.{name}"
            if top in DOORS and not file.startswith(DOORS[top]):
                yield f"{file} imports {source}: its door is {DOORS[top]}"
            if (
                file.startswith("llmcli/")
                and top == "quant"
                and not file.startswith(QUANT_USERS)
                and not any(f"{dotted}.".startswith(f"{allowed}.") for allowed in QUANT_FOR_ALL)
            ):
                yield f"{file} imports {dotted}: only {QUANT_USERS} may"
        if "os.environ" in path.read_text() and file != "llmcli/config.py":
            yield f"{file} reads os.environ: its door is llmcli/config.py"


def public_classes(root: Path) -> dict[str, list[str]]:
    """Return for each public class name the modules that define it."""
    places: dict[str, list[str]] = defaultdict(list)
    for module, path in source_files(root).items():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(module)
    return places


def public_names(body: Iterable[ast.stmt]) -> Iterator[str]:
    """Yield the names that a module defines: functions, classes, constants, methods, properties and
    fields. Those of a class have its name before them.
    """
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.ClassDef):
            yield node.name
            for name in public_names(node.body):
                yield f"{node.name}.{name}"
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (
                part.id
                for target in targets
                for part in ast.walk(target)
                if isinstance(part, ast.Name)
            )
        elif isinstance(node, ast.If | ast.Try):
            yield from public_names(node.body)


def riddles(root: Path) -> Iterator[str]:
    """Yield each module name and each public name that is a word of FORBIDDEN."""
    for module, path in source_files(root).items():
        if FORBIDDEN.intersection(module.split(".")):
            yield module
        for name in public_names(tree_of(path).body):
            if name.rpartition(".")[2].lower() in FORBIDDEN:
                yield f"{module}: {name}"


def test_no_circles_of_files() -> None:
    assert circles(import_graph(ROOT)) == []


def test_no_circles_of_packages() -> None:
    tangled = {
        folder: found
        for folder, graph in folder_graphs(import_graph(ROOT)).items()
        if (found := circles(graph))
    }
    assert tangled == {}


def test_imports_point_downward() -> None:
    assert list(upward_imports(import_graph(ROOT))) == []


def test_each_library_has_one_door() -> None:
    assert list(forbidden_imports(ROOT)) == []


def test_a_public_class_name_has_one_meaning() -> None:
    assert {name: places for name, places in public_classes(ROOT).items() if len(places) > 1} == {}


def test_public_names_are_not_riddles() -> None:
    assert list(riddles(ROOT)) == []
