"""The group `experts`: how routed experts are computed and balanced in training."""

from typing import Literal

from mesh_transformer.fields import Group, NonNegative, Positive


class ExpertsConfig(Group):
    """Routed experts in training. A model without experts refuses values other than the defaults."""

    exchange: Literal["tokens", "gather"] = "tokens"
    """how tokens reach experts on other devices of mesh.ep. tokens: each token is sent to the devices of its experts.
    gather: each device gathers all tokens of its mesh.ep group, which sends less if a token chooses more experts than
    mesh.ep has devices"""
    capacity_factor: Positive | None = None
    """each device computes at most this many times the mean number of its tokens for each expert, and drops the rest,
    later choices first; metrics count them. Absent: no token is dropped, and validation drops none"""
    balance_loss: NonNegative = 0.01
    """weight of the balance loss (Switch, arXiv:2101.03961): for each layer, experts x the sum over experts of the
    share of choices x the mean probability, 1 if even; the mean over layers. The value of transformers is
    experts_per_token times this: its router_aux_loss_coef times experts_per_token is our weight"""
    z_loss: NonNegative = 0.001
    """weight of the router's z-loss (ST-MoE, arXiv:2202.08906): the mean of the squared log-sum-exp of a router's
    logits; the mean over layers"""
    bias_rate: NonNegative = 0.001
    """for routers with a bias (DeepSeek-V3, arXiv:2412.19437): after each step, the bias of an expert with fewer tokens
    than the mean rises by this, and of one with more falls. 0: the biases stay"""
