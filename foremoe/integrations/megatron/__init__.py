"""foremoe inside Megatron-Core. Requires megatron-core.

`attach` adds physical slots to every ``MoELayer`` of a built model, and `forward_backward` runs the model with plans.
"""

from foremoe.base.errors import InputError

try:
    import megatron.core as _core  # noqa: F401
except ModuleNotFoundError:
    raise InputError("the Megatron adapter needs megatron-core; pip install 'megatron-core>=0.16'.") from None

from foremoe.integrations.megatron.attach import Attached, attach
from foremoe.integrations.megatron.forward_backward import forward_backward
from foremoe.integrations.megatron.summary import MegatronSummary
from foremoe.integrations.megatron.virtual import VirtualSummary
from foremoe.integrations.settings import AttachSettings

__all__ = ["AttachSettings", "Attached", "MegatronSummary", "VirtualSummary", "attach", "forward_backward"]
