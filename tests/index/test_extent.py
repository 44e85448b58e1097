# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Which stripes are open agrees with a model that is a list of stripes."""

from __future__ import annotations

from errno import ENOENT
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from models.extents import STRIPES_MAX, Extents
from native._sim import ffi, lib
from support.emulation import fewer


def create(stripes: int) -> Any:
    out = ffi.new("bl_extents **")
    assert lib.bl_extents_create(out, stripes) == 0
    return ffi.gc(out[0], lib.bl_extents_destroy)


def fields(view: Any) -> tuple[int, ...]:
    return tuple(getattr(view, name) for name, _ in ffi.typeof(view[0]).fields)


class ExtentsAgreeWithTheModel(RuleBasedStateMachine):
    stripe = st.integers(0, 205)

    @initialize(stripes=st.sampled_from([1, 31, 32, 100, 128, 200]))
    def start(self, stripes: int) -> None:
        self.extents, self.model = create(stripes), Extents(stripes)
        self.generation = 0

    @rule(stripe=stripe)
    def open(self, stripe: int) -> None:
        self.generation += 1
        view = ffi.new("bl_extent_view *")
        expected = self.model.open(stripe, self.generation)
        found = lib.bl_extents_open(self.extents, stripe, self.generation, view)
        assert (found or (view.first_stripe, view.stripe_count)) == expected

    @rule(stripe=stripe, count=st.integers(0, 12) | st.just(STRIPES_MAX + 1), retired=st.booleans())
    def adopt(self, stripe: int, count: int, retired: bool) -> None:
        self.generation += 1
        retired = retired and self.generation % 4 == 0
        view = ffi.new("bl_extent_view *", (self.generation, stripe, count, retired))
        expected = self.model.adopt(stripe, count, self.generation, retired)
        assert lib.bl_extents_adopt(self.extents, view) == expected

    @rule(stripe=stripe, retire=st.booleans(), own=st.booleans())
    def end(self, stripe: int, retire: bool, own: bool) -> None:
        views = self.model.views()
        if views and own:
            stripe = views[stripe % len(views)][1]
        if retire and stripe % 5 == 0:
            assert lib.bl_extents_retire(self.extents, stripe) == self.model.retire(stripe)
        else:
            assert lib.bl_extents_close(self.extents, stripe) == self.model.close(stripe)

    @invariant()
    def a_walk_meets_all(self) -> None:
        view, stripe, found = ffi.new("bl_extent_view *"), 0, []
        while lib.bl_extents_next(self.extents, stripe, view) == 0:
            found.append(fields(view))
            stripe = view.first_stripe + view.stripe_count
        assert found == self.model.views()
        assert lib.bl_extents_count(self.extents) == len(found)

    @invariant()
    def every_stripe_has_its_extent(self) -> None:
        views = {view[1]: view for view in self.model.views()}
        view = ffi.new("bl_extent_view *")
        for stripe, first in enumerate(self.model.first):
            found = lib.bl_extents_at(self.extents, stripe, view)
            assert (found or fields(view)) == (-ENOENT if first is None else views[first])
        for first, count in ((0, len(self.model.first)), (0, 1), (len(views) % 3, 7)):
            owners = self.model.first[first : first + count]
            whole = first + count <= len(self.model.first)
            serving = [owner is not None and owner not in self.model.retired for owner in owners]
            covered = whole and all(serving)
            assert lib.bl_extents_cover(self.extents, first, count) == covered
            if whole:
                closed = first + owners.index(None) if None in owners else -ENOENT
                assert lib.bl_extents_closed(self.extents, first, count) == closed
        assert lib.bl_extents_at(self.extents, len(self.model.first), view) == -ENOENT


TestExtents = ExtentsAgreeWithTheModel.TestCase
TestExtents.settings = settings(max_examples=fewer(100), stateful_step_count=30, deadline=None)


def test_too_many_stripes_for_an_open_mark_are_rejected() -> None:
    assert lib.bl_extents_create(ffi.new("bl_extents **"), 1 << 32) < 0
    assert lib.bl_pages_create(ffi.new("bl_pages **"), 0, 1 << 32) < 0
