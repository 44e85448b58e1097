# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The names that users may import are frozen: adding or removing one requires an edit here."""

import importlib

import pytest

EXPORTS: dict[str, str] = {
    "beluga": "BelugaError Client Handlers KVCache IndexServer Namespace Pool Server",
    "beluga._ffi": "core ffi lib record_dtype",
    "beluga.coherence": "crc32c features fence flush invalidate isa ntstore_copy",
    "beluga.pool": (
        "BLOCK_COUNT_MAX COHERENCE_MODES LANE_COUNT_MAX DeviceSpec DeviceView Geometry Pool "
        "STRIPE_SIZE SpecLike default_specs "
        "emulated_paths filesystem remove_default geometry_for parse_size stored_specs "
        "storing_default room scratch_folder show_size survey DaxNode PoolFile dax_nodes "
        "examine find_pools limits "
        "refuse_missing refuse_in_use runtime_dir_of_missing"
    ),
    "beluga.rpc": (
        "Buffer Calls Client ClientStat DEMOTIONS HandlerInfo Handlers "
        "KINDS LOST METHOD_COUNTERS METHOD_USER Operation Quota REASONS Report "
        "ReportTotals SECONDS SILENT_S Server ServerStat TAKEN TakeoverCause CallTrace TracedCall "
        "load_handlers method_names nanoseconds read_trace stand_by"
    ),
    "beluga.index": (
        "BlockState EVICTIONS Grant LOWER_NOTE LOWER_RECORD Lookup LowerStat LowerWork "
        "RemovalReason IndexClient IndexServer IndexStat Pins Removal CheckReport TaskClient "
        "TaskRecord Work check_devices check_pool repair_pool CHANGE NAME NAME_PARENT REMOVED "
        "STORED chain_names "
        "names_at read_names "
        "REFUSALS SessionView Sessions Tenant fetch_sessions COMMITTED ENTRY EPOCH_SHIFT FREE "
        "read_entries COUNTERS_METHOD fetch_counters BLOCK_RECORD "
        "Field HintStat OTHERS TENANT TenantShare check_shares digest_of fingerprint_of"
    ),
    "beluga.transfer": (
        "BlockLayout CHUNK CpuEngine Direction DsaEngine CopyEngine Link LinkSettings "
        "Order PIECE Plan Slots Speed Transfer TransferClass View arrangements "
        "TransferStats CopySettings CudaDevice CudaEngine default_threads "
        "Array CudaArray Tensor is_tensor tensor_start DEVICE_SPEED DTYPE_SIZES ENGINES "
        "host_link host_link_now IoHandle plan_blocks plan_rows "
        "policy settings_for parse_settings settle keep_for_good EngineEntry "
        "EngineChoice EngineFacts NEVER "
        "choose_engine copy_setting_names engine_facts "
        "engine_names WorkQueue why_no_queue work_queues"
    ),
    "beluga.transfer.cuda": (
        "CapturedTransfer CudaDevice CudaEngine CudaStat CudaTransfer DriverError why_no_cuda"
    ),
    "beluga.tiers.disk": "DiskTier SpreadTier adopt_disk",
    "beluga.kvbm": (
        "BlockManager BlockPhase BlockPool CacheTier Key MissedTarget MutableBlock "
        "OFFLOAD_POLICIES RegisteredBlock SharedTier TARGETS"
    ),
    "beluga.live": ("Note Observer Snapshot"),
    "beluga.admin": (
        "Admin AdminResponse ServerHealth AdminRequest Route Routes request request_json "
        "request_any json_response lane_routes page_routes read_address server_routes"
    ),
    "beluga.verify": "VerifyResult MachineRecord VerifyReport verify_pool",
    "beluga.kvcache": (
        "BLOCK_SIZE_MAX Blocks Buffer CHUNK_SIZE Digests Fragments GetResult KVCache Namespace "
        "PutResult Run fold hash_keys Explanation KnownNamespace explain known_namespaces "
        "namespaces_changed_ns HintResult hint_level OpTicket OpWorker"
    ),
    "beluga.router": (
        "Advice BlockHasher BusyThresholds Candidate Candidates Choice Constraints "
        "CostEstimator Decision Estimate FindMatches Goals Load LoadTracker Matches LoadReport "
        "ORDERS Overlap POLICIES Policy Prompt Query RULES Router RouterQueue FairQueue Seen "
        "Tokens Worker WorkerMetrics advise costs make_policy model_costs ModelCosts Cleared "
        "Indexer Removed RouterEvent Stored Tier ApproximateIndexer PredictiveIndexer "
        "Subscription WireDecoder hash_blocks_by ReplayBuffer PoolEvent PoolFeed DEFAULT_POLICY "
        "read_policies read_policy settings_of HashBlocks with_extra_keys read_load in_space "
        "Overlaps Remembers TOKENS_FRAME_MAX TOKENS_TAG TokenStore pack_tokens"
    ),
    "beluga.disagg": (
        "Claim PrefillOutcome PATHS PrefillTask PrefillWorker Prefiller QueueSize TASKS_MAX "
        "TaskQueue Ticket open_queue"
    ),
    "beluga.simulate": (
        "ENGINES FORMATS MEMORIES ORDERS Options PRESETS TraceEntry Reading Row SPEED_MAX "
        "SPEED_MIN Scale Spread TIME_UNITS Trace found_shares goodput load_trace make_report "
        "make_trace simulate trace_requests unequal_memory"
    ),
    "beluga.events": ("EventService EventSettings form_named"),
    "beluga.gateway": (
        "Address Callers EngineSpec Limits Prefill Service Settings read_engines "
        "read_queues read_thresholds run serve"
    ),
    "beluga.replay": (
        "DEFAULT_BLOCK_TOKENS Conversations default_requests ReplayOptions TraceRequest Result "
        "ideal_hit_rate make_workload read_trace replay"
    ),
}


def test_dir_lists_public_names() -> None:
    """A user who types ``beluga.<Tab>`` sees the public names, and no internal modules."""
    import beluga

    assert dir(beluga) == sorted([*EXPORTS["beluga"].split(), "__version__"])


@pytest.mark.parametrize("module", EXPORTS)
def test_public_names_are_pinned(module: str) -> None:
    loaded = importlib.import_module(module)
    assert set(loaded.__all__) == set(EXPORTS[module].split())
    assert all(hasattr(loaded, name) for name in loaded.__all__)
