# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Routing: chooses the worker for each request. The package does no I/O; the gateway and the
simulator call the same code. The prefix index and the sums over workers are C (``csrc/prefix/``,
``csrc/routing/``).
"""

from beluga.router import costs
from beluga.router.approximate import ApproximateIndexer, PredictiveIndexer
from beluga.router.costs import CostEstimator, Estimate, ModelCosts, model_costs
from beluga.router.decision import RULES, Decision, Prompt
from beluga.router.events import (
    Cleared,
    HashBlocks,
    PoolEvent,
    Removed,
    RouterEvent,
    Stored,
    Tier,
    WireDecoder,
    hash_blocks_by,
)
from beluga.router.feeds import PoolFeed, ReplayBuffer, Subscription, in_space
from beluga.router.hashing import BlockHasher, Tokens, with_extra_keys
from beluga.router.indexer import Indexer
from beluga.router.metrics import LoadReport, read_load
from beluga.router.planner import Advice, Goals, Seen, advise
from beluga.router.policies import (
    DEFAULT_POLICY,
    POLICIES,
    make_policy,
    read_policies,
    read_policy,
    settings_of,
)
from beluga.router.policy import (
    Candidate,
    Candidates,
    Choice,
    FindMatches,
    Matches,
    Overlaps,
    Policy,
    Query,
    Remembers,
)
from beluga.router.queue import ORDERS, FairQueue, RouterQueue
from beluga.router.router import BusyThresholds, Constraints, Router
from beluga.router.token_ids import TOKENS_FRAME_MAX, TOKENS_TAG, TokenStore, pack_tokens
from beluga.router.tracker import LoadTracker
from beluga.router.worker import Load, Overlap, Worker, WorkerMetrics

__all__ = [
    "DEFAULT_POLICY",
    "ORDERS",
    "POLICIES",
    "RULES",
    "TOKENS_FRAME_MAX",
    "TOKENS_TAG",
    "Advice",
    "ApproximateIndexer",
    "BlockHasher",
    "BusyThresholds",
    "Candidate",
    "Candidates",
    "Choice",
    "Cleared",
    "Constraints",
    "CostEstimator",
    "Decision",
    "Estimate",
    "FairQueue",
    "FindMatches",
    "Goals",
    "HashBlocks",
    "Indexer",
    "Load",
    "LoadReport",
    "LoadTracker",
    "Matches",
    "ModelCosts",
    "Overlap",
    "Overlaps",
    "Policy",
    "PoolEvent",
    "PoolFeed",
    "PredictiveIndexer",
    "Prompt",
    "Query",
    "Remembers",
    "Removed",
    "ReplayBuffer",
    "Router",
    "RouterEvent",
    "RouterQueue",
    "Seen",
    "Stored",
    "Subscription",
    "Tier",
    "TokenStore",
    "Tokens",
    "WireDecoder",
    "Worker",
    "WorkerMetrics",
    "advise",
    "costs",
    "hash_blocks_by",
    "in_space",
    "make_policy",
    "model_costs",
    "pack_tokens",
    "read_load",
    "read_policies",
    "read_policy",
    "settings_of",
    "with_extra_keys",
]
