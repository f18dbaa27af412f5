"""Every sampling setting, read off the steps."""

from collections.abc import Iterable

from llmcli.chat.chat_session import Talk
from llmcli.chat.settings.base import SAMPLING, Knob, Offer
from llmcli.runtime.sampling import Setting, settings
from llmcli.runtime.sampling.base import Limits

FAR = 1000  # a limit beyond it is no value that anybody sets


def _knob(setting: Setting) -> Knob:
    def show(talk: Talk) -> str:
        return setting.show(talk.session.sampling[setting.name])

    def change(talk: Talk, value: str) -> None:
        talk.session.sampling = talk.session.sampling.with_values({setting.name: value})

    def values(talk: Talk) -> Iterable[str]:
        default, limits = setting.show(setting.default), setting.limits
        if not isinstance(limits, Limits):
            return [Offer(default, f"default · {limits}")]
        about = {show(talk): "now", default: "default"}
        ends = ((limits.low, "the least"), (limits.high, "the most"))
        for end, what in ends[limits.open_low :]:
            if abs(end) <= FAR:
                about.setdefault(setting.show(end), what)
        return [Offer(value, f"{what} · {limits}") for value, what in about.items()]

    return Knob(
        setting.name,
        SAMPLING,
        setting.help,
        f"{setting.limits}",
        setting.show(setting.default),
        show,
        change,
        values,
        setting.aliases,
    )


KNOBS = tuple(_knob(setting) for setting in settings().values())
