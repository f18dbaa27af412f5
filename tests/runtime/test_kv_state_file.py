"""Files of KV states: a restored sequence continues exactly, and invalid files are refused."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from llmcli.chat.chat_session import ChatSession
from llmcli.chat.conversation.conversation import Conversation
from llmcli.chat.display.stream_writer import StreamWriter
from llmcli.chat.kv_states import restore_state, save_state
from llmcli.chat.local_model import LocalModel
from llmcli.config import load_config
from llmcli.model_loader.quantize_file import quantize_file
from llmcli.runtime import kv_state_file, model_identity, reproducible
from llmcli.runtime.requests.request import Request, RunOptions
from llmcli.runtime.runner import Runner, open_runner
from llmcli.runtime.sampling import default_sampling
from llmcli.ui import UI
from tests.quant.tiny_gguf import gemma3, llama

# The options of the reproducible mode: q8_0 K and V, flash attention.
EXACT = RunOptions(
    ctx_size=512,
    threads=1,
    batch_size=64,
    cache_type_k="q8_0",
    cache_type_v="q8_0",
    flash_attn="on",
    gemm="ggml",
)
GREEDY = default_sampling().with_values({"temp": 0})
PROMPT = tuple(range(3, 103))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with heads of 64 in Q8_0."""
    folder = tmp_path_factory.mktemp("state")
    quantize_file(
        llama(folder / "f32.gguf", layers=2), "Q8_0", folder / "q8_0.gguf", load_config(), UI()
    )
    return folder / "q8_0.gguf"


@contextmanager
def open_model_runner(
    path: Path, options: RunOptions = EXACT, slots: int = 4, **more: str
) -> Iterator[Runner]:
    with open_runner(path, options, slots=slots, **more) as runner:  # type: ignore[arg-type]
        yield runner
        runner.engine.ledger.check()


def generate(
    runner: Runner, tokens: tuple[int, ...], count: int = 12
) -> tuple[list[tuple[int, float | None]], int]:
    """Generate `count` tokens greedily. Return their ids with log-probabilities, and the number of
    prompt tokens that were in the cache.
    """
    request = Request(tokens, GREEDY, max_tokens=count, ignore_eos=True, logprobs=True)
    reply = runner.reply(request)
    for _ in reply:
        pass
    runner.engine.ledger.check()
    return [(token.id, token.logprob) for token in reply.answer.tokens], reply.answer.cached_tokens


def write_state_file(
    runner: Runner, path: Path, tokens: tuple[int, ...]
) -> kv_state_file.SequenceState:
    """Write the state of the slot with these tokens to a file, and return the state."""
    state, identity = kv_state_file.copy_state(runner, tokens), kv_state_file.state_identity(runner)
    assert state
    assert identity
    path.write_bytes(b"".join(kv_state_file.encode_state(state, identity)))
    return state


def test_a_restored_sequence_continues_with_the_same_bits(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "one.kv"
    with open_model_runner(model) as runner:
        first, _ = generate(runner, PROMPT)
        answer = tuple(token for token, _ in first)
        state = write_state_file(runner, file, PROMPT)
        assert state.tokens == (*PROMPT, *answer[:-1])  # the last token was never computed
        continued = (*PROMPT, *answer, 7, 8, 9)
        fresh, _ = generate(runner, continued)
    # Also with another context size and number of slots, so that the cells are elsewhere.
    for options, slots in ((EXACT, 4), (RunOptions(**{**_fields(EXACT), "ctx_size": 256}), 1)):
        with open_model_runner(model, options, slots) as runner, file.open("rb") as source:
            kv_state_file.restore_state(runner, kv_state_file.read_state(source, runner))
            assert runner.engine.ledger.used_cells == len(state.tokens)
            again, cached = generate(runner, continued)
            assert again == fresh
            assert cached == len(state.tokens)


def test_a_state_is_restored_while_other_slots_are_used_and_branches_share_its_cells(
    model: Path, tmp_path: Path
) -> None:
    with open_model_runner(model) as runner:
        generate(runner, PROMPT)
        write_state_file(runner, tmp_path / "one.kv", PROMPT)
    with open_model_runner(model) as runner, (tmp_path / "one.kv").open("rb") as source:
        generate(runner, (5, 5, 5))
        state = kv_state_file.read_state(source, runner)
        kv_state_file.restore_state(runner, state)
        kv_state_file.restore_state(runner, state)  # nothing happens the second time
        used = runner.engine.ledger.used_cells
        assert used == len(state.tokens) + 3 + 11
        assert generate(runner, (*PROMPT[:50], 200, 201))[1] == 50
        assert runner.engine.ledger.used_cells == used + 2 + 11


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"cache_type_k": "f16"}, "another type of K"),
        ({"cache_type_v": "f16"}, "another type of V"),
        ({"template": "{{ messages }}"}, "another chat template"),
        ({"model": True}, "another model file"),
        (
            {"cache_type_k": "f16", "cache_type_v": "f16", "flash_attn": "off"},
            "type of V, of the other flash-att",
        ),
    ],
)
def test_an_incompatible_state_is_refused_with_the_difference(
    change: dict, reason: str, model: Path, tmp_path: Path
) -> None:
    with open_model_runner(model) as runner:
        generate(runner, PROMPT)
        write_state_file(runner, tmp_path / "one.kv", PROMPT)
    if change.pop("model", None):
        quantize_file(
            llama(tmp_path / "f32.gguf", layers=2, seed=1),
            "Q8_0",
            tmp_path / "q8_0.gguf",
            load_config(),
            UI(),
        )
        model = tmp_path / "q8_0.gguf"
    template = {"template": change.pop("template")} if "template" in change else {}
    options = RunOptions(**{**_fields(EXACT), **change})
    with (
        open_model_runner(model, options, **template) as runner,
        (tmp_path / "one.kv").open("rb") as source,
    ):
        with pytest.raises(kv_state_file.UnusableState, match=reason):
            kv_state_file.read_state(source, runner)
        assert runner.engine.ledger.used_cells == 0


def test_a_damaged_file_never_reaches_llama_cpp(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "one.kv"
    with open_model_runner(model) as runner:
        generate(runner, PROMPT)
        write_state_file(runner, file, PROMPT)
        valid = file.read_bytes()
        size = int.from_bytes(valid[8:12], "little")
        head = json.loads(valid[12 : 12 + size])
        damaged = [
            valid[:cut] for cut in (0, 7, 11, 12, 40, 12 + size, 12 + size + 50, len(valid) - 1)
        ]
        damaged += [valid + b"x", b"\xff" * 4096, valid[:8] + b"\xff\xff\xff\xff" + valid[12:]]
        for offset in (0, 13, 12 + size + 2, 12 + size + 500, len(valid) // 2, len(valid) - 1):
            damaged.append(valid[:offset] + bytes([valid[offset] ^ 4]) + valid[offset + 1 :])
        invalid_fields = {
            "tokens": (-1, "x", 2**40),
            "state_bytes": (0, None),
            "world": [3],
            "version": [2],
            "sha256": [""],
        }
        for fields in [{key: value} for key, values in invalid_fields.items() for value in values]:
            raw = json.dumps({**head, **fields}).encode()
            damaged.append(valid[:8] + len(raw).to_bytes(4, "little") + raw + valid[12 + size :])
        monkeypatch.setattr(
            runner.context, "write_state", lambda *_: pytest.fail("llama.cpp got the state")
        )
        for number, raw in enumerate(damaged):
            file.write_bytes(raw)
            with (
                file.open("rb") as source,
                pytest.raises(kv_state_file.UnusableState, match="it is ") as refused,
            ):
                kv_state_file.read_state(source, runner)
            assert "\n" not in str(refused.value), number


def test_a_state_that_llama_cpp_refuses_leaves_an_empty_slot(model: Path) -> None:
    """`read_state` would refuse these states, too: from another type of cells, cut off, with a
    wrong number of tokens, or with more tokens than the context has cells.
    """
    with open_model_runner(
        model, RunOptions(**{**_fields(EXACT), "cache_type_k": "f16", "cache_type_v": "f16"})
    ) as runner:
        generate(runner, PROMPT)
        other_type = kv_state_file.copy_state(runner, PROMPT)
    with open_model_runner(model) as runner:
        fresh, _ = generate(runner, PROMPT)
        valid = kv_state_file.copy_state(runner, PROMPT)
    assert other_type
    assert valid
    with open_model_runner(model) as runner:
        pairs = (
            (valid.tokens, valid.state[:-100]),
            (valid.tokens[:-1], valid.state),
            (valid.tokens * 5, valid.state),
        )
        for state in (other_type, *(kv_state_file.SequenceState(*pair) for pair in pairs)):
            with pytest.raises(
                kv_state_file.UnusableState,
                match=r"does not accept it|it has 555 tokens, but the context holds 512",
            ):
                kv_state_file.restore_state(runner, state)
            runner.engine.ledger.check()
            assert runner.engine.ledger.used_cells == 0
        assert generate(runner, PROMPT)[0] == fresh


def test_a_state_lacks_the_cells_outside_the_sliding_window(tmp_path: Path) -> None:
    """In the reproducible mode a context has the cells of all positions, so a sequence can be
    trimmed to any length. A state has only those that the window sees, and is refused if others
    would be needed.
    """
    model = tmp_path / "q8_0.gguf"
    quantize_file(gemma3(tmp_path / "f32.gguf", hidden=128), "Q8_0", model, load_config(), UI())
    exact = reproducible.with_required_options(RunOptions(ctx_size=512, threads=1, batch_size=64))
    edited = (*PROMPT[:40], 200, 201, 202)
    with open_model_runner(model, exact, slots=1) as runner:
        generate(runner, PROMPT)
        state = kv_state_file.copy_state(runner, PROMPT)
        assert state and not kv_state_file.has_complete_state(runner, len(state.tokens))
    with open_model_runner(model, exact, slots=1) as runner:
        fresh, _ = generate(runner, edited)
        short_answer, _ = generate(runner, edited[-3:], 4)
        short_state = kv_state_file.copy_state(runner, edited[-3:])
        assert short_state and kv_state_file.has_complete_state(runner, len(short_state.tokens))
    with open_model_runner(model, exact, slots=1) as runner:
        with pytest.raises(kv_state_file.UnusableState, match="no longer see"):
            # If it were accepted, log-probabilities would be wrong.
            kv_state_file.restore_state(runner, state)
        assert generate(runner, edited) == (fresh, 0)
    with open_model_runner(model, exact, slots=1) as runner:
        kv_state_file.restore_state(runner, short_state)
        assert generate(runner, (*edited[-3:], *(token for token, _ in short_answer)), 4)[1] == len(
            short_state.tokens
        )


def test_a_model_file_that_was_replaced_has_no_identity(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(model.read_bytes())
    with open_model_runner(copy) as runner:
        before = kv_state_file.state_identity(runner)
        with open_model_runner(model) as original:
            assert kv_state_file.state_identity(original) == before  # independent of the path
        replacement = tmp_path / "replacement.gguf"
        replacement.write_bytes(model.read_bytes())
        replacement.replace(copy)
        assert kv_state_file.state_identity(runner) is None
        copy.unlink()
        assert kv_state_file.state_identity(runner) is None


def test_the_content_hash_depends_on_every_tensor(model: Path, tmp_path: Path) -> None:
    from quant.model_file import read_header

    copy = tmp_path / "copy.gguf"
    header = read_header.read_header(model)
    expected = model_identity.content_hash(header)
    for tensor in header.tensors[::5]:
        raw = bytearray(model.read_bytes())
        raw[tensor.offset + tensor.nbytes // 2] ^= 1
        copy.write_bytes(raw)
        assert model_identity.content_hash(read_header.read_header(copy)) != expected, tensor.name


def test_a_saved_chat_continues_without_prefill(stories_gguf: Path, tmp_path: Path) -> None:
    def new_session(runner: Runner) -> ChatSession:
        return ChatSession(
            "stories",
            LocalModel(runner),
            Conversation(GREEDY, predict=12),
            load_config(),
            UI(color=False),
        )

    options, file = RunOptions(ctx_size=512, threads=1, batch_size=64), tmp_path / "one.kv"
    with open_model_runner(stories_gguf, options) as runner:
        first = new_session(runner)
        first.ask("Once upon a time", StreamWriter(silent=True))
        assert save_state(first, file).startswith("with the KV state of ")
        assert file.stat().st_mode & 0o077 == 0
        saved = first.conversation.tree.turns[:]
        fresh = first.ask(" Then", StreamWriter(silent=True))
    with open_model_runner(stories_gguf, options) as runner:
        second = new_session(runner)
        for turn in saved:
            second.conversation.tree.add_turn(turn.question, turn.answer)
        n_tokens = len(second.conversation_tokens())
        message = restore_state(second, file)
        resumed = second.ask(" Then", StreamWriter(silent=True))
        assert (resumed.text, resumed.cached_tokens) == (fresh.text, fresh.cached_tokens)
        assert (
            message == f"{min(n_tokens, resumed.cached_tokens)} of {n_tokens} tokens in the cache"
        )


def _fields(options: RunOptions) -> dict:
    return {name: getattr(options, name) for name in options.__slots__}
