"""NeMo-RL's Megatron worker with foremoe. Ray creates this worker instead of NeMo-RL's own."""

from __future__ import annotations

from typing import Any

import ray
from nemo_rl.models.policy.utils import get_runtime_env_for_policy_worker
from nemo_rl.models.policy.workers.megatron_policy_worker import MegatronPolicyWorkerImpl

from foremoe.integrations.nemo_rl import install


@ray.remote(runtime_env=get_runtime_env_for_policy_worker("megatron_policy_worker"))
class MegatronPolicyWorker(MegatronPolicyWorkerImpl):  # type: ignore[misc]
    """Worker that behaves like NeMo-RL's own. It derives from the implementation, because a Ray actor cannot be subclassed."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        attach_to = install(config)
        super().__init__(config, *args, **kwargs)
        attach_to(self.model)
