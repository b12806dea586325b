"""The mixture of experts of DeepSeek and of families that took it over: shared experts, routing within groups."""

import re

import torch

from lightllm.common.basemodel.layer_infer.template.moe import TopKRouter
from lightllm.common.basemodel.layer_weights.experts import ExpertSlot
from lightllm.common.basemodel.layer_weights.slot import Slot, whole
from lightllm.common.basemodel.model_config import ConfigError
from lightllm.models.mixture import Mixture


class DeepseekMixture(Mixture):
    """V2's."""

    def is_sparse(self, i: int) -> bool:
        return i >= self.config.raw.count("first_k_dense_replace", 0)

    def shared_size(self) -> int:
        return self.expert_size * self.config.raw.size("n_shared_experts")

    def mixture_slots(self) -> dict[str, Slot | ExpertSlot]:
        if self.config.raw.size("moe_layer_freq", 1) != 1:
            raise ConfigError("config.json: moe_layer_freq is supported only if it is 1")
        return super().mixture_slots()

    def router(self) -> TopKRouter:
        raw, scaling = self.config.raw, self.config.raw.number("routed_scaling_factor", 1.0)
        if raw.flag("norm_topk_prob"):
            raise ConfigError("config.json: norm_topk_prob is not supported for deepseek_v2")
        match method := raw.word("topk_method", "greedy"):
            case "greedy":
                return TopKRouter(self.top_k, scaling=scaling)
            case "group_limited_greedy":
                return TopKRouter(self.top_k, "softmax", False, scaling, *self.groups())
        raise ConfigError(f"config.json: topk_method {method!r} is none of greedy, group_limited_greedy")

    def groups(self) -> tuple[int, int]:
        """(groups, best groups), of which a token's experts are; ConfigError if they cannot be."""
        groups, best = (self.config.raw.size(word, 1) for word in ("n_group", "topk_group"))
        experts, k = self.num_experts, self.top_k
        if experts % groups or best > groups or k > best * (experts // groups):
            raise ConfigError(
                f"config.json: num_experts_per_tok {k} cannot be of the topk_group {best} best of n_group {groups} "
                f"groups of {experts} experts"
            )
        return groups, best


class BiasedMixture(DeepseekMixture):
    """V3's: a learned bias steers the choice of experts."""

    def router(self) -> TopKRouter:
        raw = self.config.raw
        renormalize, scaling = raw.flag("norm_topk_prob"), raw.number("routed_scaling_factor", 1.0)
        return TopKRouter(self.top_k, "sigmoid", renormalize, scaling, *self.groups(), judges=2)

    def mixture_slots(self) -> dict[str, Slot | ExpertSlot]:
        bias = whole(self.router_name, self.num_experts, leaf="e_score_correction_bias", dtype=torch.float32)
        return super().mixture_slots() | {"router_bias": bias}

    def ignores(self, name: str) -> bool:
        """Also the blocks behind the last layer that predict further tokens (MTP): they are not needed to predict the
        next one, whether the config counts them or not."""
        found = re.match(r"model\.layers\.(\d+)\.", name)
        return super().ignores(name) or (found is not None and int(found[1]) >= self.config.num_hidden_layers)
