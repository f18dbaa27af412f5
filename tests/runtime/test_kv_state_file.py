"""A KV state from a file continues exactly; an invalid one never reaches llama.cpp."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from llmcli.chat.chat_session import ChatSession
from llmcli.chat.conversation.conversation import Conversation
from llmcli.chat.display.stream_writer import StreamWriter
from llmcli.chat.kv_states import restore_state, save_state
from llmcli.config import load_config
from llmcli.model_loader.quantize_file import quantize_file
from llmcli.runtime import kv_state_file, model_identity, reproducible
from llmcli.runtime.requests.request import Request, RunOptions
from llmcli.runtime.runner import Runner, open_runner
from llmcli.runtime.sampling import default_sampling
from llmcli.ui import UI
from tests.quant.tiny_gguf import gemma3, llama

# The reproducible mode: quantized weights, q8_0 K and V, flash attention.
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
    """A random model with heads of 64, in Q8_0."""
    folder = tmp_path_factory.mktemp("state")
    quantize_file(llama(folder / "f32.gguf", layers=2), "Q8_0", folder / "q8_0.gguf", UI())
    return folder / "q8_0.gguf"


@contextmanager
def opened(
    path: Path, options: RunOptions = EXACT, slots: int = 4, **more: str
) -> Iterator[Runner]:
    with open_runner(path, options, slots=slots, **more) as runner:  # type: ignore[arg-type]
        yield runner
        runner.engine.ledger.check()


def said(
    runner: Runner, tokens: tuple[int, ...], count: int = 12
) -> tuple[list[tuple[int, float | None]], int]:
    """Ids and log-probabilities to the last bit, and how many tokens of the prompt were there
    already.
    """
    request = Request(tokens, GREEDY, max_tokens=count, ignore_eos=True, logprobs=True)
    reply = runner.reply(request)
    for _ in reply:
        pass
    runner.engine.ledger.check()
    return [(token.id, token.logprob) for token in reply.answer.tokens], reply.answer.cached_tokens


def written(runner: Runner, path: Path, tokens: tuple[int, ...]) -> kv_state_file.SequenceState:
    """The state of the slot that holds `tokens`, written to `path`."""
    kept, here = kv_state_file.copy_state(runner, tokens), kv_state_file.state_identity(runner)
    assert kept
    assert here
    path.write_bytes(b"".join(kv_state_file.encode_state(kept, here)))
    return kept


def test_what_is_said_after_coming_back_is_what_is_said_without(
    model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "one.kv"
    with opened(model) as runner:
        first, _ = said(runner, PROMPT)
        answer = tuple(token for token, _ in first)
        kept = written(runner, file, PROMPT)
        assert kept.tokens == (*PROMPT, *answer[:-1])  # the last token was never computed
        more = (*PROMPT, *answer, 7, 8, 9)
        fresh, _ = said(runner, more)
    # Another length of the context, other slots: where the cells lie does not matter.
    for options, slots in ((EXACT, 4), (RunOptions(**{**_fields(EXACT), "ctx_size": 256}), 1)):
        with opened(model, options, slots) as runner, file.open("rb") as source:
            kv_state_file.restore_state(runner, kv_state_file.read_state(source, runner))
            assert runner.engine.ledger.used_cells == len(kept.tokens)
            again, cached = said(runner, more)
            assert again == fresh
            assert cached == len(kept.tokens)


def test_a_state_comes_back_beside_others_and_branches_share_it(
    model: Path, tmp_path: Path
) -> None:
    with opened(model) as runner:
        said(runner, PROMPT)
        written(runner, tmp_path / "one.kv", PROMPT)
    with opened(model) as runner, (tmp_path / "one.kv").open("rb") as source:
        said(runner, (5, 5, 5))
        kept = kv_state_file.read_state(source, runner)
        kv_state_file.restore_state(runner, kept)
        kv_state_file.restore_state(runner, kept)  # it is there: nothing happens
        used = runner.engine.ledger.used_cells
        assert used == len(kept.tokens) + 3 + 11
        assert said(runner, (*PROMPT[:50], 200, 201))[1] == 50
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
def test_a_state_of_another_world_is_refused_by_what_differs(
    change: dict, reason: str, model: Path, tmp_path: Path
) -> None:
    with opened(model) as runner:
        said(runner, PROMPT)
        written(runner, tmp_path / "one.kv", PROMPT)
    if change.pop("model", None):
        quantize_file(
            llama(tmp_path / "f32.gguf", layers=2, seed=1), "Q8_0", tmp_path / "q8_0.gguf", UI()
        )
        model = tmp_path / "q8_0.gguf"
    template = {"template": change.pop("template")} if "template" in change else {}
    options = RunOptions(**{**_fields(EXACT), **change})
    with opened(model, options, **template) as runner, (tmp_path / "one.kv").open("rb") as source:
        with pytest.raises(kv_state_file.UnusableState, match=reason):
            kv_state_file.read_state(source, runner)
        assert runner.engine.ledger.used_cells == 0


def test_a_damaged_file_never_reaches_llama_cpp(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "one.kv"
    with opened(model) as runner:
        said(runner, PROMPT)
        written(runner, file, PROMPT)
        whole = file.read_bytes()
        size = int.from_bytes(whole[8:12], "little")
        head = json.loads(whole[12 : 12 + size])
        damaged = [
            whole[:cut] for cut in (0, 7, 11, 12, 40, 12 + size, 12 + size + 50, len(whole) - 1)
        ]
        damaged += [whole + b"x", b"\xff" * 4096, whole[:8] + b"\xff\xff\xff\xff" + whole[12:]]
        for at in (0, 13, 12 + size + 2, 12 + size + 500, len(whole) // 2, len(whole) - 1):
            damaged.append(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        strange = {
            "tokens": (-1, "x", 2**40),
            "state_bytes": (0, None),
            "world": [3],
            "version": [2],
            "sha256": [""],
        }
        for more in [{key: value} for key, values in strange.items() for value in values]:
            raw = json.dumps({**head, **more}).encode()
            damaged.append(whole[:8] + len(raw).to_bytes(4, "little") + raw + whole[12 + size :])
        monkeypatch.setattr(
            runner.context, "write_state", lambda *_: pytest.fail("it came through")
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
    """As read() would not let it through: kept with another type of cell, cut, or for more cells
    than there are.
    """
    with opened(
        model, RunOptions(**{**_fields(EXACT), "cache_type_k": "f16", "cache_type_v": "f16"})
    ) as runner:
        said(runner, PROMPT)
        other = kv_state_file.copy_state(runner, PROMPT)
    with opened(model) as runner:
        fresh, _ = said(runner, PROMPT)
        right = kv_state_file.copy_state(runner, PROMPT)
    assert other
    assert right
    with opened(model) as runner:
        pairs = (
            (right.tokens, right.state[:-100]),
            (right.tokens[:-1], right.state),
            (right.tokens * 5, right.state),
        )
        for wrong in (other, *(kv_state_file.SequenceState(*pair) for pair in pairs)):
            with pytest.raises(
                kv_state_file.UnusableState,
                match=r"does not accept it|it has 555 tokens, but the context holds 512",
            ):
                kv_state_file.restore_state(runner, wrong)
            runner.engine.ledger.check()
            assert runner.engine.ledger.used_cells == 0
        assert said(runner, PROMPT)[0] == fresh


def test_what_a_window_lost_sight_of_is_missing_in_a_state(tmp_path: Path) -> None:
    """In the reproducible mode windows keep every cell, and going back to any is sound; their
    states do not.
    """
    model = tmp_path / "q8_0.gguf"
    quantize_file(gemma3(tmp_path / "f32.gguf", hidden=128), "Q8_0", model, UI())
    exact = reproducible.with_required_options(RunOptions(ctx_size=512, threads=1, batch_size=64))
    edited = (*PROMPT[:40], 200, 201, 202)
    with opened(model, exact, slots=1) as runner:
        said(runner, PROMPT)
        kept = kv_state_file.copy_state(runner, PROMPT)
        assert kept and not kv_state_file.has_complete_state(runner, len(kept.tokens))
    with opened(model, exact, slots=1) as runner:
        fresh, _ = said(runner, edited)
        short, _ = said(runner, edited[-3:], 4)
        small = kv_state_file.copy_state(runner, edited[-3:])
        assert small and kv_state_file.has_complete_state(runner, len(small.tokens))
    with opened(model, exact, slots=1) as runner:
        with pytest.raises(kv_state_file.UnusableState, match="no longer see"):
            kv_state_file.restore_state(
                runner, kept
            )  # taken, it gave log-probabilities that were 0.2 off
        assert said(runner, edited) == (fresh, 0)
    with opened(model, exact, slots=1) as runner:
        kv_state_file.restore_state(runner, small)
        assert said(runner, (*edited[-3:], *(token for token, _ in short)), 4)[1] == len(
            small.tokens
        )


def test_a_file_that_changed_since_it_was_loaded_is_told(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(model.read_bytes())
    with opened(copy) as runner:
        before = kv_state_file.state_identity(runner)
        with opened(model) as other:
            assert kv_state_file.state_identity(other) == before  # the place does not count
        beside = tmp_path / "beside.gguf"
        beside.write_bytes(model.read_bytes())
        beside.replace(copy)
        assert kv_state_file.state_identity(runner) is None
        copy.unlink()
        assert kv_state_file.state_identity(runner) is None


def test_every_tensor_counts(model: Path, tmp_path: Path) -> None:
    from quant.model_file import read_header

    copy = tmp_path / "copy.gguf"
    header = read_header.read_header(model)
    whole = model_identity.content_hash(header)
    for tensor in header.tensors[::5]:
        raw = bytearray(model.read_bytes())
        raw[tensor.offset + tensor.nbytes // 2] ^= 1
        copy.write_bytes(raw)
        assert model_identity.content_hash(read_header.read_header(copy)) != whole, tensor.name


def test_a_talk_that_was_saved_goes_on_without_prefill(stories_gguf: Path, tmp_path: Path) -> None:
    def talk(runner: Runner) -> ChatSession:
        return ChatSession(
            "stories", runner, Conversation(GREEDY, predict=12), load_config(), UI(color=False)
        )

    options, file = RunOptions(ctx_size=512, threads=1, batch_size=64), tmp_path / "one.kv"
    with opened(stories_gguf, options) as runner:
        one = talk(runner)
        one.ask("Once upon a time", StreamWriter(silent=True))
        assert save_state(one, file).startswith("with the KV state of ")
        assert file.stat().st_mode & 0o077 == 0
        saved = one.conversation.tree.turns[:]
        fresh = one.ask(" Then", StreamWriter(silent=True))
    with opened(stories_gguf, options) as runner:
        two = talk(runner)
        for turn in saved:
            two.conversation.tree.add_turn(turn.question, turn.answer)
        spoken = len(two.conversation_tokens())
        told = restore_state(two, file)
        resumed = two.ask(" Then", StreamWriter(silent=True))
        assert (resumed.text, resumed.cached_tokens) == (fresh.text, fresh.cached_tokens)
        assert told == f"{min(spoken, resumed.cached_tokens)} of {spoken} tokens in the cache"


def _fields(options: RunOptions) -> dict:
    return {name: getattr(options, name) for name in options.__slots__}
