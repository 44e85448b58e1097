# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Alert rules for Prometheus. The defaults are the targets of the Dynamo KV router article: hit
rate over 30 %, routing under 5 ms, imbalance under 0.2.
"""

ALERTS = """\
groups:
  - name: beluga-gateway
    rules:
      - alert: KVHitRateLow
        expr: avg(dynamo_kv_hit_rate) < 0.30
        for: 15m
        annotations: {summary: "Less than 30 % of prompt tokens are found in a cache"}
      - alert: RoutingSlow
        expr: >-
          histogram_quantile(0.99, sum by (le) (rate(dynamo_routing_latency_seconds_bucket[5m])))
          > 0.005
        for: 5m
        annotations: {summary: "Choosing a worker takes more than 5 ms (p99)"}
      - alert: LoadImbalanced
        expr: >-
          stddev(rate(beluga_gateway_worker_prompt_tokens_total[5m]))
          / avg(rate(beluga_gateway_worker_prompt_tokens_total[5m])) > 0.2
        for: 15m
        annotations: {summary: "Prompt tokens go unevenly to workers (deviation / mean)"}
      - alert: WorkerDown
        expr: beluga_gateway_worker_up == 0
        for: 1m
        annotations: {summary: "{{ $labels.worker }} does not pass its health check"}
"""
