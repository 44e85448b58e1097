# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The fields of SGLang's ``ServerArgs`` that cannot change the bytes of a page, with the reasons.

All other fields count, including fields of later releases. A test walks the real class. The rules
are those of :mod:`beluga.connectors.vllm.fields`: rounding does not count.
"""

from __future__ import annotations

from beluga.connectors.identity import Table


def _each(reason: str, *names: str) -> dict[str, str]:
    return dict.fromkeys(names, reason)


LEFT_OUT: Table = {
    "ServerArgs": {
        **_each(
            "the weights' own identity has their bytes (identity/models.py)",
            *("model_path", "revision", "lora_paths", "download_dir", "model_checksum"),
            *("speculative_draft_model_path", "speculative_draft_model_revision"),
        ),
        **_each(
            "a version is a part of the pages' names (weights.py)",
            "weight_version",
        ),
        **_each("draws tokens; the seed of made-up weights is in their identity", "random_seed"),
        **_each(
            "a limit, unless the model's positions depend on it (identity.py)", "context_length"
        ),
        **_each(
            "what happens to text before it is tokens, or to tokens after the KV was computed",
            *("tokenizer_path", "tokenizer_mode", "tokenizer_backend", "tokenizer_worker_num"),
            *("detokenizer_worker_num", "skip_tokenizer_init", "served_model_name"),
            *("chat_template", "trust_request_chat_template", "hf_chat_template_name"),
            *("completion_template", "file_storage_path", "enable_cache_report"),
            *("return_input_ids", "return_output_ids", "reasoning_parser", "tool_call_parser"),
            *("default_chat_template_kwargs", "tool_server", "sampling_defaults"),
            *("preferred_sampling_params", "allow_auto_truncate", "stream_interval"),
            *("batch_notify_size", "stream_response_default_include_usage"),
            *("incremental_streaming_output", "sampling_backend", "grammar_backend"),
            *("constrained_json_whitespace_pattern", "constrained_json_disable_any_whitespace"),
            *("constrained_json_max_whitespace_cnt", "enable_custom_logit_processor"),
            *("enable_dynamic_batch_tokenizer", "dynamic_batch_tokenizer_batch_size"),
            *("dynamic_batch_tokenizer_batch_timeout", "enable_tokenizer_batch_encode"),
            *("disable_tokenizer_batch_decode", "sampling_mask_max_tokens"),
            *("disable_outlines_disk_cache", "mlx_enable_sampling", "enable_response_store"),
            *("enable_watermark", "watermark_config", "watermark_key", "watermark_key_b"),
            *("watermark_context_window", "watermark_mixing_probability"),
            *("watermark_max_probability", "watermark_default_enabled", "watermark_enforce_all"),
            *("asr_max_buffer_seconds", "asr_max_concurrent_sessions", "strip_thinking_cache"),
        ),
        **_each(
            "addresses, processes, secrets and waits of the same computation",
            *("host", "port", "nccl_port", "dist_timeout", "dist_init_addr"),
            *("gated_launch_port", "nnodes", "node_rank", "fastapi_root_path", "smg_grpc_mode"),
            *("grpc_mode", "grpc_port", "grpc_worker_threads", "grpc_response_timeout_secs"),
            *("sidecar", "sidecar_args", "skip_server_warmup", "warmups", "enable_http2"),
            *("http2_max_concurrent_streams", "http2_initial_connection_window_size"),
            *("ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_keyfile_password"),
            *("enable_ssl_refresh", "api_key", "admin_api_key", "base_gpu_id", "gpu_id_step"),
            *("watchdog_timeout", "soft_watchdog_timeout", "sleep_on_idle", "use_ray"),
            *("custom_sigquit_handler", "numa_node", "gc_threshold", "smg_http_sidecar_port"),
            *("load_balance_method", "enable_p2p_check", "pre_warm_nccl", "mooncake_ib_device"),
            *("enable_http_worker_reuseport", "engine_info_bootstrap_port"),
            *("scheduler_recv_interval", "enable_broadcast_mm_inputs_process"),
        ),
        **_each(
            "reports only",
            *("log_level", "log_level_http", "log_requests", "log_requests_level"),
            *("log_requests_format", "log_requests_target", "show_time_cost"),
            *("uvicorn_access_log_exclude_prefixes", "crash_dump_folder", "enable_metrics"),
            *("enable_mfu_metrics", "enable_metrics_for_all_schedulers", "extra_metric_labels"),
            *("load_snapshot_publish_interval", "tokenizer_metrics_custom_labels_header"),
            *("tokenizer_metrics_allowed_custom_labels", "bucket_time_to_first_token"),
            *("bucket_inter_token_latency", "bucket_e2e_request_latency"),
            *("prompt_tokens_buckets", "generation_tokens_buckets", "gc_warning_threshold_secs"),
            *("decode_log_interval", "enable_request_time_stats_logging", "kv_events_config"),
            *("load_publish_endpoint", "enable_forward_pass_metrics", "enable_trace"),
            *("forward_pass_metrics_worker_id", "forward_pass_metrics_ipc_name"),
            *("trace_modules", "otlp_traces_endpoint", "otlp_service_name"),
            *("export_metrics_to_file", "export_metrics_to_file_dir", "stat_loggers"),
            *("enable_layerwise_nvtx_marker", "spec_trace_dir"),
            *("expert_distribution_recorder_mode", "expert_distribution_recorder_buffer_size"),
            *("expert_balancedness_report_mode", "debug_cuda_graph", "enable_profile_cuda_graph"),
        ),
        **_each(
            "which tokens a step computes together; the same operations for each token",
            *("max_running_requests", "max_queued_requests", "chunked_prefill_size"),
            *("prefill_decode_interval", "prefill_decode_interval_min_bs"),
            *("enable_dynamic_chunking", "max_prefill_tokens", "prefill_max_requests"),
            *("schedule_policy", "enable_priority_scheduling", "disable_priority_preemption"),
            *("default_priority_value", "abort_on_priority_when_disabled"),
            *("schedule_low_priority_values_first", "priority_scheduling_preemption_threshold"),
            *("retraction_policy", "schedule_conservativeness", "disable_overlap_schedule"),
            *("num_continuous_decode_steps", "enable_mixed_chunk", "pp_max_micro_batch_size"),
            *("pp_async_batch_depth", "enable_prefill_delayer", "min_free_slots_delay"),
            *("prefill_delayer_max_delay_passes", "prefill_delayer_token_usage_low_watermark"),
            *("prefill_delayer_forward_passes_buckets", "prefill_delayer_wait_seconds_buckets"),
            *("prefill_delayer_queue_min_ratio", "prefill_delayer_max_delay_ms"),
            *("enable_two_batch_overlap", "enable_single_batch_overlap"),
            *("tbo_token_distribution_threshold", "lora_drain_wait_threshold"),
            *("enable_lora_overlap_loading", "max_lora_chunk_size"),
        ),
        **_each(
            "how much memory there is, not what is in it",
            *("mem_fraction_static", "max_total_tokens", "radix_eviction_policy"),
            *("radix_eviction_policy_config", "_radix_eviction_policy_explicitly_set"),
            *("disable_radix_cache", "radix_cache_backend", "enable_memory_saver"),
            *("enable_weights_cpu_backup", "enable_draft_weights_cpu_backup"),
            *("cpu_offload_gb", "offload_group_size", "offload_num_in_group"),
            *("offload_prefetch_step", "offload_mode", "max_loaded_loras"),
            *("max_loras_per_batch", "lora_eviction_policy", "mm_preprocess_cache_size_mb"),
            *("enable_streaming_session", "enable_session_radix_cache"),
            *("num_reserved_decode_tokens", "disaggregation_decode_extra_slots"),
        ),
        **_each(
            "moves or announces KV, and computes none; the layout of the host's pages counts",
            *("enable_hierarchical_cache", "hicache_host_memory_mode", "hicache_ratio"),
            *("hicache_size", "hicache_write_policy", "hicache_io_backend"),
            *("hicache_mem_layout", "hicache_storage_backend"),
            *("hicache_storage_prefetch_policy", "hicache_storage_backend_extra_config"),
            *("hicache_storage_prefetch_retry_poll_interval", "hicache_host_memory_fraction"),
            *("hicache_storage_prefetch_retry_max_attempts", "disaggregation_mode"),
            *("disaggregation_transfer_backend", "disaggregation_bootstrap_port"),
            *("disaggregation_ib_device", "disaggregation_decode_enable_radix_cache"),
            *("disaggregation_decode_enable_offload_kvcache", "enable_pd_role_switch"),
            *("disaggregation_decode_retraction_backup", "disaggregation_enable_kv_checksum"),
            *("disaggregation_decode_polling_interval", "optimistic_prefill_attempts"),
            *("disaggregation_decode_host_receive_threshold", "enable_lmcache"),
            *("disaggregation_decode_allocation_policy", "lmcache_config_file"),
        ),
        **_each(
            "replicas compute the same; a page's name does not contain the replica",
            *("dp_size", "attn_dp_size", "enable_dp_attention_local_control_broadcast"),
        ),
        **_each(
            "the namespace has the ranks of this process",
            *("tp_size", "pp_size", "dcp_size", "attn_cp_size"),
        ),
        **_each(
            "the same operations by CUDA graphs, compilation or another sum: rounding",
            *("cuda_graph_config", "cuda_graph_backend_decode", "cuda_graph_backend_prefill"),
            *("cuda_graph_max_bs_decode", "cuda_graph_max_bs_prefill", "cuda_graph_bs_decode"),
            *("cuda_graph_bs_prefill", "cuda_graph_prefill_max_context"),
            *("cuda_graph_max_seq_len_prefill", "disable_prefill_cuda_graph"),
            *("disable_decode_cuda_graph", "disable_cuda_graph", "disable_cuda_graph_padding"),
            *("enable_cudagraph_gc", "enable_torch_compile", "enable_torch_compile_debug_mode"),
            *("torch_compile_max_bs", "disable_custom_all_reduce", "enable_nccl_nvls"),
            *("enable_symm_mem", "enable_mscclpp", "enable_torch_symm_mem"),
            *("disable_flashinfer_autotune", "flashinfer_autotune_skip_ops"),
        ),
        **_each(
            "how bytes are loaded into memory, not which ones",
            *("startup_weight_load_mode", "weight_loader_disable_mmap"),
            *("weight_loader_prefetch_checkpoints", "weight_loader_prefetch_num_threads"),
            *("weight_loader_drop_cache_after_load", "delete_ckpt_after_loading"),
            *("checkpoint_engine_wait_weights_before_ready",),
        ),
    },
}
