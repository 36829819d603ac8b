"""Samples of many prompts in one job, such as one of a cluster."""

from collections.abc import Sequence

from mesh_transformer import platforms
from mesh_transformer.config import Config
from mesh_transformer.data.tokenizer import load_tokenizer
from mesh_transformer.runtime.sample_request import Request
from mesh_transformer.runtime.sampler import Sample, Sampler
from mesh_transformer.runtime.weights import split_step


def answer(
    config: Config, request: Request, checkpoint: str, prompts: Sequence[str | list[int]]
) -> list[list[Sample]]:
    """Join the other processes, if the environment names them, and sample: the samples of each prompt.

    Args:
        prompts: texts, or lists of token ids.

    Raises:
        UserError: an argument, the config, the devices, the tokenizer or the checkpoint cannot be used.
    """
    platforms.CompileCache()
    platforms.start_distributed()
    texts = [prompt if isinstance(prompt, str) else None for prompt in prompts]
    tokenizer = None
    if request.stop or any(text is not None for text in texts):
        tokenizer = load_tokenizer(config.data.tokenizer, split_step(checkpoint)[0])
    tokens: list[list[int]] = []
    for prompt in prompts:
        if isinstance(prompt, str):
            assert tokenizer is not None
            prompt = tokenizer.encode(prompt)
        tokens.append(prompt)
    sampler = Sampler(config, checkpoint, request, tokenizer, tokens)
    return list(map(sampler.sample, tokens, texts))
