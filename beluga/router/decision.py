# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Decides whether a prefill worker prefills a prompt (remote) or the decode worker does (local).

Each rule is a set of thresholds that Dynamo uses or used, with Dynamo's defaults. A
:class:`Decision` can change them at run time.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Protocol

from beluga.errors import RouterError
from beluga.router.router import BusyThresholds
from beluga.router.worker import Load


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """The input of the rules. Tests on an unknown value (None) do not apply."""

    tokens: int
    cached: int = 0  # tokens that the best decode worker has cached
    queue_size: int = 0  # of the prefill queue, in tasks
    prefill: Load | None = None  # the load of the prefill worker that would get the prompt
    decode: Load | None = None  # the load of the decode worker that will get the request

    @property
    def effective(self) -> int:
        """The number of tokens that must be computed."""
        return max(self.tokens - self.cached, 0)


class Rule(Protocol):
    def remote(self, prompt: Prompt) -> bool: ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AlwaysRemote:
    """Dynamo's rule when its disaggregation router is disabled."""

    def remote(self, prompt: Prompt) -> bool:
        return True


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LengthAndQueue:
    """The rule of the article (examples/llm disagg_router.py): remote if many tokens remain after
    cache hits and the queue is short.
    """

    max_local_prefill_length: int = 1000
    max_prefill_queue_size: int = 2

    def remote(self, prompt: Prompt) -> bool:
        return (
            prompt.effective > self.max_local_prefill_length
            and prompt.queue_size < self.max_prefill_queue_size
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Length:
    """The rule of Dynamo's Rust version (disagg_router.rs): remote if many tokens remain after
    cache hits.
    """

    max_local_prefill_length: int = 1000

    def remote(self, prompt: Prompt) -> bool:
        return prompt.effective > self.max_local_prefill_length


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Veto:
    """A test with priority over all others: a decode worker whose active blocks exceed this share
    never prefills.
    """

    decode_blocks_max: float | None = None

    def full(self, decode: Load | None) -> bool:
        share = self.decode_blocks_max
        if share is None or decode is None or not decode.kv_total_blocks:
            return False
        return decode.active_decode_blocks > share * decode.kv_total_blocks


@dataclasses.dataclass(frozen=True, kw_only=True)
class IslBounding(_Veto):
    """Dynamo's current rule (conditional_disagg.rs): local if few tokens remain and most were
    cached.
    """

    effective_max: int = 2048
    ratio_max: float = 0.7

    def remote(self, prompt: Prompt) -> bool:
        return self.full(prompt.decode) or not self.short(prompt)

    def short(self, prompt: Prompt) -> bool:
        ratio = prompt.effective / max(prompt.tokens, 1)
        return prompt.effective < self.effective_max and ratio < self.ratio_max


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillLoad(_Veto):
    """Dynamo's current rule by load: local if the prefill worker is busy."""

    # The worker is busy above this multiple of max_num_batched_tokens
    prefill_batches: float = 16.0
    max_num_batched_tokens: int = 8192

    def remote(self, prompt: Prompt) -> bool:
        return self.full(prompt.decode) or not self.busy(prompt)

    def busy(self, prompt: Prompt) -> bool:
        limits = BusyThresholds(
            prefill_batches=self.prefill_batches,
            max_num_batched_tokens=self.max_num_batched_tokens,
        )
        return prompt.prefill is not None and limits.overloaded(prompt.prefill)


@dataclasses.dataclass(frozen=True, kw_only=True)
class IslOrLoad(IslBounding, PrefillLoad):
    """Dynamo's current combination: local if either rule results in local."""

    def remote(self, prompt: Prompt) -> bool:
        return self.full(prompt.decode) or not (self.short(prompt) or self.busy(prompt))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Roomy:
    """An earlier rule of Dynamo (config.rs): local if few tokens remain and the decode worker has
    space. Long prompts are always remote.
    """

    effective_max: int = 5000
    force_remote_above: int = 16384  # prompts of more tokens are always remote
    free_ratio_min: float = 0.5

    def remote(self, prompt: Prompt) -> bool:
        if prompt.tokens > self.force_remote_above:
            return True
        return prompt.effective > self.effective_max or not self.roomy(prompt)

    def roomy(self, prompt: Prompt) -> bool:
        decode, free = prompt.decode, 1.0
        if decode is not None and decode.kv_total_blocks:
            free = 1 - decode.active_decode_blocks / decode.kv_total_blocks
        return free >= self.free_ratio_min


_RULES: dict[str, Callable[..., Rule]] = {
    "always-remote": AlwaysRemote,
    "length-and-queue": LengthAndQueue,
    "length": Length,
    "isl-bounding": IslBounding,
    "prefill-load": PrefillLoad,
    "isl-or-load": IslOrLoad,
    "roomy": Roomy,
}
RULES = tuple(_RULES)


class Decision:
    """A named rule, whose settings may change at any time.

    Raises RouterError for a name that is not in RULES, or for a setting that the rule does not
    have.
    """

    def __init__(self, name: str, **settings: object) -> None:
        if name not in _RULES:
            raise RouterError(f"there is no rule {name!r}; choose one of {', '.join(RULES)}")
        self.name = name
        self._settings = settings
        self.rule = self._make(settings)

    def remote(self, prompt: Prompt) -> bool:
        """Return whether a prefill worker should prefill the prompt."""
        return self.rule.remote(prompt)

    @property
    def settings(self) -> dict[str, object]:
        """The rule's current settings, by name."""
        return {
            name: getattr(self.rule, name) for name in inspect.signature(type(self.rule)).parameters
        }

    def update(self, settings: Mapping[str, object] | None) -> None:
        """Replace some of the initial settings; None restores all of them, as when the key in etcd
        is deleted. On an error, raises RouterError and changes nothing.
        """
        self.rule = self._make({**self._settings, **(settings or {})})

    def _make(self, settings: Mapping[str, object]) -> Rule:
        make = _RULES[self.name]
        parameters = inspect.signature(make).parameters
        for name, value in settings.items():
            if name not in parameters:
                has = ", ".join(parameters) or "no settings"
                raise RouterError(f"rule {self.name} has no setting {name!r}; it has {has}")
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number and not (value is None and parameters[name].default is None):
                raise RouterError(f"setting {name} of rule {self.name} is {value!r}; give a number")
        return make(**settings)
