"""Writing to files, symlinks, FIFOs, devices and open file descriptors, and reading."""

import os
import stat
import sys
import threading
from functools import partial
from pathlib import Path

import pytest

from imagebuild.core import files
from imagebuild.core.errors import ConfigError
from imagebuild.core.files import read_bytes, read_inside, read_text, refuse_foreign, refuse_links, write_text
from imagebuild.core.yaml import read_yaml
from imagebuild.project.matrix import Matrix
from tests.conftest import ran

WRITE = """import sys; from pathlib import Path; from imagebuild.core.files import write_text
write_text(Path(sys.argv[1]), 'text\\n', named=True)"""


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_replaced_whole_in_a_folder_that_is_made_and_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "file"
    before = os.umask(0o027)
    try:
        write_text(path, "first")
        assert path.stat().st_mode & 0o777 == 0o640
        path.chmod(0o600)
        with path.open() as reader:
            write_text(path, "second ✓")
            assert (reader.read(), path.read_text(encoding="utf-8")) == ("first", "second ✓")
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600
    assert names_in(path.parent) == ["file"]


@pytest.mark.parametrize("exists", [True, False])
def test_the_target_of_a_link_that_the_user_named_is_written(tmp_path: Path, exists: bool) -> None:
    (tmp_path / "folder").mkdir()
    target, link, other = tmp_path / "folder" / "target", tmp_path / "link", tmp_path / "other"
    if exists:
        target.write_text("old")
    link.symlink_to("other")
    other.symlink_to("folder/target")
    with pytest.raises(ConfigError, match="link: is a link to other; remove the link"):
        write_text(link, "planted")
    assert target.exists() == exists
    write_text(link, "new", named=True)
    assert (link.is_symlink(), other.is_symlink(), target.read_text()) == (True, True, "new")
    assert names_in(target.parent) == ["target"]


def test_a_fifo_and_a_device_are_written_directly(tmp_path: Path) -> None:
    fifo, received = tmp_path / "fifo", []
    os.mkfifo(fifo)
    reader = threading.Thread(target=lambda: received.append(fifo.read_text()))
    reader.start()
    write_text(fifo, "through")
    reader.join(60)
    assert (received, fifo.is_fifo()) == (["through"], True)
    write_text(Path("/dev/null"), "text")
    assert Path("/dev/null").is_char_device()
    link = tmp_path / "link"
    link.symlink_to("/dev/null")
    write_text(link, "text", named=True)
    assert (link.is_symlink(), Path("/dev/null").is_char_device()) == (True, True)


@pytest.mark.programs
@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1", "link"])
def test_standard_output_is_written_behind_what_is_there(tmp_path: Path, name: str) -> None:
    (tmp_path / "link").symlink_to("/dev/stdout")
    path = str(tmp_path / "link") if name == "link" else name
    piped = ran(sys.executable, "-c", WRITE, path, check=True)
    assert (piped.stdout, piped.stderr) == ("text\n", "")
    file = tmp_path / "file"
    with file.open("w") as stream:
        stream.write("before\n")
        stream.flush()
        ran(sys.executable, "-c", WRITE, path, stdout=stream, check=True)
        stream.write("after\n")
    assert file.read_text() == "before\ntext\nafter\n"


CANNOT = {
    "": "is a folder; name a file in it", "file/below": "Not a directory", "loop": "Too many levels of symbolic links",
    "/dev/fd/999": "Bad file descriptor", "/dev/full": "No space left on device",
    "/sys/new": "(Permission denied|Operation not|Read-only)",  # where root may not write either
}  # fmt: skip


def test_what_cannot_be_written_or_read_is_said_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"text \xff")
    (tmp_path / "loop").symlink_to("loop")
    for name, reason in CANNOT.items():
        path = tmp_path / name
        with pytest.raises(ConfigError, match=rf"^{path}: cannot be written: {reason}"):
            write_text(path, "text", named=True)
    assert names_in(tmp_path) == ["file", "loop"]
    for name, reason in {
        "": " cannot be read: Is a directory; check the name",
        "gone": " cannot be read: No such file or directory; check the name",
        "file": "1: cannot be read: the text is not UTF-8; save the file as UTF-8",
    }.items():
        with pytest.raises(ConfigError) as caught:
            read_text(tmp_path / name)
        assert str(caught.value) == f"{tmp_path / name}:{reason}"


@pytest.mark.parametrize("hidden", ["\r", "\x85", "\u2028", "\u2029", "\u202e", "\u2066", "\x9b"])
def test_a_reviewed_file_has_no_character_that_hides_its_meaning(tmp_path: Path, hidden: str) -> None:
    (tmp_path / "file").write_bytes(f"a: 1\r\n# text{hidden}b: 2\n".encode())
    assert read_text(tmp_path / "file").startswith("a: 1\n# text")
    for read in (partial(read_yaml, model=Matrix), partial(read_inside, [tmp_path])):
        with pytest.raises(ConfigError, match=rf"file:2: contains U\+{ord(hidden):04X}, which editors do not show"):
            read(tmp_path / "file")


@pytest.mark.parametrize("kind", ["fifo", "link", "/dev/zero", "/dev/tty", "socket"])
def test_a_file_that_could_block_or_never_end_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    monkeypatch.setattr("imagebuild.core.files.FIFO_S", 0.2)
    path = Path(kind) if kind[0] == "/" else tmp_path / kind
    if kind == "fifo":
        os.mkfifo(path)
    if kind == "link":
        path.symlink_to("/dev/urandom")
    if kind == "socket":
        os.mknod(path, stat.S_IFSOCK)
    with pytest.raises(ConfigError, match=f"^{path}: cannot be read: (not a regular file|No such device)"):
        read_bytes(path)


@pytest.mark.programs
def test_an_open_stream_is_read_up_to_its_limit(tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from imagebuild.core.files import *; print(len(read_bytes(Path(sys.argv[1]), 9)))"
    for name in ("-", "/dev/stdin", "/dev/fd/0"):
        assert ran(sys.executable, "-c", code, name, input="123456789").stdout == "9\n"
        assert "is larger than 9 bytes" in ran(sys.executable, "-c", code, name, input="1234567890").stderr
    (tmp_path / "large").write_bytes(bytes(10))
    with pytest.raises(ConfigError, match="is larger than 9 bytes"):
        read_bytes(tmp_path / "large", 9)


def test_a_link_that_appears_during_the_work_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "private").write_text("private")
    monkeypatch.setattr(files, "refuse_links", lambda paths: [path.symlink_to("private") for path in paths])
    write_text(tmp_path / "file", "new")
    assert [(tmp_path / name).read_text() for name in ("private", "file")] == ["private", "new"]


def test_a_link_is_refused_even_if_it_leads_nowhere(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(ConfigError, match="link: is a link to nowhere; remove the link"):
        refuse_links([tmp_path, tmp_path / "link"])


def test_a_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.touch()
    refuse_foreign(path)
    if os.geteuid() == 0:
        os.chown(path, 1234, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 1234)
    with pytest.raises(ConfigError, match="file: belongs to another user"):
        refuse_foreign(path)
    monkeypatch.setenv("SUDO_UID", str(path.stat().st_uid))
    refuse_foreign(path)
