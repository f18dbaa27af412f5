"""The settings in a checkpoint's config.json, with checks of their types and ranges."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quant.errors import UserError


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """The settings in a checkpoint's config.json. In a multimodal checkpoint, the settings of the
    text model are at the root of `values`.

    `location` names the file in error messages.
    """

    values: Mapping[str, Any]
    location: str

    def get_int(self, *keys: str, default: int | None = None) -> int:
        """Return the positive integer under the first of `keys` that is present. If none is
        present, return `default`.

        Raises UserError if the value is not a positive integer below 2**31, or if no key is present
        and there is no default.
        """
        for key in keys:
            value = self.values.get(key)
            if value is not None:
                if type(value) is not int or not 0 < value < 1 << 31:
                    raise UserError(
                        f"{self.location}: {key} is {value!r}, not a positive number",
                        hint="fetch it again",
                    )
                return value
        if default is None:
            raise UserError(f"{self.location} has no {keys[0]}", hint="fetch it again")
        return default

    def get_float(self, key: str, default: float | None = None) -> float:
        """Return the positive number under `key` as a float. If the key is missing, return
        `default`. Raises UserError for any other value, and for a missing key without a default.
        """
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
            raise UserError(
                f"{self.location}: {key} is {value!r}, not a positive number", hint="fetch it again"
            )
        return float(value)

    def get_bool(self, key: str, default: bool = False) -> bool:
        """Return the boolean under `key`. If the key is missing or null, return `default`. Raises
        UserError for any other value.
        """
        value = self.values.get(key)
        if value is not None and type(value) is not bool:
            raise UserError(
                f"{self.location}: {key} is {value!r}, not true or false", hint="fetch it again"
            )
        return default if value is None else value
