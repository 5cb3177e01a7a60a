"""The way of a verification: which modules run before the engine is asked for a container."""

import json
import os
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from imagebuild.project import Plan
from imagebuild.render import Renderer
from tests.faulty import answering
from tests.modules_run import count_modules_run

pytestmark = pytest.mark.programs

TARGET = "quickstart-cuda13.5-debian13-runtime"
DOCKER = """#!/bin/sh
case $* in *buildx*) echo v0.30.0 ;; *) echo 29.0.0 ;; esac
"""


class Engine(BaseHTTPRequestHandler):
    """The part of a Docker Engine's API that is used before a container is created."""

    image: dict[str, object]

    def do_GET(self) -> None:
        answers = {"version": {"ApiVersion": "1.47", "Version": "29.0.0"}, "info": {"MemTotal": 1 << 30}}
        body = json.dumps(answers.get(self.path.rpartition("/")[2], self.image)).encode()
        self.send_response(404 if "/containers/" in self.path else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Keep quiet."""


@pytest.fixture
def environ(tmp_path: Path, full_plan: Plan, renderer: Renderer) -> Iterator[dict[str, str]]:
    """Variables that lead to an engine that has the image of the target."""
    target = next(target for target in full_plan.targets if target.id == TARGET)
    labels = {f"imagebuild.component.{name}": version for name, version in target.components.items()}
    Engine.image = {
        "Id": f"sha256:{'1' * 64}", "RepoTags": [target.name], "RepoDigests": [], "Os": "linux", "Architecture": "amd64",
        "Config": {"Labels": labels},
    }  # fmt: skip
    program = tmp_path / "docker"
    program.write_text(DOCKER)
    program.chmod(0o755)
    with answering(ThreadingHTTPServer(("127.0.0.1", 0), Engine)) as address:
        yield {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "DOCKER_HOST": f"tcp://{address}"}


def test_few_modules_run_before_a_verification_has_a_container(environ: dict[str, str]) -> None:
    found = count_modules_run(["verify", TARGET, "--only", "sshd"], "POST /*/containers/create*", environ)
    assert len(found.modules) <= 18, str(found)
