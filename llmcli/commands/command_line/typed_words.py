"""Check the words of a command line before they are parsed, and suggest the nearest name for one
that does not exist.

Typer reads `-sm row` as `-s m` and an argument too many, and calls a misspelled subcommand of
`bench` a model. Both would get an error about something that the user did not write.
"""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from llmcli.errors import UsageError

MIN_LIKENESS = 0.6
MAX_SUGGESTIONS = 2
LIKENESS_RANGE = (
    0.1  # suggestions that are less like the word than the best one by more are dropped
)
PREFIX_BONUS = 0.3  # for a name with which the word begins, or that begins with the word
MIN_PREFIX_CHARACTERS = 3
# An attached value that looks like the end of a misspelled option, as in -sm.
WORD_PATTERN = re.compile(r"[A-Za-z][\w-]*")
# Names of options in other programs, and those of the same thing here.
NAMES_ELSEWHERE = {
    "--temperature": "--temp",
    "--max-tokens": "--predict",
    "--max-new-tokens": "--predict",
    "--num-predict": "--predict",
    "--num-ctx": "--ctx-size",
    "--n-ctx": "--ctx-size",
    "--max-model-len": "--ctx-size",
    "--num-gpu": "--gpu-layers",
    "--num-thread": "--threads",
    "--n-threads": "--threads",
    "--stop": "--reverse-prompt",
    "--system-prompt": "--system",
    "--repetition-penalty": "--repeat-penalty",
    "--num-beams": "--beams",
    "--speculative-model": "--model-draft",
    "--draft-model": "--model-draft",
}


def check_words(command: Any, context: Any, words: Sequence[str]) -> None:
    """Raise UsageError for an option that the command does not have, an option without its value,
    or an argument too many. The hint has the nearest name.
    """
    parameters = command.get_params(context)
    options = {
        spelling: parameter
        for parameter in parameters
        if parameter.param_type_name == "option"
        for spelling in (*parameter.opts, *parameter.secondary_opts)
    }
    arguments: list[str] = []
    position, is_group = 0, hasattr(command, "list_commands")
    while position < len(words):
        word = words[position]
        position += 1
        if word == "--":
            arguments += words[position:]
            break
        if not word.startswith("-") or word == "-":
            if is_group:  # the words after it belong to the subcommand
                return
            arguments.append(word)
            continue
        option, has_value = _find_option(word, options)
        if option is None:
            raise _unknown_option(word.partition("=")[0], options, context)
        if not option.is_flag and not option.count and not has_value:
            if position == len(words):
                raise UsageError(f"{word} needs a value", hint=_help_hint(context))
            position += 1
    counts = [p.nargs for p in parameters if p.param_type_name == "argument"]
    if -1 not in counts and len(arguments) > sum(counts) and not is_group:
        raise _too_many_arguments(arguments, sum(counts), context)


def nearest_names(word: str, names: Iterable[str]) -> list[str]:
    """Return the names that are most like a word, the best first; none if no name is like it."""
    scores = {name: _likeness(word, name) for name in names}
    best = max(scores.values(), default=0.0)
    similar = [
        name
        for name in sorted(scores, key=lambda name: -scores[name])
        if scores[name] >= max(MIN_LIKENESS, best - LIKENESS_RANGE)
    ]
    return similar[:MAX_SUGGESTIONS]


def unknown_command(word: str, names: Iterable[str], program: str) -> UsageError:
    """Return the error for a subcommand that does not exist. `program`: the words before it."""
    similar = nearest_names(word, names)
    hint = (
        f"did you mean {_join_names([f'`{program} {name}`' for name in similar])}?"
        if similar
        else f"`{program} --help` lists the commands"
    )
    return UsageError(f"no such command: {word}", hint=hint)


def _likeness(word: str, name: str) -> float:
    """Return how much a name is like a word, from 0; 1 and more for names that begin alike."""
    bare_word, bare_name = word.lower().lstrip("-"), name.lower().lstrip("-")
    likeness = difflib.SequenceMatcher(None, word.lower(), name.lower()).ratio()
    shorter = min(len(bare_word), len(bare_name))
    begins_alike = bare_word.startswith(bare_name) or bare_name.startswith(bare_word)
    return likeness + PREFIX_BONUS * (begins_alike and shorter >= MIN_PREFIX_CHARACTERS)


def _find_option(word: str, options: Mapping[str, Any]) -> tuple[Any, bool]:
    """Return the option of a word, and whether the word also has its value, as in --temp=1 and -c4.
    The option is None if there is none.
    """
    name, equals, _ = word.partition("=")
    if name in options:
        return options[name], bool(equals)
    short = options.get(word[:2]) if not word.startswith("--") else None
    if short is None or (not short.is_flag and WORD_PATTERN.fullmatch(word[2:])):
        return None, False
    return short, True


def _unknown_option(word: str, options: Mapping[str, Any], context: Any) -> UsageError:
    visible = [spelling for spelling, option in options.items() if not option.hidden]
    elsewhere = NAMES_ELSEWHERE.get(word.lower(), "")
    similar = [elsewhere] if elsewhere in options else nearest_names(word, visible)
    hint = f"did you mean {_join_names(similar)}?" if similar else _help_hint(context)
    if not re.match(r"-{1,2}[A-Za-z]", word):
        hint = "write -- before an argument that begins with a dash"
    return UsageError(f"no such option: {word}", hint=hint)


def _too_many_arguments(arguments: Sequence[str], count: int, context: Any) -> UsageError:
    names = [p.metavar or p.name for p in context.command.params if p.param_type_name == "argument"]
    extra = " ".join(arguments[count:])
    if names and names[-1] == "PROMPT":
        prompt = " ".join(arguments[count - 1 :]).replace("'", "'\\''")
        before = " ".join(arguments[: count - 1])
        hint = f"put the prompt in quotes: {context.command_path} {before} '{prompt}'"
    else:
        hint = f"{context.command_path} takes {' '.join(names) or 'no arguments'}"
    return UsageError(f"too many arguments: {extra}", hint=hint)


def _help_hint(context: Any) -> str:
    return f"`{context.command_path} --help` lists the options"


def _join_names(names: Sequence[str]) -> str:
    return " or ".join(names)
