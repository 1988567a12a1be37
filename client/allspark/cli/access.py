"""The flags that a command's client proves itself with, as an ``Access``."""

from pathlib import Path

from allspark_bus.curve import ClientKeys
from allspark_bus.settings import ConfigError

from allspark.cli.settings import AccessSettings
from allspark.client import Access


def access_of(settings: AccessSettings, addresses: tuple[str, ...]) -> Access:
    """Reads the files; raises ``ConfigError`` if one cannot be used, or a token would travel unencrypted."""
    try:
        access = Access.from_files(**files_of(settings))
        access.check(addresses)
    except OSError as error:
        raise ConfigError(f"allspark {settings.command}: {error.filename}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"allspark {settings.command}: {error}") from error
    return access


def files_of(settings: AccessSettings) -> dict[str, Path]:
    """The files that were named, by the arguments of ``Access.from_files``."""
    named = {
        "ca": settings.tls_ca,
        "certificate": settings.tls_cert,
        "key": settings.tls_key,
        "token": settings.token_file,
    }
    return {name: path.expanduser().absolute() for name, path in named.items() if path is not None}


def keys_of(directory: Path | None) -> ClientKeys | None:
    """The CURVE keys in a directory, if one is named; raises ``ConfigError``."""
    return ClientKeys.read(directory.expanduser()) if directory else None
