"""Check the settings of vLLM's connector."""

import json

from beluga.connectors.vllm.settings import VllmSettings

settings = VllmSettings(pool="/dev/shm/a:/dev/shm/b", timeout_ms=200, load="async")
print(settings.loads, settings.saves)  # True True
extra = {"pool": settings.pool, "timeout_ms": settings.timeout_ms, "load": settings.load}
option = {
    "kv_connector": "BelugaConnector",
    "kv_role": settings.kv_role,
    "kv_connector_extra_config": extra,
}
print(len(json.dumps(option)) > 0)  # True: the value of vLLM's --kv-transfer-config
