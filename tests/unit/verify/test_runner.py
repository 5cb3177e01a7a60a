"""The surroundings that runners report, and the runner `exec:PREFIX` with real programs of this machine."""

import os
import pwd
import shlex
from pathlib import Path

import pytest

from imagebuild.core.errors import CommandError, ConfigError
from imagebuild.core.run import KEPT
from imagebuild.verify.runner import (
    Command,
    ExecSession,
    Execution,
    command_line,
    read_prefix,
    read_probe,
    surroundings_of,
    with_ranks,
)
from tests.conftest import ROOT, data
from tests.unit.conftest import gone

CASES = data("cases/verify/runner")

# Facts about the host

PROBED = (ROOT / "tests/data/probe.txt").read_text()


@pytest.mark.parametrize(("old", "new", "why"), CASES["the-probe-is-read-between-other-lines"])
def test_the_probe_is_read_between_other_lines(old: str, new: str, why: dict[str, str]) -> None:
    probe = read_probe(PROBED.replace(old, new, 1) if old != "port=" else PROBED.replace(old, new))
    assert probe
    have = surroundings_of(probe, "x", nodes=2, slurm=True, why={"nodes": "is not asked"})
    assert (have.why, have.user, have.facts) == (why, "root", {"kernel": "6.1", "os": "Some Linux"})
    assert (have.gpus, have.rdma) == (0 if "gpu" in why else 8, "rdma" not in why)
    assert read_probe(PROBED.replace("end=", "")) is None


# Prefixes


def test_arguments_are_quoted_once_for_each_shell_on_the_way() -> None:
    argv = ["bash", "-c", "echo 'a b'"]
    assert command_line(["kubectl", "exec", "pod", "--"], argv)[-3:] == argv
    once = command_line(["/usr/bin/ssh", "node"], argv)
    assert once == ["/usr/bin/ssh", "node", """bash -c 'echo '"'"'a b'"'"''"""]
    assert command_line(["ssh", "jump", "ssh", "node"], argv) == ["ssh", "jump", "ssh", "node", shlex.quote(once[-1])]


def test_srun_is_told_the_ranks() -> None:
    words = ["--mpi=pmix", "--ntasks=4", "--nodes=2"]
    assert with_ranks(["ssh", "a", "srun", "-v"], 4, 2) == ["ssh", "a", "srun", *words, "-v"]


ME = pwd.getpwuid(os.getuid()).pw_name
# A substitute for ssh without a connection. As ssh does, it joins its arguments with blanks and passes the line to a
# shell.
JOINING = '#!/bin/sh\nwhile [ "$1" = -o ]; do shift 2; done\nshift\nexec sh -c "$*"\n'


def program(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


@pytest.fixture(params=["env", "ssh -o Option=a host"], ids=["plain", "joining"])
def session(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ExecSession:
    program(tmp_path, "ssh", JOINING)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return ExecSession(request.param.split())


def run(session: ExecSession, script: str, **more: object) -> Execution:
    return session.run(Command(script, user=ME, **more))  # type: ignore[arg-type]


def run_patiently(session: ExecSession, script: str, timeout_s: float, status: int | None, output: str) -> Execution:
    """Repeat a command with more time until its outcome is as expected, as it may start late on a busy machine."""
    for seconds in (timeout_s, 10, 60):
        done = run(session, script, timeout_s=seconds)
        if (done.status, done.output) == (status, output):
            break
    return done


@pytest.mark.programs
@pytest.mark.parametrize(
    ("script", "timeout_s", "status", "output"),
    CASES["what-a-command-does"],
    ids=["streams-in-order", "a-pipe-fails", "unset", "nothing-to-read", "no-timeout-by-itself", "ends-itself-in-time"],
)
def test_what_a_command_does(
    session: ExecSession, script: str, timeout_s: float, status: int | None, output: str
) -> None:
    done = run_patiently(session, script, timeout_s, status, output)
    assert (done.status, done.output) == (status, output)
    assert done.argv[-5:] == ("bash", "-euo", "pipefail", "-c", script)


@pytest.mark.programs
def test_every_character_arrives(session: ExecSession) -> None:
    for text in ("it's", '"$HOME"', "a  b", "$(id)", "`id`", "back\\slash", "two\nlines", "*", "!x", "~", "é & ; | <"):
        done = run(session, f"printf '%s' {shlex.quote(text)} \"$GIVEN\"", environment={"GIVEN": text})
        assert done.output == text + text


@pytest.mark.programs
@pytest.mark.parametrize(
    ("script", "status", "output"),
    CASES["a-command-ends-with-all-that-it-started"],
    ids=["hangs", "is-deaf", "leaves-something"],
)
def test_a_command_ends_with_all_that_it_started(
    session: ExecSession, forever: str, monkeypatch: pytest.MonkeyPatch, script: str, status: int | None, output: str
) -> None:
    monkeypatch.setattr("imagebuild.verify.runner.GRACE_S", 1)
    done = run_patiently(session, script.format(forever), 1, status, output)
    assert (done.status, done.output) == (status, output)
    assert gone(forever)


@pytest.mark.programs
def test_output_is_kept_whole_in_the_log_alone(session: ExecSession, tmp_path: Path) -> None:
    log = tmp_path / "deep" / "log"
    done = run(session, "seq 100000", log=log)
    assert (done.status, log.read_text()) == (0, "".join(f"{n}\n" for n in range(1, 100001)))
    assert log.read_text().endswith(done.output)
    assert len(done.output) == KEPT


@pytest.mark.programs
def test_secrets_are_not_kept(session: ExecSession) -> None:
    done = run(session, "echo $SITE", environment={"SITE": "https://me:abc@x", "SIZE": "1G"})
    assert done.output == "https://me:abc@x\n"
    assert done.environment["SITE"] == "https://(redacted)@x"
    assert done.environment["SIZE"] == "1G"


@pytest.mark.programs
def test_the_outer_deadline_holds_where_the_launcher_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forever: str
) -> None:
    """Only the first command is run. For later commands the launcher hangs, and leaves a child process behind."""
    hung = program(
        tmp_path,
        "launch",
        f'#!/bin/sh\nif [ -e "$0.used" ]; then sleep {forever} & sleep {forever}; fi\n: > "$0.used"\nexec "$@"\n',
    )
    monkeypatch.setattr("imagebuild.verify.runner.CONNECT_S", 1)
    monkeypatch.setattr("imagebuild.verify.runner.STOP_S", 1)
    monkeypatch.setattr("imagebuild.verify.runner.GRACE_S", 0)
    assert run(ExecSession([hung]), "echo never", timeout_s=1).status is None
    assert gone(forever)


@pytest.mark.programs
def test_what_a_lost_launcher_left_on_the_other_side_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forever: str
) -> None:
    """The launcher starts each command in a new session, as sshd does."""
    launcher = program(tmp_path, "launch", '#!/bin/sh\nsetsid "$@" < /dev/null &\nwait\n')
    session = ExecSession([launcher])
    monkeypatch.setattr("imagebuild.verify.runner.CONNECT_S", -600)
    monkeypatch.setattr("imagebuild.verify.runner.STOP_S", 620)
    assert run(session, f"sleep {forever}", timeout_s=598).status is None
    assert gone(forever)


@pytest.mark.programs
def test_a_launcher_that_cannot_start_anything_is_an_error(tmp_path: Path) -> None:
    for prefix, message in (
        (program(tmp_path, "refuse", "#!/bin/sh\necho no route to host >&2\nexit 255\n"), "no route to host"),
        (str(tmp_path / "absent"), "cannot be run"),
    ):
        with pytest.raises(CommandError, match=message):
            ExecSession([prefix])
    with pytest.raises(ConfigError, match="No closing quotation"):
        read_prefix("ssh 'node")


@pytest.mark.programs
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_root_becomes_another_user_whose_processes_end_too(session: ExecSession, forever: str) -> None:
    done = session.run(Command("id -un; id -gn; echo $HOME $USER", user="daemon"))
    assert done.output == "daemon\ndaemon\n/usr/sbin daemon\n"
    assert "setpriv --reuid=daemon --regid=$(id -g daemon) --init-groups bash" in " ".join(done.argv)
    done = session.run(Command(f"sleep {forever} & sleep {forever}", user="daemon", timeout_s=1))
    assert done.timed_out
    assert gone(forever)
    unknown = session.run(Command("true", user="nobody-like-this"))
    assert (unknown.status, unknown.problem) == (1, "the image has no user 'nobody-like-this'")


@pytest.mark.programs
def test_hosts_are_nodes(session: ExecSession) -> None:
    assert session.surroundings.nodes == 1
    assert "--hosts" in session.surroundings.why["nodes"]
    several = ExecSession(["env"], ["a", "b", "c"])
    assert several.surroundings.nodes == 3
    assert several.run(Command("echo $IMAGEBUILD_NODES", user=ME, nodes=2)).output == "a b\n"
