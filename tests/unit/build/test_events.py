"""Events as BuildKit writes them, whole and in pieces."""

import base64
import json
from typing import Any

from imagebuild.build import EventStream, shorten_command

T0, T1, T2 = (f"2026-01-01T00:00:0{n}.123456789Z" for n in range(3))


def vertex(digest: str, name: str, **more: Any) -> dict[str, Any]:
    return {"vertexes": [{"digest": digest, "name": name, **more}]}


def log(digest: str, text: str) -> dict[str, Any]:
    return {"logs": [{"vertex": digest, "stream": 2, "data": base64.b64encode(text.encode()).decode()}]}


def read(*events: Any, indent: int | None = None, size: int = 7) -> EventStream:
    text = "\n".join(e if isinstance(e, str) else json.dumps(e, indent=indent) for e in events) + "\n"
    stream = EventStream()
    for start in range(0, len(text), size):
        list(stream.feed(text[start : start + size]))
    stream.close()
    return stream


RUN = "[open-cuda13_0 linux/amd64->arm64 ucx 2/3] RUN make"


def test_one_object_a_line_and_indented_objects_are_read_alike() -> None:
    events = [vertex("a", RUN, started=T0), vertex("a", RUN, started=T0, completed=T2)]
    steps = [read(*events, indent=i).steps({"ucx": "ucx"}) for i in (None, 2)]
    assert steps[0] == steps[1]
    (step,) = steps[0]
    assert (step.target, step.stage, step.component, step.cached, step.seconds) == (
        "open-cuda13_0", "ucx", "ucx", False, 2.0,
    )  # fmt: skip


def test_lines_that_are_no_events_are_kept_as_messages() -> None:
    stream = read("WARNING: something", vertex("a", RUN), "ERROR: failed to solve", "and why")
    assert stream.messages == ["WARNING: something", "ERROR: failed to solve", "and why"]


def test_a_step_that_two_targets_share_ran_once() -> None:
    ran = vertex("a", RUN, started=T0, completed=T1)
    again = vertex("a", RUN.replace("13_0", "13_5"), started=T2, completed=T2, cached=True)
    (step,) = read(ran, again).steps({})
    assert not step.cached
    assert step.seconds == 1.0


def test_a_step_that_was_only_looked_up_did_not_run() -> None:
    """Two targets have an equal step under two digests: BuildKit runs one of them, and lets the other end at once."""
    looked_up = vertex("a", RUN, started=T0, completed=T0.replace("456789", "999999"))
    ran = vertex("b", RUN.replace("13_0", "13_5"), started=T0, completed=T1)
    assert [step.cached for step in read(looked_up, ran).steps({})] == [True, False]
    # It may still run, or fail.
    (step,) = read(looked_up, vertex("a", RUN, started=T1, completed=T2)).steps({})
    assert (step.cached, step.seconds) == (False, 1.0)
    (step,) = read(vertex("a", RUN, started=T0, completed=T0, error="no such file")).steps({})
    assert not step.cached


def test_a_step_whose_layers_come_from_a_registry_did_not_run() -> None:
    pull = {"statuses": [{"vertex": "a", "id": f"sha256:{'0' * 64}", "total": 180, "started": T0}]}
    unpack = {"statuses": [{"vertex": "a", "id": f"extracting sha256:{'0' * 64}", "started": T1}]}
    looked_up = vertex("a", RUN, started=T0, completed=T0, cached=True)
    for events in ([looked_up, pull], [pull], [unpack]):
        (step,) = read(*events, vertex("a", RUN, started=T0), vertex("a", RUN, started=T0, completed=T2)).steps({})
        assert step.cached


def test_a_step_that_was_looked_up_and_then_run_ran() -> None:
    (step,) = read(
        vertex("a", RUN, started=T0, completed=T0, cached=True), vertex("a", RUN, started=T0, completed=T2)
    ).steps({})
    assert (step.cached, step.seconds) == (False, 2.0)


def test_a_step_that_was_cancelled_and_then_run_ran() -> None:
    stream = read(
        vertex("a", RUN, started=T0, completed=T0, error="context canceled: context canceled"),
        vertex("a", RUN, started=T1, completed=T2),
    )
    (step,) = stream.steps({})
    assert (step.cached, step.seconds, step.error) == (False, 1.0, None)
    assert not stream.failed()


def test_a_step_that_gave_way_to_an_equal_one_did_not_run() -> None:
    """Two targets have an equal step under two digests; BuildKit cancels one of them while it looks up its inputs."""
    why = "failed to calculate checksum of ref a::b: context canceled: context canceled"
    cancelled = vertex("a", RUN, started=T0, completed=T0, error=why)
    ran = vertex("b", RUN.replace("13_0", "13_5"), started=T0, completed=T1)
    steps = read(cancelled, ran).steps({})
    assert [(step.cached, step.error) for step in steps] == [(True, None), (False, None)]


def test_a_source_that_is_known_and_then_cannot_be_fetched_failed() -> None:
    stream = read(
        vertex("a", RUN, started=T0, completed=T1), vertex("a", RUN, started=T1, completed=T2, error="failed to fetch")
    )
    assert [v.error for v in stream.failed()] == ["failed to fetch"]


def test_internal_steps_and_halves_of_copy_link_are_no_steps() -> None:
    done = {"started": T0, "completed": T1}
    assert not read(
        vertex("a", "[internal] load build definition", **done),
        vertex("b", "[image 3/9] LINK COPY --link --from=a / /", **done),
        vertex("c", "exporting to image", **done),
    ).steps({})


def test_logs_are_joined_to_lines() -> None:
    stream = read(
        vertex("a", RUN, started=T0), log("a", "first\nsec"), log("a", "ond\nthird"),
        vertex("a", RUN, started=T0, completed=T1),
    )  # fmt: skip
    assert list(stream.vertices["a"].log) == ["first", "second", "third"]


def test_a_step_that_others_took_down_did_not_fail_itself() -> None:
    stream = read(
        vertex("a", RUN, started=T0, completed=T1, error="exit code: 2"),
        vertex("b", RUN, started=T0, completed=T1, error="context canceled: stopped"),
    )
    assert [v.digest for v in stream.failed()] == ["a"]


def test_summary_is_one_short_line() -> None:
    assert shorten_command("RUN --mount=type=bind,from=a,target=/b \\\n   make\n  all") == "RUN make all"
    assert len(shorten_command("RUN " + "x" * 500)) == 80


def test_the_source_of_an_add_is_no_step_and_its_time_counts() -> None:
    """Each build identifies it, cached or not; then it is fetched if the step is executed."""
    name = "[ucx-source 1/1] ADD https://example.org/a.tar /"
    identified = vertex("a", name, started=T0, completed=T0)
    assert read(identified).steps({}) == ()
    cached = vertex("b", name, inputs=["a"], started=T0, completed=T0, cached=True)
    assert [step.cached for step in read(identified, cached).steps({})] == [True]
    fetched = vertex("a", name, started=T0, completed=T1)
    (step,) = read(identified, fetched, vertex("b", name, inputs=["a"], started=T1, completed=T2)).steps({})
    assert (step.cached, step.seconds) == (False, 2.0)
    # Other steps that start from nothing are steps.
    assert len(read(vertex("c", "[x 1/2] FROM docker.io/x", completed=T0)).steps({})) == 1
