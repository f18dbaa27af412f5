"""Patterns of tensor names: what is accepted means the same in C++ and in Python."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from llmcli.errors import UserError
from llmcli.planning.placement.tensor_patterns import check_pattern, find_place, matches_any
from llmcli.runtime.binding.placement.model_placement import EXPERTS_PATTERN, TensorOverride

NAMES = (
    "token_embd.weight",
    "blk.0.attn_q.weight",
    "blk.1.ffn_up_exps.weight",
    "blk.11.ffn_down_exps.weight",
    "blk.12.ffn_gate_chexps.weight",
    "blk.20.ffn_up_shexp.weight",
    "output_norm.weight",
)
ACCEPTED = (
    "blk",
    r"blk\.1\.",
    EXPERTS_PATTERN,
    r"blk\.(1[0-9]|2[0-9])\.ffn_.*_exps\.weight",
    r"^blk\.\d+\.attn",
    r"\.ffn_(?:up|down)_(ch|)exps",
    r"[^.]+\.weight$",
    r"[a-z_.]*norm",
    r"blk\.1{1,2}\.",
    r"blk\.1{2}\.",
    r"o.+?t",
    r"\bblk\b",
    "a||b",
    "()",
    r"[\d]{2}",
)
REFUSED = (
    "(",
    ")",
    "a)(",
    "[",
    "[a",
    "*a",
    "a**",
    "a*+",
    "(a+)+",
    "(?:(a*)b)*",
    "(?=a)",
    "(?P<n>a)",
    "(?i)a",
    r"\p{L}",
    "\\",
    r"\1",
    "a{2",
    "a}",
    "a]",
    "{2}",
    "[[:alpha:]]",
    "[z-a]",
    "a{3,2}",
    "é",
    "a\n",
    "(|*)",
    "^*",
    "x" * 1025,
)
PROGRAM = r"""
#include <iostream>
#include <regex>
int main(int count, char ** words) {
    for (int i = 1; i < count; ++i) {
        std::string line, pattern = words[i];
        try {
            std::regex compiled(pattern);
            for (std::string name : {NAMES}) line += std::regex_search(name, compiled) ? '1' : '0';
        } catch (const std::regex_error &) { line = "error"; }
        std::cout << line << "\n";
    }
}
"""


@pytest.mark.parametrize("pattern", REFUSED)
def test_patterns_that_may_mean_something_else_are_refused(pattern: str) -> None:
    with pytest.raises(UserError, match="--override-tensor: the pattern") as caught:
        check_pattern(pattern)
    assert "blk" in caught.value.hint


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_accepted_patterns_find_the_same_names_as_std_regex(tmp_path: Path) -> None:
    source = tmp_path / "match.cpp"
    source.write_text(PROGRAM.replace("NAMES", ", ".join(f'"{name}"' for name in NAMES)))
    subprocess.run(("c++", "-O0", "-o", str(tmp_path / "match"), str(source)), check=True)
    output = subprocess.run(
        (str(tmp_path / "match"), *ACCEPTED), capture_output=True, text=True, check=True
    ).stdout
    for pattern, line in zip(ACCEPTED, output.splitlines(), strict=True):
        check_pattern(pattern)
        ours = "".join(str(int(bool(re.search(pattern, name)))) for name in NAMES)
        assert (pattern, ours) == (pattern, line)


def test_the_first_override_that_matches_decides() -> None:
    overrides = (TensorOverride(r"blk\.1\.", "B"), TensorOverride("ffn", "CPU"))
    place_of = find_place(overrides, ("A", "B"))
    assert [place_of(name) for name in NAMES[:5]] == [None, None, 1, -1, -1]
    assert matches_any("norm", NAMES)
    assert not matches_any("gate_inp", NAMES)
