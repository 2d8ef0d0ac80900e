"""Imported by the process that ranks are forked from: what each of them would import and look up for itself."""

import gc
import importlib

from torch._dynamo import trace_rules

import foremoe

for name in (
    "torch.distributed", "foremoe.testing.rank_process", "foremoe.testing.ranks", "foremoe.integrations.megatron",
    "megatron.core.models.gpt.gpt_layer_specs", "megatron.core.optimizer",
):  # fmt: skip
    importlib.import_module(name)
trace_rules.get_torch_obj_rule_map()
foremoe.warm_up()
# Ranks collect garbage often; what was loaded here need not be looked at each time.
gc.collect()
gc.freeze()
