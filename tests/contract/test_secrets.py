"""Secrets are in no log, no error, no help text, and no setting that shows its value."""

import logging
import re
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest
from allspark.cli.settings import all_settings
from allspark.launcher.ports import free_port
from allspark_broker.settings import BrokerSettings
from allspark_bus import redis_url
from allspark_bus.errors import StoreUnavailable
from allspark_bus.settings import Settings
from allspark_bus.store import Store
from allspark_bus.wakeups import Wakeups

PASSWORD = "hunter2"
URLS = [
    "redis://u:hunter2@127.0.0.1:{port}/0",
    "redis://:hunter2@127.0.0.1:{port}",
    "redis://u:%68unter2hunter2@127.0.0.1:{port}/3",
    "rediss://u:hunter2@127.0.0.1:{port}/0?ssl_cert_reqs=none",
    "rediss://u:hunter2@127.0.0.1:{port}/0?ssl_ca_certs=/nonexistent/ca.pem",
    "unix://u:hunter2@/nonexistent/socket?db=0",
    "redis+sentinel://u:hunter2@127.0.0.1:{port},127.0.0.1:{port}/name/0",
    "redis+cluster://u:hunter2@127.0.0.1:{port}",
]
SETTINGS = list(all_settings())
#: What holds secrets by its name; each is a file, or a URL that is kept out of sight.
SECRET = re.compile(r"redis|password|token|secret|curve|key|tls", re.IGNORECASE)
NUMBERS = (int, float, bool, int | None, float | None)


def url(template: str) -> str:
    return template.format(port=free_port())  # where nobody listens


@pytest.fixture
def everything(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[BaseException], str]]:
    """All that was logged, down to debug messages of the libraries, and all of an error with its causes."""
    caplog.set_level(logging.DEBUG)

    def collect(error: BaseException) -> str:
        lines = [caplog.handler.format(record) for record in caplog.records]
        lines += [repr(record.args) for record in caplog.records]
        return "\n".join([*lines, repr(error), *traceback.format_exception(error)])

    yield collect


@pytest.mark.parametrize("template", URLS)
async def test_a_server_that_is_away_is_reported_without_the_password(
    template: str, everything: Callable[[BaseException], str]
) -> None:
    store = Store(url(template), patience_s=0.2)
    wakeups = Wakeups(store)
    try:
        wakeups.join("a/u", lambda _: None)
        with pytest.raises(StoreUnavailable) as caught:
            await store.command("HGET", "as:x", "f")
    finally:
        await wakeups.close()
        await store.close()
    assert PASSWORD not in everything(caught.value)


@pytest.mark.parametrize("template", URLS)
def test_what_is_shown_of_a_url_names_the_server_only(template: str) -> None:
    where = url(template)
    assert redis_url.has_password(where)
    assert PASSWORD not in redis_url.shown(where)
    assert PASSWORD not in repr(BrokerSettings(redis=where))


@pytest.mark.parametrize("cls", SETTINGS, ids=lambda cls: cls.command)
def test_help_shows_no_value_of_the_environment(
    cls: type[Settings], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ALLSPARK_REDIS", url(URLS[0]))
    with pytest.raises(SystemExit):
        cls.load(["--help"])
    printed = capsys.readouterr()
    assert "usage:" in printed.out and PASSWORD not in printed.out + printed.err


@pytest.mark.parametrize("cls", SETTINGS, ids=lambda cls: cls.command)
def test_secrets_are_named_by_file_or_hidden(cls: type[Settings]) -> None:
    for name, field in cls.model_fields.items():
        if not SECRET.search(name) or field.annotation in NUMBERS or get_origin(field.annotation) is Literal:
            continue
        types = get_args(field.annotation) or (field.annotation,)
        is_file = Path in types or field.annotation is Path
        assert is_file or field.repr is False, f"{cls.__name__}.{name} may show a secret"
