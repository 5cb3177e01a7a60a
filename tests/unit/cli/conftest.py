"""Commands on a small project, and on one with a registry."""

from __future__ import annotations

from pathlib import Path

import pytest

from imagebuild.oci import registry
from imagebuild.project import revision
from tests.conftest import Files
from tests.publish_fakes import COMMIT, HOST, ORIGIN, Site
from tests.registry_fake import FakeRegistry
from tests.unit.conftest import Call


@pytest.fixture
def call(tiny: Files, command: Call, monkeypatch: pytest.MonkeyPatch) -> Call:
    monkeypatch.chdir(tiny.root)
    return command


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    site = Site(tmp_path, fake=FakeRegistry(HOST))
    monkeypatch.chdir(site.files.root)
    monkeypatch.setattr(registry, "connect_registry", lambda _: site.fake)
    monkeypatch.setattr(revision, "current_revision", lambda *_: COMMIT)
    real = revision.origin_of_build
    own = lambda folder, environ: real(folder, environ) if "GITHUB_REPOSITORY" in environ else ORIGIN  # noqa: E731
    monkeypatch.setattr(revision, "origin_of_build", own)
    return site
