# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Tensors without a pointer, or whose bytes are not their values, are rejected by every function
that accepts memory; and only one function reads a tensor's pointer.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

import beluga
from beluga import IndexServer, KVCache, Pool
from beluga.connectors.vllm.layout import GroupLayout
from beluga.errors import ConnectorError, LayoutError
from beluga.transfer import View

torch = pytest.importorskip("torch")
SHAPE = (2, 64)
KEYS = [b"k" * 16, b"l" * 16]


def fake(give: Callable[[Any], None]) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        inside = torch.rand(SHAPE)
        give(inside)
    give(inside)


def meta(give: Callable[[Any], None]) -> None:
    give(torch.rand(SHAPE, device="meta"))


def functional(give: Callable[[Any], None]) -> None:
    from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode

    with FunctionalTensorMode():
        give(FunctionalTensor.to_functional(torch.rand(SHAPE)))


def functionalized(give: Callable[[Any], None]) -> None:
    def one(tensor: Any) -> Any:
        give(tensor)
        return tensor

    torch.func.functionalize(one)(torch.rand(SHAPE))


def in_a_batch(give: Callable[[Any], None]) -> None:
    def one(tensor: Any) -> Any:
        give(tensor)
        return tensor

    torch.func.vmap(one)(torch.rand(3, *SHAPE))


def in_a_gradient(give: Callable[[Any], None]) -> None:
    def one(tensor: Any) -> Any:
        give(tensor)
        return tensor.sum()

    torch.func.grad(one)(torch.rand(SHAPE))


def exported(give: Callable[[Any], None]) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    def one(tensor: Any) -> Any:
        give(tensor)
        return tensor + 1

    make_fx(one, tracing_mode="fake")(torch.rand(SHAPE))


def conjugated(give: Callable[[Any], None]) -> None:
    give(torch.rand(SHAPE, dtype=torch.complex64).conj())


def negated(give: Callable[[Any], None]) -> None:
    give(torch._neg_view(torch.rand(SHAPE)))


def sparse(give: Callable[[Any], None]) -> None:
    give(torch.eye(64).to_sparse())
    give(torch.eye(64).to_sparse_csr())


def freed(give: Callable[[Any], None]) -> None:
    """A shard that FSDP has freed."""
    tensor = torch.rand(SHAPE)
    tensor.untyped_storage().resize_(0)
    give(tensor)


def cut_short(give: Callable[[Any], None]) -> None:
    tensor = torch.rand(SHAPE)
    tensor.untyped_storage().resize_(8)
    give(tensor)


WRONG = [fake, meta, functional, functionalized, in_a_batch, in_a_gradient, exported, conjugated,
         negated, sparse, freed, cut_short]  # fmt: skip


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KVCache]:
    path = Path("/dev/shm") / f"beluga-tensors-{tmp_path_factory.getbasetemp().name}"
    with (
        Pool.create([path], device_size=16 << 20, force=True) as pool,
        IndexServer(pool),
        KVCache(pool, namespace="tensors") as made,
    ):
        yield made
    Pool.destroy([path])


@pytest.mark.parametrize("wrong", WRONG)
def test_a_tensor_without_memory_or_with_pending_work_is_refused(
    cache: KVCache, wrong: Callable[[Callable[[Any], None]], None]
) -> None:
    ways: list[tuple[type[Exception], Callable[[Any], object]]] = [
        (LayoutError, lambda tensor: cache.put(KEYS, tensor)),
        (LayoutError, lambda tensor: cache.put(KEYS, [tensor, tensor])),
        (LayoutError, lambda tensor: cache.put(KEYS, [[tensor], [tensor]])),
        (LayoutError, lambda tensor: cache.get(KEYS, [tensor, tensor])),
        (LayoutError, View.of),
        (
            ConnectorError,
            lambda tensor: GroupLayout({"layer": tensor}, block_count=len(tensor), page_sizes={}),
        ),
    ]

    def give(tensor: Any) -> None:
        for kind, way in ways:
            with pytest.raises(kind) as caught:
                way(tensor)
            assert "\n" not in str(caught.value)

    wrong(give)
    assert int(cache.lookup(KEYS)) == 0


def test_tensors_with_memory_of_any_origin_are_stored(cache: KVCache) -> None:
    shared = torch._lazy_clone(torch.rand(SHAPE))
    for tensor in (torch.rand(SHAPE), torch.rand(4, 64)[1:3], shared, torch.rand(SHAPE).conj()):
        cache.remove(KEYS)
        assert cache.put(KEYS, tensor).stored == 2
        back = torch.zeros(SHAPE)
        assert cache.get(KEYS, [back[0], back[1]]).hits == 2
        assert torch.equal(back, tensor)


def test_a_view_whose_rows_share_bytes_is_read_only() -> None:
    assert View.of(as_strided(np.zeros(256, np.uint8), (2, 256), (0, 1))).read_only
    assert not View.of(as_strided(np.zeros(384, np.uint8), (1, 256), (128, 1))).read_only
    assert View.of(torch.rand(1, 4).expand(3, 4)).read_only


def test_only_one_function_reads_tensor_pointers() -> None:
    folder = Path(beluga.__file__).parent
    found = {
        f"{path.relative_to(folder)}: {ast.unparse(node.func)}"
        for path in folder.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "data_ptr"
    }
    assert found == {
        "transfer/view.py: tensor.data_ptr",
        "transfer/view.py: storage.data_ptr",
        "connectors/vllm/staging.py: storage.data_ptr",  # of a tensor that has been examined
    }
