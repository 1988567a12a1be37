"""The token file: what it may say, and what a token is worth."""

import hashlib
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from allspark_gateway.tokens import TokenFileError, Tokens, Unauthenticated, parse

GOOD = hashlib.sha256(b"t.secret").hexdigest()
ENTRY = f'[[token]]\nname = "t"\nsha256 = "{GOOD}"\ntenant = "a"\nscopes = ["infer"]\n'


def test_a_token_is_worth_its_entry() -> None:
    token = parse(ENTRY)["t"]
    assert (token.tenant, token.scopes, token.expires, token.allow_shutdown) == ("a", {"infer"}, None, False)
    assert GOOD not in repr(token)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[token]", "not TOML"),
        ("[[tokens]]\n", "tokens: Extra inputs"),
        (ENTRY.replace("name", "nam"), "Field required|Extra inputs"),
        (ENTRY + 'token = "t.secret"\n', "Extra inputs"),
        (ENTRY.replace('"t"', '"t.x"'), "name: String should match"),
        (ENTRY.replace(GOOD, GOOD[:-1]), "sha256: String should match"),
        (ENTRY.replace(GOOD, GOOD.upper()), "sha256: String should match"),
        (ENTRY.replace('"a"', '"a/b"'), "tenant: String should match"),
        (ENTRY.replace('"a"', '"operator"'), "no token may have the tenant 'operator'"),
        (ENTRY.replace('["infer"]', "[]"), "scopes: .*at least 1"),
        (ENTRY.replace('"infer"', '"root"'), "Input should be 'infer' or 'admin'"),
        (ENTRY + "expires = 2027-01-01T00:00:00\n", "expires: .*timezone"),
        (ENTRY + "allow_shutdown = true\n", "allow_shutdown needs the scope admin"),
        (ENTRY + ENTRY, "the same name"),
    ],
)
def test_a_bad_file_is_refused_with_the_place(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(TokenFileError, match=said) as caught:
        parse(text)
    assert "t.secret" not in str(caught.value)
    (tmp_path / "tokens.toml").write_text(text)
    with pytest.raises(TokenFileError, match=r"tokens\.toml"):
        Tokens(tmp_path / "tokens.toml")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenFileError, match="cannot read the token file"):
        Tokens(tmp_path / "none.toml")


def test_a_token_expires_at_its_time(tmp_path: Path) -> None:
    expires = datetime(2027, 1, 1, tzinfo=UTC)
    (tmp_path / "tokens.toml").write_text(ENTRY + "expires = 2027-01-01T01:00:00+01:00\n")
    now = [expires - timedelta(microseconds=1)]
    tokens = Tokens(tmp_path / "tokens.toml", now=lambda: now[0])
    assert tokens.authenticate("Bearer t.secret").name == "t"
    now[0] = expires
    with pytest.raises(Unauthenticated, match="expired at 2027-01-01"):
        tokens.authenticate("bearer t.secret")
    with pytest.raises(Unauthenticated, match="unknown, wrong or revoked"):  # nothing is told to a guesser
        tokens.authenticate("Bearer t.guess")


@pytest.mark.parametrize(
    "text", ["t.secret ", "t", "t.", ".secret", "T.secret", "t.secret\n", "t." + "x" * 600]
)
def test_only_the_whole_token_is_valid(text: str, tmp_path: Path) -> None:
    (tmp_path / "tokens.toml").write_text(ENTRY)
    with pytest.raises(Unauthenticated):
        Tokens(tmp_path / "tokens.toml").authenticate(f"Bearer {text}")


def test_the_file_is_looked_at_once_a_second(tmp_path: Path) -> None:
    file = tmp_path / "tokens.toml"
    file.write_text(ENTRY)
    clock = [0.0]
    tokens = Tokens(file, clock=lambda: clock[0])
    file.write_text("")
    clock[0] = 0.99
    assert tokens.authenticate("Bearer t.secret")
    clock[0] = 1.0
    with pytest.raises(Unauthenticated):
        tokens.authenticate("Bearer t.secret")
