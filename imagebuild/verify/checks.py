"""Choose the checks of an image, run them, and judge their output."""

from __future__ import annotations

import hashlib
import re
import secrets
import shlex
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from itertools import takewhile
from pathlib import Path
from types import MappingProxyType
from typing import Any

from imagebuild.bench.models import Diagnostic, Launch, Measurement, Results
from imagebuild.bench.profiles import Profile
from imagebuild.bench.verification import SPEED, CheckResult, Outcome, Surroundings
from imagebuild.core import console
from imagebuild.core.errors import ConfigError, NothingSelected, suggestion
from imagebuild.core.fields import axis_facts, matches
from imagebuild.core.scripts import shared_script
from imagebuild.project.component import Check, nodes_needed, parse_need
from imagebuild.project.load import hash_of_check, script_of
from imagebuild.project.project import Project
from imagebuild.verify.files import Tree
from imagebuild.verify.layers import is_a
from imagebuild.verify.runner import Command, Execution, Session, shell_script

IMAGE = "image"
"""First part of the names of checks that only read the image's files. Names of other checks begin with a component."""
SAME_FILES = "same-files"
"""Name of the check that tests whether the runner `exec:PREFIX` runs commands in the expected image."""
SKIPPED_STATUS = 77
"""Exit status of a check that cannot run in its surroundings. The last line of the check's output is the reason."""
OUTPUT_LIMIT = 20_000
"""Maximum number of characters of a check's output in the results. Earlier output is cut off."""
LAST_LINE = 300
"""Maximum number of characters of the last line of output in the reason of a failed check."""
ANY_VERSION = r"[0-9][0-9A-Za-z.+:~-]*"
"""Regular expression that replaces `{version}` if the component's version in the image is unknown."""
FAILED_LINE = (
    """set -E; trap 'mapfile -t lines <<< "$BASH_EXECUTION_STRING"; echo "failed: ${lines[LINENO - 1]}"' ERR"""
)
"""First line of each check's script. If a command fails, the output of the check ends with the line of the command."""
UNCOMPARED = "any version accepted: the image's labels do not name the version of this component"


@dataclass(frozen=True)
class ImageCheck:
    """A check of an image's files or of a component.
    If the check was chosen for an image, `script` and `version` are also set."""

    component: str
    name: str
    description: str
    check: Check | None = None
    """None for a check that only reads the image's files."""
    script: str = ""
    version: str | None = None
    """Version of the component; None if the image's labels do not name the version."""
    unfit: str = ""
    """Reason why the check does not apply to the image's axis values (such as `cuda`); empty if the check applies."""

    def __str__(self) -> str:
        return f"{self.component}/{self.name}"

    @property
    def runs_alone(self) -> bool:
        """Whether no other check may run at the same time: it is a benchmark, or uses GPUs, RDMA devices or Slurm."""
        needs = {parse_need(need)[0] for need in self.check.needs} if self.check else set()
        return bool(needs - {"nodes"} or (self.check and self.check.results))

    @property
    def nodes(self) -> int:
        """Number of nodes that the check needs."""
        return nodes_needed(self.check.needs) if self.check else 1


def select_checks(
    project: Project, image_checks: Mapping[str, str], components: Mapping[str, str | None] | None = None,
    patterns: Sequence[str] = (), axes: Mapping[str, str] | None = None,
) -> list[ImageCheck]:  # fmt: skip
    """Return the checks that match a pattern: checks of the image's files, and checks of the image's components.

    `image_checks` maps the names of checks of files to what the checks prove. `components` maps components to versions;
    default: all components of the project, without versions. Each pattern is a glob `COMPONENT/CHECK`, or the name of a
    component, which selects all checks of the component; default: all checks. If the image's `axes` (such as `cuda`)
    are unknown, no check is marked as unfit. Raises ConfigError for a glob that matches no check of the project and for
    a script that cannot be read, NothingSelected if no glob matches a check of this image."""
    owned: Mapping[str, str | None] = dict.fromkeys(project.components) if components is None else components
    listed = [ImageCheck(IMAGE, name, text) for name, text in image_checks.items()]
    for component, document in project.components.items():
        listed += [ImageCheck(component, check.name, check.description, check) for check in document.model.checks]
    chosen = set()
    for pattern in patterns or ["*/*"]:
        glob = pattern if "/" in pattern else f"{pattern}/*"
        fitting = {str(entry) for entry in listed if fnmatchcase(str(entry), glob)}
        if not fitting:
            known = {name for entry in listed for name in (str(entry), entry.component)}
            raise ConfigError(f"--only {pattern}: no check matches{suggestion(pattern.removesuffix('/*'), known)}")
        chosen |= fitting
    selected = []
    for entry in listed:
        if str(entry) not in chosen or entry.component not in (IMAGE, *owned):
            continue
        check, script, unfit = entry.check, "", ""
        if check:
            script = script_of(project, entry.component, check)
            if axes and not matches(check.when, axis_facts(axes)):
                unfit = "only for " + ", ".join(f"{axis} {'|'.join(values)}" for axis, values in check.when.items())
        selected.append(replace(entry, script=script, version=owned.get(entry.component), unfit=unfit))
    if not selected:
        raise NothingSelected(
            f"--only {' '.join(patterns)}: these checks belong to components that this image lacks; "
            "run `imagebuild verify --list` to see the checks of all components"
        )
    return selected


def missing_needs(needs: Iterable[str], have: Surroundings) -> str:
    """Return why a check cannot run, such as `no gpu here` or `needs 2 GPUs, 1 here`; empty if the check can run."""
    problems = []
    for what, least in map(parse_need, needs):
        count = int(getattr(have, what))
        if count < least:
            name = "gpu" if what == "gpus" else what
            units = {"gpus": "GPUs", "nodes": "nodes"}
            problem = f"needs {least} {units[what]}, {count} here" if count else f"no {name} here"
            problems.append(f"{problem}: {have.why[name]}" if have.why.get(name) else problem)
    return "; ".join(problems)


def skipped_result(planned: ImageCheck, reason: str) -> CheckResult:
    """Return the result `skipped`, with this reason, for a check that was not started."""
    return CheckResult(
        component=planned.component, check=planned.name, outcome="skipped", reason=reason, sha256=sha256_of(planned)
    )  # fmt: skip


def sha256_of(planned: ImageCheck) -> str:
    """Return the hash of all that determines the result of a check; empty for a check that only reads files."""
    return hash_of_check(planned.check, planned.script) if planned.check else ""


def run_check(
    planned: ImageCheck, session: Session, log: Path, environment: Mapping[str, str] = MappingProxyType({}),
    launch: Launch | None = None,
) -> CheckResult:  # fmt: skip
    """Run a check and return its result. If the check cannot run here, return a skipped result with the reason.

    `launch` contains what the user said about the benchmarks. It is completed and stored with each benchmark result.

    The check's own variables override those in `environment`. Raises CommandError if the runner fails; a check that
    fails does not raise an error."""
    check = planned.check
    assert check, "only checks that run a command are planned"
    launch = launch_of(check, session, environment, launch or Launch())
    helpers = ("messages", "merged") if "keep_messages" in planned.script else ()
    lines = [FAILED_LINE, *map(shared_script, helpers), planned.script]
    command = Command(
        script="\n".join(lines), user=check.user, timeout_s=check.timeout_s,
        environment={**environment, **check.environment},
        nodes=launch.nodes or 1, ranks=check.ranks, log=log,
    )  # fmt: skip
    needs = [need for need in check.needs if command.nodes == 1 or not need.startswith("nodes")]
    needs += [f"nodes>={command.nodes}"] if command.nodes > 1 else []
    missing = planned.unfit or missing_needs(needs, session.surroundings) or session.obstacle(command)
    result = skipped_result(planned, missing)
    if missing:
        return result
    started = datetime.now(UTC).isoformat(timespec="seconds")
    attempt = 1
    while (execution := session.run(command)).timed_out and attempt < check.attempts:
        attempt += 1
    results = None
    outcome: Outcome = "skipped"
    if execution.status == SKIPPED_STATUS and execution.output.strip():
        reason = execution.output.strip().splitlines()[-1]
    else:
        reason = judge_check(check, planned.version, execution, log)
        if check.results:
            from imagebuild.bench import read

            results = read.read_text(str(planned), log.read_text(errors="replace"))
            results = results.with_launch(launch) if any(s.tools for s in results.sources) else Results()
            if execution.status is not None:
                reason = "; ".join(filter(None, (reason, correctness_problem(results, check.results))))
        outcome = "failed" if reason else "passed"
        if not reason and planned.version is None and "{version}" in (check.expect or ""):
            reason = UNCOMPARED
    if attempt > 1:
        late = f"attempt {attempt} of {check.attempts}; earlier attempts did not end within {command.timeout_s} s"
        reason = "; ".join(filter(None, (reason, late)))
    return result.model_copy(
        update={
            "outcome": outcome, "reason": reason, "started": started, "results": results,
            "output": console.redacted_text(execution.output[-OUTPUT_LIMIT:]),
            "seconds": round(execution.seconds, 3), "command": execution.argv, "status": execution.status,
            "timeout": execution.timed_out, "environment": dict(execution.environment),
        }
    )  # fmt: skip


COMPARED = 192
"""Number of compared files outside of the folders that are compared completely."""
COMPARE_S = 300
"""Time limit of the comparison in seconds. The files may be on a network file system."""


def expected_files(tree: Tree, folders: Collection[str], trees: Collection[str]) -> dict[str, str]:
    """Map the paths of files that identify an image to their hashes, and the paths of symlinks to their targets.
    These are all files in `folders` and below `trees`, those of the package database, and some others."""
    below = tuple(f"{folder}/" for folder in trees)
    complete = [e for e in tree if e.path.rpartition("/")[0] in folders or e.path.startswith(below)]
    others = [entry for entry in tree if entry.sha256 and is_a("recognisable", entry.path)]
    # Sorting by hash selects files from all parts of the image.
    others.sort(key=lambda entry: (not entry.path.startswith("var/"), entry.sha256))
    return {
        f"/{entry.path}": entry.target if entry.kind == "symlink" else entry.content_sha256
        for entry in (*complete, *others[:COMPARED])
        if entry.kind in ("file", "symlink") and entry.mode & 0o004 and re.fullmatch(r"[^\\\n]+", entry.path)
    }


def compare_files(
    session: Session, tree: Tree, folders: Collection[str], trees: Collection[str], digest: str, *, log: Path
) -> CheckResult:
    """Return whether the session runs in the image with this tree and digest, as the result of the check SAME_FILES.
    Everything in `folders` and below `trees` is compared, and some other files."""
    result = CheckResult(component=IMAGE, check=SAME_FILES, outcome="passed")
    expected = expected_files(tree, folders, trees)
    if not expected:
        return result.model_copy(update={"outcome": "skipped", "reason": "the image has no files to compare"})
    # The image gets neither the expected hashes nor the one of the nonce, so that a false program cannot repeat them.
    nonce = secrets.token_hex(32)
    below = tuple(f"/{folder}/" for folder in trees)
    files = [path for path in expected if path.rpartition("/")[0][1:] not in folders and not path.startswith(below)]
    lists = {"nonce": [nonce], "folders": folders, "trees": trees, "files": files}
    script = "\n".join([*(f"{k}=({shlex.join(words)})" for k, words in lists.items()), shell_script(SAME_FILES)])
    execution = session.run(Command(script, user=session.surroundings.user, timeout_s=COMPARE_S, log=log))
    # Names of files and targets of links may contain other ends of lines, and forged hashes.
    lines = log.read_bytes().decode(errors="replace").removesuffix("\n").split("\n")
    hashes = takewhile(lambda line: not line.startswith("link "), lines)
    found = {path: sha256 for line in hashes for sha256, path in re.findall(r"^([0-9a-f]{64})  (.+)$", line)}
    links = [line.removeprefix("link ") for line in lines if line.startswith("link ")]
    found |= dict(zip(links, lines[-len(links) :] if links else (), strict=True))
    proof = found.pop("-", "")
    differing = [path for path, value in expected.items() if found.get(path) != value]
    # A path that the tree has in another form, such as one that only root can read, was not added.
    differing += [path for path in found if path not in expected and not tree.get(path[1:])]
    differing = sorted(path for path in differing if not is_a("changed-by-runtime", path))
    outcome, reason = "passed", ""
    if execution.status != 0:
        outcome, reason = "skipped", "sha256sum, xargs or readlink cannot be run in the image"
    elif proof != hashlib.sha256(nonce.encode()).hexdigest():
        outcome, reason = "failed", f"sha256sum in the image computes wrong hashes; start {digest} instead"
    elif differing:
        differ = f"{len(differing)} of {len(expected)} files differ, such as {differing[0]}"
        outcome, reason = "failed", f"{differ}: the runner runs commands in another image; start {digest} instead"
    return result.model_copy(
        update={
            "outcome": outcome, "reason": reason, "command": execution.argv, "status": execution.status,
            "output": "\n".join(differing[:COMPARED]) or f"{len(expected)} files are identical",
            "seconds": round(execution.seconds, 3),
        }
    )  # fmt: skip


def judge_check(check: Check, version: str | None, execution: Execution, log: Path | None = None) -> str:
    """Return why a check failed; empty if the check passed."""
    if execution.problem:
        return execution.problem
    if execution.timed_out:
        return f"did not end within {check.timeout_s} s"
    if execution.status:
        last = console.redacted_text(execution.output.strip().rpartition("\n")[2][:LAST_LINE])
        return f"exit status {execution.status}{last and ': '}{last}"
    if check.expect is None:
        return ""
    pattern = check.expect.replace("{version}", re.escape(version) if version is not None else ANY_VERSION)
    # The output in memory may lack its beginning; the log is complete.
    text = log.read_text(errors="replace") if log else execution.output
    return "" if re.search(pattern, text, re.MULTILINE) else f"the output does not match '{pattern}'"


def correctness_problem(results: Results, tool: str) -> str:
    """Return why the data of a benchmark are wrong, or why there are no results; empty if the data are right."""
    from imagebuild.bench import judge

    of_tool: Mapping[str, Sequence[Measurement | Diagnostic]] = {
        "nccl-tests": results.runs, "nvbandwidth": results.tests, "dcgmi": results.diagnostics,
    }  # fmt: skip
    found = of_tool.get(tool, [table for table in results.tables if table.tool == tool])
    # A benchmark waives a test that does not fit the machine. Waived tests alone prove nothing.
    claims = [(item.subject, judge.data_claim(item)) for item in found if item.verdict != "waived"]
    if not claims:
        return f"the output contains no result of {tool}"
    return next((f"{subject}: {claim.reason}" for subject, claim in claims if claim.standing() == "failed"), "")


def launch_of(check: Check, session: Session, environment: Mapping[str, str], told: Launch) -> Launch:
    """Return what is known about the benchmark of a check. `told` contains what the user said.

    If the user names a number of nodes, checks for several nodes use this number."""
    place, nodes = session.surroundings, nodes_needed(check.needs)
    facts: dict[str, Any] = {
        "ranks": check.ranks if check.ranks > 1 else None,
        "nodes": max(nodes, told.nodes or nodes) if nodes > 1 else 1,
        "one_host": session.starts_image,  # the nodes are containers of one engine
    }
    if check.results:
        from imagebuild.bench.ceilings import forced_classes

        facts["algorithms"] = forced_classes({**place.environment, **environment, **check.environment})
    return told.model_copy(update=facts)


def judged_speed(
    result: CheckResult, check: Check, profile: Profile, allowed: Collection[str] = ()
) -> CheckResult | None:
    """Judge a benchmark as `imagebuild report` does. Return the judgement as an additional result; None if `check` is
    not a benchmark. The result fails if a claim failed or is open, like a report.

    `result` is the result of the benchmark, which says whether the data are right."""
    if not check.results or result.outcome == "skipped":
        return None
    from imagebuild.bench import judge

    speed = CheckResult(
        component=result.component, check=f"{result.check}{SPEED}", outcome="skipped", sha256=result.sha256
    )
    if result.outcome == "failed" or result.results is None:
        return speed.model_copy(update={"reason": "the check of the data failed, so the speed is not judged"})
    judged = judge.judge_results(result.results, profile)
    subjects: defaultdict[str, list[str]] = defaultdict(list)
    for judgement in judged:
        worst = judgement.worst(allowed)
        if worst.standing(allowed) in ("failed", "open"):
            subjects[f"{worst.state}: {worst.text(allowed)}"].append(judgement.subject)
        for hint in judgement.hints:
            if hint.is_wrong:
                subjects[f"{hint.kind}: {hint}"].append(judgement.subject)
    failures = [
        text if len(names) == len(judged) else f"{', '.join(names)}: {text}" for text, names in subjects.items()
    ]
    passed = [judgement.speed.reason for judgement in judged if judgement.speed.standing() == "passed"]
    outcome: Outcome = "failed" if failures else "passed" if passed else "skipped"
    others = [judgement.speed.reason for judgement in judged if judgement.speed.reason]
    reason = "; ".join(failures) or [*passed, *others, "the results contain no speed that can be judged"][0]
    output = "\n".join(f"{j.subject}: {claim.state}: {claim.text(allowed)}" for j in judged for claim in j.claims)
    return speed.model_copy(update={"outcome": outcome, "reason": reason, "output": output, "judgements": judged})
