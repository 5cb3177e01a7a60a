"""Conditions of components name what an image has, not which image it is."""

from __future__ import annotations

from imagebuild.project import Project


def test_no_component_knows_an_image_by_its_name(project: Project) -> None:
    named = {
        f"{name}: {entry.when}"
        for name, document in project.components.items()
        for key in ("supports", "excludes", "facts", "env", "checks", "waivers")
        for entry in getattr(document.model, key)
        if "image" in entry.when
    }
    assert named == set()
