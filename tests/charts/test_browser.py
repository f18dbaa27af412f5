"""The HTML report in Chromium, if that is installed: it is drawn correctly, loads nothing and runs
no script.
"""

import http.server
import re
import subprocess
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from llmcli.charts.html_page import ReportPage, render_html
from tests.fixtures.browser import BROWSER, TIMEOUT_SECONDS, browser_process

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium is installed")


@pytest.fixture
def browser(tmp_path: Path) -> Callable[..., str]:
    """Return a function that opens an address in the browser. It returns stdout and stderr as one
    text, with the messages of the console if a flag is --enable-logging.
    """

    def open_address(address: str, *flags: str) -> str:
        home = tmp_path / "browser"
        home.mkdir(exist_ok=True)
        command, env = browser_process(home, *flags, address)
        result = subprocess.run(
            command, capture_output=True, timeout=TIMEOUT_SECONDS, env=env, check=False
        )
        return result.stdout.decode(errors="replace") + result.stderr.decode(errors="replace")

    return open_address


@contextmanager
def serve(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Serve a folder over HTTP. Yield the address, and the list to which every requested path is
    appended.
    """
    requested: list[str] = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args: object) -> None:
            super().__init__(*args, directory=str(folder))  # type: ignore[arg-type]

        def log_message(self, format: str, *args: object) -> None:
            requested.append(self.path)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", requested
        finally:
            server.shutdown()
            thread.join(TIMEOUT_SECONDS)


def read_png(path: Path) -> tuple[int, int, list[bytes]]:
    """Return the width, the height and the rows of pixels of a PNG file with 8 bits per channel and
    without interlacing.
    """
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = int.from_bytes(data[16:20]), int.from_bytes(data[20:24])
    depth, color_type, interlaced = data[24], data[25], data[28]
    assert (depth, interlaced) == (8, 0)
    channels = {2: 3, 6: 4}[color_type]
    compressed, offset = b"", 8
    while offset < len(data):
        size = int.from_bytes(data[offset : offset + 4])
        if data[offset + 4 : offset + 8] == b"IDAT":
            compressed += data[offset + 8 : offset + 8 + size]
        offset += size + 12
    raw, rows, row = zlib.decompress(compressed), [], bytes(width * channels)
    for number in range(height):
        start = number * (width * channels + 1)
        filtered = raw[start + 1 : start + 1 + width * channels]
        row = unfilter(raw[start], filtered, row, channels)
        rows.append(row)
    return width, height, rows


def unfilter(filter_type: int, row: bytes, above: bytes, channels: int) -> bytes:
    """Reverse the filter of one row of a PNG (PNG specification, section 9). `above`: the
    unfiltered bytes of the row above.
    """
    if filter_type == 0:
        return row
    if filter_type in (1, 2):
        pixels = np.frombuffer(row, np.uint8).reshape(-1, channels)
        if filter_type == 1:
            return np.cumsum(pixels, 0, dtype=np.uint8).tobytes()
        return (pixels + np.frombuffer(above, np.uint8).reshape(-1, channels)).tobytes()
    output = bytearray(row)
    for index in range(len(output)):
        left = output[index - channels] if index >= channels else 0
        corner = above[index - channels] if index >= channels else 0
        estimate = left + above[index] - corner
        paeth = min((left, above[index], corner), key=lambda value: abs(estimate - value))
        predictor = (left + above[index]) // 2 if filter_type == 3 else paeth
        output[index] = (output[index] + predictor) & 255
    return bytes(output)


def test_unfilter_reverses_every_png_filter() -> None:
    for filter_type, expected in (
        (0, [10, 20]),
        (1, [10, 30]),
        (2, [15, 27]),
        (3, [12, 29]),
        (4, [15, 35]),
    ):
        assert list(unfilter(filter_type, bytes([10, 20]), bytes([5, 7]), 1)) == expected


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
def test_the_page_is_drawn_in_light_and_dark_mode(
    browser: Callable[..., str], page: Path, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    screenshot = tmp_path / "page.png"
    output = browser(page.as_uri(), f"--screenshot={screenshot}", "--window-size=700,500", *flags)
    assert screenshot.exists(), output
    width, height, rows = read_png(screenshot)
    assert (width, height) == (700, 500)
    channels = len(rows[0]) // width
    pixel_rows = [
        [row[start : start + channels] for start in range(0, len(row), channels)] for row in rows
    ]
    paper = pixel_rows[2][0]
    assert (sum(paper[:3]) < 150) == bool(flags)  # the background of the dark mode is dark
    rows_with_content = sum(any(pixel != paper for pixel in row) for row in pixel_rows)
    assert rows_with_content > 200
    colors = {pixel for row in pixel_rows[::3] for pixel in row}
    assert len(colors) > 50


def test_a_phone_shows_the_narrow_pictures(
    browser: Callable[..., str], page: Path, tmp_path: Path
) -> None:
    # The report runs no script, so another page opens it in a frame as wide as a phone and measures
    # its elements.
    (tmp_path / "frame.html").write_text(
        "<iframe src=page.html width=375 height=800></iframe><p></p><script>onload=()=>{"
        "let d=frames[0].document,shown=[...d.querySelectorAll('svg')].filter(s=>s.getBoundingClientRect().width>0);"
        "document.querySelector('p').textContent='shown '+shown.map(s=>s.getAttribute('class')).join()"
        "+' width '+d.documentElement.scrollWidth+' errors '"
        "+shown.filter(s=>s.getBoundingClientRect().right>375).length}"
        "</script>"
    )
    with serve(tmp_path) as (address, _):
        result = re.search(
            r"<p>shown (.*) width (\d+) errors (\d+)</p>",
            browser(f"{address}/frame.html", "--dump-dom"),
        )
    assert result
    assert result[1] == ",".join(["chart slim"] * 3)
    assert int(result[2]) <= 375  # otherwise the page would scroll horizontally
    assert result[3] == "0"


def test_the_page_requests_nothing_and_runs_no_script(
    browser: Callable[..., str], page: Path, tmp_path: Path
) -> None:
    with serve(tmp_path) as (address, requested):
        # An attack that works in a page without a policy, and must not work inside the report.
        attack = (
            f"<img src='{address}/leak.png'><script>document.title='ran'</script>"
            "<p style='color:red'>x</p>"
        )
        (tmp_path / "unprotected.html").write_text(f"<title>bare</title>{attack}")
        text = page.read_text(encoding="utf-8")
        (tmp_path / "attacked.html").write_text(
            text.replace("</body>", attack + "</body>"), encoding="utf-8"
        )
        output = browser(f"{address}/unprotected.html", "--dump-dom")
        assert "/leak.png" in requested and "<title>ran</title>" in output
        requested.clear()
        output = browser(f"{address}/attacked.html", "--dump-dom", "--enable-logging=stderr")
        assert "/leak.png" not in requested and "<title>&lt;script&gt;</title>" in output
        assert "Content Security Policy" in output
        requested.clear()
        output = browser(f"{address}/page.html", "--dump-dom", "--enable-logging=stderr")
    assert set(requested) <= {"/page.html", "/favicon.ico"}  # browsers request /favicon.ico
    assert "CONSOLE" not in output, output
    assert output.count("<svg") == 6 and "</html>" in output
