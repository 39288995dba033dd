"""Settings of the engine as they are written on the command line, and what has to be the same in all of them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_cb.config import EngineConfig
from hf_cb.errors import OptionError

# of EngineConfig: a difference there would compare something else than the two settings
HELD = {
    "kv_dtype": "the precision",
    "max_model_len": "the lengths",
    "num_threads": "the machine",
    "return_logprobs": "what requests ask for",
    "seed": "what requests ask for",
}
OF_THE_COMMAND = ("model", "dtype", "device", "device_map", "revision", "attn_implementation")
TRACE_STEPS = 2**18  # enough for every step of a run to leave its record


@dataclass(frozen=True)
class Setting:
    """Fields of `EngineConfig`, by a name."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)

    def config(self) -> EngineConfig:
        """Raises OptionError about an option, by this setting's name."""
        try:
            return EngineConfig.of(None, **({"trace_steps": TRACE_STEPS} | self.options))
        except OptionError as error:
            raise OptionError(f"{self.name}: {error}") from error

    def __str__(self) -> str:
        return ",".join(f"{name}={_shown(value)}" for name, value in self.options.items()) or "defaults"


def parse_options(text: str) -> dict[str, Any]:
    """`key=value,key=value`, or the name of a JSON file with such an object; an empty text is the defaults.

    Values are numbers, true, false, none (or auto), and text for the rest.

    Raises:
        OptionError: something is not key=value, is given twice, or belongs to the command.
    """
    if text.endswith(".json"):
        try:
            given = json.loads(Path(text).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise OptionError(f"The settings {text} cannot be read: {error}") from error
        if not isinstance(given, dict):
            raise OptionError(f"The settings {text} must be a JSON object of EngineConfig's fields.")
        pairs = list(given.items())
    else:
        parts = [part.strip() for part in text.split(",") if part.strip()]
        for part in parts:
            if "=" not in part:
                raise OptionError(
                    f"Settings {text!r}: {part!r} must be key=value, with a field of EngineConfig as key."
                )
        pairs = [(name.strip(), _value(value.strip())) for name, _, value in (part.partition("=") for part in parts)]
    options: dict[str, Any] = {}
    for name, value in pairs:
        if name in OF_THE_COMMAND:
            raise OptionError(f"{name}={_shown(value)} is the same for all settings: give it once, as an option.")
        if name == "queue_wait":
            raise OptionError("queue_wait would hold up later arrivals: what finds the queue full is rejected here.")
        if name in options:
            raise OptionError(f"Settings {text!r}: {name} is given twice.")
        options[name] = value
    return options


def sweep(text: str, base: Mapping[str, Any]) -> list[Setting]:
    """`key=value,value,...` as one setting for each value, over `base`.

    Raises:
        OptionError: there are not two values, or a value is there twice.
    """
    name, _, rest = text.partition("=")
    values = [value.strip() for value in rest.split(",") if value.strip()]
    if not name.strip() or len(values) < 2 or len(set(values)) < len(values):
        raise OptionError(f"--sweep {text!r} must be key=value,value,... with two different values or more.")
    options = [parse_options(f"{name}={value}") for value in values]
    return [Setting(f"{name.strip()}={value}", {**base, **own}) for value, own in zip(values, options, strict=True)]


def check_comparable(settings: Sequence[Setting]) -> dict[str, EngineConfig]:
    """Their configs by name, in this order.

    Raises:
        OptionError: a name that is used twice, a wrong option, or settings that differ in what is held fixed.
    """
    configs: dict[str, EngineConfig] = {}
    for setting in settings:
        if setting.name in configs:
            raise OptionError(f"Two settings are called {setting.name!r}: give each a name of its own.")
        configs[setting.name] = setting.config()
    for name, what in HELD.items():
        values = {setting: getattr(config, name) for setting, config in configs.items()}
        if len(set(values.values())) > 1:
            shown = ", ".join(f"{setting} has {name}={_shown(value)}" for setting, value in values.items())
            raise OptionError(f"Settings must not differ in {what}: {shown}. Give {name} once, by --base.")
    return configs


def as_json(config: EngineConfig) -> dict[str, Any]:
    """All fields, for the record."""
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    return {name: value if _is_plain(value) else repr(value) for name, value in fields.items()}


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))


def _value(text: str) -> Any:
    known = {"none": None, "auto": None, "true": True, "false": False}
    if text.lower() in known:
        return known[text.lower()]
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)
