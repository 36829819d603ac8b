"""Converts checkpoints of any format to native, classic and Hugging Face format: the four commands that convert."""

import posixpath
import re
from collections.abc import Sequence

import jax
import ml_dtypes
import numpy as np

from mesh_transformer import files, hub, logs, platforms
from mesh_transformer.checkpoint.adapters import AdaptedSource
from mesh_transformer.checkpoint.classic.folder import check_shards, is_step, write_config, write_meta
from mesh_transformer.checkpoint.classic.format import ClassicStep
from mesh_transformer.checkpoint.classic.writer import write_classic
from mesh_transformer.checkpoint.format import Folder
from mesh_transformer.checkpoint.gguf.format import GgufFile
from mesh_transformer.checkpoint.hf.format import HFFolder, HubModel, weights_of
from mesh_transformer.checkpoint.hf.source import uniform_dtype, weight_files
from mesh_transformer.checkpoint.hf.writer import n_bytes, write_hf
from mesh_transformer.checkpoint.identity import check_same_architecture, with_model
from mesh_transformer.checkpoint.native.format import NativeStep
from mesh_transformer.checkpoint.native.writer import write_native
from mesh_transformer.checkpoint.open import Checkpoint, check_only_step, split_step, step_of
from mesh_transformer.checkpoint.origin import Origin
from mesh_transformer.checkpoint.peft.writer import write_peft
from mesh_transformer.checkpoint.target import check_free, new_folder
from mesh_transformer.checkpoint.tensors import TensorSource
from mesh_transformer.config import Config, ModelConfig, is_set
from mesh_transformer.data.tokens.tokenizer import ByteTokenizer, load_tokenizer, save_tokenizer, warn_of_more_ids
from mesh_transformer.environment import command
from mesh_transformer.errors import UserError, options_to_add
from mesh_transformer.logs import Transfer
from mesh_transformer.runtime.sampling import sampler
from mesh_transformer.runtime.session.weights import config_for, config_of, explain_damage, open_with

# the formats of a step
NATIVE, CLASSIC = NativeStep.FORMAT, ClassicStep.FORMAT
DTYPES = {"fp32": np.float32, "fp16": np.float16, "bf16": ml_dtypes.bfloat16}


def to_hf(
    config_path: str | None,
    overrides: Sequence[str],
    checkpoint: str,
    output: str,
    *,
    dtype: str | None = None,
    tokenizer: str | None = None,
    push: str | None = None,
    base: str | None = None,
    adapter: str | None = None,
    merge: bool = False,
    overwrite: bool = False,
) -> None:
    """Convert a checkpoint of any format to a Hugging Face folder. Adapters become a folder of PEFT.

    Args:
        config_path: the config file; None: the checkpoint records its model.
        dtype: a key of DTYPES; None: the dtype of the Hugging Face folder that the checkpoint came from, else float16
            as in the original.
        tokenizer: `bytes`, or a folder or a name on the hub, copied to the output; None: the tokenizer of the Hugging
            Face folder that the checkpoint came from, or `bytes` if the run used it.
        push: a repository on the hub, to which the output is uploaded.
        base: where the base of adapters is now.
        adapter: adapters that the checkpoint gets.
        merge: write the whole model of adapters and their base.
        overwrite: whether to replace an existing output.

    Raises:
        UserError: an argument, the config or the checkpoint cannot be used; `output` is unchanged.
    """
    if push is not None:
        _check_push(push, output)
    config, opened = config_for(config_path, overrides, checkpoint, base, adapter)
    if merge and not opened.has_base:
        raise UserError(f"--merge adds adapters to their base, and {opened.folder} is a whole model: omit the option")
    if push is not None:
        hub.check_kind(push, adapters=opened.has_base and not merge)
    if opened.has_base and not merge:
        write_peft_folder(config, opened, output, dtype=dtype, tokenizer=tokenizer, overwrite=overwrite)
    else:
        write_hf_folder(config, opened, output, dtype=dtype, tokenizer=tokenizer, overwrite=overwrite)
    if push is not None:
        logs.log.info("uploaded to %s", hub.push(output, push))


def write_hf_folder(
    config: Config,
    opened: Checkpoint,
    output: str,
    *,
    dtype: str | None = None,
    tokenizer: str | None = None,
    overwrite: bool = False,
) -> None:
    """Write an open checkpoint as a Hugging Face folder. Arguments and errors as in `to_hf`."""
    model = config.model
    # raises UserError if transformers does not support the model
    model.to_hf()
    check_free(output, overwrite=overwrite, replaceable=weight_files)
    logs.log.info("reading %s", opened)
    source = opened.source(model)
    origin, tokenizer = opened.origin(source), tokenizer or opened.adapters_tokenizer
    output_dtype = np.dtype(DTYPES[dtype]) if dtype else _default_dtype(opened.format, source, origin)
    if tokenizer is None and (origin is None or not origin.files.keys() & set(hub.TOKENIZER_FILES)):
        tokenizer = _own_tokenizer(config.data.tokenizer or opened.tokenizer.spec, model)
    end_of_text = _end_of_text(tokenizer, model) if tokenizer else None
    if origin is not None and tokenizer:
        origin = origin.without(hub.TOKENIZER_FILES)
    with (
        explain_damage(source),
        new_folder(output, overwrite=overwrite, source=source.where, replaceable=weight_files) as folder,
        Transfer("writing safetensors", n_bytes(source, model, output_dtype)) as transfer,
    ):
        write_hf(
            source, model, folder, dtype=output_dtype, origin=origin, end_of_text=end_of_text, progress=transfer.add
        )
        if tokenizer:
            save_tokenizer(tokenizer, folder)
        _finish(source)
    logs.log.info("%s: written from %s", output, source.where)


def write_peft_folder(
    config: Config,
    opened: Checkpoint,
    output: str,
    *,
    dtype: str | None = None,
    tokenizer: str | None = None,
    overwrite: bool = False,
) -> None:
    """Write the adapters of an open checkpoint as a folder of PEFT, in float32 by default. Arguments and errors as in
    `to_hf`."""
    check_free(output, overwrite=overwrite, replaceable=_is_peft)
    logs.log.info("reading %s", opened)
    source, record = opened.adapters(config.model)
    # the base that a run recorded may be gone
    if opened.base_is_given or opened.format != NATIVE:
        if opened.base.model is not None:
            check_same_architecture(config.model, opened.base.model, where=opened.base.path)
        record = record._replace(base=opened.base.place)
    with (
        explain_damage(source),
        new_folder(output, overwrite=overwrite, source=source.where, replaceable=_is_peft) as folder,
    ):
        write_peft(
            source,
            record,
            config.model,
            folder,
            dtype=np.dtype(DTYPES[dtype or "fp32"]),
            dropout=_recorded_dropout(source),
        )
        if tokenizer:
            save_tokenizer(tokenizer, folder)
    logs.log.info("%s: the adapters of %s, as PEFT has them (--merge writes the whole model)", output, source.where)


def _recorded_dropout(source: TensorSource) -> float:
    """The option lora.dropout of the run that trained adapters; 0 for others'."""
    config = source.extra.get("config")
    lora = config.get("lora") if isinstance(config, dict) else None
    dropout = lora.get("dropout") if isinstance(lora, dict) else None
    return dropout if isinstance(dropout, float) and 0 <= dropout < 1 else 0.0


def _is_peft(folder: str) -> bool:
    return hub.ADAPTER_CONFIG in files.list_dir(folder)


def _own_tokenizer(spec: str | None, model: ModelConfig) -> str | None:
    """The tokenizer `spec` of a run, if it is `bytes`. Otherwise a log line says how to add it to the output."""
    if spec == "bytes" and model.n_vocab >= ByteTokenizer.n_vocab:
        return spec
    logs.log.warning(
        "the output has no tokenizer: %s adds %s",
        *((options_to_add("--tokenizer", spec), "the run's") if spec else ("--tokenizer NAME", "one")),
    )
    return None


def _description(model: ModelConfig) -> str:
    """The family, and each field that is not the default: `gpt2, layers 12, d_model 768`."""
    named = model.model_dump(exclude_defaults=True)
    named.pop("family", None)
    return ", ".join([model.family, *(f"{name} {value}" for name, value in named.items())])


def _check_push(name: str, output: str) -> None:
    if files.is_remote(output):
        raise UserError(f"--push {name} uploads a local folder: give a local --output-path, not {output}")
    hub.check_push(name)


def _default_dtype(format: str, source: TensorSource, origin: Origin | None) -> np.dtype | None:
    """The dtype of an export without --dtype; None: each tensor in its stored dtype."""
    dtype: np.dtype | None
    if origin is None:
        dtype, reason = np.dtype(np.float16), f"the default for a {format} checkpoint"
    elif format != HFFolder.FORMAT and origin.dtype is not None:
        dtype, reason = origin.dtype, "the dtype of the model that the checkpoint is or came from"
    else:
        dtype, reason = uniform_dtype(source), "the stored dtype"
    logs.log.info("the weights are written in %s, %s; choose another with --dtype", dtype or "several dtypes", reason)
    return dtype


def from_hf(
    folder: str,
    output: str,
    *,
    format: str,
    shards: int | None = None,
    overwrite: bool = False,
    text_only: bool = False,
) -> None:
    """Convert a Hugging Face folder, a model on its hub, or a GGUF file to a native or classic step; see `write_step`.

    config.json, or the metadata of the file, describe the model.

    Args:
        text_only: convert the text model of a folder that holds a vision tower too.

    Raises:
        UserError: an argument or the folder cannot be used; `output` is unchanged.
    """
    logs.log.info("reading %s", folder)
    given = Folder(folder)
    kind = HubModel if hub.is_name(folder) else HFFolder
    checkpoint = (None if text_only else GgufFile.find(given)) or kind(given, text_only=text_only)
    model = checkpoint.model
    logs.log.info("%s: %s", folder, _description(model))
    source = checkpoint.source(model)
    origin = checkpoint.origin(source)
    write_step(source, model, output, format=format, shards=shards or 1, origin=origin, overwrite=overwrite)


def write_step(
    source: TensorSource,
    model: ModelConfig,
    output: str,
    *,
    format: str,
    shards: int = 1,
    origin: Origin | None = None,
    tokenizer: str | None = None,
    full: bool | None = None,
    dtype: np.dtype | None = None,
    overwrite: bool = False,
) -> str:
    """Write an open checkpoint as a native or classic step; return the path of the step folder.

    Args:
        output: native: the root, in which step_N is created; classic: the step folder itself.
        format: "native" or "classic".
        shards, full, dtype: for a classic step, as in `write_classic`.
        origin, tokenizer: for a native step, as in `write_native`.
        overwrite: whether to replace an existing step.

    Raises:
        UserError: `format`, `output`, the model or the number of shards cannot be used (nothing is written), or
            `source` is damaged; `output` is unchanged.
    """
    check_output(output, format, source.counts.step)
    with explain_damage(source):
        if format == NATIVE:
            output = write_native(source, output, model=model, origin=origin, tokenizer=tokenizer, overwrite=overwrite)
        else:
            with new_folder(output, overwrite=overwrite, source=source.where, replaceable=is_step) as folder:
                write_classic(source, model, folder, shards, full=full, dtype=dtype)
                write_config(folder, with_model({}, model)["config"])
            write_meta(output, source.counts.step, source.extra.get("aux"))
        _finish(source)
    logs.log.info("%s: written from %s", output, source.where)
    return output


def check_output(output: str, format: str, step: int) -> None:
    """Refuse a step folder as native output, a classic step folder of another step, a native root with other steps or
    with a Hugging Face model, and any other format.

    Raises:
        UserError: the message names the path to give, or the other steps.
    """
    if format not in (NATIVE, CLASSIC):
        raise UserError(f"format {format}: a step is written as {NATIVE} or {CLASSIC}")
    path = output.rstrip("/")
    root, name = posixpath.split(path)
    is_step = re.fullmatch(r"step_\d+", name)
    if format == NATIVE and is_step:
        raise UserError(f"{path}: for a native checkpoint give the root, {root or '.'}; step_{step} is created in it")
    if format == NATIVE:
        if weights := weights_of(Folder(path)):
            raise UserError(
                f"{path} holds a Hugging Face model ({weights[0]}), and whoever read the folder would get the native "
                "step: give a folder of its own"
            )
        check_only_step(path, step)
    if format == CLASSIC and is_step and name != f"step_{step}":
        raise UserError(
            f"{path} has the name of another step: this is step {step}, give a path that ends in step_{step}"
        )


def _end_of_text(tokenizer: str, model: ModelConfig) -> int:
    """The tokenizer's end-of-text token. Warns of a tokenizer with more IDs than the model.

    Raises:
        UserError: there is no such tokenizer, or the model does not have its end-of-text token.
    """
    loaded = load_tokenizer(tokenizer)
    if loaded.eot >= model.n_vocab:
        raise UserError(
            f"--tokenizer {tokenizer} ends a text with the token {loaded.eot}, but model.n_vocab is {model.n_vocab}: "
            f"choose the model's tokenizer"
        )
    warn_of_more_ids(loaded, model.n_vocab)
    return loaded.eot


def slim(
    config_path: str | None,
    overrides: Sequence[str],
    *,
    checkpoint: str | None = None,
    step: int | None = None,
    f16: bool = False,
    base: str | None = None,
    adapter: str | None = None,
    overwrite: bool = False,
) -> None:
    """Write the parameters of a run's checkpoint in half precision to `{root}_slim/step_N` or `{root}_slim_f16/step_N`.

    The result is a classic step in mesh.tp shards.

    Args:
        checkpoint: the folder of the run or of one of its steps; None: the run of the config.
        step: the step; None: the newest.
        f16: whether to write float16; else bfloat16.
        base: where the base of adapters is now.
        adapter: adapters that the checkpoint gets.

    Raises:
        UserError: there is no checkpoint of that step, it does not match the config, or the output exists.
    """
    if checkpoint is not None and hub.is_name(checkpoint):
        raise UserError(
            f"{checkpoint} is no folder beside which a slim checkpoint can be written: use "
            f"{command('from-hf')} --format classic"
        )
    config, opened = config_for(config_path, overrides, checkpoint, base, adapter)
    path = checkpoint or config.checkpoint.root
    root, named = split_step(path)
    if None not in (named, step):
        raise UserError(f"{path} and --ckpt-step {step} both name a step: give only one of them")
    logs.log.info("reading %s", opened)
    if step is not None:
        opened = open_with(step_of(root, step).path, base, adapter)
    source = opened.source(config.model)
    write_step(
        source,
        config.model,
        files.join(root + ("_slim_f16" if f16 else "_slim"), f"step_{source.counts.step}"),
        format=CLASSIC,
        shards=config.mesh.tp,
        full=False,
        dtype=np.dtype(np.float16 if f16 else ml_dtypes.bfloat16),
        overwrite=overwrite,
    )


def reshard(
    config_path: str | None,
    overrides: Sequence[str],
    *,
    checkpoint: str,
    shards_out: int | None,
    output: str | None,
    format: str,
    prompt: str | None,
    base: str | None = None,
    adapter: str | None = None,
    overwrite: bool = False,
) -> None:
    """Write a checkpoint of any format, with its moments if any, to `output`, and complete `prompt` with the result.

    All arguments are checked before anything is written.

    Args:
        shards_out: the number of shards of a classic output, and of devices for the prompt; None: the config's mesh.tp.
        output: see `write_step`; None: nothing is written, and the prompt is completed with the checkpoint itself.
        prompt: the text to complete; None: no completion.
        base: where the base of adapters is now.
        adapter: adapters that the checkpoint gets.

    Raises:
        UserError: neither `output` nor `prompt` is given, the checkpoint does not match the config or the number of
            shards, `output` exists, or the prompt cannot be completed on these devices.
    """
    if output is None and prompt is None:
        raise UserError("nothing to do: give --out FOLDER, --prompt TEXT or both")
    config, opened = config_for(config_path, overrides, checkpoint, base, adapter)
    _check_shards(shards_out, overrides, format, prompt)
    shards = config.mesh.tp if shards_out is None else shards_out
    if output is not None and format == CLASSIC:
        check_shards(config.model, shards, output)
    logs.log.info("reading %s", checkpoint)
    if output is not None and format == opened.format == NATIVE and not opened.has_base:
        raise UserError(f"{opened.folder} is already native and can be read on any number of devices: copy the folder")
    source = opened.source(config.model)
    prompt_sampler = None
    if prompt is not None:
        _check_devices(shards)
        prompt_config = config_of(config_path, [*overrides, f"mesh.tp={shards}"], opened)
        prompt_sampler = sampler.Sampler(prompt_config, sampler.SampleRequest(), opened, [prompt])
    if output is not None:
        step = write_step(
            source,
            config.model,
            output,
            format=format,
            shards=shards,
            origin=opened.origin(source),
            tokenizer=config.data.tokenizer or opened.adapters_tokenizer,
            overwrite=overwrite,
        )
        opened = Checkpoint.open(step)
    if prompt_sampler is not None:
        prompt_sampler.show(opened)


def _check_devices(shards: int) -> None:
    """Check that the devices can share a model in so many shards, to complete a prompt."""
    platforms.CompileCache()
    platforms.open_devices()
    if jax.device_count() % shards:
        raise UserError(
            f"--prompt with {shards} shards needs a multiple of {shards} devices, found {jax.device_count()}: give "
            f"{options_to_add('--shards-out', '1')}, or omit --prompt and test the result with "
            f"{command('sample')} --set mesh.tp=1"
        )


def _check_shards(shards_out: int | None, overrides: Sequence[str], format: str, prompt: str | None) -> None:
    if shards_out is None:
        return
    if shards_out < 1:
        raise UserError(f"--shards-out {shards_out}: must be 1 or more")
    if is_set(overrides, "mesh", "tp"):
        raise UserError("--shards-out and --set mesh.tp set the same value: give only one of them")
    if format == NATIVE and prompt is None:
        raise UserError(
            f"--shards-out {shards_out}: a native checkpoint has no shards: omit it, or give "
            f"{options_to_add('--format', 'classic')}"
        )


def _finish(source: TensorSource) -> None:
    """After all parameters were read: a base of adapters may be another one."""
    if isinstance(source, AdaptedSource):
        source.finish_reads()
