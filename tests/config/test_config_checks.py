"""Incompatible sizes are refused before anything is compiled."""

import time
from typing import Annotated, Any, Literal

import pytest
from pydantic import ValidationError, create_model

from mesh_transformer.config import Config, mesh_shape, parse_config
from mesh_transformer.config.mesh import whole_sequence_rules
from mesh_transformer.config.variants import Variants
from mesh_transformer.errors import UserError
from mesh_transformer.fields import ConfigGroup
from mesh_transformer.optimizers import OPTIMIZERS

MODEL = {"layers": 2, "d_model": 64, "n_heads": 8, "n_vocab": 512, "seq": 32}


def config(model: dict[str, Any] | None = None, **groups: dict[str, Any]) -> Config:
    return parse_config({"model": {**MODEL, **(model or {})}, **groups})


@pytest.mark.parametrize(
    ("groups", "parts"),
    [
        ({"model": {"d_model": 65}}, ["model.d_model 65", "model.n_heads 8", "set model.d_head"]),
        ({"model": {"pe_rotary_dims": 10}}, ["pe_rotary_dims 10", "at most model.d_head 8", "to 8 or less"]),
        ({"model": {"pe_rotary_dims": 3}}, ["must be even"]),
        ({"model": {"n_heads": 64}}, ["model.d_head 1 is too narrow", "lower model.n_heads"]),
        ({"mesh": {"tp": 3}}, ["model.n_heads 8", "mesh.tp 3", "6 or 9"]),
        ({"model": {"d_ff": 6}, "mesh": {"tp": 4}}, ["model.d_ff 6", "mesh.tp 4", "4 or 8"]),
        (
            {"model": {"vocab_multiple": 1, "n_vocab": 257}, "mesh": {"tp": 2}},
            ["257", "vocab_multiple to 2, or mesh.tp to 1"],
        ),
        ({"mesh": {"fsdp": 3}}, ["model.d_model 64", "mesh.fsdp 3"]),
        ({"mesh": {"cp": 3}}, ["data.seq 32 is not divisible by mesh.cp 3", "mesh.cp to 2"]),
        (
            {"mesh": {"cp": 32}},
            ["data.seq 32 is not divisible by 2 x mesh.cp 32", "mesh.cp to 16", "context_mode=ring"],
        ),
        (
            {"mesh": {"cp": 4, "tp": 4, "context_mode": "ulysses"}},
            ["model.n_heads 8 is not divisible by mesh.cp x mesh.tp 16", "context_mode=zigzag"],
        ),
        (
            {"mesh": {"cp": 16, "tp": 4, "shard_activations": True}},
            ["data.seq 32 is not divisible by mesh.cp x mesh.tp 64", "mesh.shard_activations=false"],
        ),
        (
            {"mesh": {"cp": 16, "tp": 4, "overlap_tp": True}},
            ["data.seq 32 is not divisible", "mesh.shard_activations=false and mesh.overlap_tp=false"],
        ),
        ({"mesh": {"overlap_tp": True}}, ["mesh.overlap_tp true needs mesh.tp over 1", "mesh.overlap_tp=auto"]),
        (
            {"mesh": {"tp": 4, "overlap_tp": True, "shard_activations": False}},
            ["needs mesh.shard_activations true", "or set mesh.overlap_tp=false"],
        ),
        (
            {"mesh": {"sum_gradients": "per_step", "zero1": True}},
            ["mesh.sum_gradients per_step", "set mesh.zero1=false, or mesh.sum_gradients=per_microbatch"],
        ),
        ({"mesh": {"dcn": "tp"}}, ["mesh.dcn = 'tp'", "dp, pp"]),
        ({"mesh": {"overlap_tp": "ring"}}, ["mesh.overlap_tp = 'ring'", "auto", "true or false"]),
        (
            {"mesh": {"dp": 3, "zero1": True}},
            ["model.d_model 64", "mesh.dp 3", "or set mesh.zero1=false"],
        ),
        ({"data": {"seq": 33}}, ["data.seq 33", "model.seq 32"]),
        ({"data": {"seq": 10}, "mesh": {"tp": 4, "shard_activations": True}}, ["data.seq 10", "=false"]),
        ({"data": {"batch_size": 3}, "mesh": {"dp": 2}}, ["data.batch_size 3", "2 or 4"]),
        ({"data": {"batch_size": 2, "per_replica_batch": 1}}, ["keep one", "data.per_replica_batch=null"]),
        ({"data": {"tokenizer": "bytes"}, "model": {"n_vocab": 256}}, ["n_vocab 256", "257"]),
        (
            {"checkpoint": {"bucket": "b", "model_dir": "gs://b/x"}},
            ["folder inside", "--set checkpoint.bucket="],
        ),
        ({"checkpoint": {"bucket": "b", "model_dir": "/"}}, ["folder inside"]),
        ({"data": {"restart": "yes"}}, ["data.restart = 'yes': expected true or false"]),
    ],
)
def test_combination_is_refused(groups: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        config(**groups)
    for part in parts:
        assert part in str(caught.value)


def test_limits_that_are_allowed() -> None:
    assert config({"pe": "fixed", "pe_rotary_dims": 640}).model.pe_rotary_dims == 640
    assert config({"pe": "t5", "n_heads": 64}).model.d_head == 1
    assert config({"n_vocab": 257}, data={"tokenizer": "bytes"}).model.n_vocab == 257
    assert config(optimizer={"warmup_steps": 0}).optimizer.warmup_steps == 0
    assert config(data={"seq": 32}).seq == 32
    assert config().seq == 32
    assert config(checkpoint={"model_dir": "gs://b/x"}).checkpoint.root == "gs://b/x"


@pytest.mark.parametrize(
    ("mesh", "n_devices", "shape"),
    [
        ({}, 1, {}),
        ({}, 8, {"dp": 8}),
        ({"tp": 4}, 8, {"dp": 2, "tp": 4}),
        ({"fsdp": 2, "tp": 2}, 8, {"dp": 2, "fsdp": 2, "tp": 2}),
        ({"dp": 2, "fsdp": 4}, 8, {"dp": 2, "fsdp": 4}),
        ({"cp": 4}, 8, {"dp": 2, "cp": 4}),
        ({"cp": 32, "context_mode": "ring"}, 32, {"cp": 32}),
    ],
)
def test_mesh_shape(mesh: dict[str, int], n_devices: int, shape: dict[str, int]) -> None:
    assert config(mesh=mesh).check_devices(n_devices) == mesh_shape(**shape)


@pytest.mark.parametrize(
    ("mesh", "n_devices", "advice"),
    [
        ({"tp": 8}, 1, ["--set mesh.tp=1"]),
        ({"tp": 8}, 4, ["--set mesh.tp=1"]),
        ({"tp": 8}, 12, ["--set mesh.tp=1"]),
        ({"fsdp": 2, "tp": 4}, 2, ["--set mesh.fsdp=1", "--set mesh.tp=1"]),
        ({"dp": 2, "tp": 2}, 1, ["--set mesh.dp=null", "--set mesh.tp=1"]),
        ({"dp": 2}, 1, ["--set mesh.dp=null"]),
        ({"dp": 2}, 3, ["--set mesh.dp=null"]),
    ],
)
def test_the_advice_for_a_wrong_number_of_devices_works(
    mesh: dict[str, int], n_devices: int, advice: list[str]
) -> None:
    raw = {"model": MODEL, "mesh": mesh}
    with pytest.raises(UserError, match=f"found {n_devices}") as caught:
        parse_config(raw).check_devices(n_devices)
    for change in advice:
        assert change in str(caught.value)
    changes = [change.removeprefix("--set ") for change in advice]
    assert parse_config(raw, changes).check_devices(n_devices) == mesh_shape(dp=n_devices)


@pytest.mark.parametrize(
    ("sizes", "mesh", "message"),
    [
        ({}, {"tp": 2_000_000_000},
         "model.n_heads 8 is not divisible by mesh.tp 2000000000: set mesh.tp to 1, 2, 4, 8, or "
         "model.n_heads of a new model to 2000000000"),
        ({}, {"fsdp": 2**31 - 1},
         "model.d_model 64 is not divisible by mesh.fsdp 2147483647: set mesh.fsdp to 1, 2, 4, 8, 16, 32, 64, "
         "or model.d_model of a new model to 2147483647"),
        # a prime, whose divisors are the furthest apart
        (
            {"n_heads": 2**31 - 1, "d_head": 2},
            {"tp": 2_000_000_000},
            "model.n_heads 2147483647 is not divisible by mesh.tp 2000000000: set mesh.tp to 1, 2147483647, "
            "or model.n_heads of a new model to 2000000000 or 4000000000",
        ),
    ],
)  # fmt: skip
def test_a_huge_axis_is_refused_at_once(sizes: dict[str, Any], mesh: dict[str, int], message: str) -> None:
    start = time.process_time()
    with pytest.raises(UserError) as caught:
        config(sizes, mesh=mesh)
    assert str(caught.value) == message
    # counting up to the divisor took 80 seconds
    assert time.process_time() - start < 2


def test_microbatch() -> None:
    shape = mesh_shape(dp=2, fsdp=2, tp=2)
    assert config().microbatch(shape) == 4
    assert config(data={"per_replica_batch": 3}).microbatch(shape) == 12
    assert config(data={"per_replica_batch": 3}).microbatch(mesh_shape(dp=2, cp=4)) == 6
    assert config(data={"batch_size": 8}).microbatch(shape) == 8
    with pytest.raises(
        UserError, match="data.batch_size 6 is not divisible by mesh.dp x mesh.fsdp 4: set it to 4 or 8"
    ):
        config(data={"batch_size": 6}).microbatch(shape)


@pytest.mark.parametrize(
    ("fields", "when"),
    [
        ({}, "per_microbatch"),
        ({"dcn": "dp"}, "per_step"),
        ({"dcn": "dp", "zero1": True}, "per_microbatch"),
        ({"dcn": "dp", "sum_gradients": "per_microbatch"}, "per_microbatch"),
        ({"dcn": "pp"}, "per_microbatch"),
    ],
)
def test_gradients_that_cross_slices_are_summed_once_a_step(fields: dict[str, Any], when: str) -> None:
    assert config(mesh=fields).mesh.sum_gradients == when


def test_checks_that_need_the_devices() -> None:
    with pytest.raises(UserError, match="data.batch_size 4"):
        config(data={"batch_size": 4}).check_devices(8)
    with pytest.raises(UserError, match="mesh.zero1=false"):
        config(mesh={"zero1": True}).check_devices(3)
    assert config(mesh={"zero1": True}).check_devices(4)["dp"] == 4


@pytest.mark.parametrize(
    ("shape", "heads", "embed"),
    [
        ({"cp": 2, "tp": 2}, ("cp", "tp"), ("fsdp",)),
        # 8 heads
        ({"cp": 8, "fsdp": 2, "tp": 2}, ("tp",), ("fsdp", "cp")),
        ({"cp": 3}, ("tp",), ("fsdp",)),
    ],
)
def test_pp_and_cp_split_what_they_divide_where_sequences_are_whole(
    shape: dict[str, int], heads: tuple[str, ...], embed: tuple[str, ...]
) -> None:
    rules = whole_sequence_rules(mesh_shape(**shape), config().sizes)
    assert (rules["heads"], rules["mlp"], rules["vocab"]) == (heads,) * 3
    assert rules["embed"] == embed
    assert (rules["batch"], rules["seq"], rules["block_seq"]) == (("dp", "fsdp", "ep"), (), ())


OPTIMIZER_OF = {
    "lion": {"b1": 0.8, "moments_dtype": "bfloat16"},
    "adafactor": {"decay_rate": 0.7},
    "adam": {},
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_name_selects_the_fields(name: str) -> None:
    """In both spellings, from the file or the command line. A config that was written loads again."""
    given = {"name": name, "lr": 1e-3, **OPTIMIZER_OF[name]}
    chosen = config(optimizer=given)
    assert type(chosen.optimizer) is OPTIMIZERS[name]
    assert chosen.optimizer == OPTIMIZERS[name](**given)
    assert parse_config(chosen.model_dump(mode="json")) == chosen
    changes = [f"optimizer.{field}={value}" for field, value in given.items()]
    for raw in (
        {**MODEL, "bf16_optimizer": None},
        {"model": MODEL},
        {"model": MODEL, "optimizer": {"name": None}},
    ):
        assert parse_config(raw, changes).optimizer == chosen.optimizer
    assert type(config(optimizer={"lr": 1e-3}).optimizer) is OPTIMIZERS["adam"]


@pytest.mark.parametrize(
    ("raw", "changes", "parts"),
    [
        ({}, ["optimizer.name=lino"], ["optimizer.name = 'lino'", "one of adam, lion, adafactor", "mean lion?"]),
        ({"optimizer": {"name": 3}}, [], ["optimizer.name = 3", "one of adam, lion, adafactor"]),
        ({"optimizer": {"name": "lion", "eps": 1e-8}}, [], ["optimizer.eps", "adam, adafactor, not of lion"]),
        ({}, ["optimizer.name=adafactor", "b1=0.5"], ["optimizer.b1", "adam, lion, not of adafactor"]),
        ({}, ["clipping_thresh=0.5"], ["did you mean optimizer.clipping_threshold?"]),
        ({}, ["optimizer.decay_rate=0.5"], ["name adafactor, not of adam", "or set optimizer.name=adafactor"]),
        ({}, ["optimizer.name=adafactor", "bf16_optimizer=true"], ["--set optimizer.moments_dtype=null"]),
        ({}, ["optimizer.name=lion", "optimizer.b1=2"], ["optimizer.b1 = 2: expected a number, 0 or more and under 1"]),
        ({}, ["optimizer.nam=lion"], ["did you mean optimizer.name?"]),
        ({"optimizer": {"optim": "lion"}}, [], ["did you mean optimizer.name?"]),
        ({"model": {**MODEL, "rotary_dim": 4}}, [], ["did you mean model.pe_rotary_dims?"]),
        ({"model": {**MODEL, "family": "gpt_neox", "rotary_dim": 4}}, [], ["did you mean model.rotary_dims?"]),
        ({}, ["model.family=gpt_neox", "model.rotary_dim=4"], ["did you mean model.rotary_dims?"]),
        ({}, ["optimizer.name=adafactor", "optimizer.beta1=0.5"], ["did you mean optimizer.b1?"]),
        ({"model": {**MODEL, "family": "gpt_neox", "window": 7}}, [], ["gpt_neo, mistral, qwen2", "not of gpt_neox"]),
        ({"model": {**MODEL, "family": "llama", "rotary_scaling": "yarn"}}, [], ["yarn needs model.rotary_factor"]),
        ({"model": {**MODEL, "family": "llama", "rotary_factor": 2.0}}, [],
         ["no effect with model.rotary_scaling none"]),
        ({"model": {**MODEL, "family": "llama", "n_kv_heads": 3}}, [], ["not divisible by model.n_kv_heads 3"]),
        ({"model": {**MODEL, "family": "qwen2", "window": 3}}, [], ["model.window needs model.full_layers"]),
    ],
)  # fmt: skip
def test_a_field_of_another_class_is_refused(raw: dict[str, Any], changes: list[str], parts: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        parse_config({"model": MODEL, **raw}, changes)
    for part in parts:
        assert part in str(caught.value)


def test_a_group_of_one_class_names_its_missing_fields() -> None:
    """Variants alone, with required fields, as in a model family."""

    class Wide(ConfigGroup):
        family: Literal["wide"] = "wide"
        width: int

    variants = Variants("family", {"wide": Wide})
    holder = create_model("Holder", __base__=ConfigGroup, model=(Annotated[ConfigGroup, variants], ...))
    assert holder.model_validate({"model": {"width": 3}}).model_dump() == {"model": {"family": "wide", "width": 3}}
    with pytest.raises(ValidationError) as caught:
        holder.model_validate({"model": {}})
    assert caught.value.errors()[0]["loc"] == ("model", "wide", "width")
