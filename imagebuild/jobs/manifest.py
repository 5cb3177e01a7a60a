"""Manifests, batch scripts and the scripts of containers, made from templates. Pure.

The Jinja environment quotes every value for YAML or for a shell, so a template cannot forget to quote a value. Only the
output of filters is not quoted again. Comments use the filter `comment`."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

import jinja2
from markupsafe import Markup

from imagebuild.core.errors import ConfigError, plural
from imagebuild.core.fields import Model
from imagebuild.core.scripts import SCRIPTS
from imagebuild.jobs.compare import WHEEL, comparison_of
from imagebuild.jobs.facts import DATA, GANGS_OF_PODS, Security
from imagebuild.jobs.job import Job
from imagebuild.jobs.offer import enroot_reference

PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./@+-]*(?::[A-Za-z0-9_./@+-]+)*|[0-9]+(?:Ki|Mi|Gi|Ti)")
"""Pattern of texts that need no quotes in YAML. The words in `NOT_TEXT` match this pattern, but need quotes."""
NOT_TEXT = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}
"""Words that some YAML readers read as a boolean or as null."""


def job_text(job: Job) -> str:
    """Return the job as a Slurm batch script, or as Kubernetes objects in YAML. Equal jobs give equal text."""
    if not job.size.scheduler.kubernetes:
        return _fill(quote_shell, f"{job.request.scheduler}.sh.j2", job)
    scripts = {name: _fill(quote_shell, f"{name}.sh.j2", job) for name in ("launcher", "worker")}
    return _fill(quote_yaml, f"{job.request.scheduler}.yaml.j2", job, **scripts)


def report_options(job: Job) -> list[str]:
    """Return the options with which `imagebuild report` judges the job's log."""
    least = job.size.parameters.get("min-bw")
    by_profile = job.comparable and job.least and not least and not job.comparison
    profile = (
        ["--profile", job.profile.name] if by_profile else ["--min-bw", least] if least and not job.comparison else []
    )
    profile += ["--profiles", job.request.profiles] if by_profile and job.request.profiles else []
    profile += [] if job.request.allowed_loss is None else ["--allow-loss", f"{job.request.allowed_loss:g}"]
    if job.size.test.command:
        return ["--profile", job.profile.name]
    return [*profile, "--ranks", str(job.size.run_ranks), "--nodes", str(job.size.run_nodes)]


def comparison_script(
    sides: Sequence[str], command: Sequence[str], *, libraries: str, blocks: int, seed: int, limit: int = 0,
    wheel: str = WHEEL, first: int = 1, error_rate: float | None = None, stops: bool = False,
) -> str:  # fmt: skip
    """Return a bash script that runs a command `blocks` times for each side, after one warm-up of each.

    `libraries` is a folder on the nodes with a folder `nccl-VERSION` for each version of NCCL. A run ends after `limit`
    seconds (0: no limit). A bisection measures block `first` and later ones, states the error rate of the comparison,
    wants the details that NCCL prints from the warm-up, and stops at the first failure. Raises ConfigError if the
    blocks are too few for an interval, if versions need a folder and there is none, or if the sides are images and no
    word of the command contains `{image}`, which stands for the image of the run."""
    if any(side.startswith("image=") for side in sides) and not any("{image}" in word for word in command):
        example = "docker run --rm --gpus all {image} all_reduce_perf -g 8"
        raise ConfigError(f"COMMAND: does not contain {{image}}; write for example: {example}")
    values = comparison_of(sides, libraries=libraries, blocks=blocks, seed=seed, wheel=wheel, first=first)
    values |= {"command": list(command), "limit": limit, "stops": stops}
    template = _environment(quote_shell).get_template("compare.sh.j2")
    return template.render(values, error_rate=f"{error_rate:.6f}" if error_rate else "")


# Functions for templates


def quote_yaml(value: object) -> str:
    """Return a text, number, boolean, list or mapping as YAML in one line. Mappings keep the order of their keys."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Model):
        value = value.model_dump(exclude_none=True)
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{quote_yaml(key)}: {quote_yaml(value[key])}' for key in value)}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(quote_yaml, value))}]"
    text = str(value)
    if isinstance(value, int) or (PLAIN.fullmatch(text) and text.lower() not in NOT_TEXT):
        return text
    # JSON is valid YAML, except for characters that end a line in YAML or are not allowed there.
    quoted = json.dumps(text, ensure_ascii=False)
    return re.sub("[\x7f-\x9f\u2028\u2029\ufeff]", lambda match: f"\\u{ord(match[0]):04x}", quoted)


def yaml_block(text: str, depth: int) -> Markup:
    """Return a text as YAML. A text of several lines becomes a block that is indented by `depth` spaces."""
    lines = text.removesuffix("\n").split("\n")
    if len(lines) == 1 or text[:1].isspace() or not lines[-1] or not "".join(lines).isprintable():
        return Markup(quote_yaml(text))  # noqa: S704 - of YAML, as below
    indented = (f"{' ' * depth}{line}" if line else "" for line in lines)
    return Markup("\n".join(["|" if text.endswith("\n") else "|-", *indented]))  # noqa: S704


def quote_shell(value: object) -> str:
    """Return a text or number as one shell word."""
    return shlex.quote(str(value))


def expanded(text: str) -> Markup:
    """Return a text as one shell word, in which the shell expands only `$NAME` and `${NAME}`."""
    escaped = re.sub(r'["\\`]|\$(?!\{?[A-Za-z_]\w*)', r"\\\g<0>", text)
    return Markup(f'"{escaped}"')  # noqa: S704 - of a shell


def _fill(quote: Callable[[object], str], template: str, job: Job, **scripts: str) -> str:
    size, kube = job.size, job.size.cluster.kubernetes
    of_scheduler = size.scheduler.kubernetes
    data = {
        **vars(job),
        "image": job.image,
        # parts of the job that many templates use
        "name": job.workers.name,
        "test": size.test,
        "cluster": size.cluster,
        "kube": kube,
        "scheduler": of_scheduler,
        "scopes": job.environment.scopes,
        # texts and numbers computed from the job
        "claim": f"{job.workers.name}-channel",
        "image_files": DATA["image_files"],
        "claims": any(feature.claims for feature in size.features.values()),
        "command": shlex.join(["imagebuild", *job.request.words]),
        "report_options": report_options(job),
        "grouped": kube.gang in GANGS_OF_PODS,
        "no_security": Security(),
        "deadline": 60 * (kube.start_minutes + size.test.minutes + 5),
        # The node itself uses port 22. Without an operator, workers start sshd, on a port that needs no root.
        "ssh_port": 2222 if kube.host_network or (of_scheduler and not of_scheduler.mpi_operator) else 22,
    }
    return _environment(quote).get_template(template).render(**data, **scripts)


@cache
def _environment(quote: Callable[[object], str]) -> jinja2.Environment:
    environment = jinja2.Environment(  # noqa: S701 - what it fills is not HTML; `finalize` quotes
        loader=jinja2.FileSystemLoader([Path(__file__).with_name("templates"), SCRIPTS]), auto_reload=False,
        finalize=lambda value: value if isinstance(value, Markup) else quote(value),
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    environment.filters |= {
        "block": yaml_block,
        # The text is joined to one line, so that no part of the text is outside the comment.
        "comment": lambda text: Markup(" ".join(str(text).splitlines())),  # noqa: S704
        "expanded": expanded,
        "words": lambda words: Markup(shlex.join(words)),  # noqa: S704 - of a shell
        "code": Markup,
        "enroot": enroot_reference,
        "file_name": lambda text: re.sub(r"[^A-Za-z0-9_.-]+", "+", text),
    }
    environment.globals |= {"KEY_PORT": 2221, "plural": plural}
    return environment
