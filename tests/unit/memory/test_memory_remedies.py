"""What is recommended when memory has run out, by what there is room for and where."""

from __future__ import annotations

from typing import Any

import pytest

from shardplug import ZeroConfig
from shardplug.oom.remedies import Headroom, Remedy, remedies
from shardplug.plan.run.observed import Call, Running
from shardplug.plan.sizes.optimizer_kinds import OptimizerKind
from shardplug.plan.trace.meta_copy import meta_copy, shapes_of
from shardplug.process.overhead import KEPT, RETURNED
from tests.support.models import TinyLM, tokens

GIB = 2**30


def _running(device: str, **fields: Any) -> Running:
    """A run of two ranks; micro-batches of one sample cannot be made smaller."""
    return Running(
        config=ZeroConfig(**fields),
        meta_model=meta_copy(TinyLM(width=72, hidden=288)),
        call=Call("forward", shapes_of((tokens(0, 0, 0)[:1],)), {}),
        devices=2,
        nodes=1,
        device=device,
        optimizer=OptimizerKind(),
        accumulate=1,
        loop="pytorch",
    )


def _by_setting(found: list[Remedy]) -> dict[str, Remedy]:
    return {remedy.what: remedy for remedy in found}


@pytest.mark.parametrize("short", ["host", "nvme"])
def test_state_goes_only_where_there_is_room_for_it(short: str) -> None:
    """A tier that lacks room is not said to fit, and misses by what it lacks."""
    run = _running("cuda", stage=3)
    planned = run.plan()
    running = run.choice(planned)
    assert running is not None
    tier, size = ("cpu", "host") if short == "host" else ("nvme", "disk")
    least = min(
        getattr(c, size)
        for c in planned.choices
        if c.offload_optimizer == tier and not c.unavailable
    )
    assert least > 2**18
    capacity = int(0.8 * running.device)

    def first(**room: int) -> list[Remedy]:
        return remedies(run, planned, Headroom(capacity, **{"host": GIB, "nvme": GIB, **room}))

    roomy = first()
    assert all(r.over == 0 and r.surely for r in roomy)
    assert any(f'offload_optimizer="{tier}"' in r.what for r in roomy), [r.what for r in roomy]
    tight = first(**{short: least - 1})
    assert tight and not any(r.surely and f'offload_optimizer="{tier}"' in r.what for r in tight)
    choice = next(c for c in planned.choices if getattr(c, size) == least)
    short_by = Headroom(GIB, **{"host": GIB, "nvme": GIB, short: least - 1})
    assert short_by.over(choice) == 1 and not short_by.surely(choice)
    assert not Headroom(GIB, **{"host": GIB, "nvme": GIB, short: least}).over(choice)
    assert not Headroom(GIB).over(choice), "what is not known is not held against it"


def test_memory_that_malloc_keeps_is_given_back_first() -> None:
    """What runs as it is once freed memory goes back needs no other setting."""
    run = _running("cpu", stage=1)
    planned = run.plan()
    running = run.choice(planned)
    assert running is not None
    size = running.device
    options: dict[str, Any] = {"capacity": int(1.2 * size), "error": RETURNED}
    room = Headroom(**options, outset=int(1.3 * size), kept=KEPT, freed=size // 5)
    found = remedies(run, planned, room)
    first, *others = found
    assert first.what.startswith("MALLOC_MMAP_THRESHOLD_=131072 in the environment")
    assert first.surely and first.single and first.freed == size // 5 and first.slower == 1
    assert first.lines[0] == "environment: MALLOC_MMAP_THRESHOLD_=131072"
    assert others and not any("MALLOC" in remedy.what for remedy in others)
    # Where that is not enough, it comes with another setting; and only where it is glibc's.
    least = min(c.device for c in planned.choices if c.stage == 3 and c.offload_optimizer == "none")
    room_for_it = int((1 + RETURNED) * least) + 1
    assert room_for_it < (1 + RETURNED) * size
    tighter = Headroom(room_for_it, error=RETURNED, outset=room_for_it, kept=KEPT, freed=size // 5)
    with_it = remedies(run, planned, tighter)
    assert (
        with_it[0].surely and not with_it[0].over and ", MALLOC_MMAP_THRESHOLD_" in with_it[0].what
    )
    unknown = Headroom(**options, outset=int(1.3 * size), kept=KEPT)
    assert not any("MALLOC" in r.what for r in remedies(run, planned, unknown))
