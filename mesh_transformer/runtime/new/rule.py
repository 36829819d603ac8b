"""Tokens, batch size and learning rate of a run, by the rules of published papers. It imports only `math`.

Hoffmann et al. 2022 ("Chinchilla", arXiv:2203.15556): parameters N and tokens D grow together. Table 3 has 20 to 22
tokens for each parameter up to 67B parameters. Training takes 6 N D operations.
McCandlish et al. 2018 (arXiv:1812.06162): a run of S steps and E examples reaches a loss if
(S / S_min - 1)(E / E_min - 1) = 1. The critical batch size is E_min / S_min. Kaplan et al. 2020 (arXiv:2001.08361)
fitted it for language models to their loss.
Brown et al. 2020 (GPT-3, arXiv:2005.14165): table 2.1 has learning rates and batch sizes of eight sizes.
"""

import math

TOKENS_PER_PARAMETER = 20
"""The tokens for each parameter in a run that reaches the lowest loss for its FLOPs."""
BATCH_SHARE = 0.25
"""The batch as a share of the critical batch size. By McCandlish's equation a run needs 1 + share times the fewest
tokens, and 1 + 1 / share times the fewest steps: 1.25 and 5. With this share the rule is within a factor of two of all
batch sizes of GPT-3's table 2.1, which were chosen with the noise scale of the same paper."""
FEWEST_STEPS = 1000
"""The fewest steps of a training run: the batch is made smaller to reach them. Warm-up and decay need hundreds."""
MOST_EPOCHS = 4
"""Passes over the data that are worth about as much as new data (Muennighoff et al. 2023, arXiv:2305.16264)."""
WARM_UP_TOKENS, WARM_UP_SHARE = 375e6, 0.05
"""The warm-up of GPT-3 (appendix B), and the largest share of the steps that it takes in a short run."""
END_SHARE = 0.1
"""The learning rate at the end as a share of its peak (GPT-3, Chinchilla, and the configs of 2021)."""

TUNE_EPOCHS = 3
"""Passes over the data in a fine-tuning (GPT-1, Radford et al. 2018, section 4.1)."""
TUNE_TOKENS, TUNE_FEWEST_STEPS = 32768, 50
"""Tokens of a step of a fine-tuning, as in configs/6B_finetune_v3-8.json (16 sequences of 2,048), and the fewest
steps."""
TUNE_SHARE, TUNE_END_SHARE, TUNE_WARM_UP_SHARE = 0.4, 0.2, 0.1
"""From the same config: its peak learning rate as a share of the pretraining's, the end as a share of the peak, and the
warm-up as a share of the steps."""

LORA_RANK, LORA_SHARE = 16, 4.0
"""The rank of adapters, and the peak learning rate that adapters get: ten times that of a fine-tuning of all parameters
(Schulman and Thinking Machines Lab 2025, "LoRA Without Regret")."""

# the loss of Hoffmann et al. (approach 3, appendix D.3)
_LEAST_LOSS = 1.69
_OF_PARAMETERS, _PARAMETERS_POWER = 406.4, 0.34
_OF_TOKENS, _TOKENS_POWER = 410.7, 0.28
# equation 1.4 of Kaplan et al.: tokens, and the power of the loss
_CRITICAL_TOKENS, _CRITICAL_POWER = 2e8, 1 / 0.21
# Parameters and peak learning rate: of configs/tiny_shakespeare.json, and GPT-3's table 2.1. Between two rows the
# logarithms are interpolated.
_RATES = (
    (0.89e6, 4e-3),
    (125e6, 6e-4),
    (350e6, 3e-4),
    (760e6, 2.5e-4),
    (1.3e9, 2e-4),
    (2.7e9, 1.6e-4),
    (6.7e9, 1.2e-4),
    (13e9, 1e-4),
    (175e9, 6e-5),
)


def tokens_for(parameters: float) -> float:
    """The tokens with which a model of this size reaches the lowest loss for its FLOPs."""
    return TOKENS_PER_PARAMETER * parameters


def predicted_loss(parameters: float, tokens: float) -> float:
    """The loss after a run on web text, nats for each token of a vocabulary of some 32,000."""
    return _LEAST_LOSS + _OF_PARAMETERS / parameters**_PARAMETERS_POWER + _OF_TOKENS / tokens**_TOKENS_POWER


def critical_batch(loss: float) -> float:
    """The critical batch size at this loss, tokens. It grows while the loss falls."""
    return _CRITICAL_TOKENS / loss**_CRITICAL_POWER


def batch_tokens(parameters: float, tokens: float, n_vocab: int) -> float:
    """Tokens of a step of a training run."""
    # a model with a few symbols is never worse than a guess
    loss = min(predicted_loss(parameters, tokens), math.log(n_vocab))
    return min(BATCH_SHARE * critical_batch(loss), tokens / FEWEST_STEPS)


def tuning_batch_tokens(tokens: float) -> float:
    """Tokens of a step of a fine-tuning."""
    return min(TUNE_TOKENS, tokens / TUNE_FEWEST_STEPS)


def learning_rate(parameters: float) -> float:
    """The peak learning rate of a training run. Its batch is about the same share of the critical batch size as
    GPT-3's. The best rate depends on this share (McCandlish et al.), so that it needs no correction for the batch."""
    if parameters <= _RATES[0][0]:
        return _RATES[0][1]
    for (small, high), (large, low) in zip(_RATES, _RATES[1:], strict=False):
        if parameters <= large:
            share = math.log(parameters / small) / math.log(large / small)
            return high * (low / high) ** share
    return _RATES[-1][1]


def warm_up_steps(steps: int, step_tokens: float) -> int:
    """Steps of the warm-up of a training run."""
    return max(1, round(min(WARM_UP_TOKENS / step_tokens, WARM_UP_SHARE * steps)))
