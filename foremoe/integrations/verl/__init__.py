"""foremoe inside veRL, without a fork of it. It takes two settings in addition to veRL's own two for router replay::

    actor_rollout_ref.actor.megatron._target_=foremoe.integrations.verl.EngineConfig
    +actor_rollout_ref.actor.megatron.foremoe.redundant=1

``import verl`` loads the module `plugin` through its entry point. All other modules are imported with veRL's Megatron engine.
"""

from typing import TYPE_CHECKING

from foremoe.base.lazy import lazy

if TYPE_CHECKING:
    from foremoe.integrations.verl.config import EngineConfig as EngineConfig
    from foremoe.integrations.verl.config import Settings as Settings

ENGINE_MODULE = "verl.workers.engine.megatron.transformer_impl"  # foremoe's engine derives from the one in this module
__all__ = ["EngineConfig", "Settings"]  # loaded on first use, because they import veRL

__getattr__, __dir__ = lazy(__name__, {"config": __all__})
