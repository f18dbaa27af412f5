"""All sampling settings, taken from the fields of the sampler steps."""

from collections.abc import Iterable

from llmcli.chat.chat_session import Talk
from llmcli.chat.settings.base import SAMPLING, Knob, Offer
from llmcli.runtime.sampling import SamplingSetting, sampling_settings
from llmcli.runtime.sampling.base import NumberLimits

FAR = 1000  # limits beyond this are not offered as values


def _knob(setting: SamplingSetting) -> Knob:
    def show(chat: Talk) -> str:
        return setting.format_value(chat.session.sampling[setting.name])

    def change(chat: Talk, value: str) -> None:
        chat.session.sampling = chat.session.sampling.with_values({setting.name: value})

    def values(chat: Talk) -> Iterable[str]:
        default, limits = setting.format_value(setting.default), setting.limits
        if not isinstance(limits, NumberLimits):
            return [Offer(default, f"default · {limits}")]
        descriptions = {show(chat): "current", default: "default"}
        bounds = ((limits.low, "minimum"), (limits.high, "maximum"))
        for bound, what in bounds[limits.open_low :]:
            if abs(bound) <= FAR:
                descriptions.setdefault(setting.format_value(bound), what)
        return [Offer(value, f"{what} · {limits}") for value, what in descriptions.items()]

    return Knob(
        setting.name,
        SAMPLING,
        setting.help,
        f"{setting.limits}",
        setting.format_value(setting.default),
        show,
        change,
        values,
        setting.aliases,
    )


SETTINGS = tuple(_knob(setting) for setting in sampling_settings().values())
