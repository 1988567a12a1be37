"""Settings: one frozen class per process, filled from flags, environment and one optional TOML file.

Write a class, load it, hand it to ``main``::

    class BrokerSettings(ProcessSettings):
        command = "broker"
        frontend: ZmqEndpoint = "tcp://127.0.0.1:5550"
        \"\"\"Endpoint for gateways and producers.\"\"\"

    settings = BrokerSettings.load(sys.argv[1:])

Every field ``worker_timeout_s`` is the flag ``--worker-timeout-s``, the environment variable
``ALLSPARK_WORKER_TIMEOUT_S`` and the key ``worker-timeout-s`` in the table ``[broker]`` of the file named
by ``--config`` or ``ALLSPARK_CONFIG``; the first of these that is given wins. The string under a field is
its help. Values are validated once, here; an unknown flag, table or key is a ``ConfigError``, never ignored.
"""

import argparse
import difflib
import os
import tomllib
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NoReturn, Self, get_args, get_origin

from pydantic import Field, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from allspark_bus.setting_types import Metavar, RedisUrl, Seconds, is_local_address

ENV_PREFIX = "ALLSPARK_"
#: Tables that a configuration file may hold: one per command, so that one file can describe a whole fleet.
CONFIG_TABLES = (
    *("up", "gateway", "broker", "worker", "load", "generate", "status", "bench", "demo"),
    "certs",
    "dashinfer-shim",
)

_file_values: ContextVar[Mapping[str, Any] | None] = ContextVar("_file_values", default=None)


class ConfigError(ValueError):
    """A flag, environment variable or file that cannot be used; the text says which one and what is legal."""


class Positional:
    """Marks a field as a positional argument of its command: ``Annotated[str, Positional()]``."""


class Alias:
    """A second spelling of a flag: ``Annotated[bool, Alias("--json")]``."""

    def __init__(self, flag: str) -> None:
        self.flag = flag


class Settings(BaseSettings):
    """Base of all settings classes; see the module text."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        hide_input_in_errors=True,
    )
    command: ClassVar[str] = ""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Order of precedence: flags (or keyword arguments), environment, file."""
        from_file = InitSettingsSource(settings_cls, init_kwargs=dict(_file_values.get() or {}))
        return init_settings, env_settings, from_file

    @classmethod
    def load(cls, argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> Self:
        """Read flags, environment and file; raise ``ConfigError``, or ``SystemExit(0)`` after ``--help``."""
        config = config_file(cls, argv, environ)
        in_file = read_table(cls, config) if config else {}
        given = vars(build_parser(cls).parse_args(list(argv)))
        given.pop("config", None)
        token = _file_values.set(in_file)
        try:
            return cls(**given)
        except ValidationError as error:
            raise ConfigError(_explain(cls, error, given, in_file, environ)) from error
        except SettingsError as error:
            raise ConfigError(f"allspark {cls.command}: {error}") from error
        finally:
            _file_values.reset(token)

    def to_argv(self) -> list[str]:
        """The flags that make ``load`` return an equal object, wherever it runs."""
        argv: list[str] = []
        for name in type(self).model_fields:
            argv += _as_flags(name, getattr(self, name))
        return argv


class ProcessSettings(Settings):
    """What gateway, broker and worker have in common."""

    redis: Annotated[RedisUrl, Field(repr=False)] = "redis://127.0.0.1:6379/0"
    """Redis or Valkey that holds the ledger, the streams and the catalogue. With TLS and an ACL user:
    rediss://USER@HOST:PORT/0?ssl_ca_certs=FILE&password_file=FILE. With Sentinels:
    redis+sentinel://HOST:PORT,HOST:PORT/NAME. A cluster: redis+cluster://HOST:PORT,HOST:PORT."""
    curve: Annotated[Path | None, Metavar("DIR")] = None
    """Directory of this process's CURVE keys (docs/security.md): ZeroMQ connections are encrypted, and
    brokers admit only keys that they know."""
    drain_s: Seconds = 30.0
    """After SIGTERM, how long running work may take to finish before it is handed over or cut off."""
    allow_remote: bool = False
    """Allow listening without TLS and tokens (gRPC) or CURVE (ZeroMQ) on addresses that other machines can
    reach: use it only inside a network you trust."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest severity that is logged, on standard error."""
    ready_fd: int | None = None
    """File descriptor that gets one JSON line with the bound addresses once this process serves."""

    def listening_on(self) -> tuple[str, ...]:
        """Addresses that this process binds; a subclass that listens overrides it."""
        return ()

    def is_secured(self) -> bool:
        """Whether what it binds is encrypted and asks who calls; a subclass that listens overrides it."""
        return False

    @model_validator(mode="after")
    def _only_local_unless_allowed(self) -> Self:
        remote = [address for address in self.listening_on() if not is_local_address(address)]
        if remote and not self.is_secured() and not self.allow_remote:
            raise ValueError(
                f"{', '.join(remote)} can be reached from other machines, and is not secured "
                "(docs/security.md); add --allow-remote to accept that"
            )
        return self


def config_file(
    cls: type[Settings], argv: Sequence[str], environ: Mapping[str, str] = os.environ
) -> Path | None:
    """The configuration file that ``cls.load`` would read."""
    given = vars(build_parser(cls).parse_args(list(argv))).get("config") or environ.get(ENV_PREFIX + "CONFIG")
    return Path(given) if given else None


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are ``ConfigError`` and never end the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: {message} (see {self.prog} --help)")


def build_parser(cls: type[Settings]) -> argparse.ArgumentParser:
    """The command line of a settings class; what is not given stays out of the result."""
    parser = _Parser(
        prog=f"allspark {cls.command}",
        description=cls.__doc__,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"Keys in the configuration file go into the table [{cls.command}], spelled like the flags.",
    )
    parser.add_argument("--config", metavar="FILE", help=f"TOML file with more settings [{ENV_PREFIX}CONFIG]")
    for name, field in cls.model_fields.items():
        _add_argument(parser, name, field)
    return parser


def _add_argument(parser: argparse.ArgumentParser, name: str, field: FieldInfo) -> None:
    text = _help_text(name, field)
    flags = [_flag(name), *(mark.flag for mark in field.metadata if isinstance(mark, Alias))]
    if any(isinstance(mark, Positional) for mark in field.metadata):
        parser.add_argument(name, help=text, nargs=None if field.is_required() else "?")
    elif _core(field.annotation) is bool:
        parser.add_argument(*flags, dest=name, action=argparse.BooleanOptionalAction, help=text)
    elif get_origin(_core(field.annotation)) is tuple:
        parser.add_argument(*flags, dest=name, action="append", metavar=_metavar(name, field), help=text)
    else:
        choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else None
        metavar = None if choices else _metavar(name, field)
        parser.add_argument(*flags, dest=name, metavar=metavar, choices=choices, help=text)


def _core(annotation: Any) -> Any:
    """``X`` of ``X | None``; anything else as it is."""
    options = [arg for arg in get_args(annotation) if arg is not type(None)]
    return options[0] if len(options) == 1 and type(None) in get_args(annotation) else annotation


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _metavar(name: str, field: FieldInfo) -> str:
    marks = [mark.text for mark in field.metadata if isinstance(mark, Metavar)]
    return marks[-1] if marks else name.rpartition("_")[2].upper()


def _help_text(name: str, field: FieldInfo) -> str:
    words = " ".join((field.description or "").split())
    default = field.get_default(call_default_factory=False)
    if default is not PydanticUndefined and default not in (None, (), False, ""):
        shown = ",".join(map(str, default)) if isinstance(default, tuple) else str(default)
        words += f" Default: {shown}."
    return f"{words} [{ENV_PREFIX}{name.upper()}]".replace("%", "%%")


def read_table(cls: type[Settings], path: Path) -> dict[str, Any]:
    """The table of this command in a configuration file; raise ``ConfigError`` for anything unknown in it."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a TOML file: {error}") from error
    for name in tables:
        if name not in CONFIG_TABLES:
            raise ConfigError(f"{path}: unknown table [{name}]{_did_you_mean(name, CONFIG_TABLES)}")
    table = tables.get(cls.command, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: [{cls.command}] must be a table")
    values = {key.replace("-", "_"): value for key, value in table.items()}
    if len(values) != len(table):
        raise ConfigError(f"{path}: [{cls.command}] has a key twice, once with '-' and once with '_'")
    for name in values:
        if name not in cls.model_fields:
            keys = [field.replace("_", "-") for field in cls.model_fields]
            raise ConfigError(
                f"{path}: unknown key {name.replace('_', '-')} in [{cls.command}]{_did_you_mean(name, keys)}"
            )
    return values


def check_environment(known: Sequence[type[Settings]], environ: Mapping[str, str] = os.environ) -> None:
    """Raise ``ConfigError`` for an ``ALLSPARK_…`` variable that no settings class of the fleet knows."""
    names = {ENV_PREFIX + "CONFIG"} | {
        ENV_PREFIX + field.upper() for cls in known for field in cls.model_fields
    }
    for name in environ:
        if name.startswith(ENV_PREFIX) and name not in names:
            raise ConfigError(f"unknown environment variable {name}{_did_you_mean(name, sorted(names))}")


def _did_you_mean(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]}?" if close else f"; known: {', '.join(known)}"


def _explain(
    cls: type[Settings],
    error: ValidationError,
    given: Mapping[str, Any],
    in_file: Mapping[str, Any],
    environ: Mapping[str, str],
) -> str:
    """One line per wrong value, naming the place it came from."""
    lines = []
    for item in error.errors(include_url=False, include_context=False):
        name = str(item["loc"][0]) if item["loc"] else ""
        text = item["msg"].removeprefix("Value error, ")
        variable = ENV_PREFIX + name.upper()
        if not name:
            lines.append(text)
        elif name not in given and variable in environ:
            lines.append(f"{variable}: {text}")
        elif name not in given and name in in_file:
            lines.append(f"{name.replace('_', '-')} in [{cls.command}]: {text}")
        else:
            lines.append(f"{_flag(name)}: {text}")
    return "\n".join(f"allspark {cls.command}: {line}" for line in lines)


def _as_flags(name: str, value: object) -> list[str]:
    if value is None:
        return []
    if isinstance(value, bool):
        return [_flag(name) if value else "--no-" + name.replace("_", "-")]
    if isinstance(value, tuple):
        return [f"{_flag(name)}={item}" for item in value]
    if isinstance(value, int):
        value = int(value)  # a ByteSize would print itself as "64.0MiB" and round
    return [f"{_flag(name)}={value}"]
