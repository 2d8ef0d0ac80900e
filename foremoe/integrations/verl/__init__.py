"""foremoe inside veRL, through two settings besides veRL's own two for router replay, without a fork::

    actor_rollout_ref.actor.megatron._target_=foremoe.integrations.verl.EngineConfig
    +actor_rollout_ref.actor.megatron.foremoe.redundant=1

``import verl`` loads `plugin` through its entry point. Everything else is imported with veRL's Megatron engine.
"""

from typing import TYPE_CHECKING

from foremoe.base.lazy import lazy

if TYPE_CHECKING:
    from foremoe.integrations.verl.config import EngineConfig as EngineConfig
    from foremoe.integrations.verl.config import Settings as Settings

ENGINE_MODULE = "verl.workers.engine.megatron.transformer_impl"  # veRL's, whose engine foremoe's is derived from
__all__ = ["EngineConfig", "Settings"]  # loaded on first use: they import veRL

__getattr__, __dir__ = lazy(__name__, {"config": __all__})
