"""Checks a model's chat template against its vocabulary.

Finds the two most frequent faults of published GGUF files: a BOS token that would appear twice, and
a turn that ends with a token at which generation would not stop.
"""

from dataclasses import dataclass
from pathlib import Path

from llmcli.errors import UserError
from llmcli.runtime.binding.model import Model, open_model
from llmcli.runtime.text.chat_template import ChatTemplate
from llmcli.types import Message
from quant.model_file import load_checks, read_header

PROBE_ANSWER = "Blue, I think."
PROBE_CONVERSATIONS: dict[str, tuple[Message, ...]] = {
    "one question": (Message("user", "What colour is the sky?"),),
    "with a system prompt": (
        Message("system", "Answer briefly."),
        Message("user", "What colour is the sky?"),
    ),
    "a second turn": (
        Message("user", "What colour is the sky?"),
        Message("assistant", PROBE_ANSWER),
        Message("user", "And the sea?"),
    ),
}


@dataclass(frozen=True, slots=True)
class TemplateReport:
    """The rendered probe conversations by name, and warnings about the template."""

    probes: dict[str, str]
    warnings: tuple[str, ...]


def template_report(path: Path) -> TemplateReport:
    """Render the probe conversations with the file's own template, and check it. Only the
    vocabulary of the model is loaded.

    Raises UserError for a file without a template, and when the template fails on a single
    question.
    """
    header = read_header.read_header(path)
    load_checks.check_loadable(header)
    source = header.metadata.get("tokenizer.chat_template")
    if not source:
        raise UserError(
            f"{path.name} has no chat template: a base model continues text",
            hint=f"llmcli run '{path}' -p TEXT",
        )
    with open_model(path, vocab_only=True) as model:
        template = ChatTemplate(
            str(source), bos=model.token_text(model.bos), eos=model.token_text(model.eos)
        )
        probes, warnings = {}, []
        for name, messages in PROBE_CONVERSATIONS.items():
            try:
                probes[name] = template.render(messages)
            except UserError as error:
                if name == "one question":
                    raise
                warnings.append(f"{name}: {error}")
        warnings += _doubled_bos(model, template, probes) + _endless(model, template)
    return TemplateReport(probes, tuple(warnings))


def _doubled_bos(model: Model, template: ChatTemplate, probes: dict[str, str]) -> list[str]:
    if not (template.bos and model.add_bos) or not any(
        text.startswith(template.bos) for text in probes.values()
    ):
        return []
    return [
        f"doubled BOS: the template writes {template.bos} and the file tells the tokenizer "
        "to add it, too; llmcli sends one, other programs may send two"
    ]


def check_turn_end(model: Model, source: str) -> list[str]:
    """Return warnings about how a chat template ends an assistant's turn: none or one."""
    return _endless(
        model,
        ChatTemplate(source, bos=model.token_text(model.bos), eos=model.token_text(model.eos)),
    )


def _endless(model: Model, template: ChatTemplate) -> list[str]:
    """Return a warning, in a list, if llama.cpp does not stop at the token that follows an
    assistant's answer.
    """
    question, *_ = PROBE_CONVERSATIONS["one question"]
    for turns in (
        [question, Message("assistant", PROBE_ANSWER)],
        PROBE_CONVERSATIONS["a second turn"],
    ):  # some templates write the end of a turn only when another turn follows
        try:
            text = template.render(turns, add_generation_prompt=False)
        except UserError:
            return ["the template refuses a conversation that ends with an answer"]
        _, answer, tail = text.rpartition(PROBE_ANSWER)
        if not answer:
            return [
                "the template leaves out the assistant's answer: "
                "the model would not see its earlier answers"
            ]
        ids = model.tokenize(tail.lstrip(), special=True)
        if any(model.is_end(token) for token in ids[:2]):
            return []
        if ids:
            return [
                f"an answer ends with {model.token_text(ids[0])!r}, which is no end-of-generation token "
                "of this file: generation would not stop there; use -r to stop there"
            ]
    return ["nothing marks the end of an assistant's turn: the model may never stop"]
