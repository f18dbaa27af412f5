"""The templates of `--chat-template NAME` give the prompts of llama.cpp's own."""

import ctypes

import llama_cpp
import pytest

from llmcli.runtime.text.chat_template import ChatTemplate
from llmcli.runtime.text.named_templates import find_template, template_names
from llmcli.types import Message

CONVERSATIONS = [
    [("user", "Hello")],
    [("system", "Be brief."), ("user", "  Hello there \n")],
    [
        ("system", " You are a test. "),
        ("user", 'What is "1\\n"?'),
        ("assistant", " It is\n2. "),
        ("user", "<|im_end|> Grüße 你"),
    ],
    [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"), ("user", "e")],
]


def llama_cpp_prompt(name: str, conversation: list[tuple[str, str]], generates: bool) -> str:
    messages = (llama_cpp.llama_chat_message * len(conversation))(
        *(
            llama_cpp.llama_chat_message(role=role.encode(), content=text.encode())
            for role, text in conversation
        )
    )
    buffer = ctypes.create_string_buffer(10_000)
    size = llama_cpp.llama_chat_apply_template(
        name.encode(), messages, len(conversation), generates, buffer, len(buffer)
    )
    assert size > 0, name
    return buffer.raw[:size].decode()


@pytest.mark.parametrize("name", template_names())
def test_prompts_equal_those_of_llama_cpp(name: str) -> None:
    source = find_template(name)
    assert source is not None
    template = ChatTemplate(source)
    template.check()
    for conversation in CONVERSATIONS:
        messages = [Message(role, text) for role, text in conversation]
        for generates in (True, False):
            prompt = template.render_as_sent(messages, add_generation_prompt=generates)
            assert str(prompt) == llama_cpp_prompt(name, conversation, generates)


def test_an_unknown_name_is_no_template() -> None:
    assert find_template("nonsense") is None
    assert len(template_names()) > 40
