"""Tables, messages about slow work, and texts without secrets."""

import io
import json
import re
import time

import pytest
from rich.console import Console

from imagebuild.core import console
from imagebuild.core.console import kept_environment, markdown_table, redacted_arguments
from tests.conftest import data


def test_a_markdown_table_keeps_its_cells_apart() -> None:
    rows = [("a|b", "two\nlines"), (r"has\|one", r"ends in \\|"), ("", "")]
    assert markdown_table(("x", "y|z"), rows).splitlines() == [
        r"| x | y\|z |",
        "| --- | --- |",
        r"| a\|b | two lines |",
        r"| has\|one | ends in \\\| |",
        "|  |  |",
    ]


@pytest.mark.parametrize(("width", "titles"), [(100, 3), (46, 2), (30, 1)])
def test_what_people_copy_stays_whole_in_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, width: int, titles: int
) -> None:
    file = io.StringIO()
    monkeypatch.setattr(console, "out", Console(file=file, force_terminal=True, width=width, color_system=None))
    identity = "quickstart-cuda13.5-debian13-runtime"[:30]
    row = (identity, "amd64, arm64", f"{'x' * 30} {'y' * 20}")
    console.print_table(("target", "platforms", "image"), [row])
    assert identity in file.getvalue()
    assert "…" not in file.getvalue()
    assert sum(f"{title} " in file.getvalue() for title in ("target", "platforms", "image")) == titles
    assert ("y" * 20 in file.getvalue()) == (titles == 3), "words are not broken"
    assert ("because the terminal is too narrow: platforms, image" in file.getvalue()) == (titles == 1)
    console.print_table(("target", "image"), [row[::2]], whole=["image"])
    assert row[2] in file.getvalue()


@pytest.mark.parametrize(
    ("width", "left_out"),
    [(30, "algorithm, formula, measured GB/s, source"), (40, "algorithm, formula, source"), (200, "")],
)
def test_a_narrow_terminal_keeps_what_the_reader_came_for(
    monkeypatch: pytest.MonkeyPatch, width: int, left_out: str
) -> None:
    file = io.StringIO()
    monkeypatch.setattr(console, "out", Console(file=file, force_terminal=True, width=width, color_system=None))
    columns = ("test", "algorithm", "ceiling GB/s", "formula", "measured GB/s", "source")
    console.print_table(columns, [("reduce_scatter", "ring", "343.0", "a formula", "320.1", "a source of a speed")])
    assert "343.0" in file.getvalue()
    assert file.getvalue().partition("too narrow: ")[2].strip() == left_out


def test_what_takes_long_shows_that_it_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    monkeypatch.setattr(console, "err", Console(file=file, width=200))
    monkeypatch.setattr(console, "FIRST_S", 0.3)
    monkeypatch.setattr(console, "NEXT_S", 0.3)
    with console.Progress() as progress:
        progress.begin("1", "compiler 1/3")
        with console.doing("push") as push:
            push.detail = "500; trying again"
            soon(file, r"compiler 1/3 for \d.* s\n")  # the oldest
            progress.advance("1", "10 %\r20 %\r\n")
            soon(file, r"compiler 1/3 for \d.* s; 20 %\n")
            progress.end("1", "")
            soon(file, r"push for \d.* s; 500; trying again\n")


def soon(file: io.StringIO, text: str) -> None:
    deadline = time.monotonic() + 60
    while not re.search(text, file.getvalue()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert re.search(text, file.getvalue())


@pytest.mark.parametrize(("value", "kept"), data("secrets").items())
def test_secrets_are_blanked_by_what_they_look_like(value: str, kept: str) -> None:
    assert kept_environment({"NCCL_X": value}) == {"NCCL_X": kept}


def test_what_explains_a_measurement_is_kept_and_nothing_else() -> None:
    variables = {
        "PATH": "/usr/local/cuda/bin:/usr/bin:/bin", "NCCL_DEBUG": "INFO",
        "NCCL_IB_HCA": "mlx5_0:1,mlx5_1:1", "UCX_TLS": "rc,cuda_copy,cuda_ipc", "OMPI_MCA_btl": "^openib",
        "NVIDIA_VISIBLE_DEVICES": "GPU-8a56a4bc-06f9-f4e9-4d6c-0123456789ab", "SLURM_JOB_NODELIST": "node[001-004]",
    }  # fmt: skip
    others = {"GITHUB_TOKEN": "x", "DB_PASSWORD": "x", "SLURM_JWT": "x", "OLDPWD": "/", "EDITOR": "vi"}
    assert kept_environment(variables | others) == variables


def test_arguments_lose_the_values_of_secret_options() -> None:
    argv = ["kubectl", "--token", "abc", "--password=x", "-n", "team", "exec", "pod", "--", "bash", "-c", "echo $TOKEN"]
    assert redacted_arguments(argv) == (
        "kubectl", "--token", "(redacted)", "--password=(redacted)", "-n", "team", "exec", "pod", "--", "bash", "-c",
        "echo $TOKEN",
    )  # fmt: skip


@pytest.mark.parametrize(("text", "shown"), data("untrusted-texts").items())
def test_untrusted_text_is_harmless_in_terminals_logs_and_tables(
    monkeypatch: pytest.MonkeyPatch, text: str, shown: str
) -> None:
    file = io.StringIO()
    monkeypatch.setattr(console, "out", console.Output(file=file, width=200, soft_wrap=True))
    console.out.print(text)
    console.out.print(console.styled((text, "bold"), ""))
    assert file.getvalue() == f"{shown}\n" * 2
    console.print_table(("title",), [(text,)])
    assert "\x1b" not in file.getvalue()
    assert not re.search(r"^\s*::|##\[", file.getvalue(), re.MULTILINE)


@pytest.mark.parametrize(
    "part", ["a-", "+", "://a:", "://a:/x", "eyJabcdefgh-", "sk-", "token", 'token" ', "login ", " \n", "x@"]
)
def test_a_long_hostile_text_is_soon_printable(part: str) -> None:
    began = time.process_time()
    console.printable(part * (50_000 // len(part)))
    assert time.process_time() - began < 5


def test_json_keeps_its_value_without_invisible_characters() -> None:
    text = json.dumps({"a": "x\u202e\x9b\U000e0041"}, ensure_ascii=False)
    assert console.escaped_json(text).isascii()
    assert json.loads(console.escaped_json(text)) == json.loads(text)


def test_values_of_secret_variables_are_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEPLOY_TOKEN", "correct-horse")
    monkeypatch.setenv("COSIGN_KEY", "cosign.key")
    console._secret_variables.cache_clear()
    try:
        assert console.printable("--set nccl=correct-horse: cosign.key") == "--set nccl=(redacted): cosign.key"
    finally:
        console._secret_variables.cache_clear()
