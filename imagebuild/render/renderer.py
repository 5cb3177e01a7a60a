"""The Dockerfile of a target, rendered from templates."""

import hashlib
import json
import re
import shlex
from collections.abc import Iterable, Sequence

from imagebuild import __version__
from imagebuild.core.errors import ConfigError, Mistakes
from imagebuild.core.fields import axis_facts, matches
from imagebuild.core.files import read_inside
from imagebuild.core.yaml import dotted_key
from imagebuild.project.load import hash_of_check, script_of
from imagebuild.project.plan import Target
from imagebuild.project.project import Project
from imagebuild.render import image
from imagebuild.render.recipe import BuildStage, Recipe
from imagebuild.render.resolve import SharedParts, gpu_capabilities, resolve_recipe
from imagebuild.render.stages import Dockerfile, check_appended, check_stages, first_mistake
from imagebuild.render.templates import Templates

MAY_CHANGE_FOLDERS = re.compile(
    r"/out/(\w+|\{[\w,]+\}|\$\w+)/(tmp|root|run|s?bin|lib(64)?|var/(tmp|run))\b"
    r"|\b(umask|chown|rsync|cpio|unzip)\b|(-C|--directory[= ]|-x \S+|-d) ?[\"']?/out/"
    r"|cp -(?=\w{0,30}[ap])\w++ (?:(?!cp -).)*/\. [\"']?/out/\w+/?[\"'\s]"
)
"""Matches commands that can leave folders of the base image in /out/ as another kind of file, or with another mode or
owner. `mkdir` and `install` make folders as they are there."""


class Renderer:
    """Renderer of the Dockerfiles of a project. Build stages that several targets share are rendered only once."""

    def __init__(self, project: Project) -> None:
        self.project = project
        self._templates = Templates(project)
        self._shared = SharedParts(project)
        self._recipes: dict[str, Recipe] = {}
        self._stages: dict[BuildStage, str] = {}
        """Maps each build stage to its text in the Dockerfile."""
        self._installs: dict[tuple[str, str, str], str] = {}
        """Maps component, version and variant to the instructions that install the component in the final stage."""

    def recipe(self, target: Target) -> Recipe:
        if target.id not in self._recipes:
            self._recipes[target.id] = resolve_recipe(self.project, target, self._shared)
        return self._recipes[target.id]

    def check(self, targets: Iterable[Target]) -> None:
        """Render targets to find mistakes in templates. Raises ConfigError with all mistakes."""
        mistakes = Mistakes()
        for target in targets:
            try:
                self.dockerfile(target)
            except ConfigError as error:
                mistakes.texts.append(str(error))
        mistakes.stop_if_any()

    def dockerfile(self, target: Target, options: Sequence[str] = ()) -> Dockerfile:
        """Render the self-contained Dockerfile of a target.

        `options` are added to the `imagebuild render` command in the comment at the top. A source without a pin is
        rendered as `unresolved`, which no builder accepts. Raises ConfigError if a template is wrong."""
        recipe = self.recipe(target)
        components, variant = recipe.components, target.axes["variant"]
        words = ("imagebuild", "render", target.id, *self.project.changes.options, *options)
        installs = [
            self._install(part.name, part.version, variant)
            for part in components
            if self.project.template(f"components/{part.name}/install.j2").exists()
        ]
        if recipe.image.append:
            place = ("images", target.image, "append")
            check_appended(recipe.image.append, f"{self.project.matrix.at(*place)}: {dotted_key(place)}")
        text = self._templates.render(
            "Dockerfile.j2", target=target.model_dump(mode="json"), imagebuild=__version__,
            command=" ".join(shlex.join(words).split()), lock_hash=recipe.lock_hash, base=recipe.base,
            foreign=bool(recipe.image.base or self.project.changes.base_image),
            description=recipe.image.description, stages=[self.stage(target, stage).strip() for stage in recipe.stages],
            packages=image.package_arguments(recipe),
            repositories=[
                image.package_repository(part.name, part.repository)
                for part in components
                if part.repository and (own := part.component.repository) and not own.configured
            ],
            before_install="".join(part.component.packages.before_install for part in components),
            after_install="".join(part.component.packages.after_install for part in components),
            libraries=image.library_folders(recipe),
            copied=recipe.copied,
            installs=installs, labels=image.image_labels(recipe), user=image.numeric_user(recipe, self.project.matrix),
            env=image.image_environment(recipe, self.project.matrix), cmd=json.dumps(recipe.image.cmd),
            append=recipe.image.append.strip(),
        )  # fmt: skip
        check_stages(text, f"{self.project.template('Dockerfile.j2')}:1", recipe.base)
        return Dockerfile(text)

    def key(self, target: Target) -> str:
        """Return the digest of everything that an image depends on: Dockerfile, date of the lock, checks.

        Comments in a Dockerfile do not change the digest. Raises ConfigError if a script or a template cannot be read.
        """
        entry, axes = self.project.matrix.model.images[target.image], axis_facts(target.axes)
        parts = [*list(self.dockerfile(target).stages.values())[-1:], str(self.project.lock.date)]
        parts.append(repr((entry.waivers, entry.size_limit_mb)))
        for name in target.components:
            component = self.project.components[name].model
            parts.append(repr(component.waivers))
            checks = (check for check in component.checks if matches(check.when, axes))
            parts += [hash_of_check(check, script_of(self.project, name, check)) for check in checks]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def stage(self, target: Target, stage: BuildStage) -> str:
        """Return the text of a build stage. Raises ConfigError if its template is wrong."""
        if stage in self._stages:
            return self._stages[stage]
        name, component = stage.name, stage.component
        own = stage.packages if component.repository else None
        values = {**stage.values, "signed": image.package_repository(name, own) if own else None}
        if stage.toolkit:
            values["gpu"] = gpu_capabilities(self.project, target, stage.toolkit)
        summary = f"{component.title}: {component.description}. {component.license}, {component.homepage}"
        summary += f", tag {stage.tag}" if stage.tag else ""
        heading = self._templates.rule(name, summary)
        template = f"components/{name}/build.j2"
        text = self._templates.render(template, name, **values)
        path = self.project.template(template)
        line, problem = first_mistake(text)
        if problem:
            source = read_inside(self.project.folders, path)
            place = source.rfind(line)
            if place < 0 and (place := source.find("file(")) >= 0:  # the template inserts the line
                problem += "; `file(…)` inserts the text of a file: put it into a heredoc"
            number = source.count("\n", 0, max(0, place)) + 1
            raise ConfigError(f"{path}:{number}: {problem}")
        if not re.search(rf"^(?i:FROM) .* (?i:AS) {name}$", text, re.MULTILINE):
            raise ConfigError(f"{path}:1: has no stage {name}; write `FROM … AS {name}`")
        last = re.findall(r"^(?i:FROM) .*$", text, re.MULTILINE)[-1]
        own_last = re.fullmatch(rf"(?i:FROM) (?!.*scratch ).* (?i:AS) {name}", last)
        if own_last and not component.stage_only and MAY_CHANGE_FOLDERS.search(text):
            text += "\n" + self._templates.render("folders.j2", name=name)
        return self._stages.setdefault(stage, f"{heading}\n{text}")

    def _install(self, name: str, version: str, variant: str) -> str:
        if (name, version, variant) not in self._installs:
            template = f"components/{name}/install.j2"
            text = self._templates.render(template, name, version=version, variant=variant)
            check_appended(text, f"{self.project.template(template)}:1")
            self._installs[name, version, variant] = text.strip()
        return self._installs[name, version, variant]
