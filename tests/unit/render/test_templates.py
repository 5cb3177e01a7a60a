import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from imagebuild.core.errors import ConfigError
from imagebuild.core.run import Dialogue, ProgramEnded
from imagebuild.render import sandbox, templates
from imagebuild.render.templates import Templates
from tests.conftest import ROOT, TOOL, Files

PLACE = "components/tool/build.j2"
HOSTILE = yaml.safe_load((ROOT / "tests/data/render/hostile.yaml").read_text())


@pytest.mark.parametrize("row", HOSTILE, ids=[str(row.get("build", row))[:60] for row in HOSTILE])
def test_a_template_cannot_attack(tiny: Files, monkeypatch: pytest.MonkeyPatch, row: dict[str, Any]) -> None:
    monkeypatch.setattr(templates, "SECONDS", 1.0)
    monkeypatch.setenv("TOKEN", "hunter2")
    tool = tiny.root / "dockerfiles/components/tool"
    for path in (tiny.root.parent / "secret", tiny.root / "secret", tiny.root / ".git/config"):
        path.parent.mkdir(exist_ok=True)
        path.write_text("hunter2")
    tiny.component("tool", TOOL, row.get("build") or f"{{{{ {row['nested'] * 20_000}1 }}}}")
    for name, target in row.get("link", {}).items():
        (tool / name).parent.mkdir(exist_ok=True)
        (tool / name).symlink_to(target)
    (tool / "files").mkdir(exist_ok=True)
    if "pipe" in row:
        os.mkfifo(tool / row["pipe"])
    if "giant" in row:
        with (tool / row["giant"]).open("wb") as file:
            file.truncate(1 << 40)
    filled, values = Templates(tiny.load()), {"name": "tool", "version": "1", "stage": {"a": "b"}, "wheels": [1]}
    if "says" not in row:
        assert filled.render(PLACE, "tool", **values) == row["yields"] + "\n"
        return
    with pytest.raises(ConfigError) as caught:
        filled.render(PLACE, "tool", **values)
    message = str(caught.value)
    assert row["says"] in message
    assert "hunter2" not in message
    assert message.isprintable()
    assert filled.rule("a", "b").startswith("# ---- a ---")  # the process works, or another one has been started


@pytest.mark.programs
def test_the_process_has_no_variables_and_opens_no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "hunter2")
    for code, printed in (("{'text': str(dict(os.environ))}", "PYTHONPATH"), ("open('/')", "Too many open files")):
        program = f"import os, sandbox\nsandbox.fill = lambda *_: {code}\nsandbox.main(1 << 29, 5.0)"
        argv = [sys.executable, "-c", program]
        dialogue = Dialogue(argv, {"PYTHONPATH": os.pathsep.join([str(Path(sandbox.__file__).parent), *sys.path])})
        dialogue.send('["", {}]')
        try:
            answer = dialogue.receive(1 << 20)
        except ProgramEnded as end:
            answer = end.args[1]
        assert printed in answer
        assert "hunter2" not in answer


@pytest.mark.programs
def test_the_process_is_started_again_if_the_thread_that_started_it_has_ended(tiny: Files) -> None:
    filled = Templates(tiny.load())
    thread = threading.Thread(target=filled.rule, args=("a", "b"))
    thread.start()
    thread.join()
    for _ in range(20):  # the kernel ends the process soon after the thread
        time.sleep(0.02)
        assert filled.rule("a", "b").startswith("# ---- a ---")
