"""The mixture of experts of DeepSeek and of families that took it over: shared experts, routing within groups."""

import re
from collections.abc import Mapping

import torch

from lightllm.common.basemodel.basemodel import BaseModel
from lightllm.common.basemodel.layer_infer.template.feed_forward import GATED, FeedForward, GatedFeedForward
from lightllm.common.basemodel.layer_infer.template.moe import MoeFeedForward, SumFeedForward
from lightllm.common.basemodel.layer_infer.template.routing import Router, TopKRouter
from lightllm.common.basemodel.layer_weights.experts import ExpertSlot, expert_slots, named_experts
from lightllm.common.basemodel.layer_weights.slot import Part, Slot, router
from lightllm.common.basemodel.model_config import ConfigError, ModelConfig


def v2_router(config: ModelConfig) -> Router:
    raw, k = config.raw, config.raw.size("num_experts_per_tok")
    scaling = raw.number("routed_scaling_factor")
    if raw.flag("norm_topk_prob"):
        raise ConfigError("config.json: norm_topk_prob is not supported for deepseek_v2")
    match method := raw.word("topk_method"):
        case "greedy":
            return TopKRouter(k, scaling=scaling)
        case "group_limited_greedy":
            return TopKRouter(k, "softmax", False, scaling, *groups_of(config))
    raise ConfigError(f"config.json: topk_method {method!r} is none of greedy, group_limited_greedy")


def v3_router(config: ModelConfig) -> Router:
    raw = config.raw
    renormalize, scaling = raw.flag("norm_topk_prob"), raw.number("routed_scaling_factor")
    k = raw.size("num_experts_per_tok")
    return TopKRouter(k, "sigmoid", renormalize, scaling, *groups_of(config), judges=2)


def groups_of(config: ModelConfig) -> tuple[int, int]:
    """(groups, best groups), of which a token's experts are; ConfigError if they cannot be."""
    raw = config.raw
    experts, k, groups, best = (
        raw.size(word) for word in ("num_experts", "num_experts_per_tok", "n_group", "topk_group")
    )
    if experts % groups or best > groups or k > best * (experts // groups):
        raise ConfigError(
            f"config.json: num_experts_per_tok {k} cannot be of the topk_group {best} best of n_group {groups} groups "
            f"of {experts} experts"
        )
    return groups, best


def deepseek_moe(model: BaseModel, router: Router) -> FeedForward:
    act = model.config.hidden_act
    return SumFeedForward(MoeFeedForward(router, GATED[act], model.parallel), GatedFeedForward(act, prefix="shared_"))


def deepseek_moe_slots(model: BaseModel, biased: bool) -> Mapping[str, Slot | ExpertSlot]:
    """Slots of one layer; `biased` routers steer the choice of experts by a learned bias."""
    hidden, raw = model.config.hidden_size, model.config.raw
    if raw.size("moe_layer_freq", 1) != 1:
        raise ConfigError("config.json: moe_layer_freq is supported only if it is 1")
    experts, size = raw.size("num_experts"), raw.size("moe_intermediate_size")
    shared = "mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj", "mlp.shared_experts.down_proj"
    part = Part("mlp.gate", experts, leaf="e_score_correction_bias")
    bias = {"router_bias": Slot((part,), None, dtype=torch.float32)}
    return {
        "router": router("mlp.gate", experts, hidden),
        **(bias if biased else {}),
        **expert_slots(model.parallel, experts, hidden, size, named_experts("mlp.experts", hidden, size)),
        **model.gated_slots(*shared, size * raw.size("n_shared_experts"), prefix="shared_"),
    }


def is_mtp_block(config: ModelConfig, name: str) -> bool:
    """Whether a tensor belongs to the blocks behind the last layer that predict further tokens. They are not needed
    to predict the next one, whether the config counts them or not."""
    found = re.match(r"model\.layers\.(\d+)\.", name)
    return found is not None and int(found[1]) >= config.num_hidden_layers
