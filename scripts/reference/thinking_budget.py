#!/usr/bin/env python3
"""Show that thinking ends: every answer thinks for at most its budget, and has a reply.

usage: .venv/bin/python scripts/reference/thinking_budget.py MODEL.gguf [--prompts 100]
       [--budgets 0,16,64,256] [-n 48] [-t N] [--temp 0.8]

Without a thinking template of its own, the model gets TEMPLATE, which opens the thinking in the
prompt as those of thinking models do. Each prompt gets one of the budgets in turn. An answer passes
if its tokens have the closing tag within the budget and SLACK tokens, and text follows it. The
script prints a line for each failure and the totals, and exits with 1 if any failed.
"""

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from llmcli.runtime.requests.request import Request, RunOptions
from llmcli.runtime.runner import Runner, open_runner
from llmcli.runtime.sampling import default_sampling
from llmcli.runtime.text.chat_template import ChatTemplate
from llmcli.types import Message

SLACK = 16  # tokens of the closing text
TEMPLATE = """\
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
<think>
{% endif %}"""
SUBJECTS = ("rivers", "clouds", "bread", "bridges", "sleep", "maps", "glass", "bees", "ice", "salt")
QUESTIONS = (
    "Why do people need {}?",
    "Explain {} to a child.",
    "How many kinds of {} are there?",
    "What would the world be without {}?",
    "Write a sentence about {}.",
    "Compare {} with stones.",
    "Who first wrote about {}?",
    "Is it true that {} can be dangerous?",
    "Give three facts about {}.",
    "Translate the word {} into French.",
)


def check_answer(runner: Runner, question: str, budget: int, options: argparse.Namespace) -> str:
    """Return what is wrong with the answer to a question, or "" if nothing is."""
    tokens = runner.encode_chat([Message("user", question)])
    opened = runner.opened_tags(tokens)
    if opened is None:
        return "the prompt opens no thinking"
    request = Request(
        tokens,
        default_sampling().with_values({"temp": options.temp, "seed": 1}),
        max_tokens=budget + SLACK + options.predict,
        strategy=runner.default_strategy(),
        thinking=runner.thinking_limit(opened, budget),
    )
    reply = runner.reply(request)
    for _ in reply:
        pass
    thought, closing, text = reply.answer.text.partition(opened.closing)
    pieces = [runner.model.piece(token.id) for token in reply.answer.tokens]
    if not closing:
        return f"no closing tag after {len(pieces)} tokens"
    until_tag = next(
        count
        for count in range(len(pieces) + 1)
        if opened.closing.encode() in b"".join(pieces[:count])
    )
    if until_tag > budget + SLACK:
        return f"the thinking ends after {until_tag} tokens: {thought[-40:]!r}"
    return "" if text.strip() else "no reply"


def main() -> int:
    """Ask all prompts, print the failures and the totals, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--budgets", default="0,16,64,256")
    parser.add_argument("-n", "--predict", type=int, default=48)
    parser.add_argument("-t", "--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--temp", type=float, default=0.8)
    options = parser.parse_args()
    budgets = [int(word) for word in options.budgets.split(",")]
    n_failed = 0
    with open_runner(options.model, RunOptions(ctx_size=2048, threads=options.threads)) as runner:
        if runner.template is None or "<think>" not in runner.template.source:
            runner.template = ChatTemplate(TEMPLATE)
        for number in range(options.prompts):
            question = QUESTIONS[number // len(SUBJECTS) % len(QUESTIONS)]
            question = question.format(SUBJECTS[number % len(SUBJECTS)])
            budget = budgets[number % len(budgets)]
            if problem := check_answer(runner, question, budget, options):
                n_failed += 1
                print(f"{question} (budget {budget}): {problem}")
    print(f"{options.prompts - n_failed} of {options.prompts} end in time and have a reply")
    return int(n_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
