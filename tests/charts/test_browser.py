"""The page in a real browser, if one is installed: it is drawn, and it loads and runs nothing."""

import http.server
import re
import shutil
import subprocess
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from llmcli.charts.html_page import ReportPage, render_html

BROWSER = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium is installed")
PATIENCE = 120  # seconds
ALONE = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--disable-extensions",
)


@pytest.fixture
def browser(tmp_path: Path) -> Callable[..., str]:
    """Open an address; what was written to stdout, and (--enable-logging) what the console said."""

    def call(address: str, *flags: str) -> str:
        home = tmp_path / "browser"
        home.mkdir(exist_ok=True)
        words = [str(BROWSER), *ALONE, f"--user-data-dir={home}", *flags, address]
        env = {"HOME": str(home), "PATH": "/usr/bin:/bin"}
        done = subprocess.run(words, capture_output=True, timeout=PATIENCE, env=env, check=False)
        return done.stdout.decode(errors="replace") + done.stderr.decode(errors="replace")

    return call


@contextmanager
def served(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """A folder under an address, and the paths that were asked for."""
    asked: list[str] = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *words: object) -> None:
            super().__init__(*words, directory=str(folder))  # type: ignore[arg-type]

        def log_message(self, form: str, *words: object) -> None:
            asked.append(self.path)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", asked
        finally:
            server.shutdown()
            thread.join(PATIENCE)


def pixels(path: Path) -> tuple[int, int, list[bytes]]:
    """A screenshot's width, height and the colour of every pixel, row by row (PNG, 8 bits, not
    interlaced).
    """
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    wide, high = int.from_bytes(data[16:20]), int.from_bytes(data[20:24])
    depth, kind, interlaced = data[24], data[25], data[28]
    assert (depth, interlaced) == (8, 0)
    step = {2: 3, 6: 4}[kind]
    packed, at = b"", 8
    while at < len(data):
        size = int.from_bytes(data[at : at + 4])
        packed += data[at + 8 : at + 8 + size] if data[at + 4 : at + 8] == b"IDAT" else b""
        at += size + 12
    raw, rows, before = zlib.decompress(packed), [], bytes(wide * step)
    for row in range(high):
        start = row * (wide * step + 1)
        before = unfiltered(raw[start], raw[start + 1 : start + 1 + wide * step], before, step)
        rows.append(before)
    return wide, high, rows


def unfiltered(kind: int, line: bytes, above: bytes, step: int) -> bytes:
    """One row of a PNG as it was before its filter (PNG specification, section 9)."""
    if kind == 0:
        return line
    if kind in (1, 2):  # the common ones
        pieces = np.frombuffer(line, np.uint8).reshape(-1, step)
        if kind == 1:
            return np.cumsum(pieces, 0, dtype=np.uint8).tobytes()
        return (pieces + np.frombuffer(above, np.uint8).reshape(-1, step)).tobytes()
    found = bytearray(line)
    for at in range(len(found)):
        left = found[at - step] if at >= step else 0
        corner = above[at - step] if at >= step else 0
        guess = left + above[at] - corner
        near = min((left, above[at], corner), key=lambda value: abs(guess - value))
        found[at] = (found[at] + ((left + above[at]) // 2 if kind == 3 else near)) & 255
    return bytes(found)


def test_the_decoder_of_pictures_knows_every_filter() -> None:
    for kind, expected in (
        (0, [10, 20]),
        (1, [10, 30]),
        (2, [15, 27]),
        (3, [12, 29]),
        (4, [15, 35]),
    ):
        assert list(unfiltered(kind, bytes([10, 20]), bytes([5, 7]), 1)) == expected


@pytest.fixture
def page(charts, tmp_path: Path) -> Path:
    path = tmp_path / "page.html"
    path.write_text(
        render_html(ReportPage("<script>", "about", ("lead",), tuple(charts), (), ())),
        encoding="utf-8",
    )
    return path


@pytest.mark.parametrize(
    "flags", [(), ("--blink-settings=preferredColorScheme=0",)], ids=["light", "dark"]
)
def test_it_is_drawn(
    browser: Callable[..., str], page: Path, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    shot = tmp_path / "page.png"
    said = browser(page.as_uri(), f"--screenshot={shot}", "--window-size=700,500", *flags)
    assert shot.exists(), said
    wide, high, rows = pixels(shot)
    assert (wide, high) == (700, 500)
    step = len(rows[0]) // wide
    paper = rows[2][:step]
    assert (sum(paper[:3]) < 150) == bool(flags)  # the dark one is dark
    drawn = [sum(row[at : at + step] != paper for at in range(0, len(row), step)) for row in rows]
    assert sum(count > 0 for count in drawn) > 200  # words and pictures all the way down
    colours = {row[at : at + step] for row in rows[::3] for at in range(0, len(row), step)}
    assert len(colours) > 50


def test_a_phone_shows_the_slim_pictures(
    browser: Callable[..., str], page: Path, tmp_path: Path
) -> None:
    # A page of our own measures another in a frame as wide as a phone: its script is not the
    # report's.
    (tmp_path / "frame.html").write_text(
        "<iframe src=page.html width=375 height=800></iframe><p></p><script>onload=()=>{"
        "let d=frames[0].document,shown=[...d.querySelectorAll('svg')].filter(s=>s.getBoundingClientRect().width>0);"
        "document.querySelector('p').textContent='shown '+shown.map(s=>s.getAttribute('class')).join()"
        "+' width '+d.documentElement.scrollWidth+' errors '"
        "+shown.filter(s=>s.getBoundingClientRect().right>375).length}"
        "</script>"
    )
    with served(tmp_path) as (address, _):
        found = re.search(
            r"<p>shown (.*) width (\d+) errors (\d+)</p>",
            browser(f"{address}/frame.html", "--dump-dom"),
        )
    assert found
    assert found[1] == ",".join(["chart slim"] * 3)
    assert int(found[2]) <= 375  # nothing makes the page scroll sideways
    assert found[3] == "0"


def test_it_asks_for_nothing_and_runs_nothing(
    browser: Callable[..., str], page: Path, tmp_path: Path
) -> None:
    with served(tmp_path) as (address, asked):
        # What would be asked for and run if the policy did not hold: planted behind everything
        # else.
        planted = f"<img src='{address}/leak.png'><script>document.title='ran'</script><p style='color:red'>x</p>"
        (tmp_path / "bare.html").write_text(f"<title>bare</title>{planted}")
        text = page.read_text(encoding="utf-8")
        (tmp_path / "planted.html").write_text(
            text.replace("</body>", planted + "</body>"), encoding="utf-8"
        )
        bare = browser(f"{address}/bare.html", "--dump-dom")
        assert "/leak.png" in asked and "<title>ran</title>" in bare  # they do, elsewhere
        asked.clear()
        held = browser(f"{address}/planted.html", "--dump-dom", "--enable-logging=stderr")
        assert "/leak.png" not in asked and "<title>&lt;script&gt;</title>" in held
        assert "Content Security Policy" in held
        asked.clear()
        clean = browser(f"{address}/page.html", "--dump-dom", "--enable-logging=stderr")
    assert set(asked) <= {"/page.html", "/favicon.ico"}  # the browser's own habit
    assert "CONSOLE" not in clean, clean
    assert clean.count("<svg") == 6 and "</html>" in clean
