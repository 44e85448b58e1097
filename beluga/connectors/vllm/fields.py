# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The fields of vLLM's configuration that cannot change the bytes of a block, with the reasons.

The table is for :mod:`beluga.connectors.identity.canonical`: class -> field -> reason. Everything
else in a ``VllmConfig`` counts, including fields that a later release adds. A test walks the real
classes and fails for a name that does not exist.

Rounding does not count. The kernels and shapes of a step depend on what else the step computes, so
one engine rounds the same block differently from step to step; vLLM's own prefix cache shares such
blocks. A setting that only reorders the same operations (CUDA graphs, compilation, the number of
tokens in a step) is therefore in the table. One that computes something else (another type of data,
a quantized kernel, another attention backend) is not.
"""

from __future__ import annotations

from beluga.connectors.identity import Table

_STEPS = "which tokens a step computes together; the same operations for each token"
_MEMORY = "how much memory there is, not what is in it"
_FRONT = "what happens to text before it is tokens, or to tokens after the KV was computed"
_WIRES = "addresses, processes and waits of the same computation"
_WEIGHTS = "the weights' own identity has their bytes (identity/models.py)"
_REPORTS = "reports only"
_OTHERS = "moves or announces KV, and computes none"
_REPLICA = "replicas compute the same; a block's name does not contain the replica"
_LOADING = "how bytes are loaded into memory, not which ones"
_DERIVED = "derived by vLLM from fields that count"
_RANK = "the namespace has this process's part of a block, or its rank"

LEFT_OUT: Table = {
    "VllmConfig": {
        "structured_outputs_config": _FRONT,
        "reasoning_config": _FRONT,
        "watermark_config": _FRONT,
        "observability_config": _REPORTS,
        "logging_config": _REPORTS,
        "profiler_config": _REPORTS,
        "kv_transfer_config": _OTHERS,
        "kv_events_config": _OTHERS,
        "ec_transfer_config": "moves the encoder's outputs, and computes none",
        "ec_manager_config": "keeps the encoder's outputs, and computes none",
        "compilation_config": "the same operations, fused and compiled: rounding",
        "optimization_level": "the default of fields that count by themselves",
        "quant_config": _DERIVED,
        "weight_transfer_config": "how new weights come; an update is followed (updates.py)",
        "instance_id": "a random name",
        "shutdown_timeout": _WIRES,
    },
    "ModelConfig": {
        "model": _WEIGHTS,
        "model_weights": _WEIGHTS,
        "revision": _WEIGHTS,
        "tokenizer": _FRONT,
        "tokenizer_mode": _FRONT,
        "tokenizer_revision": _FRONT,
        "skip_tokenizer_init": _FRONT,
        "seed": "draws tokens; the seed of made-up weights is in their identity",
        "hf_config_path": "hf_config has what was found there",
        "config_format": "hf_config has what was found",
        "hf_overrides": "hf_config has the result",
        "hf_token": "a secret that opens the hub",
        "allowed_local_media_path": _FRONT,
        "allowed_media_domains": _FRONT,
        "max_model_len": "a limit, unless the model's positions depend on it (identity.py)",
        "spec_target_max_model_len": "a limit of a draft model",
        "enforce_eager": "no CUDA graphs and no compilation: rounding",
        "max_logprobs": _FRONT,
        "logprobs_mode": _FRONT,
        "return_sampling_mask": _FRONT,
        "use_fp64_gumbel": _FRONT,
        "logits_processors": _FRONT,
        "generation_config": _FRONT,
        "override_generation_config": _FRONT,
        "served_model_name": _FRONT,
        "io_processor_plugin": _FRONT,
        "renderer_num_workers": _FRONT,
        "enable_trace_replay": _REPORTS,
        "allow_deprecated_quantization": "permits a method; the method counts",
        "disable_cascade_attn": "shares the prefix's attention within a step: rounding",
        "enable_sleep_mode": _MEMORY,
        "sleep_mode_backend": _MEMORY,
        "sleep_mode_offload_cudagraph": _MEMORY,
        "sleep_preserve_parameter_names": _MEMORY,
        "enable_nccl_comm_suspend": _MEMORY,
        "enable_cumem_allocator": _MEMORY,
    },
    "MultiModalConfig": {
        "limit_per_prompt": "how many items a prompt may have",
        "mm_processor_cache_gb": _MEMORY,
        "mm_processor_cache_type": _MEMORY,
        "mm_shm_cache_max_object_size_mb": _MEMORY,
        "skip_mm_profiling": _MEMORY,
    },
    "PretrainedConfig": {
        "_name_or_path": _WEIGHTS,
        "transformers_version": "the release that wrote the file",
        "_commit_hash": _WEIGHTS,
    },
    "CacheConfig": {
        "user_specified_block_size": "the block size counts, whoever chose it",
        "_block_size_resolved": "the block size counts, whoever chose it",
        "gpu_memory_utilization": _MEMORY,
        "num_gpu_blocks_override": _MEMORY,
        "num_gpu_blocks": _MEMORY,
        "num_cpu_blocks": _MEMORY,
        "kv_cache_size_tokens": _MEMORY,
        "kv_cache_max_concurrency": _MEMORY,
        "kv_cache_memory_bytes": _MEMORY,
        "effective_attention_block_size": _DERIVED,
        "enable_prefix_caching": _MEMORY,
        "prefix_cache_retention_interval": _MEMORY,
        "kv_offloading_size": _OTHERS,
        "kv_offloading_backend": _OTHERS,
    },
    "ParallelConfig": {
        "rank": _RANK,
        "world_size": _RANK,
        "tensor_parallel_size": _RANK,
        "data_parallel_size": _REPLICA,
        "data_parallel_size_local": _REPLICA,
        "data_parallel_rank": _REPLICA,
        "data_parallel_rank_local": _REPLICA,
        "data_parallel_index": _REPLICA,
        "data_parallel_master_ip": _WIRES,
        "data_parallel_rpc_port": _WIRES,
        "data_parallel_master_port": _WIRES,
        "data_parallel_backend": _WIRES,
        "data_parallel_external_lb": _WIRES,
        "data_parallel_hybrid_lb": _WIRES,
        "_data_parallel_master_port_list": _WIRES,
        "_coord_store_port": _WIRES,
        "_api_process_count": _WIRES,
        "_api_process_rank": _WIRES,
        "dp_sync_interval": _WIRES,
        "disable_nccl_for_dp_synchronization": _WIRES,
        "max_parallel_loading_workers": _LOADING,
        "disable_custom_all_reduce": "another way to the same sum: rounding",
        "enable_shm_tensor_arena": _WIRES,
        "distributed_executor_backend": _WIRES,
        "ray_workers_use_nsight": _REPORTS,
        "ray_runtime_env": _WIRES,
        "placement_group": _WIRES,
        "master_addr": _WIRES,
        "master_port": _WIRES,
        "node_rank": _WIRES,
        "nnodes": _WIRES,
        "numa_bind": _WIRES,
        "numa_bind_nodes": _WIRES,
        "numa_bind_cpus": _WIRES,
        "assigned_physical_gpu_ids": _WIRES,
        "distributed_timeout_seconds": _WIRES,
        "cpu_distributed_timeout_seconds": _WIRES,
        "enable_fault_tolerance": _WIRES,
        "fault_tolerance_config": _WIRES,
        "enable_elastic_ep": _REPLICA,
        "elastic_ep_max_dp_size": _REPLICA,
        "enable_dbo": _STEPS,
        "ubatch_size": _STEPS,
        "dbo_decode_token_threshold": _STEPS,
        "dbo_prefill_token_threshold": _STEPS,
        "enable_batch_sharded_sampling": _FRONT,
        "enable_eplb": "which GPU has which expert; the experts are the same",
        "eplb_config": "which GPU has which expert; the experts are the same",
        "expert_placement_strategy": "which GPU has which expert; the experts are the same",
    },
    "SchedulerConfig": {
        "max_num_batched_tokens": _STEPS,
        "max_num_scheduled_tokens": _STEPS,
        "max_num_seqs": _STEPS,
        "max_num_active_seqs": _STEPS,
        "max_num_queued_reqs": _STEPS,
        "max_num_queued_tokens": _STEPS,
        "long_prefill_token_threshold": _STEPS,
        "long_prefill_token_threshold_adaptive": _STEPS,
        "enable_chunked_prefill": _STEPS,
        "max_num_encoder_input_tokens": _STEPS,
        "encoder_cache_size": _MEMORY,
        "policy": _STEPS,
        "disable_chunked_mm_input": _STEPS,
        "scheduler_cls": _STEPS,
        "scheduler_reserve_full_isl": _STEPS,
        "watermark": _MEMORY,
        "prefill_schedule_interval": _STEPS,
        "async_scheduling": _STEPS,
        "stream_interval": _FRONT,
    },
    "LoadConfig": {
        "download_dir": _LOADING,
        "safetensors_load_strategy": _LOADING,
        "safetensors_prefetch_num_threads": _LOADING,
        "safetensors_prefetch_block_size": _LOADING,
        "device": _LOADING,
        "use_tqdm_on_load": _REPORTS,
        "pt_load_map_location": _LOADING,
    },
    "OffloadConfig": dict.fromkeys(("offload_backend", "uva", "prefetch"), _MEMORY),
    "KernelConfig": {
        "enable_flashinfer_autotune": "chooses among kernels of the same operation: rounding",
        "enable_rocm_segmented_attn_autotune": "chooses among kernels of the same operation",
        "enable_cutedsl_warmup": _LOADING,
        "enable_jit_warmup": _LOADING,
    },
    "LoRAConfig": {
        "max_loras": _MEMORY,
        "max_cpu_loras": _MEMORY,
        "default_mm_loras": "an adapter's own identity has its bytes (adapters.py)",
    },
    "SpeculativeConfig": {
        "model": _WEIGHTS,
        "revision": _WEIGHTS,
        "target_model_config": "the model's own configuration counts",
        "target_parallel_config": "the model's own configuration counts",
    },
}
