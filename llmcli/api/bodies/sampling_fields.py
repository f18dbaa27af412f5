"""SamplingFields: the fields for sampling settings, which all generating APIs share. They are made
from the registry of sampler steps, so a new step is a new field. A setting has its own name, its
aliases, and its name in other servers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import create_model
from pydantic_core import core_schema

from llmcli.api.bodies.base import RequestBody, expected, honored, problem
from llmcli.errors import UserError
from llmcli.runtime.sampling import N_SEEDS, RANDOM_SEED, SamplingSetting, sampling_settings
from llmcli.runtime.sampling.base import NumberLimits
from llmcli.runtime.sampling.logit_bias import BIAS_PATTERN

# Names of settings in the APIs of vLLM and other servers -> their names here.
SETTING_ALIASES = {"repetition_penalty": "repeat_penalty"}
BIAS_WORDS = (
    "an object of token ids or texts and numbers, or a list of pairs of a token and a number"
)
MAX_TOKENS = 10**9  # token ids are below this number
SEED_SETTING = "seed"
BIAS_SETTING = "logit_bias"  # its texts need the model's tokenizer, so it has a class of its own


@dataclass(frozen=True, slots=True)
class SettingValue:
    """Annotates the value of a sampling setting in a request. `name`: the name of the field."""

    setting: SamplingSetting
    name: str

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(self.read)

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        if not isinstance(self.setting.limits, NumberLimits):
            return {"type": "array", "items": {"type": "string"}}
        kind = "integer" if self.setting.kind is int else "number"
        if self.setting.name == SEED_SETTING:
            return {"type": kind}
        return {
            "type": kind,
            "minimum": self.setting.limits.low,
            "maximum": self.setting.limits.high,
        }

    def read(self, value: Any) -> Any:
        """Return the value. Raises PydanticCustomError for one that the setting does not have."""
        if self.setting.name == SEED_SETTING and type(value) is int:
            value = value if value == RANDOM_SEED else value % N_SEEDS  # OpenAI allows any integer
        try:
            return self.setting.parse(value)
        except UserError as error:
            hint = "" if "--" in error.hint else f"; {error.hint}"
            raise problem(f"{error}{hint}".replace(self.setting.name, self.name)) from None


def read_bias(value: Any) -> Any:
    """Return a logit bias as it is in the request, after a check of its types. Raises
    PydanticCustomError.
    """
    pairs = list(value.items()) if isinstance(value, dict) else value
    if isinstance(value, str):
        pairs = value.replace(",", " ").split()
    if not isinstance(pairs, list) or not all(_is_bias(pair) for pair in pairs):
        raise expected(BIAS_WORDS)
    return value


def _is_bias(entry: Any) -> bool:
    """Return whether an entry is a pair of a token and a bias, or a text such as "15043+1"."""
    if isinstance(entry, str):
        return BIAS_PATTERN.fullmatch(entry) is not None
    if not isinstance(entry, list | tuple) or len(entry) != 2:
        return False
    token, bias = entry
    if bias is not False and type(bias) not in (int, float):
        return False
    return isinstance(token, str) or (type(token) is int and 0 <= token < MAX_TOKENS)


class BiasValue:
    """Annotates the field `logit_bias`."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(read_bias)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: Any) -> dict[str, Any]:
        pair = {"type": "array", "minItems": 2, "maxItems": 2}
        amounts = {"type": ["number", "boolean"]}
        return {
            "oneOf": [
                {"type": "object", "additionalProperties": amounts},
                {"type": "array", "items": {"oneOf": [pair, {"type": "string"}]}},
            ]
        }


def _setting_names() -> dict[str, SamplingSetting]:
    """Return the settings by the names of their fields."""
    settings = sampling_settings()
    names = {name: settings[own_name] for name, own_name in SETTING_ALIASES.items()}
    for setting in settings.values():
        names |= dict.fromkeys((setting.name, *setting.aliases), setting)
    del names[BIAS_SETTING]
    return names


SETTING_NAMES = _setting_names()


class BiasField(RequestBody):
    """The field of a bias on single tokens."""

    origin: ClassVar[str] = "OpenAI, llama-server"
    logit_bias: Annotated[Any, BiasValue] = honored(
        "make tokens likelier or less likely, by id or by text; false forbids a token"
    )


if TYPE_CHECKING:

    class SamplingFields(BiasField):
        """The fields of all sampling settings."""
else:
    SamplingFields = create_model(
        "SamplingFields",
        __base__=BiasField,
        __module__=__name__,
        __doc__="The fields of all sampling settings.",
        **{
            name: (Annotated[Any, SettingValue(setting, name)], honored(setting.help))
            for name, setting in SETTING_NAMES.items()
        },
    )
    SamplingFields.origin = "llama-server, llmcli"


def chosen_settings(body: SamplingFields) -> Mapping[str, object]:
    """Return the values of the sampling settings that a request sets, by the names of the settings.
    If a request sets a setting by several of its names, the setting's own name decides.
    """
    return {
        setting.name: value
        for name, setting in SETTING_NAMES.items()
        if (value := getattr(body, name)) is not None
    }


def bias_texts(value: Any, tokenize: Callable[[str], Sequence[int]]) -> list[str]:
    """Return the entries of a field `logit_bias` in the syntax of --logit-bias, such as "15043+1".
    A text stands for all of its tokens, which `tokenize` returns; the bias `false` forbids them.
    """
    if isinstance(value, str):
        return value.replace(",", " ").split()
    texts = []
    for entry in value.items() if isinstance(value, dict) else value:
        if isinstance(entry, str):
            texts.append(entry)
            continue
        token, bias = entry
        is_id = isinstance(token, int) or (token.isascii() and token.strip().isdigit())
        amount = "-inf" if bias is False else f"{bias:+d}" if type(bias) is int else f"{bias:+f}"
        texts += [f"{id_}{amount}" for id_ in ([int(token)] if is_id else tokenize(token))]
    return texts
