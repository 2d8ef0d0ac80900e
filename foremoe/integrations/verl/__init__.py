"""foremoe inside veRL: two settings beside veRL's own two for router replay; nothing is forked::

    actor_rollout_ref.actor.megatron._target_=foremoe.integrations.verl.EngineConfig
    +actor_rollout_ref.actor.megatron.foremoe.redundant=1

`plugin` is what ``import verl`` finds by its entry point. Everything else is imported where veRL's Megatron engine is.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    if name in ("EngineConfig", "Settings"):
        from foremoe.integrations.verl import config

        return getattr(config, name)
    raise AttributeError(f"module 'foremoe.integrations.verl' has no attribute {name!r}")


__all__ = ["EngineConfig", "Settings"]  # loaded on first use: they import veRL
