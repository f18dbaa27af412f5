"""The certificate files (JSON, Markdown and HTML) next to a model file."""

import json
from pathlib import Path

from llmcli.atomic_files import write_atomically
from llmcli.workflows.certification.certificate_text import format_markdown
from quant.certificate.certificate import Certificate

SIDECAR_EXTENSIONS = ("json", "md", "html")


def sidecar_path(out: Path, extension: str) -> Path:
    """Return the path of a certificate file next to the model file `out`:
    OUT.certificate.EXTENSION.
    """
    return out.with_name(f"{out.name.removesuffix('.gguf')}.certificate.{extension}")


def write_sidecars(verified: Certificate, out: Path) -> list[Path]:
    """Write the three certificate files next to `out`, each atomically. Return their paths."""
    from llmcli.charts.html_page import render_html
    from llmcli.workflows.certification.certificate_page import build_page

    certificate_json = json.loads(verified.to_json())
    texts = {
        "json": json.dumps(certificate_json, ensure_ascii=False, indent=1) + "\n",
        "md": format_markdown(verified),
        "html": render_html(build_page(verified)),
    }
    for extension in SIDECAR_EXTENSIONS:
        write_atomically(sidecar_path(out, extension), texts[extension].encode())
    return [sidecar_path(out, extension) for extension in SIDECAR_EXTENSIONS]


def has_stale_certificate(out: Path) -> bool:
    """Return whether a certificate file already exists next to `out`. If `out` was just written
    without --verify, this certificate describes an earlier file.
    """
    return sidecar_path(out, "json").exists()
