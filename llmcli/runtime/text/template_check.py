"""Check the chat template of a GGUF file against the vocabulary of the file.

The check finds the two most frequent faults of published files. The template and the tokenizer both
write the BOS token. Or the template ends an assistant's message with a token at which llama.cpp
would not stop.
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
    """The result of a template check."""

    probes: dict[str, str]  # by the names in PROBE_CONVERSATIONS, the prompt of the conversation
    warnings: tuple[str, ...]


def template_report(path: Path) -> TemplateReport:
    """Render PROBE_CONVERSATIONS with the chat template of the GGUF file at `path`, and check the
    template. No weights are loaded.

    Raises UserError when the file has no template, or when the template fails on a single question.
    """
    header = read_header.read_header(path)
    load_checks.check_loadable(header)
    source = header.chat_template
    if not source:
        raise UserError(
            f"{path.name} has no chat template: a base model continues text",
            hint=f"llmcli run '{path}' -p TEXT",
        )
    with open_model(path, vocab_only=True) as model:
        template = ChatTemplate(
            source, bos=model.token_text(model.bos), eos=model.token_text(model.eos)
        )
        probes, warnings = dict[str, str](), list[str]()
        for name, messages in PROBE_CONVERSATIONS.items():
            try:
                probes[name] = template.render(messages).plain
            except UserError as error:
                if name == "one question":
                    raise
                warnings.append(f"{name}: {error}")
        warnings += _check_bos(model, template, probes) + _check_answer_end(model, template)
    return TemplateReport(probes, tuple(warnings))


def _check_bos(model: Model, template: ChatTemplate, probes: dict[str, str]) -> list[str]:
    """Return a warning, in a list, if the template and the tokenizer both write the BOS token.
    `probes`: the rendered conversations by name.
    """
    if not (template.bos and model.add_bos) or not any(
        text.startswith(template.bos) for text in probes.values()
    ):
        return []
    return [
        f"doubled BOS: the template writes {template.bos} and the file tells the tokenizer "
        "to add it, too; llmcli sends one, other programs may send two"
    ]


def check_turn_end(model: Model, source: str) -> list[str]:
    """Return a warning, in a list, if llama.cpp does not stop where a chat template ends an
    assistant's message; otherwise an empty list. `source`: the Jinja text of the template.
    """
    return _check_answer_end(
        model,
        ChatTemplate(source, bos=model.token_text(model.bos), eos=model.token_text(model.eos)),
    )


def _check_answer_end(model: Model, template: ChatTemplate) -> list[str]:
    """Return a warning, in a list, if the token that the template writes after an assistant's
    message is no token at which llama.cpp stops; otherwise an empty list.
    """
    question, *_ = PROBE_CONVERSATIONS["one question"]
    # some templates write the end of a message only when another message follows
    for messages in (
        [question, Message("assistant", PROBE_ANSWER)],
        PROBE_CONVERSATIONS["a second turn"],
    ):
        try:
            text = template.render_as_sent(messages, add_generation_prompt=False)
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
