"""`llmcli serve` before it loads a model: refusals with hints."""

import shutil
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from llmcli.errors import UserError
from llmcli.runtime.runner import Runner
from tests.fixtures.cli import Done

KEY = "a-key-that-is-long"


@pytest.mark.parametrize(
    ("words", "told", "code"),
    [
        ((), "no model given", 2),
        (("x", "-m", "y"), "two models", 2),
        (("x", "--host", "0.0.0.0"), "no API key is set", 1),
        (("x", "--api-key", "short"), "too short", 1),
        (("x", "--pooling", "none"), "--pooling is 'none'", 2),
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
        (("x", "--cors", "app.example"), "--cors 'app.example' is not an origin", 1),
        (("x", "--cors", "https://app.example/chat"), "is not an origin", 1),
        (("x", "--allow-host", "http://app.example"), "is not a host name", 1),
        (("x", "--host", "256.1.1.1", "--api-key", KEY), "cannot listen on 256.1.1.1:8080", 1),
    ],
)
def test_what_cannot_be_served_is_told(
    llmcli: Callable[..., Done], words: tuple[str, ...], told: str, code: int
) -> None:
    done = llmcli("serve", *words)
    assert (done.code, done.out) == (code, "")
    assert told in done.err
    assert "hint: " in done.err
    assert "Traceback" not in done.err


def test_a_port_that_is_taken_is_told_before_a_model_is_looked_for(
    llmcli: Callable[..., Done],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = llmcli("serve", "no-such-model", "--port", str(taken.getsockname()[1]))
    assert done.code == 1
    assert "in use" in done.err
    assert "--port" in done.err


def test_files_of_keys_and_of_tls_are_read_before_a_model_is_looked_for(
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


@pytest.mark.skipif(shutil.which("openssl") is None, reason="nothing to make a key with")
def test_a_key_that_is_locked_is_told_and_nobody_is_asked_for_its_password(
    llmcli: Callable[..., Done], tmp_path: Path
) -> None:
    key, cert = str(tmp_path / "key.pem"), str(tmp_path / "cert.pem")
    made = (
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
    subprocess.run(["openssl", "req", "-x509", *made], capture_output=True, check=True)
    told = llmcli("serve", "x", "--ssl-key-file", key, "--ssl-cert-file", cert)
    assert told.code == 1
    assert "is protected by a password" in told.err


def test_thinking_is_asked_for_where_the_template_can(fake: Callable[..., list[Runner]]) -> None:
    from llmcli import config
    from llmcli.model_loader import open_server_model
    from llmcli.model_loader.run_flags import RunFlags
    from llmcli.runtime.requests.beam_settings import NO_SEARCH
    from llmcli.runtime.requests.request import RunOptions
    from llmcli.ui import UI

    def opened(wanted: str) -> bool | None:
        given = RunFlags(RunOptions(ctx_size=256, threads=1), {}, NO_SEARCH, reasoning=wanted)
        with open_server_model.open_server_model(
            "fake", given, config.load_config(), UI(), 2
        ) as hosted:
            assert hosted.runner.template is not None
            return hosted.runner.template.reasoning

    fake(template="{{ messages[0].content }}{{ enable_thinking }}")
    assert [opened(wanted) for wanted in ("auto", "on", "off")] == [None, True, False]
    fake()
    with pytest.raises(UserError, match="no switch for thinking"):
        opened("on")


def test_clients_share_what_was_computed_unless_they_are_kept_apart(
    fake: Callable[..., list[Runner]],
) -> None:
    from llmcli import config
    from llmcli.model_loader import open_server_model
    from llmcli.model_loader.run_flags import RunFlags
    from llmcli.runtime.requests.beam_settings import NO_SEARCH
    from llmcli.runtime.requests.request import Request, RunOptions
    from llmcli.runtime.sampling import default_sampling
    from llmcli.ui import UI

    def cached(private: bool) -> int:
        given = RunFlags(RunOptions(ctx_size=256, threads=1), {}, NO_SEARCH)
        with open_server_model.open_server_model(
            "fake", given, config.load_config(), UI(), 2, is_private=private
        ) as hosted:
            engine = hosted.runner.engine
            for client in "one", "other":
                asked = engine.submit(
                    Request(tuple(b"a long question"), default_sampling(), 4, client=client)
                )
                while engine.is_busy:
                    engine.step()
                answer = engine.pop_answer(asked)
        return answer.cached_tokens

    fake()
    assert cached(private=False) > 0
    assert cached(private=True) == 0
