"""The command lines that json_documents.py records, in order, and the files that they read.

Every command runs in one work folder with one LLMCLI_HOME, so that later commands see the files,
sessions and measurements of earlier ones. Models are small: SmolLM2-135M from the package index,
stories260K, and a random checkpoint whose rows fill the superblocks of k-quants.
"""

import json
import os
import shutil
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

Output = Literal["json", "json lines", "csv", "table", "text", "messages"]

CHANGED_NS = 1_760_000_000_000_000_000
# These flags make results independent of measurements of speed and of other load.
STEADY = "-fa on -t 1"
SMOLLM2 = f"smollm2:135m {STEADY} --offline"
STORIES = f"stories.gguf {STEADY} -s 1"
RUN = f"run {SMOLLM2} -c 512 -s 1 -n 12"
RAW = f"run {STORIES} --raw --temp 0 -n 12"
TEMPLATE = f"run {STORIES} --temp 0 -n 8 --chat-template"
CHAT = f"chat {SMOLLM2} -c 512 -s 1 -n 8 --temp 0"
BATCH = f"batch {SMOLLM2} -c 2048 -np 2 --temp 0"
QUANTIZE = "quantize wide --threads 1"
GPTQ = "--method gptq --calibration prose.txt --calibration-chunks 2"
EVAL = f"--text prose.txt -c 64 --chunks 4 {STEADY}"
PARETO = "pareto wide --threads 1 -f prose.txt -c 64 --chunks 2"
BENCH = f"bench stories.gguf {STEADY} -r 2"
LOAD = (
    f"bench load stories.gguf --serve '-c 512 -np 2 {STEADY}' --endpoint completions "
    "--requests 4 --warmup 1 -p 16 -n 4"
)
ONCE = "'Once upon a time'"

TEMPLATE_TEXT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "size": {"enum": ["small", "large"]},
        "years": {"type": "array", "items": {"type": "integer"}, "maxItems": 2},
    },
    "required": ["city", "size"],
    "additionalProperties": False,
}
GRAMMAR = 'root ::= "The " ("cat" | "dog") " is " [a-z]+ "."'
BATCH_LINES: tuple[Any, ...] = (
    "Name a river.",
    {"prompt": "Name a lake.", "max_tokens": 4},
    {
        "custom_id": "sea",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {
            "messages": [{"role": "user", "content": "Name a sea."}],
            "max_tokens": 5,
            "logprobs": True,
        },
    },
    {
        "custom_id": "vector",
        "method": "POST",
        "url": "/v1/embeddings",
        "body": {"input": "Name a sea.", "dimensions": 4},
    },
    {"messages": [{"role": "user", "content": "Name a hill."}], "temperature": "warm"},
    {"custom_id": "lost", "method": "POST", "url": "/v1/nowhere", "body": {}},
)
CHAT_LINES = """\
Name a fruit.
/set temp 0.5
/set seed 4
Name a color.
/regen
/edit 1 Name a bird.
/branch other
Name a fish.
/tree
/switch 1
/kv
/timing
/stats
/probs
/context
/export json exported.json
/export md exported.md
/set format schema.json
Describe Paris.
/save kept
/set format none
/undo
/think hide
/read prompt.txt What is it?
"""


@dataclass(frozen=True)
class Command:
    """A command line of llmcli to record.

    `output`: how its stdout is parsed (see `recorded_tree.parse_output`). `exit_code`: the expected
    one. `documents`: files that it writes, recorded as documents. `hashes`: files that it writes,
    recorded by their sha256. `environment`: additional variables.
    """

    line: str
    output: Output = "json"
    stdin: str = ""
    exit_code: int = 0
    documents: tuple[str, ...] = ()
    hashes: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()


def json_command(line: str, **settings: Any) -> Command:
    """Return a command with --json. `settings`: other fields of `Command`."""
    return Command(f"{line} --json", **settings)


def quantize_command(options: str, out: str, **settings: Any) -> Command:
    """Return a command that quantizes the random checkpoint to the file `out`, whose sha256 is
    recorded. `settings`: other fields of `Command`.
    """
    return json_command(f"{QUANTIZE} {options} -o {out}", hashes=(out,), **settings)


def failure(line: str, exit_code: int = 1) -> Command:
    """Return a command that must fail with this exit code."""
    return Command(line, "messages", exit_code=exit_code)


MODEL_COMMANDS = (
    Command("--version", "text"),
    Command(
        "",
        "text",
        environment=(
            ("_LLMCLI_COMPLETE", "complete_bash"),
            ("COMP_WORDS", "llmcli "),
            ("COMP_CWORD", "1"),
        ),
    ),
    json_command("list"),
    json_command("pull smollm2:135m"),
    json_command("pull smollm2:135m --offline"),
    json_command("pull ./stories --offline"),
    json_command("pull ./stories --offline --quant Q8_0"),
    json_command("list"),
    json_command("list --all"),
    json_command("convert stories -o stories.gguf --outtype f32", hashes=("stories.gguf",)),
    json_command("convert stories -o stories.gguf --outtype f32"),
    json_command("convert stories -o small.gguf --outtype q8_0", hashes=("small.gguf",)),
    json_command("convert wide -o wide.gguf", hashes=("wide.gguf",)),
    json_command("convert wide -o none.gguf --dry-run"),
    json_command("show smollm2:135m"),
    json_command("show smollm2:135m --template"),
    json_command("show stories:Q8_0"),
    json_command("show ./stories:Q8_0"),
    json_command("show stories.gguf"),
    json_command("show stories.gguf --tensors"),
    json_command("show wide"),
    json_command("diff stories.gguf small.gguf"),
    json_command("diff stories.gguf small.gguf --all"),
)

CALIBRATE = f"calibrate wide -o imatrix.gguf --moments moments.gguf -c 128 --chunks 4 {STEADY}"
QUANTIZE_COMMANDS = (
    json_command(CALIBRATE, hashes=("imatrix.gguf", "moments.gguf")),
    json_command(CALIBRATE),
    json_command(
        f"calibrate stories.gguf -o seeded.gguf --seed 2 {EVAL}",
        hashes=("seeded.gguf",),
    ),
    json_command(
        "calibrate --merge imatrix.gguf imatrix.gguf -o merged.gguf",
        hashes=("merged.gguf",),
    ),
    quantize_command("--q4_k_m", "ggml.gguf"),
    json_command(f"{QUANTIZE} --q4_k_m -o ggml.gguf"),
    json_command(f"{QUANTIZE} --q4_k_m -o none.gguf --dry-run"),
    json_command("quantize wide.gguf --q4_k_m -o file.gguf", hashes=("file.gguf",)),
    quantize_command("--type IQ3_XXS --imatrix imatrix.gguf", "iq3.gguf"),
    quantize_command("--q4_k_m --method search --imatrix imatrix.gguf", "search.gguf"),
    quantize_command("--q4_k_m --method gptq --moments moments.gguf", "gptq.gguf"),
    quantize_command(f"--type Q4_K_S {GPTQ}", "collected.gguf"),
    quantize_command(f"--type Q4_K_M --sequential {GPTQ}", "sequential.gguf"),
    quantize_command("--q4_k_m --fold awq,deal --moments moments.gguf", "fold.gguf"),
    quantize_command(
        "--target-size 0.9M --probe-chunks 1 --swaps 1 --sensitivity --plan-out plan.json",
        "target.gguf",
        documents=("plan.json",),
    ),
    quantize_command("--plan plan.json", "planned.gguf"),
    quantize_command(
        "--target-bpw 5.5 --quick --types q4_k,q6_k,q8_0 --imatrix imatrix.gguf", "quick.gguf"
    ),
    quantize_command(
        "--q5_k_m --pure --tensor-type attn_v=q8_0 --token-embedding-type q4_0", "overrides.gguf"
    ),
    json_command(
        f"{QUANTIZE} --type Q8_0 --split-max-size 1M -o split.gguf",
        hashes=("split-00001-of-00002.gguf", "split-00002-of-00002.gguf"),
    ),
    json_command(
        f"{QUANTIZE} --q4_k_m -o verified.gguf --verify --verify-chunks 2",
        documents=("verified.certificate.json",),
    ),
    json_command("show verified.gguf"),
    json_command("show verified.gguf --check"),
    json_command("show split-00001-of-00002.gguf"),
    json_command(f"eval stories.gguf -c 128 --chunks 2 {STEADY}"),
    json_command(f"eval ggml.gguf --base wide.gguf {EVAL}"),
    json_command(f"eval ggml.gguf --base ggml.gguf -ctk q8_0 -ctv q8_0 {EVAL}"),
    json_command(
        f"eval stories.gguf --save-base base.logits {EVAL}",
        hashes=("base.logits",),
    ),
    json_command(f"eval small.gguf --base-logits base.logits {STEADY}"),
    json_command(
        f"{PARETO} --types Q4_K_M,Q6_K --methods ggml,search --imatrix imatrix.gguf --seconds 0.2"
    ),
    json_command(f"{PARETO} --types Q4_K_M,Q8_0 --seconds 0"),
    Command(f"{PARETO} --types Q4_K_M,Q8_0 --seconds 0 -o csv", "csv"),
)

RUN_COMMANDS = (
    json_command(f"{RUN} 'Say hello.' --temp 0"),
    json_command(f"{RUN} 'Say hello.' --top-p 0.9 --min-p 0.02 -sys 'Be brief.'"),
    json_command(f"{RUN} 'Name a fruit.' --samples 3"),
    json_command(f"{RUN} 'Name a fruit.' --beams 3 --length-penalty 0.8"),
    json_command(f"{RUN} 'Describe Paris.' -j '{json.dumps(SCHEMA)}' -n 60 --temp 0"),
    json_command(f"{RUN} 'Describe Paris.' -jf schema.json -n 60 --jump off"),
    json_command(f"{RUN} 'Describe Paris.' -jf schema.json -n 60 --beams 2"),
    json_command(f"{RUN} 'Describe Paris.' -jf schema.json -n 4 --temp 0", exit_code=1),
    json_command(f"{RUN} 'What is it?' --grammar '{GRAMMAR}'"),
    json_command(f"{RUN} 'What is it?' --grammar-file grammar.gbnf --grammar-engine llama"),
    json_command(
        f"{RUN} 'Repeat: one two three one two three' --temp 0 -ctk q8_0 -ctv q8_0 --ngram-draft on"
    ),
    json_command(f"{RUN} 'Count to ten.' --temp 0 -md smollm2:135m"),
    json_command(f"{RUN} 'Say hello.' --temp 0 --reproducible --ngram-draft off"),
    json_command(f"{RUN} 'Why is sleep good?' --temp 0 --skeleton"),
    json_command(f"{RAW} {ONCE}"),
    json_command(f"{RAW} {ONCE} --logprobs 3"),
    json_command(
        f"{RAW} {ONCE} --temp 0.9 --dynatemp-range 0.2 --top-k 30 --typical 0.9 "
        "--repeat-penalty 1.1 --presence-penalty 0.1 --frequency-penalty 0.1 "
        "--dry-multiplier 0.8 --xtc-probability 0.3 -l 383-1.5"
    ),
    json_command(f"{RAW} {ONCE} --temp 0.9 --mirostat 2"),
    json_command(f"{RAW} {ONCE} -r girl -n 40"),
    json_command(f"{RAW} {ONCE} -c 64 -n 100 --ignore-eos"),
    json_command(f"{RAW} {ONCE} -c 64 -n 100 --ignore-eos --on-full shift"),
    json_command(f"{RAW} {ONCE} -c 64 -n 100 --ignore-eos --on-full sinks"),
    json_command(f"{RAW} -f prompt.txt"),
    json_command(RAW, stdin="One day, a boy"),
    json_command(f"{TEMPLATE} template.jinja {ONCE}"),
    json_command(f"{TEMPLATE} thinking.jinja {ONCE}"),
    Command(f"{RAW} {ONCE}", "text"),
    Command(
        "alias poet ./stories.gguf --system 'Tell a story.' --temp 0 --set top_k=5", "messages"
    ),
    json_command("list"),
    json_command("show poet"),
    json_command(f"run poet {STEADY} -s 1 -n 8 --chat-template template.jinja {ONCE}"),
    json_command(
        f"{BATCH} batch.jsonl -o answers.jsonl -n 6 --reproducible",
        exit_code=1,
        documents=("answers.jsonl",),
    ),
    json_command(
        f"{BATCH} questions.jsonl -o skeleton.jsonl -n 16 --skeleton",
        documents=("skeleton.jsonl",),
    ),
    json_command(
        "export vllm smollm2:135m -o vllm -c 4096 -np 8 --temp 0.2 -s 7 --offline",
        documents=("vllm/config.yaml", "vllm/serve.sh", "vllm/chat_template.jinja"),
    ),
    json_command("export vllm stories.gguf --original org/stories -a tales"),
)

CHAT_COMMANDS = (
    Command(CHAT, "text", stdin="Say hello.\nSay it again.\n"),
    json_command("sessions show last"),
    Command(
        f"{CHAT} --logprobs 3",
        "messages",
        stdin=CHAT_LINES,
        documents=("exported.json", "exported.md"),
    ),
    json_command("sessions show last"),
    json_command("sessions show kept"),
    Command(f"{CHAT} --resume kept", "text", stdin="And another.\n"),
    Command(f"{CHAT} --beams 2", "text", stdin="Name a tree.\n"),
    Command(
        f"chat {STORIES} -n 8 --temp 0 --chat-template thinking.jinja",
        "text",
        stdin="Who is there?\n",
    ),
    json_command("sessions"),
    json_command("sessions --all"),
)

PLAN_COMMANDS = (
    json_command(f"plan {SMOLLM2} -c 1024"),
    json_command(f"plan {SMOLLM2} -c 1024 -ctk q8_0 -ctv q4_0"),
    json_command(f"plan {SMOLLM2} -c 512 -md smollm2:135m"),
    json_command("plan stories.gguf -t 1 -c 1024 -np 4 -fa off"),
    json_command(f"plan stories.gguf {STEADY} -c 1024 -np 2 --no-kv-unified"),
    json_command(f"plan stories.gguf {STEADY} --measure"),
    json_command(f"plan wide {STEADY} --quant Q4_K_M"),
    json_command("doctor"),
)

BENCH_COMMANDS = (
    json_command(f"{BENCH} -p 16 -n 8"),
    json_command(f"{BENCH} -p 16 -n 8 -pg 16,8 -d 0,16 -np 1,2 --sampling"),
    json_command("bench stories.gguf -t 1 -r 2 -p 0 -n 4 --fa-sweep --no-history"),
    Command(f"{BENCH} -p 16 -n 8 -o jsonl", "json lines"),
    Command(f"{BENCH} -p 16 -n 8 -o csv", "csv"),
    Command(f"{BENCH} -p 16 -n 8", "table"),
    json_command("bench roofline stories.gguf -t 1 -d 0,16 -r 1"),
    json_command(f"bench phases stories.gguf {STEADY} -p 16 -n 8 -r 2"),
    json_command(f"bench spec stories.gguf {STEADY} -n 8 --pairs 1 --tasks free --methods ngram"),
    json_command(f"bench compare stories.gguf small.gguf {STEADY} -p 16 -n 8 --seconds 0.3"),
    json_command(
        "bench compare stories.gguf --a '-ub 16' --b '-ub 32' -t 1 -p 16 -n 8 --seconds 0.3"
    ),
    json_command("bench compare 1 1"),
    json_command("bench history --last 3"),
    json_command("bench tune stories.gguf --budget 8"),
    json_command("bench tune --show"),
    json_command(f"{LOAD} --concurrency 1,2"),
    json_command(f"{LOAD} --rate 40 --slo ttft:2000,tpot:1000 --mix sonnet"),
    json_command(f"{LOAD} --concurrency 1 --against small.gguf -r 2"),
    json_command(f"{LOAD} --find-max concurrency --slo ttft:0.001 -r 2"),
)

FAILURES = (
    failure("quantise", 2),
    failure("run stories.gguf --tmep 0", 2),
    failure("serve stories.gguf -np 0", 2),
    failure("show", 2),
    failure("run smolm2:135m hello --offline --json"),
    failure("run ./none.gguf hello --json"),
    failure("run ./prose.txt.gguf hello --json"),
    failure("run stories.gguf -m stories.gguf hello", 2),
    failure(f"{RAW} {ONCE} -ctk q9_0"),
    failure(f'{RAW} {ONCE} -j \'{{"type": "array", "items": true, "uniqueItems": true}}\''),
    failure(f"{RAW} {ONCE} --grammar 'root ::= ('"),
    failure("quantize wide --type Q9_K -o none.gguf --json"),
    failure("quantize wide --type IQ2_XXS -o none.gguf --json"),
    failure("quantize wide --q4_k_m -o wide --json"),
    failure("calibrate stories.gguf --text prose.txt -o prose.txt --json"),
    failure("bench load stories.gguf --find-max both", 2),
    failure("quantize wide --target-size 1K --quick -o none.gguf"),
    failure("eval stories.gguf --base smollm2:135m --chunks 1 --offline"),
    failure("batch stories.gguf none.jsonl -o answers.jsonl"),
    failure("sessions show nobody --json"),
    failure("bench compare 901 902 --json"),
    failure("serve stories.gguf --host 0.0.0.0 --port 0"),
)

CLOSING_COMMANDS = (
    json_command("bench tune --forget stories.gguf"),
    json_command("gc --dry-run"),
    json_command("gc"),
    Command("rm poet", "messages"),
    Command("sessions rm kept", "messages"),
    json_command("sessions"),
    json_command("list"),
)

WORKER_COMMANDS = (
    json_command(f"plan stories.gguf {STEADY} --rpc WORKER"),
    json_command("doctor --rpc WORKER"),
    json_command(f"{RAW} {ONCE} --rpc WORKER"),
)


def write_inputs(work: Path, stories_folder: Path) -> None:
    """Write the models, texts, templates and batches that the commands read to the work folder."""
    shutil.copytree(stories_folder, work / "stories")
    write_checkpoint(work / "wide", stories_folder)
    words = ["the", "cat", "dog", "sat", "ran", "by", "a", "river", "and", "house", "girl", "story"]
    order = np.random.default_rng(3).integers(len(words), size=2400)
    prose = " ".join(
        words[index] + ("." if number % 9 == 8 else "") for number, index in enumerate(order)
    )
    texts = {
        "prose.txt": prose,
        "prose.txt.gguf": prose,
        "prompt.txt": "One day, a girl",
        "template.jinja": TEMPLATE_TEXT,
        "thinking.jinja": TEMPLATE_TEXT.replace("<assistant>", "<assistant><think>\n"),
        "schema.json": json.dumps(SCHEMA),
        "grammar.gbnf": GRAMMAR,
        "batch.jsonl": "".join(json.dumps(line) + "\n" for line in BATCH_LINES),
        "questions.jsonl": '"Why is sleep good?"\n"How do plants grow?"\n',
    }
    for name, text in texts.items():
        (work / name).write_text(text, encoding="utf-8")
    for path in work.rglob("*"):  # the keys of some caches contain a file's modification time
        os.utime(path, ns=(CHANGED_NS, CHANGED_NS))


def write_checkpoint(
    folder: Path, stories_folder: Path, hidden: int = 256, feed_forward: int = 512
) -> None:
    """Write a checkpoint of a random BF16 Llama of two blocks in two shards, with the tokenizer of
    stories260K.
    """
    shutil.copytree(stories_folder, folder)
    (folder / "model.safetensors").unlink()
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config |= {
        "hidden_size": hidden,
        "intermediate_size": feed_forward,
        "num_hidden_layers": 2,
        "head_dim": 32,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    key_rows = hidden * config["num_key_value_heads"] // config["num_attention_heads"]
    block = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (key_rows, hidden),
        "self_attn.v_proj": (key_rows, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (feed_forward, hidden),
        "mlp.up_proj": (feed_forward, hidden),
        "mlp.down_proj": (hidden, feed_forward),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    shapes |= {
        f"model.layers.{layer}.{name}.weight": shape
        for layer in range(2)
        for name, shape in block.items()
    }
    names, random, shard_of = sorted(shapes), np.random.default_rng(5), {}
    for number, first in enumerate((0, len(names) // 2)):
        shard = f"model-{number + 1:05}-of-00002.safetensors"
        members = names[first : len(names) // 2 if number == 0 else None]
        write_safetensors(
            folder / shard, {name: random_weights(random, shapes[name]) for name in members}
        )
        shard_of |= dict.fromkeys(members, shard)
    index = {"metadata": {}, "weight_map": shard_of}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def random_weights(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Return random F32 weights that resemble trained ones: heavy-tailed for a matrix, near 1 for a
    norm.
    """
    if len(shape) == 1:
        return (1 + 0.1 * random.standard_normal(shape)).astype(np.float32)
    return (0.05 * random.standard_t(5, shape)).astype(np.float32)


def write_safetensors(file: Path, tensors: dict[str, np.ndarray]) -> None:
    """Write F32 tensors to a safetensors file as BF16, by truncation."""
    header, blobs, offset = {}, [], 0
    for name, values in tensors.items():
        blob = (np.ascontiguousarray(values).view(np.uint32) >> 16).astype(np.uint16).tobytes()
        header[name] = {
            "dtype": "BF16",
            "shape": values.shape,
            "data_offsets": [offset, offset + len(blob)],
        }
        blobs.append(blob)
        offset += len(blob)
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(blobs))
