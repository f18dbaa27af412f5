"""The settings of the quantization methods that measurements chose, and the day they were fixed.

settings.json has their values. A comparison of methods is honest only if they were fixed before its
models and texts were looked at, so every certificate names the day and the digest of the values
that were in use. `python -m llmcli.workflows.certification.frozen_settings` writes the file anew,
with today's date; a test fails while it differs from the code.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from quant.allocation import allocate, defaults, probes, refine
from quant.folds import choose, loss
from quant.json_dataclasses import read_json
from quant.methods import error_feedback, gptq, hessian_factor, search_settings

FILE = Path(__file__).with_name("settings.json")
MAX_FILE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class SettingsFile:
    """The content of settings.json: the day as YYYY-MM-DD, and the values by name."""

    date: str
    settings: dict[str, Any]


def settings_in_use() -> dict[str, Any]:
    """Return the values of the code by name, as JSON has them."""
    values = {
        "gptq.damping": hessian_factor.DAMPING,
        "gptq.damping_growth": hessian_factor.DAMPING_GROWTH,
        "gptq.descent_sweeps": gptq.DESCENT_SWEEPS,
        "gptq.feed_columns": error_feedback.FEED_COLUMNS,
        "gptq.left_to_search": gptq.UNSOLVED_FORMATS,
        "search.min_importance": search_settings.MIN_IMPORTANCE,
        **{
            f"search.{name}": asdict(settings)
            for name, settings in search_settings.SEARCH_SETTINGS.items()
        },
        "folds.auto": choose.AUTO_KINDS,
        "folds.exponents": choose.SCALE_EXPONENTS,
        "folds.max_factor": choose.MAX_FACTOR,
        "folds.subblock_channels": choose.SUBBLOCK_CHANNELS,
        "folds.sample_rows": loss.SAMPLE_ROWS,
        "folds.max_moment_columns": loss.MAX_MOMENT_COLUMNS,
        "folds.max_solved_columns": loss.MAX_SOLVED_COLUMNS,
        "allocation.probe": defaults.PROBE_UNIT,
        "allocation.probe_chunks": defaults.PROBE_CHUNKS,
        "allocation.swaps": defaults.SWAPS,
        "allocation.probe_bits": probes.PROBE_BITS,
        "allocation.coarse_probe_bits": probes.COARSE_PROBE_BITS,
        "allocation.codebook_probe_bits": probes.CODEBOOK_PROBE_BITS,
        "allocation.types": probes.K_QUANT_TYPES + probes.IQ_TYPES,
        "allocation.legacy_types": probes.LEGACY_TYPES + probes.LEGACY_IQ_TYPES,
        "allocation.max_types": allocate.MAX_TYPES,
        "allocation.max_loss_growth": allocate.MAX_LOSS_GROWTH,
        "allocation.large_share": allocate.LARGE_SHARE,
        "allocation.max_large_tensors": allocate.MAX_LARGE_TENSORS,
        "allocation.role_factors": refine.ROLE_FACTORS,
        "allocation.min_standard_errors": refine.MIN_STANDARD_ERRORS,
    }
    as_json: dict[str, Any] = json.loads(json.dumps(values))
    return as_json


def digest_settings(settings: dict[str, Any]) -> str:
    """Return the sha256 of settings."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def frozen_date() -> str:
    """Return the day on which the settings in use were fixed; "" if they differ from the file."""
    file = read_json(SettingsFile, FILE, MAX_FILE_BYTES)
    return file.date if file.settings == settings_in_use() else ""


def write_file() -> None:
    """Write settings.json with the values of the code and today's date, one line for each value."""
    lines = [
        f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in settings_in_use().items()
    ]
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    text = f'{{\n "date": "{date}",\n "settings": {{\n' + ",\n".join(lines) + "\n }\n}\n"
    FILE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write_file()
