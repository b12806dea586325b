"""Every way in which one axis of a model can be wrong, found by looking at the model: name -> what breaks it."""

import copy
import dataclasses
from collections.abc import Callable, Iterator

import torch

from lightllm.common.basemodel.basemodel import BaseModel
from lightllm.common.basemodel.layer_infer.pre_layer_infer import PreLayerInfer
from lightllm.common.basemodel.layer_infer.template import norm, residual
from lightllm.common.basemodel.layer_infer.template.feed_forward import GATED, GatedFeedForward, PlainFeedForward
from lightllm.common.basemodel.layer_infer.template.moe import MoeFeedForward, SumFeedForward
from lightllm.common.basemodel.layer_infer.template.position import NoRope
from lightllm.common.basemodel.layer_infer.transformer_layer_infer import TransformerLayerInfer
from lightllm.common.basemodel.partial_sum import taken, total
from lightllm.models.olmo2.model import PostNorm

Break = Callable[[BaseModel], None]


def breaks(model: BaseModel) -> dict[str, Break]:
    """All breaks that this model offers. Each changes layers, pre, post or weight dictionaries, never a tensor."""
    return dict([*_scores(model), *_positions(model), *_norms(model), *_residuals(model), *_feed_forwards(model),
                 *_ends(model), *_weights(model)])  # fmt: skip


def layers(change: Callable[[TransformerLayerInfer], TransformerLayerInfer]) -> Break:
    def apply(model: BaseModel) -> None:
        model.layers = [change(layer) for layer in model.layers]

    return apply


def attention(**fields) -> Break:
    return layers(lambda la: dataclasses.replace(la, attention=dataclasses.replace(la.attention, **fields)))


def spec(change: Callable) -> Break:
    def of_layer(layer: TransformerLayerInfer) -> TransformerLayerInfer:
        changed = dataclasses.replace(layer.attention.spec, **change(layer.attention.spec))
        return dataclasses.replace(layer, attention=dataclasses.replace(layer.attention, spec=changed))

    return layers(of_layer)


def _scores(model: BaseModel) -> Iterator[tuple[str, Break]]:
    yield "scale", spec(lambda s: dict(scale=s.scale * 1.1))
    specs = [layer.attention.spec for layer in model.layers]
    for name in ("window", "chunk"):
        values = {getattr(s, name) for s in specs} - {None}
        if values:
            more = lambda s, name=name: {name: getattr(s, name) and getattr(s, name) + 1}
            yield f"{name} + 1", spec(more)
            yield f"{name} - 1", spec(lambda s, name=name: {name: getattr(s, name) and getattr(s, name) - 1})
            yield f"no {name}", spec(lambda s, name=name: {name: None})
        if values and len({getattr(s, name) for s in specs}) > 1:
            (value,) = values
            yield f"{name} in every layer", spec(lambda s, name=name, value=value: {name: value})
    if any(s.softcap for s in specs):
        yield "no softcap", spec(lambda s: dict(softcap=None))
        yield "softcap", spec(lambda s: dict(softcap=s.softcap * 1.1))
    if any(s.slopes is not None for s in specs):
        yield "no slopes", spec(lambda s: dict(slopes=None))
        yield "slopes", spec(lambda s: dict(slopes=s.slopes.flip(0)))


class Displaced:
    """Angles of other positions, or of other pairs."""

    def __init__(self, inner, change) -> None:
        self.inner, self.change = inner, change

    def angles(self, state):
        angles = self.inner.angles(state)
        return angles and self.change(*angles)

    def write(self, *arguments):
        return self.inner.write(*arguments)


def _positions(model: BaseModel) -> Iterator[tuple[str, Break]]:
    def displaced(change) -> Break:
        found = {}

        def of_layer(layer):
            inner = layer.attention.position
            position = found.setdefault(inner, Displaced(inner, change))
            return dataclasses.replace(layer, attention=dataclasses.replace(layer.attention, position=position))

        return layers(of_layer)

    kinds = {layer.attention.position for layer in model.layers}
    if all(isinstance(kind, NoRope) for kind in kinds):
        return
    yield "theta", _other_theta
    yield "pairs in another order", displaced(lambda cos, sin: (cos.flip(-1), sin.flip(-1)))
    yield "positions one too far", displaced(lambda cos, sin: (cos.roll(1, 0), sin.roll(1, 0)))
    yield "turned the other way", displaced(lambda cos, sin: (cos, -sin))
    yield "longer vectors", displaced(lambda cos, sin: (cos * 1.05, sin * 1.05))
    if len(kinds) > 1 and len({getattr(layer.attention, "head_dim", None) for layer in model.layers}) == 1:
        for i, kind in enumerate(kinds):
            same = lambda la, k=kind: dataclasses.replace(la, attention=dataclasses.replace(la.attention, position=k))
            yield f"position {i} in every layer", layers(same)


def _other_theta(model: BaseModel) -> None:
    was, rope = model.position, model.config.rope
    model.config = dataclasses.replace(model.config, rope=dataclasses.replace(rope, theta=rope.theta * 0.9))
    position = model.make_position()
    changed = lambda la: dataclasses.replace(la, position=position) if la.position is was else la
    layers(lambda layer: dataclasses.replace(layer, attention=changed(layer.attention)))(model)


def _norms(model: BaseModel) -> Iterator[tuple[str, Break]]:
    kind = model.layers[0].norm
    other = norm.RMSNorm(kind.eps) if not isinstance(kind, norm.RMSNorm) else norm.UnitOffsetRMSNorm(kind.eps)
    yield "norm kind", layers(lambda layer: dataclasses.replace(layer, norm=other))
    yield "norm eps", layers(lambda layer: dataclasses.replace(layer, norm=dataclasses.replace(kind, eps=0.05)))
    if getattr(model.layers[0].attention, "qk_norm", None):
        yield "no norm of heads", attention(qk_norm=NoNorm(kind.eps))


class NoNorm(norm.RMSNorm):
    def __call__(self, x, w):
        return x


class Serial(residual.ParallelResidual):
    def feed(self, attended, w, norm, ffn):
        return residual.PreNorm().feed(attended, w | {"ffn_norm": w["attn_norm"]}, norm, ffn)


class NoNormBehind(residual.PreNorm):
    def attend(self, stream, w, norm, attention):
        if "attn_norm" in w:
            return super().attend(stream, w, norm, attention)
        hidden, rest = stream
        summed = total(hidden) if rest is None else rest + total(hidden)
        return residual.Attended(attention(summed), summed)

    def feed(self, attended, w, norm, ffn):
        if "attn_norm" in w:
            return super().feed(attended, w, norm, ffn)
        summed = attended.residual + attended.answer.total()
        return ffn(summed), summed


def _residuals(model: BaseModel) -> Iterator[tuple[str, Break]]:
    replaced = lambda new: layers(lambda layer: dataclasses.replace(layer, residual=new))
    match kind := model.layers[0].residual:
        case residual.ParallelResidual():
            yield "one branch after the other", replaced(Serial())
        case residual.SandwichNorm() | PostNorm():
            yield "no norms behind the branches", replaced(NoNormBehind())
        case residual.ScaledPreNorm():
            yield "branches unscaled", replaced(residual.PreNorm())
            yield "scale of branches", replaced(residual.ScaledPreNorm(kind.scale * 1.1))
        case residual.PreNorm():
            yield "scaled branches", replaced(residual.ScaledPreNorm(0.9))


class NoExperts(MoeFeedForward):
    def apply(self, x, weights, ids, w, addend=None):
        return taken(torch.zeros_like(x) if addend is None else addend)


def _blocks_of(ffn) -> dict[str, object]:
    """The feed-forward blocks that it is made of."""
    kinds = GatedFeedForward, PlainFeedForward, MoeFeedForward
    return {name: part for name, part in vars(ffn).items() if isinstance(part, kinds)}


def _feed_forwards(model: BaseModel) -> Iterator[tuple[str, Break]]:
    def everywhere(kind: type, change: Callable) -> Break:
        def of(ffn):
            if isinstance(ffn, kind):
                return change(ffn)
            return dataclasses.replace(ffn, **{name: of(part) for name, part in _blocks_of(ffn).items()})

        return layers(lambda layer: dataclasses.replace(layer, feed_forward=of(layer.feed_forward)))

    found = [layer.feed_forward for layer in model.layers]
    parts = [part for f in found for part in (f, *_blocks_of(f).values())]
    for kind in (GatedFeedForward, PlainFeedForward):
        acts = {p.act for p in parts if isinstance(p, kind)}
        if acts:
            other = "relu" if "relu" not in acts else "silu"
            yield f"activation of {kind.__name__}", everywhere(kind, lambda f, a=other: dataclasses.replace(f, act=a))
    moe = [p for p in parts if isinstance(p, MoeFeedForward)]
    if moe:
        yield (
            "activation of experts",
            everywhere(MoeFeedForward, lambda f: dataclasses.replace(f, activation=GATED["relu"])),
        )
        router = moe[0].router
        wrong = {"k": 1 if router.k > 1 else 2, "score": "sigmoid" if router.score == "softmax" else "softmax"}
        if "experts_post_norm" not in model.layer_weights[-1]:  # which takes away any factor
            wrong |= {"renormalize": not router.renormalize, "scaling": router.scaling * 1.1}
        if router.groups > 1:
            wrong |= {"groups": 1, "best_groups": router.best_groups - 1 or 2, "judges": 3 - router.judges}
        for field, value in wrong.items():
            changed = lambda f, field=field, value=value: dataclasses.replace(
                f, router=dataclasses.replace(f.router, **{field: value})
            )
            yield f"router: {field}", everywhere(MoeFeedForward, changed)
        yield "no routed experts", everywhere(MoeFeedForward, lambda f: NoExperts(f.router, f.activation, f.parallel))
    if any(isinstance(f, SumFeedForward) for f in found):
        routed_only = lambda f: f.routed if isinstance(f, SumFeedForward) else f
        yield (
            "no shared expert",
            layers(lambda layer: dataclasses.replace(layer, feed_forward=routed_only(layer.feed_forward))),
        )


def _ends(model: BaseModel) -> Iterator[tuple[str, Break]]:
    if type(model.pre) is not PreLayerInfer:
        yield "plain embeddings", lambda m: setattr(m, "pre", PreLayerInfer())
    post = model.post
    replaced = lambda **fields: lambda m: setattr(m, "post", dataclasses.replace(m.post, **fields))
    yield "scale of logits", replaced(scale=post.scale * 1.01)
    if post.softcap:
        yield "no softcap of logits", replaced(softcap=None)


def _weights(model: BaseModel) -> Iterator[tuple[str, Break]]:
    """Each weight rolled, each bias left out: no slot is there in vain."""

    def changed(name: str, leaf: str) -> Break:
        def of(weights: dict) -> dict:
            if name not in weights or getattr(weights[name], leaf) is None:
                return weights
            weight = copy.copy(weights[name])
            wrong = weight.weight.roll(1, -1) if weight.weight.numel() > 1 else weight.weight * 1.5
            setattr(weight, leaf, None if leaf == "bias" else wrong)
            return weights | {name: weight}

        def apply(m: BaseModel) -> None:
            m.layer_weights, m.outer_weights = [of(w) for w in m.layer_weights], of(m.outer_weights)

        return apply

    def reordered(name: str, order: Callable) -> Break:
        """order(weight, attention of its layer) -> weight."""

        def of(weights: dict, layer: TransformerLayerInfer) -> dict:
            if name not in weights:
                return weights
            weight = copy.copy(weights[name])
            weight.weight = order(weight.weight, layer.attention)
            return weights | {name: weight}

        return lambda m: setattr(m, "layer_weights", [of(w, la) for w, la in zip(m.layer_weights, m.layers)])

    for name in ("gate_up", "shared_gate_up", "experts_gate_up"):
        if any(name in w for w in model.layer_weights):
            dim = 1 if name.startswith("experts") else 0
            yield f"halves of {name}", reordered(name, lambda w, _, d=dim: torch.cat(w.chunk(2, d)[::-1], d))
    if "qkv" in model.layer_weights[0]:
        yield "k and v in the other order", reordered("qkv", _swap_k_and_v)
        yield "heads of q in another order", reordered("qkv", _roll_queries)
    for weights in (model.outer_weights, *model.layer_weights):
        for name, weight in weights.items():
            yield f"slot {name}", changed(name, "weight")
            if weight.bias is not None:
                yield f"bias of {name}", changed(name, "bias")


def _swap_k_and_v(weight: torch.Tensor, attention) -> torch.Tensor:
    queries = attention.heads * attention.head_dim
    return torch.cat((weight[:queries], *weight[queries:].chunk(2)[::-1]))


def _roll_queries(weight: torch.Tensor, attention) -> torch.Tensor:
    queries = attention.heads * attention.head_dim
    return torch.cat((weight[:queries].roll(attention.head_dim, 0), weight[queries:]))
