"""How the images of a target were made, as publishing attaches it; and who signs them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from imagebuild import programs, provenance, signing
from imagebuild.errors import CommandError, ConfigError
from imagebuild.models import Target
from imagebuild.publishing.decide import Choice
from imagebuild.registry.reference import Reference
from imagebuild.render import Renderer


def provenance_with(renderer: Renderer, *, allow_dirty: bool) -> Callable[[Target, Choice], bytes]:
    """What makes the provenance of an image from the results of its build, for several threads.

    It raises ResultError if the build was of another Dockerfile than this checkout renders, and ConfigError if
    something in it came from a folder of the builder, unless `allow_dirty`.
    """
    lock = threading.Lock()

    def make(target: Target, choice: Choice) -> bytes:
        # Equal images of several builds have one provenance: that of the first.
        build = min(choice.builds, key=lambda found: (found.value.started, str(found.path))).value
        with lock:
            recipe, text = renderer.recipe(target), renderer.dockerfile(target).text
        document = provenance.statement(build, choice.platform, recipe, renderer.project.lock, text)
        if (folders := provenance.unpinned(document)) and not allow_dirty:
            listed = ", ".join(folders)
            raise ConfigError(f"{listed} came from a folder that nobody can compare; build without --source")
        return provenance.encode(document)

    return make


def signature_by(signer: signing.Signer) -> Callable[[Iterable[Reference]], None]:
    """What signs images. Raises CommandError if cosign is missing: better now than when images are copied."""
    if not programs.which("cosign"):
        raise CommandError(f"--sign: `cosign` is missing, which signs images; install it: {signing.INSTALL}")
    return lambda images: signing.sign(images, signer)
