"""``allspark certs``: a development set of certificates, keys and tokens."""

from collections.abc import Sequence

from allspark.certs import CertsError, write_set
from allspark.cli.console import out
from allspark.cli.errors import CommandError
from allspark.cli.settings import CertsSettings


def run(argv: Sequence[str]) -> int:
    """Write it and name what is in it; 0."""
    settings = CertsSettings.load(argv)
    directory = settings.directory.expanduser().absolute()
    try:
        write_set(directory, hosts=settings.host, tenants=settings.tenant, days=settings.days)
    except CertsError as error:
        raise CommandError(f"allspark certs: {error}") from error
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            out.print(str(path), markup=False, soft_wrap=True)
    return 0
