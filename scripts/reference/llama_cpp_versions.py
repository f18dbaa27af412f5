"""Say what of llmcli's contract with llama.cpp another version of llama-cpp-python breaks.

usage: .venv/bin/python scripts/reference/llama_cpp_versions.py 0.3.35 0.3.34 [--folder DIR]

A VERSION is a version number, or a source distribution (.tar.gz) or wheel of llama-cpp-python on
this disk. Source distributions are downloaded with pip into DIR (by default a temporary folder),
those of the pinned version, too: they have 75 MB each. Nothing of them is imported or compiled.

The ctypes binding is parsed, and a stand-in for it is compared with the tables as the binding is
when it is loaded (llmcli/runtime/binding/contract.py). The headers are parsed for the functions,
numbers and structures that only they have. C++ functions whose output llmcli reads byte by byte
are compared with those of the pinned version. A wheel has no headers, so only its binding is
checked.

The script prints for each version what llmcli would refuse when it starts, which optional functions
are missing, and which source texts differ. Read the differing texts before you move to the version.
The exit code is 1 if anything is refused.
"""

import argparse
import ast
import ctypes
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from llmcli.runtime.binding import contract, ggml_tensor
from quant.native import ggml, ggml_contract

BINDING = "llama_cpp/llama_cpp.py"
VENDORED = "vendor/llama.cpp/"
INTERFACE_HEADERS = ("ggml/include/ggml.h", "ggml/include/ggml-backend.h")
HEADERS = (
    *INTERFACE_HEADERS,
    "ggml/include/ggml-rpc.h",
    "include/llama.h",
    "src/llama-cparams.h",
)
SOURCES = (
    "ggml/src/ggml-rpc/ggml-rpc.cpp",
    "ggml/src/ggml-cpu/vec.cpp",
    "ggml/src/ggml-cpu/vec.h",
    "ggml/src/ggml-cpu/ggml-cpu.cpp",
    "ggml/src/ggml-cpu/ggml-cpu-impl.h",
    "ggml/src/ggml-cpu/repack.h",
    "src/llama-context.cpp",
    "src/llama-ext.h",
    "src/llama-kv-cache.cpp",
    "src/llama-model.cpp",
    "src/llama-model.h",
    "ggml/src/ggml.c",
)
# The declarations of functions that are called under their mangled names, which depend on the types
# of their arguments. The result is read in memory, so its type matters, too.
DECLARATIONS = {
    contract.MEMORY_BREAKDOWN: "llama_memory_breakdown llama_get_memory_breakdown(const struct llama_context * ctx)",
    contract.TENSOR_MAP: (
        "const std::vector<std::pair<std::string, ggml_tensor *>> & "
        "llama_internal_get_tensor_map(const llama_model * model)"
    ),
    contract.SET_LAYER_INPUT: (
        "void llama_set_embeddings_layer_inp(struct llama_context * ctx, uint32_t lid, bool value)"
    ),
    contract.GET_LAYER_INPUT: (
        "float * llama_get_embeddings_layer_inp(struct llama_context * ctx, uint32_t lid)"
    ),
    contract.GGML_VERSION: "const char * ggml_version(void)",
    contract.REPACK_BUFFER_TYPE: "ggml_backend_buffer_type_t ggml_backend_cpu_repack_buffer_type(void)",
    contract.BARRIER: "void ggml_barrier(struct ggml_threadpool * tp)",
    contract.CHUNK_SET: "void ggml_threadpool_chunk_set(struct ggml_threadpool * tp, int value)",
    contract.CHUNK_ADD: "int ggml_threadpool_chunk_add(struct ggml_threadpool * tp, int value)",
    contract.SOFT_MAX: "ggml_float ggml_vec_soft_max_f32(const int n, float * y, const float * x, float max)",
}
# definitions whose output or conditions llmcli repeats in Python
READ_FUNCTIONS = {
    "src/llama-kv-cache.cpp": (
        "void llama_kv_cache::state_write(",
        "void llama_kv_cache::state_write_meta(",
        "void llama_kv_cache::state_write_data(",
    ),
    "ggml/src/ggml-rpc/ggml-rpc.cpp": (
        "static bool negotiate_hello(",
        "struct rpc_msg_hello_req ",
        "struct rpc_msg_hello_rsp ",
        "struct rpc_msg_device_count_rsp ",
        "struct rpc_msg_get_device_memory_req ",
        "struct rpc_msg_get_device_memory_rsp ",
    ),
    "src/llama-ext.h": ("struct llama_memory_breakdown_data ", "using llama_memory_breakdown "),
}


@dataclass(frozen=True)
class Version:
    """The texts of a version of llama-cpp-python, by their paths. Those of llama.cpp are without
    the folder in which they are vendored. A wheel has only the binding.
    """

    name: str
    texts: Mapping[str, str]

    @property
    def has_headers(self) -> bool:
        """Return whether the texts of llama.cpp are there."""
        return any(name in self.texts for name in HEADERS)


@dataclass
class Report:
    """What differs in a version. `refused`: differences with which llmcli does not start. `lost`:
    optional functions that are missing. `to_read`: texts that are different from the pinned
    version's.
    """

    refused: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    to_read: list[str] = field(default_factory=list)


def main() -> None:
    """Parse the flags, and print the report of each version."""
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("versions", nargs="+", metavar="VERSION")
    parser.add_argument("--folder", type=Path, help="where the downloaded archives are kept")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = flags.folder or Path(scratch)
        pinned = read_version(contract.PACKAGE_VERSION, folder)
        reports = {}
        for word in flags.versions:
            version = read_version(word, folder)
            reports[version.name] = compare(version, pinned)
    for name, report in reports.items():
        print_report(name, report)
    sys.exit(any(report.refused for report in reports.values()))


def read_version(word: str, folder: Path) -> Version:
    """Return the texts of a version. `word`: its number, or the path of its archive. `folder`: where
    archives are downloaded. Raises SystemExit if pip cannot download it.
    """
    if Path(word).is_file():
        archive = Path(word)
    else:
        pattern = f"llama_cpp_python-{word}.tar.gz"
        if not (folder / pattern).is_file():
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            command += ["--no-binary", ":all:", "--dest", str(folder), f"llama-cpp-python=={word}"]
            if subprocess.run(command, check=False).returncode:
                raise SystemExit(f"pip cannot download llama-cpp-python {word}")
        archive = folder / pattern
    number = re.search(r"llama_cpp_python-([^-]+?)(-|\.tar)", archive.name)
    return Version(number[1] if number else archive.stem, read_texts(archive))


def read_texts(archive: Path) -> dict[str, str]:
    """Return the texts of an archive that are compared, by their paths."""
    wanted = {BINDING: BINDING} | {VENDORED + name: name for name in (*HEADERS, *SOURCES)}
    texts = {}
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            texts[BINDING] = wheel.read(BINDING).decode("utf-8", "replace")
        return texts
    with tarfile.open(archive) as source:
        for member in source:
            name = wanted.get(member.name.partition("/")[2])
            if name is not None and member.isfile():
                stream = source.extractfile(member)
                assert stream is not None
                texts[name] = stream.read().decode("utf-8", "replace")
    return texts


def compare(version: Version, pinned: Version) -> Report:
    """Return what differs in a version from the tables, and from the texts of the pinned one."""
    report = Report()
    binding = parse_binding(version.texts[BINDING])
    functions = (
        declared_functions(version)
        if version.has_headers
        else {*contract.GGML_FUNCTIONS, *ggml_contract.FUNCTIONS}
    )
    binding["_lib"] = SimpleNamespace(**dict.fromkeys(functions))
    report.refused += contract.interface_differences(SimpleNamespace(**binding))
    if version.has_headers:
        report.refused += header_differences(version, functions)
        report.lost += lost_functions(version)
        report.to_read += changed_texts(version, pinned)
    return report


# ---- the binding


class UnknownExpressionError(Exception):
    """Raised for an expression of the binding that is no type and no number."""


def parse_binding(text: str) -> dict[str, Any]:
    """Return what the module llama_cpp.llama_cpp defines: structures as ctypes structures,
    functions with their `argtypes`, types of callbacks, and numbers. The code is parsed, not run.
    """
    names: dict[str, Any] = {}
    for node in ast.parse(text).body:
        try:
            match node:
                case ast.ClassDef():
                    names[node.name] = _structure(node, names)
                case ast.FunctionDef():
                    names |= _function(node)
                case ast.Assign(targets=targets):
                    value = _value(node.value, names)
                    names |= {
                        target.id: value for target in targets if isinstance(target, ast.Name)
                    }
                case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                    names[name] = _value(value, names)
        except UnknownExpressionError:
            continue
    return names


def _structure(node: ast.ClassDef, names: Mapping[str, Any]) -> Any:
    """Return a class of the binding as a ctypes structure with the same layout."""
    for statement in node.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id="_fields_")], value=ast.List(elts=elements)):
                fields = [
                    (_text(element.elts[0]), _value(element.elts[1], names))
                    for element in elements
                    if isinstance(element, ast.Tuple)
                ]
                return type(node.name, (ctypes.Structure,), {"_fields_": fields})
    raise UnknownExpressionError(node.name)


def _function(node: ast.FunctionDef) -> dict[str, Any]:
    """Return the C function that a Python function of the binding stands for, by its name."""
    for decorator in node.decorator_list:
        match decorator:
            case ast.Call(func=ast.Name(id="ctypes_function"), args=[_, ast.List(elts=types), *_]):
                return {node.name: SimpleNamespace(argtypes=types)}
    raise UnknownExpressionError(node.name)


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise UnknownExpressionError(ast.dump(node))


def _value(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """Return the ctypes type or the number that an expression stands for. Pointers and functions
    count as ctypes.c_void_p, which has their size.
    """
    match node:
        case ast.Constant(value=int() as number):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, names)
        case ast.BinOp(left=left, op=ast.LShift(), right=right):
            return _value(left, names) << _value(right, names)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _value(left, names) * _value(right, names)
        case ast.Attribute(value=ast.Name(id="ctypes"), attr=name) if name.startswith("c_"):
            return getattr(ctypes, name)
        case ast.Call(func=ast.Attribute(value=ast.Name(id="ctypes"), attr=name)) if name in (
            "POINTER",
            "CFUNCTYPE",
        ):
            return ctypes.c_void_p
        case ast.Name(id=name) if name in names:
            return names[name]
    raise UnknownExpressionError(ast.dump(node))


# ---- the headers


def declared_functions(version: Version) -> set[str]:
    """Return the names of the functions that the headers of ggml declare."""
    texts = (_without_comments(version.texts.get(name, "")) for name in INTERFACE_HEADERS)
    return {name for text in texts for name in re.findall(r"\b(ggml_\w+)\s*\(", text)}


def header_differences(version: Version, functions: set[str]) -> Iterator[str]:
    """Yield each difference of the headers from the tables that makes llmcli refuse the version, or
    that only the headers show. `functions`: the names of the functions that are declared.
    """
    for name in ggml_contract.FUNCTIONS:
        if name not in functions:
            yield f"libggml-base has no function {name}"
    numbers = read_numbers(version)
    wanted = dict(contract.HEADER_NUMBERS) | {"LLAMA_MAX_SEQ": contract.MAX_SEQUENCES}
    wanted |= {f"GGML_TYPE_{name}": number for number, name in ggml.TYPE_NAMES.items()}
    for name, number in wanted.items():
        if numbers.get(name) != number:
            yield f"{name} is {numbers.get(name, 'not there')} instead of {number}"
    for header, name, mirror, is_whole in (
        ("ggml/include/ggml.h", "ggml_tensor", ggml_tensor.Tensor, True),
        ("ggml/include/ggml.h", "ggml_init_params", ggml_tensor.InitParams, True),
        ("ggml/include/ggml.h", "ggml_type_traits", ggml_contract.TypeTraits, False),
        (
            "include/llama.h",
            "llama_model_tensor_buft_override",
            contract.TensorBufferOverride,
            True,
        ),
    ):
        ours = [field for field, *_ in mirror._fields_]
        theirs = read_fields(version.texts.get(header, ""), name)
        if ours != (theirs if is_whole else theirs[: len(ours)]):
            yield f"struct {name} has the fields {', '.join(theirs) or '(none)'}"
    for function, values in contract.DEFAULTS.items():
        yield from _default_differences(version, function, values)


def _default_differences(
    version: Version, function: str, values: Mapping[str, int]
) -> Iterator[str]:
    """Yield each default value in the source of a function that is not as in `values`."""
    names = {"true": 1, "false": 0, **read_numbers(version)}
    texts = (
        version.texts.get(name, "") for name in ("src/llama-context.cpp", "src/llama-model.cpp")
    )
    body = next(filter(None, (definition(text, f" {function}()") for text in texts)), "")
    found = dict(re.findall(r"/\*\.(\w+)\s*=\*/\s*([-\w]+)", body))
    for name, value in values.items():
        other = found.get(name, "not there")
        if str(names.get(other, other)) != str(value):
            yield f"{function} returns {name} = {other} instead of {value}"


def read_numbers(version: Version) -> dict[str, int]:
    """Return the numbers of the enums and the macros in the headers, by their names."""
    numbers: dict[str, int] = {}
    for name in (*HEADERS, "ggml/src/ggml-rpc/ggml-rpc.cpp"):
        text = _without_comments(version.texts.get(name, ""))
        for macro, value in re.findall(r"^\s*#define\s+(\w+)\s+(\d+)\s*$", text, re.MULTILINE):
            numbers[macro] = int(value)
        for body in re.findall(r"\benum\s+\w*\s*\{(.*?)\}", text, re.DOTALL):
            following: int | None = 0
            for entry in filter(None, map(str.strip, body.split(","))):
                key, _, expression = (part.strip() for part in entry.partition("="))
                if expression:
                    following = _number(expression, numbers)
                if following is not None and key.isidentifier():
                    numbers[key] = following
                    following += 1
    return numbers


def _number(expression: str, known: Mapping[str, int]) -> int | None:
    """Return the value of an expression of an enum, or None for one that is not understood."""
    if expression in known:
        return known[expression]
    if shift := re.fullmatch(r"\(?\s*(\d+)\s*<<\s*(\d+)\s*\)?", expression):
        return int(shift[1]) << int(shift[2])
    try:
        return int(expression, 0)
    except ValueError:
        return None


def read_fields(text: str, name: str) -> list[str]:
    """Return the names of the fields of a C structure in their order, empty if it is not there."""
    body = re.search(rf"\bstruct\s+{name}\s*\{{(.*?)\n\s*\}};", _without_comments(text), re.DOTALL)
    if body is None:
        return []
    return [
        match[1]
        for line in body[1].split(";")
        if (match := re.search(r"(\w+)\s*(?:\[[^\]]*\]\s*)*$", line.strip()))
    ]


# ---- functions that are not part of the interface


def lost_functions(version: Version) -> Iterator[str]:
    """Yield each optional function that the version does not declare in the same way, with what
    llmcli does without it.
    """
    texts = " ".join(_normalized(version.texts.get(name, "")) for name in (*HEADERS, *SOURCES))
    for symbol in contract.OPTIONAL_SYMBOLS:
        declaration = DECLARATIONS.get(symbol, f'"{symbol.name}"')
        if _normalized(declaration) not in texts:
            yield f"{symbol.name}: {symbol.lost}"


def changed_texts(version: Version, pinned: Version) -> Iterator[str]:
    """Yield each definition that llmcli repeats in Python and that differs from the pinned
    version's.
    """
    for name, beginnings in READ_FUNCTIONS.items():
        for beginning in beginnings:
            ours, theirs = (
                _normalized(definition(each.texts.get(name, ""), beginning))
                for each in (pinned, version)
            )
            if ours != theirs:
                verb = "differs" if theirs else "is not there"
                yield f"{name}: {beginning.rstrip('( ')} {verb}"


def definition(text: str, beginning: str) -> str:
    """Return the text of a definition up to the brace or semicolon that ends it; "" if there is
    none. `beginning`: its first words.
    """
    start = text.find(beginning)
    while start >= 0:
        opening, end = text.find("{", start), text.find(";", start)
        if opening >= 0 and (end < 0 or opening < end):
            return text[start : _closing_brace(text, opening) + 1]
        if beginning.startswith("using "):
            return text[start : end + 1]
        start = text.find(beginning, start + 1)  # a declaration
    return ""


def _closing_brace(text: str, opening: int) -> int:
    """Return the index of the brace that closes the one at `opening`."""
    depth = 0
    for match in re.finditer(r"[{}]", text[opening:]):
        depth += 1 if match[0] == "{" else -1
        if not depth:
            return opening + match.start()
    return len(text)


def _normalized(text: str) -> str:
    """Return the text without comments, and with single spaces."""
    return re.sub(r"\s+", " ", _without_comments(text)).strip()


def _without_comments(text: str) -> str:
    return re.sub(r"/\*.*?\*/|//[^\n]*", " ", text, flags=re.DOTALL)


def print_report(name: str, report: Report, write: Callable[[str], object] = print) -> None:
    """Print the report of a version."""
    write(f"llama-cpp-python {name}")
    for title, lines in (
        ("refused", report.refused),
        ("lost", report.lost),
        ("to read", report.to_read),
    ):
        write(f"  {title}: {len(lines) or 'nothing'}")
        for line in lines:
            write(f"    - {line}")


if __name__ == "__main__":
    main()
