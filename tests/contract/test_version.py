"""The version text and the commit in it, found without starting git."""

import re
import subprocess
from pathlib import Path

import pytest
from allspark_proto import version

GIT = ["git", "-c", "user.name=t", "-c", "user.email=t@localhost", "-c", "commit.gpgsign=false"]


def git(repository: Path, *arguments: str) -> str:
    done = subprocess.run(
        [*GIT, "-C", str(repository), *arguments], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    path = tmp_path / "repository"
    path.mkdir()
    git(path, "init", "-q", "-b", "main")
    git(path, "commit", "-q", "--allow-empty", "-m", "first")
    return path


def test_the_text_has_the_layout_of_upstream() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+/\(GitSha1:[0-9a-f]{7}\)", version.version_full())


def test_a_branch_a_detached_head_and_packed_refs(repository: Path) -> None:
    head = git(repository, "rev-parse", "HEAD")
    assert version.read_head(repository / ".git") == head
    git(repository, "pack-refs", "--all")
    assert not (repository / ".git/refs/heads/main").exists()
    assert version.read_head(repository / ".git") == head
    git(repository, "checkout", "-q", "--detach")
    assert version.read_head(repository / ".git") == head


def test_a_worktree(repository: Path, tmp_path: Path) -> None:
    git(repository, "worktree", "add", "-q", "-b", "side", str(tmp_path / "side"))
    git(tmp_path / "side", "commit", "-q", "--allow-empty", "-m", "second")
    side = git(tmp_path / "side", "rev-parse", "HEAD")
    assert side != git(repository, "rev-parse", "HEAD")
    assert version.read_head(tmp_path / "side" / ".git") == side


def test_no_repository_and_a_branch_without_commits(tmp_path: Path) -> None:
    assert version.read_head(tmp_path / ".git") == ""
    git(tmp_path, "init", "-q")
    assert version.read_head(tmp_path / ".git") == ""


def test_what_a_build_recorded_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / version.SHA_FILE).write_text("0123456789abcdef0123456789abcdef01234567\n")
    monkeypatch.setattr(version.resources, "files", lambda _: tmp_path)
    assert version.git_sha() == "0123456"
    (tmp_path / version.SHA_FILE).write_text("no digest\n")
    assert version.git_sha() == version.UNKNOWN_SHA
