"""Beluga: a shared KV-cache pool for LLM inference."""
