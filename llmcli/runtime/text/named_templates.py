"""The chat templates that `--chat-template NAME` names, as in llama.cpp (src/llama-chat.cpp). They
are for models whose file has no template or a broken one, and know neither functions nor thinking.

Most differ only in the words around a message, so they are written as data. A test compares each with
llama.cpp.
"""

from dataclasses import dataclass

Words = tuple[str, str]  # the words before and after a message
ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, slots=True)
class NamedTemplate:
    """The words of a template.

    - `any_role`: the words around a message of any role; `{role}` stands for its role.
    - `system`, `user`, `assistant`: the words around messages of one role, where they differ.
    - `generation`: the words that begin an answer.
    - `start`: the words before the first message.
    - `trims`: the roles whose messages are stripped of whitespace.
    """

    any_role: Words = ("", "")
    system: Words | None = None
    user: Words | None = None
    assistant: Words | None = None
    generation: str = ""
    start: str = ""
    trims: tuple[str, ...] = ()

    def to_jinja(self) -> str:
        """Return the template in Jinja."""
        body = ""
        for number, role in enumerate(ROLES):
            keyword = "elif" if number else "if"
            body += f'{{%- {keyword} message.role == "{role}" %}}'
            body += _message(getattr(self, role) or self.any_role, role in self.trims)
        body += f"{{%- else %}}{_message(self.any_role, bool(self.trims))}{{%- endif %}}"
        return (
            f"{_write(self.start)}{{%- for message in messages %}}{body}{{%- endfor %}}"
            f"{{%- if add_generation_prompt %}}{_write(self.generation)}{{%- endif %}}"
        )


def _message(words: Words, is_trimmed: bool) -> str:
    """Return the Jinja of a message with the words around it."""
    before = "{{- message.role }}".join(map(_write, words[0].split("{role}")))
    return f"{before}{{{{- message.content{' | trim' if is_trimmed else ''} }}}}{_write(words[1])}"


def _write(text: str) -> str:
    """Return the Jinja that writes a text."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'{{{{- "{escaped}" }}}}' if text else ""


def find_template(name: str) -> str | None:
    """Return the template with this name in Jinja, or None."""
    if name in WORDS:
        return WORDS[name].to_jinja()
    return WRITTEN.get(name)


def template_names() -> list[str]:
    """Return the names of all templates."""
    return sorted([*WORDS, *WRITTEN])


END_OF_SENTENCE = "<｜end▁of▁sentence｜>"
GRANITE = NamedTemplate(
    ("<|start_of_role|>{role}<|end_of_role|>", "<|end_of_text|>\n"),
    generation="<|start_of_role|>assistant<|end_of_role|>",
)
VICUNA = NamedTemplate(
    system=("", "\n\n"),
    user=("USER: ", "\n"),
    assistant=("ASSISTANT: ", "</s>\n"),
    generation="ASSISTANT:",
)
EXAONE = NamedTemplate(
    system=("[|system|]", "[|endofturn|]\n"),
    user=("[|user|]", "\n"),
    assistant=("[|assistant|]", "[|endofturn|]\n"),
    generation="[|assistant|]",
    trims=ROLES,
)
WORDS: dict[str, NamedTemplate] = {
    "chatml": NamedTemplate(
        ("<|im_start|>{role}\n", "<|im_end|>\n"), generation="<|im_start|>assistant\n"
    ),
    "chatglm3": NamedTemplate(
        ("<|{role}|>\n ", ""), generation="<|assistant|>", start="[gMASK]sop"
    ),
    "chatglm4": NamedTemplate(
        ("<|{role}|>\n", ""), generation="<|assistant|>\n", start="[gMASK]<sop>"
    ),
    "command-r": NamedTemplate(
        system=("<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
        user=("<|START_OF_TURN_TOKEN|><|USER_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
        assistant=("<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
        generation="<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
        trims=ROLES,
    ),
    "deepseek": NamedTemplate(
        user=("### Instruction:\n", "\n"),
        assistant=("### Response:\n", "\n<|EOT|>\n"),
        generation="### Response:\n",
    ),
    "deepseek2": NamedTemplate(
        system=("", "\n\n"),
        user=("User: ", "\n\n"),
        assistant=("Assistant: ", END_OF_SENTENCE),
        generation="Assistant:",
    ),
    "deepseek3": NamedTemplate(
        system=("", "\n\n"),
        user=("<｜User｜>", ""),
        assistant=("<｜Assistant｜>", END_OF_SENTENCE),
        generation="<｜Assistant｜>",
    ),
    "exaone3": EXAONE,
    "exaone4": EXAONE,
    "exaone-moe": NamedTemplate(
        ("<|{role}|>\n", "<|endofturn|>\n"), generation="<|assistant|>\n", trims=ROLES
    ),
    "falcon3": NamedTemplate(("<|{role}|>\n", "\n"), generation="<|assistant|>\n"),
    "glmedge": NamedTemplate(("<|{role}|>\n", ""), generation="<|assistant|>"),
    "gpt-oss": NamedTemplate(
        ("<|start|>{role}<|message|>", "<|end|>"),
        assistant=("<|start|>assistant<|message|>", "<|return|>"),
        generation="<|start|>assistant",
    ),
    "granite": GRANITE,
    "granite-4.0": GRANITE,
    "granite-4.1": GRANITE,
    "grok-2": NamedTemplate(
        system=("System: ", "<|separator|>\n\n"),
        user=("Human: ", "<|separator|>\n\n"),
        assistant=("Assistant: ", "<|separator|>\n\n"),
        generation="Assistant:",
        trims=("system", "user"),
    ),
    "hunyuan-moe": NamedTemplate(
        ("<|startoftext|>", "<|extra_0|>"),
        system=("<|startoftext|>", "<|extra_4|>"),
        assistant=("", "<|eos|>"),
    ),
    "kimi-k2": NamedTemplate(
        system=("<|im_system|>system<|im_middle|>", "<|im_end|>"),
        user=("<|im_user|>user<|im_middle|>", "<|im_end|>"),
        assistant=("<|im_assistant|>assistant<|im_middle|>", "<|im_end|>"),
        generation="<|im_assistant|>assistant<|im_middle|>",
    ),
    "llama3": NamedTemplate(
        ("<|start_header_id|>{role}<|end_header_id|>\n\n", "<|eot_id|>"),
        generation="<|start_header_id|>assistant<|end_header_id|>\n\n",
        trims=ROLES,
    ),
    "llama4": NamedTemplate(
        ("<|header_start|>{role}<|header_end|>\n\n", "<|eot|>"),
        generation="<|header_start|>assistant<|header_end|>\n\n",
        trims=ROLES,
    ),
    "megrez": NamedTemplate(
        ("<|role_start|>{role}<|role_end|>", "<|turn_end|>"),
        generation="<|role_start|>assistant<|role_end|>",
    ),
    "minicpm": NamedTemplate(user=("<用户>", "<AI>"), trims=ROLES),
    "mistral-v7": NamedTemplate(
        (" ", "</s>"),
        system=("[SYSTEM_PROMPT] ", "[/SYSTEM_PROMPT]"),
        user=("[INST] ", "[/INST]"),
    ),
    "mistral-v7-tekken": NamedTemplate(
        ("", "</s>"),
        system=("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
        user=("[INST]", "[/INST]"),
    ),
    "phi3": NamedTemplate(("<|{role}|>\n", "<|end|>\n"), generation="<|assistant|>\n"),
    "phi4": NamedTemplate(
        ("<|im_start|>{role}<|im_sep|>", "<|im_end|>"), generation="<|im_start|>assistant<|im_sep|>"
    ),
    "seed_oss": NamedTemplate(
        ("<seed:bos>{role}\n", "<seed:eos>"),
        generation="<seed:bos>assistant\n",
        trims=("assistant",),
    ),
    "smolvlm": NamedTemplate(
        system=("", "\n\n"),
        user=("User: ", "<end_of_utterance>\n"),
        assistant=("Assistant: ", "<end_of_utterance>\n"),
        generation="Assistant:",
        start="<|im_start|>",
    ),
    "solar-open": NamedTemplate(
        ("<|begin|>{role}<|content|>", "<|end|>"), generation="<|begin|>assistant"
    ),
    "vicuna": VICUNA,
    "vicuna-orca": NamedTemplate(
        system=("SYSTEM: ", "\n"),
        user=VICUNA.user,
        assistant=VICUNA.assistant,
        generation=VICUNA.generation,
    ),
    "zephyr": NamedTemplate(("<|{role}|>\n", "<|endoftext|>\n"), generation="<|assistant|>\n"),
}

# Templates whose words depend on the messages before.
GEMMA = """{%- set system = namespace(text="") %}
{%- for message in messages %}
    {%- if message.role == "system" %}
        {%- set system.text = system.text + message.content | trim %}
    {%- else %}
        {{- "<start_of_turn>" + ("model" if message.role == "assistant" else message.role) + "\\n" }}
        {%- if system.text and message.role != "assistant" %}
            {{- system.text }}{{- "\\n\\n" }}{% set system.text = "" %}
        {%- endif %}
        {{- message.content | trim }}{{- "<end_of_turn>\\n" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<start_of_turn>model\\n" }}{% endif %}"""
OPENCHAT = """{%- for message in messages %}
    {%- if message.role == "system" %}
        {{- message.content }}{{- "<|end_of_turn|>" }}
    {%- else %}
        {{- "GPT4 Correct " + message.role | capitalize + ": " }}{{- message.content }}
        {{- "<|end_of_turn|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- "GPT4 Correct Assistant:" }}{% endif %}"""
MONARCH = """{%- for message in messages %}
    {{- ("" if loop.first else "<s>") + message.role + "\\n" }}{{- message.content }}{{- "</s>\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<s>assistant\\n" }}{% endif %}"""
ORION = """{%- set system = namespace(text="") %}
{%- for message in messages %}
    {%- if message.role == "system" %}
        {%- set system.text = system.text + message.content %}
    {%- elif message.role == "user" %}
        {{- "Human: " }}
        {%- if system.text %}{{- system.text }}{{- "\\n\\n" }}{% set system.text = "" %}{% endif %}
        {{- message.content }}{{- "\\n\\nAssistant: </s>" }}
    {%- else %}
        {{- message.content }}{{- "</s>" }}
    {%- endif %}
{%- endfor %}"""


def _mistral(before: str, after: str, *, is_trimmed: bool) -> str:
    """Return a Jinja template of Mistral before version 7. `before`, `after`: the spaces before and
    after [INST]. `is_trimmed`: the assistant's messages are stripped of whitespace.
    """
    trim = " | trim" if is_trimmed else ""
    return f"""{{%- set turn = namespace(is_open=false) %}}
{{%- for message in messages %}}
    {{%- if not turn.is_open %}}{{{{- "{before}[INST]{after}" }}}}{{% set turn.is_open = true %}}{{% endif %}}
    {{%- if message.role == "system" %}}{{{{- message.content }}}}{{{{- "\\n\\n" }}}}
    {{%- elif message.role == "user" %}}{{{{- message.content }}}}{{{{- "{before}[/INST]" }}}}
    {{%- else %}}
        {{{{- "{after}" }}}}{{{{- message.content{trim} }}}}{{{{- "</s>" }}}}{{% set turn.is_open = false %}}
    {{%- endif %}}
{{%- endfor %}}"""


def _llama2(system: Words, *, opening: str = "[INST] ", is_trimmed: bool = False) -> str:
    """Return a Jinja template of Llama 2. `system`: the words around the system text. `opening`: the
    words before a further turn. `is_trimmed`: messages are stripped of whitespace.
    """
    content = "{{- message.content" + (" | trim" if is_trimmed else "") + " }}"
    return f"""{{%- set turn = namespace(is_open=true) %}}{{{{- "[INST] " }}}}
{{%- for message in messages %}}
    {{%- if not turn.is_open %}}{{{{- "{opening}" }}}}{{% set turn.is_open = true %}}{{% endif %}}
    {{%- if message.role == "system" %}}{_write(system[0])}{content}{_write(system[1])}
    {{%- elif message.role == "user" %}}{content}{{{{- " [/INST]" }}}}
    {{%- else %}}{content}{{{{- "</s>" }}}}{{% set turn.is_open = false %}}
    {{%- endif %}}
{{%- endfor %}}"""


SYSTEM_WORDS = "<<SYS>>\n", "\n<</SYS>>\n\n"
WRITTEN: dict[str, str] = {
    "gemma": GEMMA,
    "llama2": _llama2(("", "\n")),
    "llama2-sys": _llama2(SYSTEM_WORDS),
    "llama2-sys-bos": _llama2(SYSTEM_WORDS, opening="<s>[INST] "),
    "llama2-sys-strip": _llama2(SYSTEM_WORDS, is_trimmed=True),
    "mistral-v1": _mistral(" ", " ", is_trimmed=False),
    "mistral-v3": _mistral("", " ", is_trimmed=True),
    "mistral-v3-tekken": _mistral("", "", is_trimmed=False),
    "monarch": MONARCH,
    "openchat": OPENCHAT,
    "orion": ORION,
}
