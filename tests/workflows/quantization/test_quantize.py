"""The steps of the quantize workflow, called directly instead of from the command line."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from llmcli.commands.quantize.report import build_document
from llmcli.config import load_config
from llmcli.errors import UsageError, UserError
from llmcli.model_loader.quantize_file import OutputSettings
from llmcli.ui import UI
from llmcli.workflows.certification.certify import VerifySettings
from llmcli.workflows.quantization.method_settings import MethodSettings
from llmcli.workflows.quantization.quantize import (
    QuantizeRequest,
    check,
    open_job,
    run_quantization,
    validate,
)
from llmcli.workflows.quantization.size_request import SizeRequest
from llmcli.workflows.quantization.type_overrides import TensorTypeSettings
from quant.native import array_backends, ggml, kernels
from quant.quantize import cost_forecast
from tests.quant import tiny_gguf


@pytest.fixture
def request_(tmp_path: Path) -> QuantizeRequest:
    """A request to quantize a tiny model to Q8_0."""
    source = tiny_gguf.llama(tmp_path / "tiny.gguf", hidden=64, ff=96, layers=1)
    return QuantizeRequest(str(source), "Q8_0", output=OutputSettings(tmp_path / "q.gguf", 1))


def test_a_result_describes_the_written_file(request_: QuantizeRequest) -> None:
    result = run_quantization(request_, load_config(), UI(color=False))
    assert result.files == [request_.output.out]
    assert result.nbytes == result.files[0].stat().st_size == result.plan.nbytes
    assert result.report and result.report.sha256 == result.read_sha256()
    assert (result.fallback_rows, result.damping, result.certified_file) == (0, {}, None)
    second_result = run_quantization(request_, load_config(), UI(color=False))
    assert second_result.report and second_result.report.already_finished


def test_a_dry_run_writes_nothing(request_: QuantizeRequest) -> None:
    dry_run = replace(request_, output=replace(request_.output, dry_run=True))
    result = run_quantization(dry_run, load_config(), UI(color=False))
    assert (result.report, result.seconds, result.read_sha256()) == (None, 0.0, None)
    assert not result.out.exists()
    assert result.nbytes == result.plan.nbytes


def test_gptq_says_beforehand_how_long_it_takes(
    request_: QuantizeRequest, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cost_forecast, "PANEL_TRIAL_COLUMNS", (64, 128))
    monkeypatch.setattr(cost_forecast, "FACTOR_TRIAL_COLUMNS", (64, 128))
    gptq = replace(
        request_,
        file_type="Q4_0",
        method=MethodSettings("gptq"),
        output=replace(request_.output, dry_run=True),
    )
    result = run_quantization(gptq, load_config(), UI(color=False))
    assert result.forecast is None and build_document(result)["forecast"] is None
    assert "forecast" not in capsys.readouterr().err
    monkeypatch.setattr(cost_forecast, "MIN_MULTIPLICATIONS", 0)
    result = run_quantization(gptq, load_config(), UI(color=False))
    assert result.forecast and result.forecast.seconds > 0
    assert build_document(result)["forecast"] == {
        "elapsed_ms": result.forecast.seconds * 1000,
        "factor_ms": result.forecast.factor_seconds * 1000,
        "memory_bytes": result.forecast.memory_bytes,
    }
    assert "to choose codes, of which" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"file_type": "Q9"}, "Q9"),
        ({"method": MethodSettings("nonsense")}, "unknown method"),
        ({"method": MethodSettings(sequential=True)}, "--sequential needs a method"),
        ({"verification": VerifySettings(verify_chunks=3)}, "needs --verify"),
        ({"size": SizeRequest(fit=True)}, "--fit decides every tensor's type"),
        (
            {"file_type": None, "size": SizeRequest(fit=True, target_bpw=4.0)},
            "--target-bpw and --fit cannot be combined",
        ),
        (
            {
                "file_type": None,
                "size": SizeRequest(target_bpw=4.0),
                "types": TensorTypeSettings(pure=True),
            },
            "--target-bpw decides every tensor's type",
        ),
        ({"split_max_size": "many"}, "is no size of a shard"),
    ],
)
def test_settings_are_validated_without_a_source(
    request_: QuantizeRequest, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        validate(replace(request_, source="nothing", **changes))  # type: ignore[arg-type]


def test_output_paths_that_would_overwrite_the_source_are_refused(
    request_: QuantizeRequest, tmp_path: Path
) -> None:
    source = Path(request_.source)
    into_itself = replace(request_, output=replace(request_.output, out=source))
    with pytest.raises(UserError):
        check(open_job(into_itself, load_config(), UI(color=False), ExitStack()))
    plan_over_source = replace(request_, size=SizeRequest(plan_out=source))
    with pytest.raises((UserError, UsageError)):
        check(open_job(plan_over_source, load_config(), UI(color=False), ExitStack()))
    assert list(tmp_path.glob("*.gguf")) == [source]


@pytest.mark.parametrize("method", ["search", "ggml"])
def test_a_search_without_c_code_is_noted_once_with_its_reason(
    request_: QuantizeRequest,
    method: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    missing = kernels.Kernels(None, "kernels-x86-64", "kernels-x86-64 was not built: no C compiler")
    monkeypatch.setattr(kernels, "open_kernels", lambda: missing)
    monkeypatch.setattr(ggml, "native_search", lambda: None)
    monkeypatch.setattr(array_backends, "device", lambda: None)
    request = replace(request_, method=MethodSettings(method))
    run_quantization(request, load_config(), UI(color=False))
    printed = capsys.readouterr().err
    assert printed.count("scales are searched with numpy") == (method == "search")
    assert printed.count("was not built: no C compiler") == (method == "search")
    assert printed.count("hint: install a C compiler") == (method == "search")
