"""Mixtral: Mistral with eight experts in every layer, two of which a token takes."""

from lightllm.models.mixture import Mixture


class Mixtral(Mixture):
    router_name = "block_sparse_moe.gate"
    experts_name = "block_sparse_moe.experts"
    projections = ("w1", "w3", "w2")
    size_word = "intermediate_size"
