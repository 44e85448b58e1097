# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Routing: chooses the worker for each request. The package does no I/O; the gateway and the
simulator call the same code.
"""

from beluga.router.candidates import Candidates
from beluga.router.constraints import BusyThresholds, Constraints
from beluga.router.decision import RULES, Decision, Prompt
from beluga.router.load import costs
from beluga.router.load.costs import ModelCosts, model_costs
from beluga.router.load.estimate import CostEstimator, Estimate
from beluga.router.load.metrics import LoadReport, read_load
from beluga.router.load.queue import ORDERS, RouterQueue
from beluga.router.load.tracker import LoadTracker
from beluga.router.planner import Advice, Goals, Role, Seen, advise
from beluga.router.policies import (
    DEFAULT_POLICY,
    POLICIES,
    Estimator,
    make_policy,
    read_policies,
    read_policy,
    settings_of,
)
from beluga.router.policy import Candidate, Choice, Policy, Query, Remembers, Usual
from beluga.router.prefix.approximate import ApproximateIndexer, PredictiveIndexer
from beluga.router.prefix.events import (
    Cleared,
    Removed,
    RouterEvent,
    Stored,
    Tier,
)
from beluga.router.prefix.hashing import (
    BlockHasher,
    Era,
    Tokens,
    salt_seed,
    unsigned,
    with_extra_keys,
)
from beluga.router.prefix.indexer import Indexer
from beluga.router.prefix.matches import FindMatches, Matches, Overlaps
from beluga.router.prefix.pool_feed import PoolFeed, in_space
from beluga.router.prefix.replay_buffer import ReplayBuffer
from beluga.router.prefix.subscription import Subscription
from beluga.router.prefix.wire import (
    HashBlocks,
    PoolEvent,
    WireDecoder,
    encode_dynamo,
    encode_pool,
    hash_blocks_by,
)
from beluga.router.router import Router
from beluga.router.worker import Load, Overlap, Worker, WorkerMetrics

__all__ = [
    "DEFAULT_POLICY",
    "ORDERS",
    "POLICIES",
    "RULES",
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
    "Era",
    "Estimate",
    "Estimator",
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
    "Role",
    "Router",
    "RouterEvent",
    "RouterQueue",
    "Seen",
    "Stored",
    "Subscription",
    "Tier",
    "Tokens",
    "Usual",
    "WireDecoder",
    "Worker",
    "WorkerMetrics",
    "advise",
    "costs",
    "encode_dynamo",
    "encode_pool",
    "hash_blocks_by",
    "in_space",
    "make_policy",
    "model_costs",
    "read_load",
    "read_policies",
    "read_policy",
    "salt_seed",
    "settings_of",
    "unsigned",
    "with_extra_keys",
]
