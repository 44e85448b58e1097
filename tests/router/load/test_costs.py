# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The cost constants, compared with the values of the reference."""

from __future__ import annotations

from typing import Any

import pytest

from beluga.errors import RouterError
from beluga.router import CostEstimator, costs

QWEN = costs.MODELS["qwen3-32b-h200"]


def test_prefill_is_linear_with_a_quadratic_tail() -> None:
    """The cost is 7.19 ms, 76.63 ms per 1000 tokens, and attention among these and to earlier
    tokens.
    """
    assert QWEN.prefill_ms(1000) == pytest.approx(84.5805)
    assert QWEN.prefill_ms(1000, 9000) == pytest.approx(98.2695)


def test_a_fully_cached_prompt_costs_nothing() -> None:
    assert QWEN.prefill_ms(0, 5000) == 0


def test_a_prompt_in_two_chunks_costs_one_more_constant() -> None:
    whole = QWEN.prefill_ms(4096)
    assert QWEN.prefill_ms(2048) + QWEN.prefill_ms(2048, 2048) == pytest.approx(whole + QWEN.a)


def test_a_block_of_512_tokens_of_qwen3_is_128_mib() -> None:
    assert QWEN.kv_bytes_per_token * 512 == 128 << 20
    assert QWEN.hbm_bytes == 470 * (128 << 20)


@pytest.mark.parametrize(("path", "gain"), [(26e9, 7.6), (5e9, 1.5), (3.42e9, 1.0)])
def test_onboarding_pays_off_at_the_lengths_of_the_reference(path: float, gain: float) -> None:
    onboard_ms = QWEN.kv_bytes_per_token / path * 1e3
    assert QWEN.b / onboard_ms == pytest.approx(gain, rel=0.05)


def test_every_model_has_a_source_and_fits_its_device() -> None:
    for name, model in costs.MODELS.items():
        assert model.name == name
        assert model.source
        assert model.hbm_bytes > 1e9
        assert model.decode_ms(1, 1000) > model.e > 0


def test_an_unknown_model_is_refused() -> None:
    with pytest.raises(
        RouterError, match="no costs for the model 'gpt'; choose one of qwen3-32b-h200"
    ):
        costs.model_costs("gpt")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"bytes_per_s": 0.0}, "bandwidth is 0.0, but must be greater than 0"),
        ({"host_bytes_per_s": float("nan")}, "local_bandwidth is nan, but must be greater than 0"),
        ({"step_tokens": 0}, "step_tokens is 0, but must be at least 1"),
    ],
)
def test_an_estimate_needs_speeds(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(RouterError, match=message):
        CostEstimator(**wrong)
