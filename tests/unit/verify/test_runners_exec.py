"""The runner `exec:PREFIX` with real programs of this machine."""

import os
import pwd
import shlex
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from imagebuild.core import KEPT, CommandError, ConfigError
from imagebuild.core import run as programs
from imagebuild.verify import Command, ExecRunner, ExecSession, Execution, wrapped_script
from tests.unit.conftest import gone

pytestmark = pytest.mark.programs

# What ssh does with its arguments: joined by blanks, read by a shell on the other side. It is not ssh: there is no
# connection, and the other side is this machine.
JOINING = '#!/bin/sh\nwhile [ "$1" = -o ]; do shift 2; done\nshift\nexec sh -c "$*"\n'
# As `docker exec --user NAME CONTAINER …`: the option is taken, nothing else happens.
CONTAINER = '#!/bin/sh\necho "$@" > "$0.called"\nshift; [ "$1" != --user ] || shift 2\nshift\nexec "$@"\n'


def me() -> str:
    return pwd.getpwuid(os.getuid()).pw_name


def program(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


@pytest.fixture(params=["env", "ssh -o Option=a host"], ids=["plain", "joining"])
def session(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ExecSession]:
    program(tmp_path, "ssh", JOINING)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with ExecRunner(request.param).session() as started:
        yield started


def run(session: ExecSession, script: str, **more: object) -> Execution:
    return session.run(Command(script, user=me(), **more))  # type: ignore[arg-type]


def run_patiently(session: ExecSession, script: str, timeout_s: float, status: int | None, output: str) -> Execution:
    """Give a command more time as long as it ends otherwise: a busy machine may not have begun it."""
    for seconds in (timeout_s, 10, 60):
        done = run(session, script, timeout_s=seconds)
        if (done.status, done.output) == (status, output):
            break
    return done


@pytest.mark.parametrize(
    ("script", "timeout_s", "status", "output"),
    [
        ("echo one; echo two >&2; echo three; exit 7", 60, 7, "one\ntwo\nthree\n"),
        ("false | true; echo on", 60, 1, ""),
        ("echo $not_set; echo on", 60, 1, "bash: line 1: not_set: unbound variable\n"),
        ("cat; echo read to the end", 60, 0, "read to the end\n"),
        ("exit 124", 60, 124, ""),
        ("trap 'echo tidy; exit 0' TERM; sleep 1000 & wait", 3, None, "tidy\n"),
    ],
    ids=["streams-in-order", "a-pipe-fails", "unset", "nothing-to-read", "no-timeout-by-itself", "ends-itself-in-time"],
)
def test_what_a_command_does(
    session: ExecSession, script: str, timeout_s: float, status: int | None, output: str
) -> None:
    done = run_patiently(session, script, timeout_s, status, output)
    assert (done.status, done.output) == (status, output)
    assert done.argv[-5:] == ("bash", "-euo", "pipefail", "-c", script)


@pytest.mark.parametrize(
    "text", ["it's", '"$HOME"', "a  b", "$(id)", "`id`", "back\\slash", "two\nlines", "*", "!x", "~", "é & ; | <"]
)
def test_every_character_arrives(session: ExecSession, text: str) -> None:
    done = run(session, f"printf '%s' {shlex.quote(text)} \"$GIVEN\"", environment={"GIVEN": text})
    assert done.output == text + text


ENDED = {
    "hangs": ("echo before; (setsid sleep {0} &); bash -c 'sleep {0} & wait'", None, "before\n"),
    "is-deaf": ("trap '' TERM; echo deaf; while :; do sleep {0} || true; done", None, "deaf\n"),
    "leaves-something": ("sleep {0} & (setsid sleep {0} > /dev/null &); echo done", 0, "done\n"),
    # For a moment the kernel shows no variables of a process that starts another program; here the moment is long.
    "is-starting": (
        '(env -i setsid bash -c "sleep 0.1; IMAGEBUILD_RUN=$IMAGEBUILD_RUN exec sleep {0}" > /dev/null 2>&1 &); '
        "echo done", 0, "done\n",
    ),
}  # fmt: skip
"""What a command does, in other sessions and groups too; its status and its output."""


@pytest.mark.parametrize(("script", "status", "output"), ENDED.values(), ids=ENDED)
def test_a_command_ends_with_all_that_it_started(
    session: ExecSession, forever: str, monkeypatch: pytest.MonkeyPatch, script: str, status: int | None, output: str
) -> None:
    monkeypatch.setattr("imagebuild.verify.runner.GRACE_S", 1)
    done = run_patiently(session, script.format(forever), 1, status, output)
    assert (done.status, done.output) == (status, output)
    time.sleep(0.5)  # a process that was missed while it started sleeps by now
    assert gone(forever)


def test_a_command_that_prints_without_end_is_ended(
    session: ExecSession, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(programs, "LIMIT", 20 << 20)
    log = tmp_path / "log"
    done = run(session, "yes 0123456789abcdef", log=log)
    assert done.status is None
    assert done.problem == "printed more than 20 MiB"
    assert log.stat().st_size == 20 << 20
    assert len(done.output) == KEPT


def test_the_whole_output_is_in_the_log_and_its_end_in_memory(session: ExecSession, tmp_path: Path) -> None:
    done = run(session, "seq 100000", log=tmp_path / "deep" / "log")
    assert done.status == 0
    whole = (tmp_path / "deep" / "log").read_text()
    assert whole == "".join(f"{n}\n" for n in range(1, 100001))
    assert whole.endswith(done.output)
    assert len(done.output) == KEPT


def test_secrets_are_not_kept(session: ExecSession) -> None:
    done = run(session, "echo $SITE", environment={"SITE": "https://me:abc@x", "SIZE": "1G"})
    assert done.output == "https://me:abc@x\n"
    assert done.environment["SITE"] == "https://(redacted)@x"
    assert done.environment["SIZE"] == "1G"


def test_the_outer_deadline_holds_where_the_launcher_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forever: str
) -> None:
    """The first command gets through; later ones hang in the launcher, which leaves a child behind."""
    hung = program(
        tmp_path,
        "launch",
        f'#!/bin/sh\nif [ -e "$0.used" ]; then sleep {forever} & sleep {forever}; fi\n: > "$0.used"\nexec "$@"\n',
    )
    monkeypatch.setattr("imagebuild.verify.prefix.CONNECT_S", 1)
    monkeypatch.setattr("imagebuild.verify.prefix.SWEEP_S", 1)
    monkeypatch.setattr("imagebuild.verify.runner.GRACE_S", 0)
    with ExecRunner(hung).session() as session:
        done = run(session, "echo never", timeout_s=1)
    assert done.status is None
    assert gone(forever)


def test_a_launcher_that_cannot_start_anything_is_an_error(tmp_path: Path) -> None:
    for prefix, message in (
        (program(tmp_path, "refuse", "#!/bin/sh\necho no route to host >&2\nexit 255\n"), "no route to host"),
        (str(tmp_path / "absent"), "cannot be run"),
    ):
        with pytest.raises(CommandError, match=message), ExecRunner(prefix).session():
            pass
    with pytest.raises(ConfigError, match="No closing quotation"):
        ExecRunner("ssh 'node")


def test_the_user_is_changed_by_the_launcher_where_it_can(tmp_path: Path) -> None:
    docker = program(tmp_path, "docker", CONTAINER)
    with ExecRunner(f"{docker} exec c1").session() as session:
        assert session.run(Command("echo run", user="daemon")).output == "run\n"
    assert (tmp_path / "docker.called").read_text().startswith("exec --user 1:1 c1 bash -c")


def test_a_user_that_nothing_can_change_to_is_an_obstacle(session: ExecSession) -> None:
    assert session.obstacle(Command("x", user="nobody-like-this")).startswith(
        "the image has no user 'nobody-like-this'"
    )
    assert session.obstacle(Command("x", user=me())) == ""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_root_becomes_another_user_whose_processes_end_too(session: ExecSession, forever: str) -> None:
    done = session.run(Command("id -un; echo $HOME $USER", user="daemon"))
    assert done.output == "daemon\n/usr/sbin daemon\n"
    done = session.run(Command(f"(setsid sleep {forever} &); sleep {forever}", user="daemon", timeout_s=1))
    assert done.status is None
    assert gone(forever)


def test_a_rank_that_is_done_does_not_end_the_others() -> None:
    """srun starts the same program several times, and they see each other's processes."""
    number = "echo rank $SLURM_PROCID; sleep $((SLURM_PROCID % 10)); sleep 0.2; echo end $SLURM_PROCID"
    program = wrapped_script(number, token="several", timeout_s=300, environment={})
    ranks = [
        subprocess.Popen(
            ["bash", "-c", program], env={**os.environ, "SLURM_PROCID": rank}, stdout=subprocess.PIPE, text=True
        )
        # The second is the beginning of the third.
        for rank in ("0", "1", "11", "2")
    ]
    message = [(rank.communicate(timeout=300)[0], rank.returncode) for rank in ranks]
    assert message == [(f"rank {n}\nend {n}\n", 0) for n in (0, 1, 11, 2)]


def test_hosts_are_nodes(session: ExecSession) -> None:
    assert session.facilities.nodes == 1
    assert "--hosts" in session.facilities.why["nodes"]
    with ExecRunner("env", ["a", "b", "c"]).session() as several:
        assert several.facilities.nodes == 3
        assert several.run(Command("echo $IMAGEBUILD_NODES", user=me(), nodes=2)).output == "a b\n"
