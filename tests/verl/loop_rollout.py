"""Stands in for rollout in veRL's loop: responses, scores and recorded routing that depend on the step alone."""

import numpy as np
import torch
from engine_program import PROMPT, RESPONSE
from program import VOCABULARY, E, K

LAYERS, STEPS, PROMPTS = 4, 3, 4  # of the model; of training; of a step


class Prompts(torch.utils.data.Dataset):
    """As many as all steps take; what they say comes with the responses."""

    def __init__(self, **_):
        pass

    def __len__(self):
        return STEPS * PROMPTS

    def __getitem__(self, i):
        return {"dummy_tensor": torch.tensor([i]), "index": i, "raw_prompt": [{"role": "user", "content": str(i)}]}


class Absent:
    """In place of the servers of rollout and rewards."""

    reward_loop_workers = reward_loop_worker_handles = ()

    def __init__(self, *_, **__):
        pass

    @classmethod
    def create(cls, **_):
        return cls()

    def get_client(self):
        return None

    def get_replicas(self):
        return []


class Weights:
    """In place of the checkpoint manager: the actor's own `update_weights`, to a rollout in the same process."""

    def __init__(self, config, actor_wg, replicas):
        self.actor = actor_wg

    def update_weights(self, global_steps):
        import ray

        ray.get(self.actor.update_weights(global_steps=global_steps))

    def sleep_replicas(self):
        pass


class AgentLoop:
    """In place of veRL's: hands over all samples of a step at once, as its trainers want them."""

    def __init__(self, config):
        self.config, self.step = config, 0

    @classmethod
    def create(cls, config, **_):
        return cls(config)

    def generate_sequences(self, prompts):
        self.step += 1
        if self.config.trainer.use_v1:
            return self.to_queue(prompts)
        found = [padded(sample) for sample in self.samples(len(prompts))]
        return from_dict({name: torch.stack([sample[name] for sample in found]) for name in found[0]})

    def samples(self, num):
        """Prompt, response, score and, with R3, the experts of every token that rollout has run through the model."""
        generator = torch.Generator().manual_seed(self.step)
        for _ in range(num):
            prompt, response = (int(torch.randint(2, n + 1, (), generator=generator)) for n in (PROMPT, RESPONSE))
            ids = torch.randint(1, VOCABULARY, (prompt + response,), generator=generator)
            weight = torch.ones(prompt + response - 1, LAYERS, E)
            weight[..., : E // 2] = 3.0
            routes = torch.multinomial(weight.view(-1, E), K, generator=generator).view(*weight.shape[:2], K)
            score = float(torch.rand((), generator=generator))
            yield ids[:prompt], ids[prompt:], score, routes if replays(self.config) else None

    def to_queue(self, prompts):
        """As `AgentLoopWorkerTQ` does."""
        import transfer_queue as tq
        from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
        from verl.utils.tensordict_utils import list_of_dict_to_tensordict

        num = self.config.actor_rollout_ref.rollout.n
        uids = list(prompts["uid"])
        keys, fields, tags = [], [], []
        for i, (prompt, response, score, routes) in enumerate(self.samples(num * len(uids))):
            output = AgentLoopOutput(
                prompt_ids=prompt.tolist(), response_ids=response.tolist(), response_mask=[1] * len(response), num_turns=2,
                reward_score=score, metrics=AgentLoopMetrics(), **({} if routes is None else {"routed_experts": routes}),
            )  # fmt: skip
            ids, version = torch.cat([prompt, response]), self.step - 1
            field = output.as_dict()
            field |= {"loss_mask": field["response_mask"], "input_ids": ids, "position_ids": torch.arange(len(ids))}
            keys.append(f"{uids[i // num]}_{i % num}_0")
            fields.append(field | {"uid": uids[i // num], "multi_modal_inputs": {}})
            tags.append({
                "status": "success", "prompt_len": len(prompt), "response_len": len(response), "seq_len": len(ids),
                "global_steps": self.step, "min_global_steps": version, "max_global_steps": version,
            })  # fmt: skip
        tq.kv_batch_put(keys=keys, fields=list_of_dict_to_tensordict(fields), tags=tags, partition_id="train")
        for uid in uids:
            tq.kv_put(key=uid, partition_id="train", tag={"status": "finished"})


def replays(config):
    """Whether rollout records routing."""
    return config.actor_rollout_ref.rollout.enable_rollout_routing_replay


def padded(sample):
    """One sample with its prompt padded on the left and its response on the right."""
    prompt, response, score, routes = sample
    begin, end = PROMPT - len(prompt), PROMPT + len(response)
    found = {name: torch.zeros(PROMPT + RESPONSE, dtype=torch.long) for name in ("input_ids", "attention_mask")}
    found["input_ids"][begin:end] = torch.cat([prompt, response])
    found["attention_mask"][begin:end] = 1
    found["position_ids"] = (found["attention_mask"].cumsum(0) - 1).clamp(0)
    found["prompts"], found["responses"] = found["input_ids"].split([PROMPT, RESPONSE])
    found["response_mask"] = found["attention_mask"][PROMPT:]
    found["rm_scores"] = torch.zeros(RESPONSE)
    found["rm_scores"][len(response) - 1] = score
    if routes is not None:
        found["routed_experts"] = torch.zeros(PROMPT + RESPONSE, LAYERS, K, dtype=torch.int16)
        found["routed_experts"][begin : end - 1] = routes
    return found


def from_dict(tensors):
    from verl import DataProto

    others = {"multi_modal_inputs": np.array([{} for _ in range(len(tensors["input_ids"]))])}
    return DataProto.from_dict(tensors=tensors, non_tensors=others, meta_info={"timing": {}})
