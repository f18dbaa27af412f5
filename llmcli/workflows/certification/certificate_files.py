"""Certificate.json, .md and .html beside the model."""

import json
from pathlib import Path

from llmcli.atomic_files import write_whole
from llmcli.workflows.certification.certificate_text import markdown
from quant.certificate.certificate import Certificate

ENDS = ("json", "md", "html")


def beside(out: Path, end: str) -> Path:
    """Return the path of a certificate file of `out`, such as OUT.certificate.json."""
    return out.with_name(f"{out.name.removesuffix('.gguf')}.certificate.{end}")


def write(found: Certificate, out: Path) -> list[Path]:
    """Write the certificate's three files next to `out` atomically; return their paths."""
    from llmcli.charts.html_page import html
    from llmcli.workflows.certification.certificate_page import made

    certificate_json = json.loads(found.text())
    texts = {
        "json": json.dumps(certificate_json, ensure_ascii=False, indent=1) + "\n",
        "md": markdown(found),
        "html": html(made(found)),
    }
    for end in ENDS:
        write_whole(beside(out, end), texts[end].encode())
    return [beside(out, end) for end in ENDS]


def stale(out: Path) -> bool:
    """Return whether the certificate of an earlier file is stored next to `out`."""
    return beside(out, "json").exists()
