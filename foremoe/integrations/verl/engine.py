"""Engine that replaces veRL's Megatron engine. The only difference is that it plans micro-batches once they are formed."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from foremoe.integrations.settings import Settings
from foremoe.integrations.verl import ENGINE_MODULE

# Device and vendor. veRL prefers an engine of the vendor, and falls back to this one without an accelerator.
PLATFORM = "cuda", "nvidia"


def register(module: ModuleType) -> type:
    """Registers and returns an engine that replaces the engine in veRL's module `transformer_impl`.

    It also replaces an engine that was registered before the module was reloaded. veRL itself would refuse a second engine.
    """
    engine = engine_class(module)
    registered = getattr(module.EngineRegistry, "_engines", {}).get("language_model", {}).get("megatron", {})
    if getattr(registered.get(PLATFORM), "__module__", "") == __name__:
        del registered[PLATFORM]
    module.EngineRegistry.register(model_type="language_model", backend="megatron", device=PLATFORM[0], vendor=PLATFORM[1])(
        engine
    )
    return engine


def engine_class(module: ModuleType) -> type:
    """Returns a subclass of veRL's `MegatronEngineWithLMHead`. It makes plans if the config has `foremoe`.

    Unpickling uses the last class that was created in this module.
    """

    class ForeMoEEngine(module.MegatronEngineWithLMHead):  # type: ignore[name-defined, misc]
        """veRL's engine, extended to plan every pass with known routing once its micro-batches are formed."""

        __qualname__ = "ForeMoEEngine"
        _foremoe: Any = None

        def initialize(self) -> None:
            super().initialize()
            settings = getattr(self.engine_config, "foremoe", None)
            if isinstance(settings, Settings):
                self.attach_foremoe(settings)

        def attach_foremoe(self, settings: Settings) -> None:
            """Adds slots to the model's MoE layers. Called by `initialize` if the config has `foremoe`. Collective."""
            from foremoe.integrations.verl.session import Session

            self._foremoe = Session(self, settings)

        def forward_backward_batch(self, data: Any, loss_function: Callable[..., Any] | None, forward_only: bool = False) -> Any:
            session = self._foremoe
            if session is None:
                return super().forward_backward_batch(data, loss_function, forward_only)
            if session.should_plan(data, forward_only):
                with session.run_stage(forward_only) as stage:
                    with _before_micro_batches(module, stage.begin):
                        output = super().forward_backward_batch(data, loss_function, forward_only)
                    stage.end()
            else:
                output = super().forward_backward_batch(data, loss_function, forward_only)
            if not forward_only:
                session.report(data, output)
            return output

    globals()["ForeMoEEngine"] = ForeMoEEngine
    return ForeMoEEngine


def __getattr__(name: str) -> Any:
    """Returns `ForeMoEEngine`, which pickles look up by name. Imports veRL's module."""
    if name != "ForeMoEEngine":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(ENGINE_MODULE)  # with foremoe's plugin, this import creates the class
    return globals().get(name) or engine_class(module)


@contextlib.contextmanager
def _before_micro_batches(module: Any, begin: Callable[[Any, list[Any], Any], tuple[list[Any], Any]]) -> Iterator[None]:
    """Calls `begin` with the micro-batches after veRL has formed them. `begin` may return other micro-batches."""
    prepare = module.prepare_micro_batches

    def then_begin(data: Any, *args: Any, **kwargs: Any) -> Any:
        return begin(data, *prepare(data, *args, **kwargs))

    module.prepare_micro_batches = then_begin
    try:
        yield
    finally:
        module.prepare_micro_batches = prepare
