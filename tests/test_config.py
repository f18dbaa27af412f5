"""llmcli/config.py: settings from environment variables."""

from llmcli import config


def test_token_file_that_is_not_text_is_ignored(tmp_path):
    file = tmp_path / "token"
    file.write_bytes(b"\xff\xfe\x00")
    assert (
        config.load_config({"LLMCLI_HOME": str(tmp_path), "HF_TOKEN_PATH": str(file)}).hub_token
        is None
    )
    file.write_text("hf_abc\n")
    assert (
        config.load_config({"LLMCLI_HOME": str(tmp_path), "HF_TOKEN_PATH": str(file)}).hub_token
        == "hf_abc"
    )
