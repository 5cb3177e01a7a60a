"""What registries answer, and what a request has to ask for. Pure."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import requests

from imagebuild.errors import CommandError

HINTS = {
    HTTPStatus.UNAUTHORIZED: "log in with `docker login`",
    HTTPStatus.FORBIDDEN: "log in with `docker login` as someone who may do this",
}
TEXT = 300
"""Characters of an answer that are shown."""


def pull(repository: str) -> tuple[str, ...]:
    """What a token for reading a repository is asked for."""
    return (f"repository:{repository}:pull",)


def push(repository: str) -> tuple[str, ...]:
    """What a token for reading and writing a repository is asked for."""
    return (f"repository:{repository}:pull,push",)


def delete(repository: str) -> tuple[str, ...]:
    """What a token for deleting in a repository is asked for."""
    return (f"repository:{repository}:delete,pull,push",)


def problems(answer: requests.Response) -> list[dict[str, Any]]:
    """The errors that a registry lists; none if the answer is something else."""
    try:
        found = answer.json()
    except ValueError:
        return []
    listed = found.get("errors") if isinstance(found, dict) else None
    return [item for item in listed if isinstance(item, dict)] if isinstance(listed, list) else []


def codes(answer: requests.Response) -> tuple[str, ...]:
    """`BLOB_UNKNOWN`, …"""
    return tuple(str(item.get("code", "")) for item in problems(answer))


def said(answer: requests.Response) -> str:
    """`403 (DENIED: requested access to the resource is denied)`."""
    listed = [
        ": ".join(filter(None, (str(item.get("code", "")), str(item.get("message") or ""), _detail(item))))
        for item in problems(answer)
    ]
    text = "; ".join(dict.fromkeys(listed)) or str(answer.reason or "")
    return f"{answer.status_code} ({text[:TEXT]})"


def document(answer: requests.Response, what: str) -> dict[str, Any]:
    """The answer as JSON. Raises CommandError if it is none."""
    try:
        found = answer.json()
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise CommandError(f"{what}: the answer is not what a registry answers with; is it one?")
    return found


def _detail(problem: dict[str, Any]) -> str:
    detail = problem.get("detail")
    if isinstance(detail, dict):
        detail = detail.get("digest") or detail.get("Digest") or ""
    return detail if isinstance(detail, str) else ""


def expect(answer: requests.Response, what: str, *statuses: int) -> None:
    """Raises CommandError for another status."""
    if answer.status_code in statuses:
        return
    hint = HINTS.get(HTTPStatus(answer.status_code)) if answer.status_code in set(HTTPStatus) else None
    raise CommandError(f"{what}: the registry answered {said(answer)}" + (f"; {hint}" if hint else ""))
