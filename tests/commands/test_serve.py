"""`llmcli serve`: invalid flags are refused before a model is loaded, and flags that change how the
model is opened.
"""

import shutil
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from llmcli.errors import UserError
from llmcli.runtime.runner import Runner
from llmcli.serve.batches import file_store
from tests.fixtures.cli import Done

KEY = "a-key-that-is-long"


@pytest.mark.parametrize(
    ("words", "message", "code"),
    [
        ((), "no model is here", 1),
        (("x", "y", "--rpc", "127.0.0.1:9"), "--rpc belongs to a server of a single model", 2),
        (("x", "--memory-limit", "1G"), "--memory-limit applies only to several models", 2),
        (("--keep-alive", "soon"), "is no duration", 2),
        (("--memory-limit", "much"), "is no size of memory", 1),
        (("x", "-m", "y"), "two models", 2),
        (("x", "--host", "0.0.0.0"), "no API key is set", 1),
        (("x", "--api-key", "short"), "too short", 1),
        (("x", "--pooling", "max"), "--pooling is 'max'", 2),
        (("x", "--api-key", "with a space"), "too short, or contains characters", 1),
        (("x", "--ssl-key-file", "k.pem"), "TLS needs a key and a certificate", 2),
        (("x", "-p", "hello"), "-p does not apply to serve and batch", 2),
        (("x", "--beams", "3"), "--beams does not apply to serve and batch", 2),
        (("x", "--on-full", "shift"), "--on-full shift applies only to chat", 2),
        (("x", "--logprobs"), "--logprobs does not apply to serve and batch", 2),
        (
            ("x", "--grpc-port", "50051", "--rpc", "127.0.0.1:9"),
            "--grpc-port needs the model in this process",
            1,
        ),
        (
            ("x", "--grpc-port", "50051", "--replicas", "2"),
            "--grpc-port needs the model in this process",
            1,
        ),
        (
            ("x", "--files-folder", "files", "--replicas", "2"),
            "--files-folder needs a single model",
            2,
        ),
        (("x", "--max-files-size", "1G"), "applies only to --files-folder", 2),
        (("x", "--files-folder", "f", "--max-files-size", "9"), "'9' is no size of all files", 1),
        (("x", "--files-folder", __file__), "cannot write", 1),
        (("x", "--files-folder", f"{__file__}/files"), "cannot write", 1),
        (("x", "--cors", "app.example"), "--cors 'app.example' is not an origin", 1),
        (("x", "--cors", "https://app.example/chat"), "is not an origin", 1),
        (("x", "--allow-host", "http://app.example"), "is not a host name", 1),
        (("x", "--host", "256.1.1.1", "--api-key", KEY), "cannot listen on 256.1.1.1:8080", 1),
    ],
)
def test_invalid_flags_are_an_error_with_a_hint(
    llmcli: Callable[..., Done], words: tuple[str, ...], message: str, code: int
) -> None:
    done = llmcli("serve", *words)
    assert (done.code, done.out) == (code, "")
    assert message in done.err
    assert "hint: " in done.err
    assert "Traceback" not in done.err


def test_a_folder_of_files_that_is_used_is_an_error_before_the_model_is_looked_up(
    llmcli: Callable[..., Done], tmp_path: Path
) -> None:
    with file_store.open_store(tmp_path, 1000):
        done = llmcli("serve", "x", "--files-folder", str(tmp_path))
    assert done.code == 1
    assert "another server keeps its files" in done.err
    assert "hint: choose another --files-folder" in done.err


def test_a_port_in_use_is_an_error_before_the_model_is_looked_up(
    llmcli: Callable[..., Done],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        done = llmcli("serve", "no-such-model", "--port", str(listener.getsockname()[1]))
    assert done.code == 1
    assert "in use" in done.err
    assert "--port" in done.err


def test_unusable_key_files_are_an_error_before_the_model_is_looked_up(
    llmcli: Callable[..., Done], tmp_path: Path
) -> None:
    empty, pem = tmp_path / "keys", tmp_path / "pem"
    empty.write_text("# none yet\n\n")
    pem.write_text("no pem")
    assert "there is no key in" in llmcli("serve", "x", "--api-key-file", str(empty)).err
    assert "cannot read" in llmcli("serve", "x", "--api-key-file", str(tmp_path / "gone")).err
    assert (
        "cannot be used for TLS"
        in llmcli("serve", "x", "--ssl-key-file", str(pem), "--ssl-cert-file", str(pem)).err
    )


@pytest.mark.skipif(
    shutil.which("openssl") is None, reason="openssl, which makes the key, is not installed"
)
def test_a_tls_key_with_a_password_is_an_error_without_a_prompt(
    llmcli: Callable[..., Done], tmp_path: Path
) -> None:
    key, cert = str(tmp_path / "key.pem"), str(tmp_path / "cert.pem")
    key_flags = (
        "-newkey",
        "rsa:2048",
        "-passout",
        "pass:secret",
        "-subj",
        "/CN=localhost",
        "-keyout",
        key,
        "-out",
        cert,
    )
    subprocess.run(["openssl", "req", "-x509", *key_flags], capture_output=True, check=True)
    done = llmcli("serve", "x", "--ssl-key-file", key, "--ssl-cert-file", cert)
    assert done.code == 1
    assert "is protected by a password" in done.err


def test_reasoning_sets_the_switch_of_the_template(fake: Callable[..., list[Runner]]) -> None:
    from llmcli import config
    from llmcli.model_loader import open_server_model
    from llmcli.model_loader.run_flags import RunFlags
    from llmcli.runtime.requests.beam_settings import NO_SEARCH
    from llmcli.runtime.requests.request import RunOptions
    from llmcli.ui import UI

    def template_switch(reasoning: str) -> bool | None:
        flags = RunFlags(RunOptions(ctx_size=256, threads=1), {}, NO_SEARCH, reasoning=reasoning)
        with open_server_model.open_server_model(
            "fake", flags, config.load_config(), UI(), 2
        ) as hosted:
            assert hosted.runner.template is not None
            return hosted.runner.template.reasoning

    fake(template="{{ messages[0].content }}{{ enable_thinking }}")
    assert [template_switch(reasoning) for reasoning in ("auto", "on", "off")] == [
        None,
        True,
        False,
    ]
    fake()
    with pytest.raises(UserError, match="no switch for thinking"):
        template_switch("on")


def test_clients_share_the_kv_cache_unless_the_server_is_private(
    fake: Callable[..., list[Runner]],
) -> None:
    from llmcli import config
    from llmcli.model_loader import open_server_model
    from llmcli.model_loader.run_flags import RunFlags
    from llmcli.runtime.requests.beam_settings import NO_SEARCH
    from llmcli.runtime.requests.request import Request, RunOptions
    from llmcli.runtime.sampling import default_sampling
    from llmcli.ui import UI

    def cached_tokens_of_second_client(private: bool) -> int:
        flags = RunFlags(RunOptions(ctx_size=256, threads=1), {}, NO_SEARCH)
        with open_server_model.open_server_model(
            "fake", flags, config.load_config(), UI(), 2, is_private=private
        ) as hosted:
            engine = hosted.runner.engine
            for client in "first", "second":
                request_id = engine.submit(
                    Request(tuple(b"a long question"), default_sampling(), 4, client=client)
                )
                while engine.is_busy:
                    engine.step()
                answer = engine.pop_answer(request_id)
        return answer.cached_tokens

    fake()
    assert cached_tokens_of_second_client(private=False) > 0
    assert cached_tokens_of_second_client(private=True) == 0
