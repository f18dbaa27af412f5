"""Tests of the table of what llmcli relies on in llama.cpp. Stand-in modules differ from the
installed binding in one point each, and each kind of difference gives one line.
"""

import ast
import ctypes
import importlib
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmcli.errors import UserError
from llmcli.runtime.binding import contract, library
from llmcli.runtime.binding.library import ggml, lib
from llmcli.runtime.binding.placement.model_placement import ON_HOST
from llmcli.runtime.binding.sampler import CandidateTable
from llmcli.runtime.binding.trials import dry_run
from quant import installation
from quant.native import ggml_contract

ROOT = Path(__file__).parents[3]
MODULE_NAMES = (
    *contract.STRUCTURES,
    *contract.FUNCTIONS,
    *contract.CALLBACK_TYPES,
    *contract.CONSTANTS,
)


class StandInLibrary:
    """libggml without the functions in `hidden`, and with those in `replaced` instead of its own."""

    def __init__(self, hidden: frozenset[str] = frozenset(), **replaced: Any) -> None:
        self._hidden, self._replaced = hidden, replaced

    def __getattr__(self, name: str) -> Any:
        if name in self._hidden:
            raise AttributeError(name)
        return self._replaced.get(name) or getattr(ggml(), name)


def stand_in(**changes: Any) -> Any:
    """Return a copy of the binding with some names changed; None removes a name."""
    names = {name: getattr(lib(), name) for name in MODULE_NAMES} | {"_lib": ggml()} | changes
    return SimpleNamespace(**{name: value for name, value in names.items() if value is not None})


def structure(name: str, *, without: str = "", before: str = "", size: int = 0) -> Any:
    """Return a structure of the binding without a field, or with another field before `before`, or
    with `size` more bytes at its end.
    """
    fields: list[tuple[str, Any]] = []
    for field, kind in getattr(lib(), name)._fields_:
        if field == before:
            fields.append(("inserted", ctypes.c_int64))
        if field != without:
            fields.append((field, kind))
    fields += [("added", ctypes.c_char * size)] * bool(size)
    return type(name, (ctypes.Structure,), {"_fields_": fields})


def function(arguments: int) -> Any:
    return SimpleNamespace(argtypes=[ctypes.c_int] * arguments)


def declared(result: Any) -> Any:
    """Return a function of any arguments with a constant result, whose types can be declared."""

    def call(*_arguments: object) -> Any:
        return result

    return call


def defaults(name: str, **values: int) -> Any:
    """Return the function of a structure's default values, with some of them changed."""

    def call() -> Any:
        params = getattr(lib(), name)()
        for field, value in values.items():
            setattr(params, field, value)
        return params

    call.argtypes = []  # type: ignore[attr-defined]
    return call


DIFFERENCES = {
    "llama_context_params has no field kv_unified": lambda: stand_in(
        llama_context_params=structure("llama_context_params", without="kv_unified")
    ),
    "llama_context_params.n_threads has 4 bytes at 40 instead of 4 at 28": lambda: stand_in(
        llama_context_params=structure("llama_context_params", before="n_threads")
    ),
    "llama_model_params has 88 bytes instead of 80": lambda: stand_in(
        llama_model_params=structure("llama_model_params", size=8)
    ),
    "there is no llama_batch": lambda: stand_in(llama_batch=None),
    "there is no function llama_memory_seq_add": lambda: stand_in(llama_memory_seq_add=None),
    "llama_tokenize has 6 arguments instead of 7": lambda: stand_in(llama_tokenize=function(6)),
    "there is no type llama_log_callback": lambda: stand_in(llama_log_callback=None),
    "LLAMA_POOLING_TYPE_RANK is 5 instead of 4": lambda: stand_in(LLAMA_POOLING_TYPE_RANK=5),
    "LLAMA_STATE_SEQ_VERSION is 4 instead of 3": lambda: stand_in(LLAMA_STATE_SEQ_VERSION=4),
    "there is no LLAMA_LOAD_MODE_NONE": lambda: stand_in(LLAMA_LOAD_MODE_NONE=None),
    "the binding does not say which library it has loaded": lambda: stand_in(_lib=None),
    "libggml has no function ggml_backend_dev_memory": lambda: stand_in(
        _lib=StandInLibrary(frozenset({"ggml_backend_dev_memory"}))
    ),
    "llama_context_default_params returns n_batch = 512 instead of 2048": lambda: stand_in(
        llama_context_default_params=defaults("llama_context_default_params", n_batch=512)
    ),
    "llama.cpp has up to 64 sequences instead of 256": lambda: stand_in(
        llama_max_parallel_sequences=declared(64)
    ),
    "tensor type 0 is q9 instead of f32": lambda: stand_in(
        _lib=StandInLibrary(ggml_type_name=declared(b"q9"))
    ),
    "a ggml_tensor has 368 bytes instead of 336": lambda: stand_in(
        _lib=StandInLibrary(ggml_tensor_overhead=declared(400))
    ),
    "the fields of a ggml_tensor are in other places": lambda: stand_in(
        _lib=StandInLibrary(ggml_op_name=declared(b"ADD"))
    ),
}


@pytest.fixture
def old_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ggml_contract, "installed_version", lambda: "0.3.34")


def test_the_installed_version_has_no_difference() -> None:
    assert list(contract.differences(lib())) == []
    assert list(contract.differences(stand_in())) == []


@pytest.mark.usefixtures("old_version")
@pytest.mark.parametrize("difference", DIFFERENCES)
def test_each_kind_of_difference_is_one_line(difference: str) -> None:
    with pytest.raises(UserError) as refused:
        contract.check(DIFFERENCES[difference]())
    assert str(refused.value) == (
        f"llmcli needs llama-cpp-python 0.3.36; this is 0.3.34 ({difference})"
    )
    assert refused.value.hint.startswith(installation.install_llama_command())


@pytest.mark.usefixtures("old_version")
def test_the_check_is_made_when_the_library_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    other = stand_in(llama_context_params=structure("llama_context_params", without="kv_unified"))
    monkeypatch.setattr(importlib, "import_module", lambda name: other)
    with pytest.raises(UserError, match=r"this is 0\.3\.34 \(llama_context_params has no field"):
        library.lib.__wrapped__()

    def fail(name: str) -> None:
        raise AttributeError("libllama.so: undefined symbol: llama_new")

    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(UserError, match=r"the library and its binding differ: .*llama_new"):
        library.lib.__wrapped__()


def test_unknown_fields_are_refused() -> None:
    params = lib().llama_model_default_params()
    with pytest.raises(AttributeError, match="does not list the field no_allocation"):
        contract.set_fields(params, no_allocation=True)
    renamed = structure("llama_model_params", without="no_alloc")()
    with pytest.raises(AttributeError, match="llama_model_params has no field no_alloc"):
        contract.set_fields(renamed, no_alloc=True)
    with pytest.raises(AttributeError, match="has no field no_alloc"):
        contract.field_setter(renamed, "no_alloc")
    with pytest.raises(AttributeError):
        CandidateTable.Array().length = 1


def test_a_dry_run_never_loads_a_model_whose_parameter_was_renamed(
    stories_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[object] = []
    renamed = structure("llama_model_params", without="no_alloc")
    monkeypatch.setattr(lib(), "llama_model_default_params", renamed)
    monkeypatch.setattr(lib(), "llama_model_load_from_file", lambda *words: loads.append(words))
    with pytest.raises(AttributeError, match="no_alloc"), dry_run.dry_run(stories_gguf, ON_HOST):
        pass
    assert not loads


def test_a_missing_optional_function_is_no_difference() -> None:
    names = frozenset(symbol.name for symbol in contract.OPTIONAL_SYMBOLS)
    without = StandInLibrary(names)
    assert list(contract.differences(stand_in(_lib=without))) == []
    for symbol in contract.OPTIONAL_SYMBOLS:
        assert contract.optional_function(without, symbol) is None
        assert symbol.lost
    assert contract.optional_function(ggml(), contract.MEMORY_BREAKDOWN) is not None


def source_trees() -> Iterator[tuple[Path, ast.Module]]:
    """Yield the path and the syntax tree of each module that touches llama.cpp's structures, and of
    each script.
    """
    for pattern in (
        "llmcli/runtime/binding/**/*.py",
        "quant/native/*.py",
        "scripts/**/*.py",
    ):
        for path in sorted(ROOT.glob(pattern)):
            yield path.relative_to(ROOT), ast.parse(path.read_text())


FIELD_NAMES = frozenset(field for _, fields in contract.STRUCTURES.values() for field in fields)
# mirrors of structures, which refuse unknown attributes themselves
CLOSED = {
    ("llmcli/runtime/binding/kernels/cpu_graph.py", "Tensor.from_address(tensor)"),
    ("llmcli/runtime/binding/sampler.py", "array"),
    ("llmcli/runtime/binding/sampler.py", "plan"),
}
UNRELATED = {
    ("scripts/fuzz/repl.py", "self.screen"),
    ("llmcli/runtime/binding/sampler.py", "draw"),
    ("scripts/quality/quantized_checkpoints.py", "linear.weight"),  # of torch
}


def test_no_field_is_assigned_directly() -> None:
    """Fields of llama.cpp's structures are set through contract.set_fields."""
    found = []
    for path, tree in source_trees():
        for node in ast.walk(tree):
            targets = (
                node.targets
                if isinstance(node, ast.Assign)
                else [node.target]
                if isinstance(node, ast.AugAssign | ast.AnnAssign)
                else []
            )
            for target in targets:
                for part in ast.walk(target):
                    if (
                        isinstance(part, ast.Attribute)
                        and isinstance(part.ctx, ast.Store)
                        and part.attr in FIELD_NAMES
                        and not (isinstance(part.value, ast.Name) and part.value.id == "self")
                        and (str(path), ast.unparse(part.value)) not in CLOSED | UNRELATED
                    ):
                        found.append(f"{path}:{part.lineno} {ast.unparse(part)}")
    assert found == []


def used_names() -> set[str]:
    """Return the names of llama.cpp and ggml that the code of llmcli mentions: attributes, and
    whole strings.
    """
    names = set()
    for path in sorted((ROOT / "llmcli").glob("**/*.py")):
        if path.name == "contract.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                names.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                names.add(node.value)
    return {name for name in names if re.fullmatch(r"(llama|ggml)_[a-z0-9_]+", name)}


def test_all_functions_that_are_used_are_in_the_table() -> None:
    optional = {symbol.name for symbol in contract.OPTIONAL_SYMBOLS}
    listed = {*MODULE_NAMES, *contract.GGML_FUNCTIONS, *ggml_contract.FUNCTIONS}
    exported = {name for name in used_names() if hasattr(lib(), name) or hasattr(ggml(), name)}
    exported.remove("ggml_pad")  # the code uses the method of gguf.GGUFWriter
    assert exported - listed == optional & exported
    # functions whose names are put together, such as f"llama_sampler_init_{name}"
    composed = ("llama_sampler_init_", "llama_vocab_fim_", "ggml_backend_")
    unused = {name for name in listed - exported if not name.startswith(composed)}
    own = set(contract.CONSTANTS) | set(ggml_contract.FUNCTIONS) | set(contract.STRUCTURES)
    assert unused - own == {"llama_max_parallel_sequences"}


def test_all_samplers_that_are_made_are_in_the_table() -> None:
    names = {
        node.elts[0].value
        for path in (ROOT / "llmcli/runtime/sampling").glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Tuple)
        and len(node.elts) == 2
        and isinstance(node.elts[0], ast.Constant)
        and hasattr(lib(), f"llama_sampler_init_{node.elts[0].value}")
        and isinstance(node.elts[1], ast.Tuple | ast.Call | ast.Name)
    }
    assert {"top_k", "penalties", "dry", "xtc"} <= names
    assert {f"llama_sampler_init_{name}" for name in names} <= set(contract.FUNCTIONS)


def test_one_version_is_pinned_everywhere() -> None:
    version = contract.PACKAGE_VERSION
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"llama-cpp-python=={version}" in project["dependencies"]
    constraints = (ROOT / "scripts/constraints.txt").read_text().splitlines()
    assert f"llama_cpp_python=={version}" in constraints
